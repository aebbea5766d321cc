"""What a replica can be told: identity, activation mode, and every limit it works within."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stitch.admission import GateConfig
from stitch.destinations.base import Destination
from stitch.engines.base import Engine
from stitch.errors import InvalidInput
from stitch.types import ActivationMode, Ref

__all__ = ["DestinationFactory", "ReplicaConfig"]

# Makes the destination of one incarnation: called with the engine and the incarnation's id at
# start and again whenever the engine came back as another process.
DestinationFactory = Callable[[Engine, str], Destination]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Settings of one replica. Times in seconds.

    work_dir: fetched publications are cached here; removed once staged.
    run_id: the run whose `boot_version` the engine's checkpoint is. Without it the boot
        checkpoint is labelled only after the store names a run with that base.
    poll_s: the backstop interval; 0 turns polling off. `poll_jitter` is a fraction of it.
    pass_interval_s: two passes never start closer than this, however many wakes arrive.
    control_s, rank_s: deadline of one engine control call, of one order to all ranks.
    order_tries: sends of one idempotent order before its outcome counts as unknown.
    resume_tries: sends of `resume` before the engine counts as unhealthy.
    engine_return_s: how long a lost engine may take to come back before the replica fails.
    recover_tries: failed repairs (not lost calls) before the replica fails.
    ready_lag_max, ready_stale_s_max: not ready when further behind, or longer without a
        successful pass; None means that readiness, once reached, does not depend on it.
    scrub_s: interval of full verification while serving; 0 turns it off.
    """

    replica_id: str
    work_dir: Path
    run_id: str | None = None
    boot_version: int = 0
    mode: ActivationMode = ActivationMode.RECOMPUTE
    gate: GateConfig = field(default_factory=GateConfig)
    poll_s: float = 5.0
    poll_jitter: float = 0.2
    pass_interval_s: float = 0.02
    backoff_s_min: float = 0.5
    backoff_s_max: float = 30.0
    stage_s_max: float = 3600.0
    activate_s_max: float = 600.0
    control_s: float = 10.0
    rank_s: float = 30.0
    resume_s: float = 60.0
    boot_s_max: float = 600.0
    lease_beat_s: float = 10.0
    flush_s_max: float = 10.0
    flush_retry_s: float = 0.2
    order_tries: int = 2
    resume_tries: int = 5
    probe_s: float = 5.0
    probe_failures_max: int = 3
    engine_return_s: float = 60.0
    recover_tries: int = 3
    supersede_max: int = 2
    ready_lag_max: int | None = None
    ready_stale_s_max: float | None = None
    scrub_s: float = 3600.0
    visible_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if self.run_id is not None:
            Ref(self.run_id, self.boot_version)
        if not self.replica_id:
            raise InvalidInput("replica_id is empty; name this replica", param="replica_id")
        if self.boot_version < 0:
            raise InvalidInput(
                f"boot_version {self.boot_version} is negative", param="boot_version"
            )
        if self.poll_s < 0 or not 0 <= self.poll_jitter <= 1:
            raise InvalidInput(
                f"poll_s {self.poll_s} and poll_jitter {self.poll_jitter} must be at least 0 "
                "(jitter at most 1)",
                param="poll_s",
            )

    @property
    def boot(self) -> Ref | None:
        """The ref that the boot checkpoint counts as, if this replica was told its run."""
        return None if self.run_id is None else Ref(self.run_id, self.boot_version)
