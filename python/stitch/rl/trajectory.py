"""Trajectories and their age: which version made each token, and how stale it is when consumed.

Staleness of a token is the trainer's version at consumption minus the version that made the
token. Versions come from the response's spans alone, never from counters of the caller, so a
trainer that restarts goes on with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stitch.errors import Conflict, CorruptData
from stitch.types import Ref, Span, validate_spans

__all__ = ["StalenessReport", "Trajectory", "staleness", "token_versions"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled completion, as a learner consumes it.

    `logprobs` are the behaviour policy's, one per output token. `group` ties the samples of one
    prompt together. `rewards` has one entry per output token, or one for the whole completion.

    Raises: CorruptData if the spans do not tile the output or the lengths differ.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    rewards: tuple[float, ...]
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.output_ids):
            raise CorruptData(
                f"{len(self.logprobs)} log-probabilities for {len(self.output_ids)} tokens"
            )
        validate_spans(self.spans, len(self.output_ids))

    @property
    def reward(self) -> float:
        """Mean reward over the entries of `rewards`."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0

    @property
    def run_id(self) -> str | None:
        """The run that made it; None for an empty output. A trajectory never mixes runs."""
        return self.spans[0].ref.run_id if self.spans else None


def token_versions(spans: Sequence[Span]) -> list[int]:
    """The version that made each token, from spans that tile the completion."""
    versions: list[int] = []
    for span in spans:
        versions += [span.ref.version] * (span.end - span.start)
    return versions


def staleness(spans: Sequence[Span], trainer: Ref) -> list[int]:
    """Age of each token, in versions, if consumed by a trainer that stands at `trainer`.

    Raises: Conflict for tokens of another run (their numbers do not compare) or of a version
        above the trainer's, which only a mixed-up trainer can see.
    """
    ages = []
    for span in spans:
        if span.ref.run_id != trainer.run_id:
            raise Conflict(
                f"tokens of run {span.ref.run_id} cannot age against {trainer}",
                found=str(span.ref),
            )
        age = trainer.version - span.ref.version
        if age < 0:
            raise Conflict(
                f"tokens of {span.ref} are newer than the trainer's own {trainer}",
                found=str(span.ref),
            )
        ages += [age] * (span.end - span.start)
    return ages


@dataclass(slots=True)
class StalenessReport:
    """Counts of token ages, gathered batch by batch."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, trajectory: Trajectory, trainer: Ref) -> int:
        """Count one trajectory's tokens. Returns its greatest age (0 if it is empty)."""
        ages = staleness(trajectory.spans, trainer)
        for age in ages:
            self.counts[age] = self.counts.get(age, 0) + 1
        return max(ages, default=0)

    @property
    def mean(self) -> float:
        """Mean token age in versions; 0 before any token."""
        total = sum(self.counts.values())
        return sum(a * n for a, n in self.counts.items()) / total if total else 0.0

    @property
    def max(self) -> int:
        """Greatest token age seen."""
        return max(self.counts, default=0)
