"""What a demo run can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stitch.errors import InvalidInput

__all__ = ["DemoSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of one run.

    out: gets `report.html`, `report.json`, `store/`, `base/` and `logs/`.
    groups, samples: prompts per step, completions per prompt.
    lag_max: requests ask for a version at most this far behind the pointer.
    in_flight, finished_max: groups being sampled at once, and finished ones that may wait for
        the trainer; more keeps the engines busy, and makes tokens staler.
    reward_margin: how much the mean reward of the last steps must exceed that of the first.
    reward_steps: how many steps "first" and "last" are.
    tolerance: greatest accepted difference of a token's log-probability between the engine and
        a recomputation under the labelled version, in nats. Both compute in fp32; what remains
        is the order of summation.
    reject_min: fraction of spans for which a neighbouring version must exceed the tolerance.
    swap_s_max: target for the median swap, reported, not enforced.
    shift_labels: falsifies the labels before they are checked; the check must fail then.
    """

    out: Path
    replicas: int = 3
    steps: int = 60
    seed: int = 0
    lr: float = 1e-3
    chaos: bool = True
    keep: bool = False
    mode: Literal["recompute", "in_place", "quiesce"] = "recompute"
    groups: int = 24
    samples: int = 8
    lag_max: int = 2
    in_flight: int = 18
    finished_max: int = 8
    reward_margin: float = 0.25
    reward_steps: int = 5
    tolerance: float = 2e-4
    reject_min: float = 0.95
    swap_s_max: float = 0.05
    shift_labels: int = 0
    ready_s: float = 180.0
    step_s_max: float = 120.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("replicas", self.replicas, 1),
            ("steps", self.steps, 2),
            ("groups", self.groups, 1),
            ("samples", self.samples, 2),
            ("lag_max", self.lag_max, 0),
        ):
            if value < least:
                raise InvalidInput(f"{name} is {value}; it must be at least {least}", param=name)
        if not self.lr >= 0.0:
            raise InvalidInput(f"lr is {self.lr}; it must not be negative", param="lr")

    @property
    def kill_step(self) -> int | None:
        """The step after which a replica is killed and another one joins."""
        return self.steps // 2 if self.chaos and self.replicas > 1 else None
