"""The gate between requests and activation on one replica.

Requests take leases; the reconciler drains leases, closes, relabels, and opens again. A
request's constraint is checked against the served version and its lease captured in one
step without an `await`, so no activation can slip in between. Everything here runs on one
event loop; there are no locks because there are no threads. (One file though long: every
part is about the same few fields.)

States: OPEN; DRAINING_PINS (new exact pins on the served version are refused retryably,
others are admitted); CLOSED (an activation is under way; callers wait). A gate without a
label knows no version and refuses everything retryably.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from stitch.env import Env
from stitch.errors import Closed, NeverSatisfiable, NotReady, Overloaded, StitchError
from stitch.types import (
    UNCONSTRAINED,
    Constraint,
    GateState,
    Label,
    Ref,
    Unmet,
    check_constraint,
)

__all__ = ["AdmissionGate", "Drained", "GateConfig", "Lease", "LeaseKind"]

log = logging.getLogger(__name__)

LeaseKind = Literal["request", "session"]
_CLOSED = GateState.CLOSED
_DRAINING = GateState.DRAINING_PINS


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Limits of the gate. Seconds and counts.

    running_max: leases held at once; more is Overloaded.
    waiting_max: callers waiting for the gate or for a version; more is Overloaded.
    gate_wait_s: how long a caller without its own wait waits for a closed gate.
    wait_s_max: cap on any caller's wait.
    drain_deadline_s: how long leases may hold one activation back.
    defer_count_max: deferrals before the leases that hold it back are aborted.
    abort_deadline_s: how long an aborted holder may take to let go.
    """

    running_max: int = 4096
    waiting_max: int = 1024
    gate_wait_s: float = 30.0
    wait_s_max: float = 600.0
    drain_deadline_s: float = 30.0
    defer_count_max: int = 3
    abort_deadline_s: float = 10.0


class Drained(Enum):
    """How a `close` ended: the gate is closed, or it reopened and the caller tries later."""

    CLOSED = "closed"
    DEFERRED = "deferred"


class Lease:
    """The right of one request or session to run. Held until the last byte or abort.

    `label` is what was served at admission. `error` is set, then `on_abort` called with it,
    when the gate ends the lease; the holder aborts its generation, answers with the error,
    and releases. `expiry` is on the monotonic clock; an expired lease holds nothing back.
    """

    __slots__ = ("constraint", "error", "expiry", "id", "kind", "label", "on_abort")

    def __init__(
        self, id: int, label: Label, constraint: Constraint, kind: LeaseKind, expiry: float | None
    ) -> None:
        self.id = id
        self.label = label
        self.constraint = constraint
        self.kind = kind
        self.expiry = expiry
        self.error: StitchError | None = None
        self.on_abort: Callable[[StitchError], None] | None = None


class _Waiter:
    """One caller in the queue. `version` tells whether it may also wait for a version."""

    __slots__ = ("constraint", "expiry_s", "future", "kind", "version")

    def __init__(
        self, constraint: Constraint, kind: LeaseKind, expiry_s: float | None, version: bool
    ) -> None:
        self.constraint = constraint
        self.kind = kind
        self.expiry_s = expiry_s
        self.version = version
        self.future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()


class AdmissionGate:
    """Admits requests to the served version; the reconciler alone closes, labels and opens.

    `why_unserved` is the reconciler's word, for people, on why no version is served.
    """

    def __init__(self, env: Env, config: GateConfig | None = None) -> None:
        self._env = env
        self.config = config or GateConfig()
        self._state = GateState.OPEN
        self._label: Label | None = None
        self._latest: Ref | None = None
        self._superseded: frozenset[str] = frozenset()
        self._refusal: StitchError | None = None
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._pins: dict[int, Lease] = {}
        self._queue: dict[_Waiter, None] = {}
        self._drains: list[asyncio.Event] = []
        self._highest: Ref | None = None
        self._deferred = 0
        self.why_unserved: str | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_refused: Callable[[Unmet], None] | None = None

    @property
    def state(self) -> GateState:
        return self._state

    @property
    def label(self) -> Label | None:
        """What is served, or None while no version is known."""
        return self._label

    @property
    def served(self) -> Ref | None:
        return None if self._label is None else self._label.ref

    @property
    def running(self) -> int:
        """Leases held."""
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Callers queued."""
        return len(self._queue)

    @property
    def deferred(self) -> int:
        """Times the present activation was put off because leases held it back."""
        return self._deferred

    def try_admit(
        self,
        constraint: Constraint,
        *,
        kind: LeaseKind = "request",
        latest: Ref | None = None,
        expiry_s: float | None = None,
    ) -> Lease | None:
        """Check and capture in one step. None: the gate is closed and the caller may `admit`.

        `latest` is the caller's pointer for `max_lag`, else the reconciler's is used.
        Raises: NotReady (fields run_id of what is served, target_version, applied, reason),
            NeverSatisfiable (run superseded), Overloaded, Closed (the replica is leaving).
        """
        if self._refusal is not None:
            raise _copy(self._refusal)
        if self._state is _CLOSED:
            return None
        if constraint is not UNCONSTRAINED or self._label is None:
            unmet = self._unmet(constraint, latest)
            if unmet is not None:
                raise self._not_ready(constraint, unmet)
        return self._capture(constraint, kind, expiry_s)

    async def admit(
        self,
        constraint: Constraint,
        *,
        kind: LeaseKind = "request",
        wait_s: float | None = None,
        expiry_s: float | None = None,
    ) -> Lease:
        """`try_admit`, waiting first in, first out for the gate and for a version to come.

        `wait_s` bounds both waits. Without it the constraint's `max_wait_ms` does; without
        that, a closed gate is waited for (`gate_wait_s`) and a missing version is not.
        Raises: as `try_admit`; Closed if the gate stayed closed past the wait; Overloaded if
            the queue is full.
        """
        if wait_s is None and constraint.max_wait_ms is not None:
            wait_s = constraint.max_wait_ms / 1000
        for_version = wait_s is not None and wait_s > 0
        try:
            lease = self.try_admit(constraint, kind=kind, expiry_s=expiry_s)
        except NotReady as error:
            if not (for_version and _may_come(error)):
                raise
            lease = None
        if lease is not None:
            return lease
        if len(self._queue) >= self.config.waiting_max:
            raise Overloaded(
                f"{len(self._queue)} requests already wait for this replica; try later",
                waiting=len(self._queue),
            )
        limit_s = self.config.gate_wait_s if wait_s is None else wait_s
        waiter = _Waiter(constraint, kind, expiry_s, for_version)
        return await self._wait(waiter, min(limit_s, self.config.wait_s_max))

    def release(self, lease: Lease) -> None:
        """Give the lease back, after the last byte or once its generation ended. Repeatable."""
        if self._leases.pop(lease.id, None) is None:
            return
        self._pins.pop(lease.id, None)
        for event in self._drains:
            event.set()

    # The reconciler's side.

    async def close(self, *, everything: bool) -> Drained:
        """Drain what holds an activation back, then close.

        everything: all leases hold it back (quiesce, run switch) and the gate closes to new
        ones first; else only exact pins do, and others ride through.
        Returns: CLOSED, or DEFERRED with the gate open again when leases were still held at
            the drain deadline. After `defer_count_max` deferrals they are aborted instead.
        """
        drained = await self._drain_or_defer(everything)
        if drained is Drained.CLOSED:
            # No await since the last lease went: nothing was admitted in between.
            assert not self._holders(everything), "closing over leases that must not cross"
            self._move(_CLOSED)
        return drained

    async def drain_pins(self) -> Drained:
        """As `close`, but stay in DRAINING_PINS with no exact pin held: enough to move a label."""
        return await self._drain_or_defer(False)

    def relabel(self, label: Label | None) -> None:
        """Set what is served. Only while closed, or with no exact pin held while draining."""
        assert self._state is _CLOSED or (self._state is _DRAINING and not self._pins), self._state
        self._set_label(label)

    def open(self, label: Label | None) -> None:
        """Open with `label`; None means no version is known and everything is refused."""
        self._set_label(label)
        self._move(GateState.OPEN)
        self._serve_queue()

    def forget(self) -> None:
        """A new incarnation begins: no version is known, and any version may follow."""
        self._highest = None
        self._deferred = 0
        self.open(None)

    def see_latest(self, latest: Ref | None, superseded: frozenset[str] = frozenset()) -> None:
        """Take over the reconciler's freshest pointer and the runs the store proves superseded."""
        self._latest = latest
        self._superseded = superseded

    def refuse(self, error: StitchError) -> None:
        """Refuse everything from now on with `error`: the replica is leaving its pool."""
        self._refusal = error
        for waiter in list(self._queue):
            self._fail(waiter, _copy(error))
        self._changed()

    async def drained(self, deadline_s: float) -> bool:
        """Wait until no lease is held; False if some still are after `deadline_s`."""
        return await self._drain(True, deadline_s)

    def oldest_epoch(self) -> int | None:
        """The lowest activation epoch at which a running lease was admitted; None if none runs."""
        return min((lease.label.epoch for lease in self._leases.values()), default=None)

    def abort_all(self, error: StitchError) -> None:
        """End every lease with `error`: the engine they run on is gone or must not be trusted."""
        for lease in list(self._leases.values()):
            _end(lease, error)

    async def _wait(self, waiter: _Waiter, limit_s: float) -> Lease:
        self._queue[waiter] = None
        try:
            async with self._env.clock.timeout(limit_s):
                return await waiter.future
        except TimeoutError:
            if _granted(waiter):
                return waiter.future.result()
            if self._state is _CLOSED:
                raise Closed(
                    f"admission stayed closed for {limit_s:g} s while weights change; try again",
                    waited_s=limit_s,
                ) from None
            unmet = self._unmet(waiter.constraint, None) or Unmet.BEHIND
            raise self._not_ready(waiter.constraint, unmet) from None
        except asyncio.CancelledError:
            if _granted(waiter):
                self.release(waiter.future.result())
            raise
        finally:
            self._queue.pop(waiter, None)

    def _serve_queue(self) -> None:
        """Settle every waiter that the present label and state decide, oldest first."""
        if self._refusal is not None or self._state is _CLOSED:
            return
        for waiter in list(self._queue):
            if waiter.future.done():
                continue
            try:
                unmet = self._unmet(waiter.constraint, None)
                if unmet is None:
                    lease = self._capture(waiter.constraint, waiter.kind, waiter.expiry_s)
                    del self._queue[waiter]
                    waiter.future.set_result(lease)
                    continue
                error: StitchError = self._not_ready(waiter.constraint, unmet)
            except StitchError as refused:
                error = refused
            if not (waiter.version and isinstance(error, NotReady) and _may_come(error)):
                self._fail(waiter, error)

    def _fail(self, waiter: _Waiter, error: StitchError) -> None:
        self._queue.pop(waiter, None)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _unmet(self, constraint: Constraint, latest: Ref | None) -> Unmet | None:
        unmet = check_constraint(constraint, self.served, latest=latest or self._latest)
        if unmet is None and self._state is _DRAINING and constraint.is_pin:
            return Unmet.CLOSING
        return unmet

    def _not_ready(self, constraint: Constraint, unmet: Unmet) -> StitchError:
        served = self.served
        if self.on_refused is not None:
            self.on_refused(unmet)
        fields = {
            "run_id": None if served is None else served.run_id,
            "target_version": constraint.target_version,
            "applied": None if served is None else served.version,
            "reason": unmet.value,
        }
        if unmet is Unmet.OTHER_RUN and constraint.run_id in self._superseded:
            return NeverSatisfiable(
                f"run {constraint.run_id!r} was superseded; the store names another run", **fields
            )
        nothing = self.why_unserved or "this replica serves no known version"
        message = nothing if served is None else f"this replica serves {served}"
        return NotReady(message, **fields)

    def _capture(self, constraint: Constraint, kind: LeaseKind, expiry_s: float | None) -> Lease:
        label = self._label
        assert label is not None
        assert self._state is not _CLOSED, "admission while closed"
        if len(self._leases) >= self.config.running_max:
            raise Overloaded(
                f"{len(self._leases)} requests already run on this replica; try later",
                running=len(self._leases),
            )
        expiry = None if expiry_s is None else self._env.clock.monotonic() + expiry_s
        lease = Lease(next(self._ids), label, constraint, kind, expiry)
        self._leases[lease.id] = lease
        if constraint.exact_version is not None:
            self._pins[lease.id] = lease
        return lease

    def _holders(self, everything: bool) -> list[Lease]:
        return list((self._leases if everything else self._pins).values())

    async def _drain_or_defer(self, everything: bool) -> Drained:
        assert self._state is GateState.OPEN, f"drain from {self._state}"
        self._move(_CLOSED if everything else _DRAINING)
        try:
            if not await self._drain(everything, self.config.drain_deadline_s):
                if self._deferred < self.config.defer_count_max:
                    self._deferred += 1
                    log.info("activation deferred", extra={"deferred": self._deferred})
                    self.open(self._label)
                    return Drained.DEFERRED
                await self._abort_holders(everything)
        except BaseException:
            self.open(self._label)
            raise
        self._deferred = 0
        return Drained.CLOSED

    async def _drain(self, everything: bool, deadline_s: float) -> bool:
        end = self._env.clock.monotonic() + deadline_s
        released = asyncio.Event()
        self._drains.append(released)
        try:
            while True:
                self._expire()
                holders = self._holders(everything)
                if not holders:
                    return True
                now = self._env.clock.monotonic()
                until = min([end, *(lease.expiry for lease in holders if lease.expiry is not None)])
                if now >= end:
                    return False
                released.clear()
                try:
                    async with self._env.clock.timeout(max(until - now, 0.001)):
                        await released.wait()
                except TimeoutError:
                    continue
        finally:
            self._drains.remove(released)

    async def _abort_holders(self, everything: bool) -> None:
        error = Closed(
            "an exact pin or run held a weight update back for too long and was ended; try again",
            reason="aborted",
        )
        for lease in self._holders(everything):
            _end(lease, error)
        if await self._drain(everything, self.config.abort_deadline_s):
            return
        for lease in self._holders(everything):
            # Its error is set, so whatever it still receives is never sent as an answer.
            log.warning("lease dropped", extra={"lease": lease.id, "kind": lease.kind})
            self.release(lease)

    def _expire(self) -> None:
        now = self._env.clock.monotonic()
        for lease in list(self._leases.values()):
            if lease.expiry is not None and now >= lease.expiry:
                _end(lease, Closed("the session's lease expired; open a new one", reason="expired"))
                self.release(lease)

    def _set_label(self, label: Label | None) -> None:
        if label is not None:
            high = self._highest
            assert (
                high is None
                or high.run_id != label.ref.run_id
                or (label.ref.version >= high.version)
            ), f"served version would go back from {high} to {label.ref}"
            self._highest = label.ref
        self._label = label

    def _move(self, state: GateState) -> None:
        self._state = state
        self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


def _may_come(error: NotReady) -> bool:
    """Whether waiting can help: a later version or the other run may still arrive here."""
    return error.fields.get("reason") in {Unmet.BEHIND.value, Unmet.OTHER_RUN.value}


def _copy(error: StitchError) -> StitchError:
    # Raising one instance again and again would grow its traceback without end.
    return type(error)(error.message, **error.fields)


def _granted(waiter: _Waiter) -> bool:
    future = waiter.future
    return future.done() and not future.cancelled() and future.exception() is None


def _end(lease: Lease, error: StitchError) -> None:
    if lease.error is not None:
        return
    lease.error = error
    if lease.on_abort is not None:
        try:
            lease.on_abort(error)
        except Exception:
            log.exception("abort callback failed", extra={"lease": lease.id})
