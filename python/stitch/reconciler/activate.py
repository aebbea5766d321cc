"""Making a staged version the one in use: drain, close, pause, swap, verify, label, resume, open.

Before the first live byte every failure backs out to the old version untouched. From then on
the version is UNKNOWN until a verified commit or a verified undo; if neither comes about, the
life is marked unknown and `recover` takes over.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NoReturn

from stitch.admission import Drained
from stitch.destinations.base import Staged
from stitch.engines.base import Engine
from stitch.env import Env
from stitch.errors import ActivationFailed, EngineUnavailable, StitchError
from stitch.reconciler.config import ReplicaConfig
from stitch.reconciler.life import Life, lose
from stitch.reconciler.status import ReplicaStatus
from stitch.types import ActivationMode, GateState, Label, Phase, Ref

__all__ = ["Activated", "Activator"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Activated:
    """What one activation took, in seconds. `crossing`: leases that rode through it."""

    drain_s: float
    gate_closed_s: float
    swap_s: float
    recompute_s: float
    crossing: int


class Activator:
    """Performs activations and label moves on the present life. One at a time."""

    def __init__(
        self, engine: Engine, status: ReplicaStatus, config: ReplicaConfig, env: Env
    ) -> None:
        self._engine = engine
        self._status = status
        self._gate = status.gate
        self._config = config
        self._clock = env.clock

    async def activate(self, life: Life, staged: Staged, *, drain_all: bool) -> Activated | None:
        """Activate `staged`. None: deferred, leases held it back; the gate is open again.

        Raises: ActivationFailed if it was undone and the old version serves again, or if it
            failed before anything changed; EngineUnavailable or ActivationFailed with
            `life.known` False if the live weights are unknown.
        """
        everything = drain_all or self._config.mode is ActivationMode.QUIESCE
        started = self._clock.monotonic()
        self._status.phase = Phase.ACTIVATING
        self._status.changed()
        try:
            if await self._gate.close(everything=everything) is Drained.DEFERRED:
                return None
            self._check_known(life)
            closed = self._clock.monotonic()
            swap_s, recompute_s = await self._bounded(life, staged, everything)
            now = self._clock.monotonic()
            done = Activated(
                closed - started, now - closed, swap_s, recompute_s, self._gate.running
            )
        except BaseException:
            if self._gate.state is GateState.CLOSED:
                lose(life, self._status)
            raise
        finally:
            self._status.phase = Phase.IDLE
            self._status.changed()
        self._record(done)
        await life.destination.adopt(staged)
        return done

    async def _bounded(self, life: Life, staged: Staged, drained_all: bool) -> tuple[float, float]:
        limit_s = self._config.activate_s_max
        try:
            async with self._clock.timeout(limit_s):
                return await self._while_closed(life, staged, drained_all)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"activation of {staged.target} took longer than {limit_s:g} s"
            ) from error

    async def move_label(self, life: Life, target: Ref) -> bool:
        """Name the bytes in use `target`: no stage, no pause, the same cache epoch.

        Exact pins are drained first, everything if the run changes. False: deferred.
        """
        old = self._gate.label
        if old is None:
            label = life.next_label(target)
            await life.control.label(life.label_attempt(), label)
            self._check_known(life)
            self._gate.open(label)
        else:
            label = Label(target, old.epoch)
            if not await self._move(life, old, label):
                return False
        life.held = target
        self._status.changed()
        return True

    async def _move(self, life: Life, old: Label, label: Label) -> bool:
        self._status.phase = Phase.ACTIVATING
        try:
            if label.ref.run_id != old.ref.run_id:
                drained = await self._gate.close(everything=True)
            else:
                drained = await self._gate.drain_pins()
            if drained is Drained.DEFERRED:
                return False
            try:
                self._check_known(life)
                await life.control.label(life.label_attempt(), label)
            except BaseException:
                await self._keep_either(life, old, label)
                raise
            self._gate.relabel(label)
            self._gate.open(label)
            return True
        finally:
            self._status.phase = Phase.IDLE
            self._status.changed()

    async def _keep_either(self, life: Life, old: Label, label: Label) -> None:
        """A label move broke off. Both names are true of the bytes, whichever a rank stamps."""
        try:
            if life.known:
                await life.control.confirm(life.attempt, old, label)
        except StitchError:
            life.known = False
        self._gate.open(old if life.known else None)
        if not life.known:
            lose(life, self._status)

    async def _while_closed(
        self, life: Life, staged: Staged, drained_all: bool
    ) -> tuple[float, float]:
        modes = self._engine.capabilities.modes
        mode = self._config.mode
        if drained_all and ActivationMode.QUIESCE in modes:
            mode = ActivationMode.QUIESCE
        recompute = mode is not ActivationMode.IN_PLACE
        old = self._gate.label
        try:
            await life.destination.preflight(staged)
            await life.control.pause(mode)
        except StitchError as error:
            await self._back_out(life, staged, old)
            raise ActivationFailed(
                f"activation of {staged.target} was given up before anything changed: "
                f"{error.message}"
            ) from error
        self._status.known = False
        self._status.swapping = True
        self._gate.relabel(None)
        self._status.changed()
        try:
            label, swap_s = await self._swap(life, staged)
        except StitchError as error:
            await self._undo(life, staged, old, recompute, error)
        life.held = staged.target
        self._gate.relabel(label)
        try:
            recompute_s = await life.control.resume(recompute=recompute)
        except StitchError:
            # The new bytes are verified and in place; only the engine does not go on.
            await life.destination.adopt(staged)
            raise
        if not self._engine.capabilities.keyed_cache and self._gate.running:
            life.crossed_epoch = label.epoch
        await self._open(life, label)
        return swap_s, recompute_s

    async def _swap(self, life: Life, staged: Staged) -> tuple[Label, float]:
        began = self._clock.monotonic()
        await life.destination.commit(staged)
        verified = await life.destination.verify(staged)
        if not verified.ok:
            raise ActivationFailed(
                f"{len(verified.mismatched)} of {verified.checked} changed tensors are wrong in "
                f"the engine after the copy, first {verified.mismatched[0]!r}",
                tensor=verified.mismatched[0],
            )
        swap_s = self._clock.monotonic() - began
        if not self._engine.capabilities.keyed_cache:
            await life.control.flush()
        label = life.next_label(staged.target)
        await life.control.label(staged.attempt, label)
        return label, swap_s

    async def _back_out(self, life: Life, staged: Staged, old: Label | None) -> None:
        """Nothing was written; whatever `pause` did, the engine must go on."""
        await life.control.resume(recompute=False)
        await self._open(life, old)
        await life.destination.discard(staged)

    async def _undo(
        self, life: Life, staged: Staged, old: Label | None, recompute: bool, cause: StitchError
    ) -> NoReturn:
        log.warning(
            "activation undone",
            extra={"target": str(staged.target), "code": cause.code, "error": cause.message},
        )
        verified = await life.destination.undo(staged)
        if not verified.ok:
            raise ActivationFailed(
                f"activation of {staged.target} failed ({cause.message}) and its undo left "
                f"{verified.mismatched[0]!r} wrong; the weights in use are unknown",
                tensor=verified.mismatched[0],
            ) from cause
        label = None if old is None else life.next_label(old.ref)
        await life.control.label(staged.attempt, label)
        self._gate.relabel(label)
        await life.control.resume(recompute=recompute)
        await self._open(life, label)
        self._status.undone += 1
        self._status.metrics.add("stitch_replica_activations_total", outcome="undone")
        raise ActivationFailed(
            f"activation of {staged.target} was undone, the old weights are verified: "
            f"{cause.message}"
        ) from cause

    async def _open(self, life: Life, label: Label | None) -> None:
        # An engine that restarted since its last order holds boot weights: look before opening.
        await life.control.confirm(life.attempt, label)
        life.known = True
        self._status.known = True
        self._status.swapping = False
        self._gate.open(label)

    def _check_known(self, life: Life) -> None:
        if not life.known:
            raise EngineUnavailable("the engine was lost while its requests drained")

    def _record(self, done: Activated) -> None:
        status = self._status
        status.activations += 1
        status.gate_closed_s = done.gate_closed_s
        status.swap_s = done.swap_s
        status.recompute_s = done.recompute_s
        status.metrics.add("stitch_replica_activations_total", outcome="done")
        status.metrics.observe("stitch_replica_gate_closed_seconds", done.gate_closed_s)
        status.metrics.observe("stitch_replica_swap_seconds", done.swap_s)
        status.metrics.observe("stitch_replica_recompute_seconds", done.recompute_s)
        status.changed()
