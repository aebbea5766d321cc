"""Two torch.distributed processes publish one model together, over gloo."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.stores import Store, open_store
from stitch.testing.publisher_ranks import EXIT_DEAD, RankScript, Step, run_rank
from stitch.testing.publisher_suite import state_of
from stitch.types import Ref

CONTEXT = multiprocessing.get_context("forkserver")
RANKS = 2
# Deltas of such small tensors are bigger than the tensors.
SMALL = {"anchor_ratio": 100.0}

Tensors = dict[str, np.ndarray[Any, Any]]


def together(tmp_path: Path, script: RankScript, *, dying: int | None = None) -> list[list[Any]]:
    """Run a script on all ranks; returns what each rank reported, in order."""
    CONTEXT.set_forkserver_preload(["stitch.testing.publisher_ranks", "torch.distributed"])
    ends: list[Connection] = []
    processes = []
    meet, root = str(tmp_path / "meet"), str(tmp_path / "store")
    for rank in range(RANKS):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=run_rank, args=(rank, RANKS, meet, root, script, theirs), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        reports = []
        for rank, end in enumerate(ends):
            if rank == dying:
                continue
            assert end.poll(60), "a rank hangs"
            reports.append(end.recv())
    finally:
        for process, end in zip(processes, ends, strict=True):
            process.join(20)
            if process.is_alive():
                process.kill()
            end.close()
    wanted = [EXIT_DEAD if rank == dying else 0 for rank in range(RANKS)]
    assert [process.exitcode for process in processes] == wanted
    return reports


def store_of(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def parts(seed: int) -> list[Tensors]:
    """What each rank gives: disjoint, but for `tied`, which both give."""
    rng = np.random.default_rng(seed)
    tied = rng.standard_normal(8).astype(np.float32)
    return [
        {"a": rng.standard_normal((4, 8)).astype(np.float32), "tied": tied},
        {"b": rng.standard_normal((3, 8)).astype(np.float16), "tied": tied.copy()},
    ]


def whole(given: list[Tensors]) -> dict[str, bytes]:
    return {name: array.tobytes() for part in given for name, array in part.items()}


@pytest.mark.slow
def test_ranks_write_one_version_together(tmp_path: Path) -> None:
    first, second = parts(1), parts(2)
    third = [second[0], {**second[1], "b": second[1]["b"] + np.float16(1)}]
    differing = [parts(5)[0], parts(6)[1]]
    unknown = [{"a": first[0]["a"]}, {"never.seen": np.zeros(3, np.float32)}]
    script = RankScript(
        [
            Step(first),
            Step(second),
            Step(third),
            Step(differing),
            Step(unknown),
            Step(first, fail_put_on=1),
            Step(first),
            Step([{}, {}]),
            Step([{}, {}], anchor=True),
            Step(rollback_to=2),
        ],
        SMALL,
    )
    reports = together(tmp_path, script)
    one, two = reports
    good = (0, 1, 2, 6, 7, 8, 9)
    assert [one[i] for i in good] == [two[i] for i in good], "ranks report different outcomes"
    assert [one[i][:2] for i in good] == [
        (1, "anchor"),
        (2, "delta"),
        (3, "delta"),
        (7, "anchor"),  # 4, 5 and 6 failed, so a delta would span a gap
        (8, "delta"),
        (9, "anchor"),
        (10, "delta"),
    ]
    assert one[1][2:] == (4, 3), "two data files, and the tied tensor counted once"
    assert one[2][2:] == (3, 1), "only rank 1 has changes"
    for report in reports:
        assert report[3][0] == "InvalidInput"
        assert "'tied'" in report[3][1]
        assert report[4][0] == "InvalidInput"
        assert "never.seen" in report[4][1]
        assert report[5][0] == "Unavailable"
        assert "disk is full" in report[5][1]
    store = store_of(tmp_path)
    wanted = {1: first, 2: second, 3: third, 7: first, 8: first, 9: first, 10: second}
    for version, given in wanted.items():
        assert state_of(store, Ref("a", version)) == whole(given), f"version {version} is wrong"
    folders = sorted(path.name for path in (tmp_path / "store" / "updates").iterdir())
    assert folders == [f"weight_v{number:06d}" for number in sorted(wanted)], (
        "failed versions left something visible"
    )


@pytest.mark.slow
def test_ranks_resume_together_with_their_base(tmp_path: Path) -> None:
    """A restarted job goes on with deltas, and an anchor has what no rank gives."""
    first = parts(1)
    frozen = {"visual.frozen": np.arange(6, dtype=np.float32)}
    with_frozen = [{**first[0], **frozen}, first[1]]
    together(tmp_path, RankScript([Step(with_frozen)]))
    (tmp_path / "meet").unlink(missing_ok=True)
    second = parts(2)
    reports = together(tmp_path, RankScript([Step(second), Step(second, anchor=True)], SMALL))
    assert [report[0][:2] for report in reports] == [(2, "delta")] * RANKS
    store = store_of(tmp_path)
    for version in (2, 3):
        assert state_of(store, Ref("a", version)) == whole([*second, frozen])


@pytest.mark.slow
def test_a_rank_that_dies_leaves_nothing_visible(tmp_path: Path) -> None:
    """The survivor's publication fails in bounded time; the job restarts and goes on."""
    first, second = parts(1), parts(2)
    (report,) = together(tmp_path, RankScript([Step(first), Step(second, die_on=1)]), dying=1)
    assert report[0][:2] == (1, "anchor")
    assert report[1][0] == "Unavailable", report[1]
    updates = tmp_path / "store" / "updates"
    assert [path.name for path in updates.glob("weight_v*")] == ["weight_v000001"]
    (tmp_path / "meet").unlink(missing_ok=True)
    again = together(tmp_path, RankScript([Step(second)], SMALL))
    assert [report[0][:2] for report in again] == [(2, "delta")] * RANKS
    assert state_of(store_of(tmp_path), Ref("a", 2)) == whole(second)
    assert not list(updates.glob(".tmp-*"))
