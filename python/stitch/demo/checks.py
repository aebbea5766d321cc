"""What must be true at the end of a demo run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from stitch.demo.labels import LabelReport
from stitch.demo.record import RunRecord
from stitch.demo.settings import DemoSettings

__all__ = ["NO_NEIGHBOURS", "Check", "all_checks", "reward_check", "swap_target"]


NO_NEIGHBOURS: Final = "none could be tested, no weights differ between neighbouring versions"


@dataclass(frozen=True, slots=True)
class Check:
    """One check. Targets (`required` False) are reported but do not decide the exit code."""

    name: str
    passed: bool
    detail: str
    required: bool = True


def all_checks(
    settings: DemoSettings,
    record: RunRecord,
    labels: LabelReport,
    *,
    latest: int,
    live: Sequence[str],
    missing: dict[str, str],
) -> list[Check]:
    """Every check in the order of the summary."""
    checks = [
        reward_check([step.reward for step in record.steps], settings),
        _converged(latest, live, missing, settings),
        _labels(labels),
    ]
    if settings.kill_step is not None:
        checks.append(_replaced(record, latest))
    checks.append(swap_target(record, settings))
    return checks


def reward_check(rewards: Sequence[float], settings: DemoSettings) -> Check:
    """Mean reward of the last steps against that of the first."""
    count = max(1, min(settings.reward_steps, len(rewards) // 2))
    first = sum(rewards[:count]) / count if rewards else 0.0
    last = sum(rewards[-count:]) / count if rewards else 0.0
    return Check(
        "reward rose",
        last - first >= settings.reward_margin,
        f"{first:.3f} in the first {count} steps, {last:.3f} in the last; must rise by "
        f"{settings.reward_margin:g}",
    )


def swap_target(record: RunRecord, settings: DemoSettings) -> Check:
    """The median swap against its target."""
    swaps = [a.swap_s for a in record.activations if a.swap_s is not None]
    if not swaps:
        return Check("median swap", False, "no activation was seen", required=False)
    found = median(swaps)
    return Check(
        "median swap",
        found < settings.swap_s_max,
        f"{found * 1e3:.1f} ms over {len(swaps)} activations; target "
        f"{settings.swap_s_max * 1e3:g} ms",
        required=False,
    )


def _converged(
    latest: int, live: Sequence[str], missing: dict[str, str], settings: DemoSettings
) -> Check:
    behind = "; ".join(f"{name}: {why}" for name, why in missing.items())
    return Check(
        "replicas converged",
        len(live) >= settings.replicas and not missing,
        f"{len(live)} of {settings.replicas} serve version {latest}"
        + (f"; not {behind}" if behind else ""),
    )


def _labels(labels: LabelReport) -> Check:
    rejected = (
        f"neighbouring versions rejected in {labels.rejected_share:.1%} of {labels.neighbours}"
        if labels.neighbours
        else f"neighbouring versions: {NO_NEIGHBOURS}"
    )
    carried = f", {labels.carried} carried spans not judged" if labels.carried else ""
    return Check(
        "labels are true",
        labels.passed,
        f"{labels.accepted} of {labels.spans} spans match their version within "
        f"{labels.tolerance:g} nats (worst {labels.error_max:.1e}); {rejected}{carried}",
    )


def _replaced(record: RunRecord, latest: int) -> Check:
    killed = [track for track in record.tracks.values() if track.killed]
    at = min((track.left_s or 0.0 for track in killed), default=None)
    joined = [
        track
        for track in record.tracks.values()
        if at is not None and track.joined_s > at and track.served == latest
    ]
    return Check(
        "a killed replica was replaced",
        bool(killed and joined),
        f"{', '.join(t.id for t in killed) or 'none'} killed, "
        f"{', '.join(t.id for t in joined) or 'none'} joined and caught up",
    )
