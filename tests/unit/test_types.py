"""Vocabulary rules: refs, pointer text, pointer moves, constraints, spans."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.errors import Conflict, CorruptData, InvalidInput
from stitch.types import (
    UNCONSTRAINED,
    VERSION_MAX,
    Constraint,
    Ref,
    Span,
    Unmet,
    at_least,
    check_constraint,
    decide_pointer_move,
    exactly,
    lag,
    parse_pointer,
    parse_version_name,
    validate_spans,
    version_name,
)


@pytest.mark.parametrize(
    ("version", "name"),
    [(0, "weight_v000000"), (7, "weight_v000007"), (1_000_000, "weight_v1000000")],
)
def test_version_names(version: int, name: str) -> None:
    assert version_name(version) == name
    assert parse_version_name(name) == version


@pytest.mark.parametrize(
    "name",
    ["weight_v1", "weight_v0000001", "weight_v", "weight_v00000x", "v000001", "weight_v-00001", ""]
    + [f"weight_v{VERSION_MAX + 1}", "weight_v000001/", "weight_v000001\n"],
)
def test_version_names_refused(name: str) -> None:
    with pytest.raises(CorruptData):
        parse_version_name(name)


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("run-a1/weight_v000003", Ref("run-a1", 3)),
        ("run-a1/weight_v000003\n", Ref("run-a1", 3)),
        (b"r/weight_v1000000", Ref("r", 1_000_000)),
        ("", None),
        (b"", None),
        (" \n", None),
    ],
)
def test_pointer_text(text: str | bytes, ref: Ref | None) -> None:
    assert parse_pointer(text) == ref


@pytest.mark.parametrize(
    "text",
    ["weight_v000003", "3", "run/", "run/weight_v3", "/weight_v000003", "a/b/weight_v000003"]
    + ["run/weight_v00000", "../x/weight_v000001", b"\0" * 12, b"\xff\xfe", "run weight_v000001"],
)
def test_pointer_text_refused(text: str | bytes) -> None:
    with pytest.raises(CorruptData):
        parse_pointer(text)


@pytest.mark.parametrize("version", [-1, VERSION_MAX + 1, True])
def test_ref_bounds(version: int) -> None:
    with pytest.raises(InvalidInput):
        Ref("run", version)


@pytest.mark.parametrize("run_id", ["", ".x", "-x", "a/b", "a" * 65, "a b", "ä"])
def test_run_id_form(run_id: str) -> None:
    with pytest.raises(InvalidInput):
        Ref(run_id, 0)


def test_pointer_moves() -> None:
    decide_pointer_move(None, Ref("a", 0))
    decide_pointer_move(Ref("a", 3), Ref("a", 4))
    decide_pointer_move(Ref("a", 9), Ref("b", 0))
    for version in (3, 2):
        with pytest.raises(Conflict, match="rewind"):
            decide_pointer_move(Ref("a", 3), Ref("a", version))


A5 = Ref("a", 5)


@pytest.mark.parametrize(
    ("constraint", "served", "unmet"),
    [
        (UNCONSTRAINED, A5, None),
        (UNCONSTRAINED, None, Unmet.BEHIND),
        (at_least(5), A5, None),
        (at_least(6), A5, Unmet.BEHIND),
        (at_least(0), A5, None),
        (exactly(5), A5, None),
        (exactly(4), A5, Unmet.PASSED),
        (exactly(6), A5, Unmet.BEHIND),
        (exactly(5, run_id="b"), A5, Unmet.OTHER_RUN),
        (Constraint(run_id="a"), A5, None),
        # With both, the exact one decides.
        (Constraint(min_version=9, exact_version=5), A5, None),
        (Constraint(min_version=1, exact_version=6), A5, Unmet.BEHIND),
    ],
)
def test_constraints(constraint: Constraint, served: Ref | None, unmet: Unmet | None) -> None:
    assert check_constraint(constraint, served) is unmet


def test_lag_needs_a_pointer_of_the_same_run() -> None:
    assert check_constraint(lag(1), A5) is None
    assert check_constraint(lag(1), A5, latest=Ref("a", 6)) is None
    assert check_constraint(lag(1), A5, latest=Ref("a", 7)) is Unmet.BEHIND
    assert check_constraint(lag(0), A5, latest=Ref("b", 99)) is None


@pytest.mark.parametrize("make", [at_least, exactly, lag])
@pytest.mark.parametrize("wrong", [-1, "3", True, 1.0, None, 2**53])
def test_a_constraint_that_no_server_takes_is_not_built(make: Any, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="must be an integer"):
        make(wrong)


def test_spans_tile_the_completion() -> None:
    spans = [Span(A5, 0, 3), Span(Ref("a", 6), 3, 8)]
    validate_spans(spans, 8)
    validate_spans([], 0)
    for bad, count in [(spans, 9), (spans[1:], 8), ([Span(A5, 0, 0)], 0), (spans[:1] * 2, 6)]:
        with pytest.raises(CorruptData):
            validate_spans(bad, count)
