"""What a running replica shows to the sidecar: a report, health, and wakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from stitch.admission import AdmissionGate
from stitch.engines.base import Engine
from stitch.types import GateState, Phase, Ref, ReplicaState

__all__ = ["ReplicaReport", "ReplicaView"]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One full report. Consumers drop any with a lower `seq` of the same incarnation.

    `served` is None while the version is unknown. `lag` is latest minus served, in versions.
    Times in seconds.
    """

    replica_id: str
    incarnation: str
    seq: int
    state: ReplicaState
    phase: Phase
    gate: GateState
    served: Ref | None
    latest: Ref | None
    lag: int | None
    running: int
    waiting: int
    reason: str | None
    gate_closed_s: float | None
    swap_s: float | None
    recompute_s: float | None

    @property
    def event_id(self) -> str:
        """The SSE id."""
        return f"{self.incarnation}:{self.seq}"

    def to_wire(self) -> dict[str, Any]:
        """The report as `/events` and `/status` send it (docs/http-contract.md, Events)."""
        return {
            "replica_id": self.replica_id,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "state": self.state.value,
            "phase": self.phase.value,
            "gate": self.gate.value,
            "served": None if self.served is None else self.served.to_wire(),
            "latest": None if self.latest is None else self.latest.to_wire(),
            "lag": self.lag,
            "running": self.running,
            "waiting": self.waiting,
            "reason": self.reason,
            "gate_closed_s": self.gate_closed_s,
            "swap_s": self.swap_s,
            "recompute_s": self.recompute_s,
        }


class ReplicaView(Protocol):
    """A replica as its HTTP process sees it. All methods are called on the event loop."""

    @property
    def gate(self) -> AdmissionGate: ...

    @property
    def engine(self) -> Engine: ...

    def report(self) -> ReplicaReport:
        """The present report, with the newest `seq`."""
        ...

    def reports(self) -> AsyncIterator[ReplicaReport]:
        """The present report at once, then one after every change (coalesced), until closed."""
        ...

    def server_info(self) -> dict[str, Any]:
        """The `/server_info` body: the drop-in keys, versions, last errors, last pass."""
        ...

    def health(self) -> tuple[bool, str | None]:
        """Ready, and if not why (preparing, catching up, broken)."""
        ...

    def wake(self) -> None:
        """A hint that the pointer may have moved (also called on every 409). Coalesced."""
        ...

    def metrics(self) -> str:
        """Prometheus text of the replica's own series."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """SIGTERM: readiness false at once, new requests refused retryably, running ones end."""
        ...
