"""Everything a demo run observes, in plain data: for the live view, the checks and the report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from stitch.rl.trajectory import StalenessReport, Trajectory

__all__ = ["Activation", "ReplicaTrack", "RunRecord", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One trainer step. Times in seconds since the run began, or durations."""

    step: int
    at_s: float
    version: int
    reward: float
    entropy: float
    clipped: float
    staleness_mean: float
    staleness_max: int
    wait_s: float
    train_s: float
    publish_s: float


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation as a replica reported it."""

    replica: str
    at_s: float
    version: int
    gate_closed_s: float | None
    swap_s: float | None
    recompute_s: float | None


@dataclass(slots=True)
class ReplicaTrack:
    """One replica over the run: `points` are (seconds, state, served version or None)."""

    id: str
    joined_s: float
    left_s: float | None = None
    killed: bool = False
    points: list[tuple[float, str, int | None]] = field(default_factory=list)
    now: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """The last state known; KILLED or GONE after its end."""
        if self.killed:
            return "KILLED"
        if self.left_s is not None:
            return "GONE"
        return str(self.now.get("state", "BOOTING"))

    @property
    def served(self) -> int | None:
        """The version it serves, None while unknown."""
        served = self.now.get("served")
        return int(served["version"]) if isinstance(served, dict) else None


@dataclass(slots=True)
class RunRecord:
    """Filled by trainer, monitor and feed; one lock, short critical sections."""

    clock: Callable[[], float]
    began: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    tracks: dict[str, ReplicaTrack] = field(default_factory=dict)
    activations: list[Activation] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    delta_bytes: dict[int, int] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    notes: list[tuple[float, str]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    client_retries: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    lost_requests: int = 0
    phase: str = "starting"
    staleness: StalenessReport = field(default_factory=StalenessReport)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.began

    def note(self, text: str) -> None:
        """Remember one event in words, with its time."""
        with self.lock:
            self.notes.append((self.now_s, text))

    def track(self, replica: str) -> ReplicaTrack:
        """The track of one replica, made when first asked for. Call it under the lock."""
        if replica not in self.tracks:
            self.tracks[replica] = ReplicaTrack(replica, self.now_s)
        return self.tracks[replica]

    def observe(self, report: dict[str, Any]) -> None:
        """Take one report of a replica's `/events`."""
        with self.lock:
            track = self.track(str(report["replica_id"]))
            before = track.served
            track.now = report
            track.points.append((self.now_s, track.state, track.served))
            served = track.served
            swapped = served is not None and served != before and report.get("swap_s") is not None
            if swapped and served is not None and not self._seen(track.id, served):
                self.activations.append(
                    Activation(
                        track.id,
                        self.now_s,
                        served,
                        report.get("gate_closed_s"),
                        report.get("swap_s"),
                        report.get("recompute_s"),
                    )
                )

    def _seen(self, replica: str, version: int) -> bool:
        return any(
            a.replica == replica and a.version == version for a in reversed(self.activations[-64:])
        )

    def ended(self, replica: str, *, killed: bool) -> None:
        """A replica is gone."""
        with self.lock:
            track = self.track(replica)
            if track.left_s is None:
                track.left_s = self.now_s
            track.killed = track.killed or killed

    def to_wire(self) -> dict[str, Any]:
        """The series for `report.json`; trajectories are summed up, not listed."""
        with self.lock:
            return {
                "steps": [asdict(step) for step in self.steps],
                "activations": [asdict(activation) for activation in self.activations],
                "replicas": [
                    {
                        "id": t.id,
                        "joined_s": t.joined_s,
                        "left_s": t.left_s,
                        "state": t.state,
                        "served": t.served,
                        "points": [list(point) for point in t.points],
                    }
                    for t in self.tracks.values()
                ],
                "publication_bytes": {str(v): size for v, size in self.delta_bytes.items()},
                "publication_kinds": {str(v): kind for v, kind in self.kinds.items()},
                "notes": [list(note) for note in self.notes],
                "gateway_counters": dict(self.counters),
                "client_retries": dict(self.client_retries),
                "requests": self.requests,
                "lost_requests": self.lost_requests,
                "staleness": {str(k): n for k, n in sorted(self.staleness.counts.items())},
            }
