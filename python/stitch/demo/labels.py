"""Are the labels true? Every trajectory's log-probabilities, recomputed from the store alone.

For each version the checkpoint is materialized from the base and the publications, as anybody
else would. A span passes if recomputing its tokens under the labelled version, each given its
full prefix, gives the reported log-probabilities within the tolerance. The same spans are scored
under the versions before and after: a check that those pass as well would prove nothing, so at
least `reject_min` of the spans whose weights differ must exceed the tolerance there.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from stitch.demo.model import load_model, load_tensors, output_logprobs
from stitch.env import Env
from stitch.format.materialize import materialize
from stitch.rl.trajectory import Trajectory
from stitch.types import Prefix, Ref, Span

__all__ = ["LabelReport", "check_labels", "shifted"]

# Trajectories per forward pass: more fall out of the cache.
_PART: Final = 64


@dataclass(slots=True)
class LabelReport:
    """Outcome. `errors_*` are greatest differences per span, in nats.

    spans: judged ones; `carried` spans come from no single policy and are counted apart.
    accepted: within the tolerance under the labelled version. neighbours: (span, other version)
    pairs whose weights differ; rejected: those beyond the tolerance there; `neighbour_error_low`
    is the lowest percent's bound.
    """

    tolerance: float
    reject_min: float
    trajectories: int = 0
    tokens: int = 0
    spans: int = 0
    multi_span: int = 0
    carried: int = 0
    versions: int = 0
    accepted: int = 0
    neighbours: int = 0
    rejected: int = 0
    error_max: float = 0.0
    neighbour_error_low: float = 0.0
    neighbour_error_median: float = 0.0
    worst: str = ""
    neighbour_errors: list[float] = field(default_factory=list, repr=False)

    @property
    def rejected_share(self) -> float:
        """Share of neighbouring versions that the tolerance tells apart."""
        return self.rejected / self.neighbours if self.neighbours else 0.0

    @property
    def passed(self) -> bool:
        """Right version accepted everywhere, neighbours rejected often enough."""
        return (
            self.spans > 0
            and self.accepted == self.spans
            and (self.neighbours == 0 or self.rejected_share >= self.reject_min)
        )

    def to_wire(self) -> dict[str, Any]:
        """For `report.json`."""
        facts = asdict(self)
        del facts["neighbour_errors"]
        return {**facts, "rejected_share": self.rejected_share, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class _Claim:
    trajectory: Trajectory
    span: Span


def check_labels(
    trajectories: Sequence[Trajectory],
    *,
    base: Path,
    updates: Path,
    run_id: str,
    boot_version: int,
    latest: int,
    scratch: Path,
    tolerance: float,
    reject_min: float,
    env: Env,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LabelReport:
    """Recompute and judge. `scratch` must not exist; it is removed again.

    `on_progress` gets how many of the run's versions are done, and how many there are.
    """
    report = LabelReport(tolerance, reject_min, trajectories=len(trajectories))
    claims = _claims(trajectories, report)
    report.versions = len(claims)
    wanted = {w for v in claims for w in (v - 1, v, v + 1) if boot_version <= w <= latest}
    model = load_model(base)
    scorer = _Scorer(model)
    digests: dict[int, str] = {}
    held: list[tuple[int, _Claim, float]] = []
    scratch.mkdir()
    try:
        walk = _versions(base, updates, run_id, boot_version, max(wanted, default=-1), scratch, env)
        for version, directory, digest in walk:
            digests[version] = digest
            if version not in wanted:
                continue
            load_tensors(model, load_file(directory / "model.safetensors"))
            near = [c for v in (version - 1, version, version + 1) for c in claims.get(v, ())]
            held += [(version, claim, error) for claim, error in scorer.errors(near)]
            on_progress(version - boot_version + 1, latest - boot_version + 1)
    finally:
        scorer.close()
        shutil.rmtree(scratch, ignore_errors=True)
    _judge(report, held, digests)
    return report


def shifted(
    trajectories: Sequence[Trajectory], by: int, *, boot_version: int, latest: int
) -> list[Trajectory]:
    """The same trajectories with every label moved by `by` versions (back, where there is none)."""

    def moved(span: Span) -> Span:
        version = span.ref.version + by
        if not boot_version <= version <= latest:
            version = span.ref.version - by
        return Span(Ref(span.ref.run_id, version), span.start, span.end, span.prefix)

    return [
        Trajectory(
            t.prompt_ids, t.output_ids, t.logprobs, tuple(map(moved, t.spans)), t.rewards, t.group
        )
        for t in trajectories
    ]


def _claims(trajectories: Sequence[Trajectory], report: LabelReport) -> Mapping[int, list[_Claim]]:
    claims: dict[int, list[_Claim]] = defaultdict(list)
    for trajectory in trajectories:
        report.tokens += len(trajectory.output_ids)
        report.multi_span += len(trajectory.spans) > 1
        for span in trajectory.spans:
            if span.prefix is Prefix.CARRIED:
                report.carried += 1
                continue
            report.spans += 1
            claims[span.ref.version].append(_Claim(trajectory, span))
    return claims


def _versions(
    base: Path, updates: Path, run_id: str, boot: int, last: int, scratch: Path, env: Env
) -> Iterator[tuple[int, Path, str]]:
    """Every version from `boot` to `last` as a checkpoint, each built on the one before."""
    before = base
    for version in range(boot, last + 1):
        out = scratch / f"v{version}"
        made = materialize(
            base=before,
            updates=updates,
            version=version,
            out=out,
            env=env,
            base_version=max(boot, version - 1),
            run_id=run_id,
        )
        if before != base:
            shutil.rmtree(before)
        before = out
        yield version, out, made.model_digest


class _Scorer:
    """Scores trajectories on every core: parts of a batch in threads, each with one torch thread,
    which beats torch's own threads at this size."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._pool = ThreadPoolExecutor(
            os.cpu_count() or 1, "stitch-labels", initializer=lambda: torch.set_num_threads(1)
        )

    def errors(self, claims: Sequence[_Claim]) -> list[tuple[_Claim, float]]:
        """Greatest |recomputed - reported| over each claim's span, under the model's weights."""
        distinct = {id(claim.trajectory): claim.trajectory for claim in claims}
        shapes: dict[tuple[int, int], list[Trajectory]] = defaultdict(list)
        for trajectory in distinct.values():
            shapes[len(trajectory.prompt_ids), len(trajectory.output_ids)].append(trajectory)
        parts = [
            same[at : at + _PART] for same in shapes.values() for at in range(0, len(same), _PART)
        ]
        rows: dict[int, torch.Tensor] = {}
        for part, found in zip(parts, self._pool.map(self._score, parts), strict=True):
            rows |= {id(t): row for t, row in zip(part, found, strict=True)}
        return [(c, float(rows[id(c.trajectory)][c.span.start : c.span.end].max())) for c in claims]

    def _score(self, part: Sequence[Trajectory]) -> torch.Tensor:
        with torch.inference_mode():
            found, _ = output_logprobs(self._model, part)
            return (found - torch.tensor([t.logprobs for t in part])).abs()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def _judge(
    report: LabelReport, held: Sequence[tuple[int, _Claim, float]], digests: Mapping[int, str]
) -> None:
    for version, claim, error in held:
        labelled = claim.span.ref.version
        if version == labelled:
            report.accepted += error <= report.tolerance
            if error > report.error_max:
                report.error_max = error
                report.worst = (
                    f"tokens {claim.span.start} to {claim.span.end} labelled {labelled} differ by "
                    f"{error:.2e} nats"
                )
        elif digests[version] != digests.get(labelled):
            report.neighbours += 1
            report.rejected += error > report.tolerance
            report.neighbour_errors.append(error)
    if report.neighbour_errors:
        ordered = sorted(report.neighbour_errors)
        report.neighbour_error_median = ordered[len(ordered) // 2]
        report.neighbour_error_low = ordered[len(ordered) // 100]
