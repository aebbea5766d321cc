"""The reconciler's one decision, as a table; and that following it always ends in Idle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.errors import Conflict, CorruptData
from stitch.reconciler.decide import (
    Activate,
    Idle,
    Observed,
    Recover,
    Refuse,
    Relabel,
    Reload,
    Stage,
    Step,
    SwitchRun,
    match_base,
    next_step,
)
from stitch.types import Ref


def a(version: int) -> Ref:
    return Ref("run-a", version)


def b(version: int) -> Ref:
    return Ref("run-b", version)


def observed(**fields: Any) -> Observed:
    return Observed(**({"known": True, "latest": None, "served": None} | fields))


@pytest.mark.parametrize(
    ("seen", "step"),
    [
        ({"known": False, "latest": a(9), "served": a(1)}, Recover()),
        ({}, Idle()),
        ({"served": a(3)}, Idle()),
        ({"served": a(3), "latest": a(3)}, Idle()),
        ({"boot": a(0)}, Relabel(a(0))),
        ({"boot": a(0), "boot_match": "equal", "latest": a(4)}, Relabel(a(0))),
        ({"boot": a(0), "boot_match": "differs", "latest": a(4)}, Reload(a(4))),
        ({"served": a(3), "latest": a(5)}, Stage(a(5))),
        ({"served": a(3), "latest": a(5), "staged": a(5)}, Activate(a(5), False)),
        ({"served": a(3), "latest": a(6), "staged": a(5)}, Stage(a(6))),
        ({"served": a(3), "latest": a(6), "staged": a(5), "superseded": 1}, Stage(a(6))),
        (
            {"served": a(3), "latest": a(6), "staged": a(5), "superseded": 2},
            Activate(a(5), False),
        ),
        ({"served": a(3), "latest": b(5)}, SwitchRun(b(5))),
        ({"served": a(3), "latest": b(5), "staged": a(4), "superseded": 2}, SwitchRun(b(5))),
        ({"served": a(3), "latest": b(5), "staged": b(5)}, Activate(b(5), True)),
        ({"served": a(3), "latest": b(5), "fork": b(3)}, Relabel(b(3))),
        (
            {"boot": a(0), "boot_match": "differs", "latest": a(4), "staged": a(4)},
            Activate(a(4), True),
        ),
    ],
)
def test_table(seen: dict[str, Any], step: Step) -> None:
    assert next_step(observed(**seen)) == step


def test_a_rewind_is_refused() -> None:
    step = next_step(observed(served=a(5), latest=a(4)))
    assert isinstance(step, Refuse)
    assert isinstance(step.error, Conflict)


def test_a_disproved_base_without_a_pointer_is_refused() -> None:
    step = next_step(observed(boot=a(0), boot_match="differs"))
    assert isinstance(step, Refuse)
    assert isinstance(step.error, CorruptData)


def test_base_matches() -> None:
    assert match_base("x", "x") == "equal"
    assert match_base("x", "y") == "differs"
    assert match_base("x", None) == "unproven"


refs = st.builds(Ref, st.sampled_from(["run-a", "run-b"]), st.integers(0, 6))


@given(
    known=st.booleans(),
    latest=st.none() | refs,
    served=st.none() | refs,
    boot=st.none() | st.integers(0, 3).map(a),
    match=st.sampled_from(["equal", "unproven", "differs"]),
)
def test_following_it_ends_and_never_goes_back(
    known: bool, latest: Ref | None, served: Ref | None, boot: Ref | None, match: Any
) -> None:
    staged: Ref | None = None
    for _ in range(8):
        step = next_step(
            observed(
                known=known,
                latest=latest,
                served=served,
                boot=boot,
                boot_match=match,
                staged=staged,
            )
        )
        before = served
        if isinstance(step, Idle | Refuse):
            return
        if isinstance(step, Recover):
            known = True
        elif isinstance(step, Relabel):
            served = step.target
        elif isinstance(step, Activate):
            assert staged == step.target, "activated what was not staged"
            served, staged = step.target, None
        else:
            staged = step.target
        if before is not None and served is not None and before.run_id == served.run_id:
            assert served.version >= before.version
    raise AssertionError("eight steps did not end")
