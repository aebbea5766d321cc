"""Trajectories and staleness: labels in, ages out."""

from __future__ import annotations

import pytest

from stitch.errors import Conflict, CorruptData
from stitch.rl import StalenessReport, Trajectory, staleness, token_versions
from stitch.types import Ref, Span

RUN = "run-a"
CROSSED = (Span(Ref(RUN, 4), 0, 3), Span(Ref(RUN, 6), 3, 5))


def trajectory(spans: tuple[Span, ...], count: int = 5) -> Trajectory:
    return Trajectory((1, 2), tuple(range(count)), (-0.5,) * count, spans, (1.0, 0.0))


def test_each_token_has_the_version_of_its_span() -> None:
    assert token_versions(CROSSED) == [4, 4, 4, 6, 6]


def test_staleness_is_the_trainers_version_minus_the_tokens() -> None:
    assert staleness(CROSSED, Ref(RUN, 7)) == [3, 3, 3, 1, 1]


def test_staleness_continues_over_a_trainer_restart() -> None:
    # The trainer comes back at version 40; an answer made at 38 is two versions old, not -38.
    assert staleness((Span(Ref(RUN, 38), 0, 1),), Ref(RUN, 40)) == [2]


def test_another_run_does_not_compare() -> None:
    with pytest.raises(Conflict, match="run-a"):
        staleness(CROSSED, Ref("run-b", 7))


def test_a_token_newer_than_the_trainer_is_refused() -> None:
    with pytest.raises(Conflict, match="newer"):
        staleness(CROSSED, Ref(RUN, 5))


def test_spans_must_tile_the_output() -> None:
    with pytest.raises(CorruptData, match="continue at token 0"):
        trajectory((Span(Ref(RUN, 4), 1, 5),))
    with pytest.raises(CorruptData, match="cover 3 of 5"):
        trajectory((Span(Ref(RUN, 4), 0, 3),))


def test_one_logprob_per_token() -> None:
    with pytest.raises(CorruptData, match="2 log-probabilities for 3 tokens"):
        Trajectory((1,), (1, 2, 3), (-0.1, -0.2), (Span(Ref(RUN, 1), 0, 3),), (0.0,))


def test_report_counts_tokens_by_age() -> None:
    report = StalenessReport()
    assert report.add(trajectory(CROSSED), Ref(RUN, 7)) == 3
    assert report.add(trajectory((Span(Ref(RUN, 7), 0, 5),)), Ref(RUN, 7)) == 0
    assert report.counts == {3: 3, 1: 2, 0: 5}
    assert report.max == 3
    assert report.mean == pytest.approx(1.1)
