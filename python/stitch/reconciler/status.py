"""A replica's own account of itself: state, versions, errors, last pass; the reports made of it.

One owner (the reconciler's task) writes it; anybody on the loop reads it. Every change that a
consumer could see grows `seq`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

from stitch.admission import AdmissionGate
from stitch.env import Env
from stitch.errors import StitchError
from stitch.reconciler.base import ReplicaReport
from stitch.reconciler.config import ReplicaConfig
from stitch.telemetry import Metrics
from stitch.types import Phase, Ref, ReplicaState

__all__ = ["LastError", "PassRecord", "ReplicaStatus", "declare_metrics"]

# How often a reader of reports hears of load that changed while nothing else did.
_LOAD_S: Final = 1.0
_UNCLAIMED: Final = (
    "no run is claimed: the store has no pointer and this replica was given no run id; "
    "publish a version, or start the replica with a run id"
)
_SYNC_STATE = {
    Phase.IDLE: "IDLE",
    Phase.FETCHING: "FETCHING",
    Phase.STAGING: "STAGING",
    Phase.ACTIVATING: "COMMITTING",
}


@dataclass(frozen=True, slots=True)
class LastError:
    """The newest failure, kept after it healed. `at` is wall time, for people."""

    code: str
    message: str
    at: float

    def to_wire(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "at": self.at}


@dataclass(slots=True)
class PassRecord:
    """The last pass that did something, as `/server_info` shows it under `metrics`."""

    at: float
    target_version: int | None = None
    applied_version: int | None = None
    initial_target_version: int | None = None
    coalesced_versions: int | None = None
    stage_s: float | None = None
    commit_s: float | None = None
    gate_closed_s: float | None = None
    swap_s: float | None = None
    recompute_s: float | None = None
    drain_s: float | None = None
    bytes_read: int | None = None
    skipped_weight_update: bool | None = None
    coalesce_error: str | None = None
    error: str | None = None

    def to_wire(self) -> dict[str, Any]:
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) is not None
        }


def declare_metrics(metrics: Metrics) -> None:
    """The replica's own series (docs/operations.md lists them)."""
    metrics.gauge("stitch_replica_ready", "1 while the replica is ready.")
    metrics.gauge("stitch_replica_state", "1 for the present state.")
    metrics.gauge("stitch_replica_served_version", "Version number served; absent if unknown.")
    metrics.gauge("stitch_replica_latest_version", "Version number the pointer names.")
    metrics.gauge("stitch_replica_lag_versions", "Latest minus served, in versions.")
    metrics.gauge("stitch_replica_running", "Leases held.")
    metrics.gauge("stitch_replica_waiting", "Callers waiting at the gate.")
    metrics.counter("stitch_replica_passes_total", "Reconcile passes by outcome.")
    metrics.counter("stitch_replica_activations_total", "Activations by outcome.")
    metrics.counter("stitch_replica_refused_total", "Constraints not met at admission, by reason.")
    metrics.counter("stitch_replica_stage_bytes_total", "Bytes read while staging.")
    metrics.histogram("stitch_replica_gate_closed_seconds", "Time the gate was closed.")
    metrics.histogram("stitch_replica_swap_seconds", "Time from the first live byte to verified.")
    metrics.histogram("stitch_replica_recompute_seconds", "Time spent rebuilding key/value state.")
    metrics.histogram("stitch_replica_stage_seconds", "Time to fetch, decode and verify a stage.")


@dataclass(slots=True)
class ReplicaStatus:
    """State that reports are made of. Change fields, then call `changed()`.

    booted: this incarnation's weights were known once. known: they are known now. swapping: an
    activation within its bound is between the first live byte and its end. latched: this
    incarnation was caught up once.
    """

    env: Env
    config: ReplicaConfig
    gate: AdmissionGate
    metrics: Metrics
    incarnation: str = ""
    booted: bool = False
    known: bool = False
    swapping: bool = False
    latched: bool = False
    draining: bool = False
    phase: Phase = Phase.IDLE
    latest: Ref | None = None
    base: str = "unproven"
    destination: str = ""
    destination_ready: bool = False
    destination_error: str | None = None
    terminal: str | None = None
    reason: str | None = "the engine's weights are not proven yet"
    failing: bool = False
    last_error: LastError | None = None
    last_success: float | None = None
    last_pass: PassRecord | None = None
    passes: int = 0
    passes_failed: int = 0
    activations: int = 0
    undone: int = 0
    gate_closed_s: float | None = None
    swap_s: float | None = None
    recompute_s: float | None = None
    _seq: int = 0
    _shown: tuple[Any, ...] = ()
    _listeners: list[asyncio.Event] = field(default_factory=list)

    @property
    def state(self) -> ReplicaState:
        """The one state that the flags add up to."""
        if self.terminal is not None:
            return ReplicaState.FAILED
        if self.draining:
            return ReplicaState.DRAINING
        if not self.known:
            return ReplicaState.UNKNOWN if self.booted else ReplicaState.BOOTING
        return ReplicaState.READY if self.latched else ReplicaState.CATCHING_UP

    @property
    def served(self) -> Ref | None:
        """None while unknown: the gate has the new label while the engine still resumes."""
        return self.gate.served if self.known else None

    @property
    def unclaimed(self) -> str | None:
        """Why there is nothing to serve yet: neither store nor configuration names a run."""
        named = self.latest or self.config.boot or self.served
        return _UNCLAIMED if self.known and named is None else None

    @property
    def why(self) -> str | None:
        """What stands in the way, for people; None if nothing does."""
        return self.reason if self.reason is not None else self.unclaimed

    @property
    def lag(self) -> int | None:
        """Latest minus served; None across runs or while either is unknown."""
        served = self.served
        if self.latest is None or served is None or served.run_id != self.latest.run_id:
            return None
        return max(0, self.latest.version - served.version)

    def begin_incarnation(self, incarnation: str) -> None:
        """A new engine life: numbers of reports start over, nothing is known of the weights."""
        self.incarnation = incarnation
        self._seq = 0
        self._shown = ()
        self.booted = self.known = self.swapping = self.latched = False
        self.destination_ready = False
        self.changed()

    def changed(self) -> None:
        """Wake every `reports()` consumer."""
        for event in self._listeners:
            event.set()

    def fail(self, error: BaseException) -> None:
        """Note a failure; it stays in `last_error`, and in `reason` until a pass succeeds."""
        code = error.code if isinstance(error, StitchError) else type(error).__name__
        text = error.message if isinstance(error, StitchError) else str(error) or code
        self.last_error = LastError(code, text, self.env.clock.wall())
        self.reason = f"{code}: {text}"
        self.failing = True
        self.changed()

    def succeed(self) -> None:
        """A pass ended well."""
        self.last_success = self.env.clock.monotonic()
        self.failing = False
        if self.terminal is None:
            self.reason = None
        self.changed()

    @property
    def last_success_age_s(self) -> float | None:
        """Seconds since the last pass that ended well; None before the first."""
        if self.last_success is None:
            return None
        return self.env.clock.monotonic() - self.last_success

    def health(self) -> tuple[bool, str | None]:
        """Ready, and if not why. An activation within its bound is not a failure."""
        if self.terminal is not None:
            return False, f"broken: {self.terminal}"
        if self.draining:
            return False, "draining: this replica is leaving its pool"
        if self.why is not None and self.why == self.unclaimed:
            return False, self.why
        if not (self.latched and (self.known or self.swapping)):
            doing = {
                ReplicaState.BOOTING: "preparing",
                ReplicaState.UNKNOWN: "recovering: the version in use is unknown",
            }.get(self.state, "catching up")
            return False, doing if self.reason is None else f"{doing}: {self.reason}"
        lag_max, stale_max = self.config.ready_lag_max, self.config.ready_stale_s_max
        if lag_max is not None and (self.lag or 0) > lag_max:
            return False, f"catching up: {self.lag} versions behind, at most {lag_max} allowed"
        age = self.last_success_age_s
        if stale_max is not None and age is not None and age > stale_max:
            return False, f"stale: no successful pass for {age:.0f} s"
        return True, None

    def report(self) -> ReplicaReport:
        """The present report; `seq` grows whenever its content differs from the last one."""
        content = (
            self.state,
            self.phase,
            self.gate.state,
            self.served,
            self.latest,
            self.lag,
            self.gate.running,
            self.gate.waiting,
            self.why,
            self.gate_closed_s,
            self.swap_s,
            self.recompute_s,
        )
        if content != self._shown:
            self._shown = content
            self._seq += 1
        return ReplicaReport(self.config.replica_id, self.incarnation, self._seq, *content)

    async def reports(self) -> AsyncIterator[ReplicaReport]:
        """The present report, then one after every change; changes in between coalesce.

        Load (`running`, `waiting`) changes with every request, so it makes a report by itself
        only every `_LOAD_S`; while it stays the same there is none.
        """
        event = asyncio.Event()
        self._listeners.append(event)
        try:
            last: ReplicaReport | None = None
            beat = 0.0
            while True:
                event.clear()
                report, now = self.report(), self.env.clock.monotonic()
                if report != last and (last is None or now >= beat or not _same(report, last)):
                    last, beat = report, now + _LOAD_S
                    yield report
                    continue
                with contextlib.suppress(TimeoutError):
                    async with self.env.clock.timeout(beat - now if beat > now else _LOAD_S):
                        await event.wait()
        finally:
            self._listeners.remove(event)

    def server_info(self) -> dict[str, Any]:
        """The `/server_info` body (docs/http-contract.md, Server info)."""
        served = self.served
        ready, why = self.health()
        return {
            "ready": ready,
            "applied": None if served is None else str(served),
            "sync_state": self._sync_state(),
            "reason": why if why is not None else self.why,
            "run_id": self._run_id(),
            "commit_mode": self.config.mode.value,
            "active_requests": self.gate.running,
            "update_destination_ready": self.destination_ready,
            "update_destination_error": self.destination_error,
            "terminal_error": self.terminal,
            "metrics": None if self.last_pass is None else self.last_pass.to_wire(),
            "replica_id": self.config.replica_id,
            "incarnation": self.incarnation,
            "state": self.state.value,
            "phase": self.phase.value,
            "gate": self.gate.state.value,
            "served": None if served is None else served.to_wire(),
            "latest": None if self.latest is None else self.latest.to_wire(),
            "lag": self.lag,
            "base": self.base,
            "destination": self.destination,
            "last_success_age_s": self.last_success_age_s,
            "last_error": None if self.last_error is None else self.last_error.to_wire(),
            "waiting_requests": self.gate.waiting,
            "passes": {
                "total": self.passes,
                "failed": self.passes_failed,
                "activations": self.activations,
                "undone": self.undone,
            },
            "gate_closed_s": self.gate_closed_s,
            "swap_s": self.swap_s,
            "recompute_s": self.recompute_s,
        }

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date before the metrics page is rendered."""
        served = self.served
        self.metrics.set("stitch_replica_ready", 1.0 if self.health()[0] else 0.0)
        for state in ReplicaState:
            on = 1.0 if state is self.state else 0.0
            self.metrics.set("stitch_replica_state", on, state=state.value)
        self.metrics.set(
            "stitch_replica_served_version", None if served is None else float(served.version)
        )
        self.metrics.set(
            "stitch_replica_latest_version",
            None if self.latest is None else float(self.latest.version),
        )
        lag = self.lag
        self.metrics.set("stitch_replica_lag_versions", None if lag is None else float(lag))
        self.metrics.set("stitch_replica_running", float(self.gate.running))
        self.metrics.set("stitch_replica_waiting", float(self.gate.waiting))

    def _sync_state(self) -> str:
        if self.terminal is not None or (self.failing and self.phase is Phase.IDLE):
            return "ERROR"
        return _SYNC_STATE[self.phase]

    def _run_id(self) -> str | None:
        if self.served is not None:
            return self.served.run_id
        return self.latest.run_id if self.latest is not None else self.config.run_id


def _same(report: ReplicaReport, last: ReplicaReport) -> bool:
    """Whether they differ in load alone."""
    return last == dataclasses.replace(
        report, seq=last.seq, running=last.running, waiting=last.waiting
    )
