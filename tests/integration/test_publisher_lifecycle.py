"""A publisher's claims, limits, failures and end: what a store has after each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stitch.commands.store_survey import survey
from stitch.env import Env
from stitch.errors import Conflict, CorruptData, InvalidInput, Unavailable
from stitch.format.records import FIRST_RUN_KEY
from stitch.publisher import Publisher
from stitch.publisher.loop import LoopThread
from stitch.stores import open_store
from stitch.stores.base import INDEX_NAME
from stitch.stores.versions import record_of
from stitch.testing.memory_store import Cells, MemoryStore
from stitch.testing.publisher_suite import WAIT_S, WakeCounter, model, state_of
from stitch.testing.watched_store import watched
from stitch.types import Kind, Ref


def test_publish_blocks_at_the_limit_and_goes_on(tmp_path: Path) -> None:
    watcher, store = watched(open_store(str(tmp_path)))
    with Publisher(store, run_id="a", in_flight_max=2) as publisher:
        publisher.publish(model()).wait(WAIT_S)
        watcher.gate.clear()
        publications = [publisher.publish(model(seed)) for seed in (1, 2)]
        third = threading.Event()

        def publish_third() -> None:
            publications.append(publisher.publish(model(3)))
            third.set()

        thread = threading.Thread(target=publish_third)
        thread.start()
        assert not third.wait(0.2), "a third publication went under way"
        with pytest.raises(Unavailable, match="not published after"):
            publications[0].wait(0.01)
        assert publications[0].error is None
        watcher.gate.set()
        thread.join(WAIT_S)
        assert [p.wait(WAIT_S).ref.version for p in publications] == [2, 3, 4]


@pytest.mark.parametrize("lost", [b"", b" \n", None])
def test_a_lost_pointer_never_goes_back_to_the_boot_version(
    tmp_path: Path, lost: bytes | None
) -> None:
    with Publisher(str(tmp_path), run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
    latest = tmp_path / "latest"
    latest.unlink()
    if lost is not None:
        latest.write_bytes(lost)
    with (
        Publisher(str(tmp_path), run_id="a") as publisher,
        pytest.raises(CorruptData, match="put back"),
    ):
        publisher.claim()
    assert (latest.read_bytes() if latest.exists() else None) == lost
    latest.write_text("a/weight_v000001")
    with Publisher(str(tmp_path), run_id="a") as publisher:
        assert publisher.publish(model(1)).wait(WAIT_S).ref == Ref("a", 2)


def test_an_interrupt_never_leaves_a_baseline_that_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between encoding and queueing: the next delta stands on what the store has."""
    with Publisher(str(tmp_path), run_id="a", anchor_ratio=100.0) as publisher:
        publisher.publish(model()).wait(WAIT_S)

        def interrupted(self: LoopThread, work: Any) -> Any:
            work.close()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LoopThread, "run", interrupted)
            publisher.publish(model(1))
        changed = model(1)
        changed["c.bias"][:] = 5
        published = publisher.publish(changed).wait(WAIT_S)
    assert published.kind is Kind.DELTA
    wanted = {name: array.tobytes() for name, array in changed.items()}
    assert state_of(open_store(str(tmp_path)), published.ref) == wanted


@pytest.mark.parametrize("fails", [False, True])
def test_measurements_lie_beside_a_version_and_nothing_needs_them(
    tmp_path: Path, fails: bool
) -> None:
    watcher, store = watched(open_store(str(tmp_path)))
    with Publisher(store, run_id="a", anchor_ratio=100.0) as publisher:
        publisher.publish(model()).wait(WAIT_S)
        if fails:
            watcher.fail_next("put facts", Unavailable("full"))
        published = publisher.publish(model(1)).wait(WAIT_S)
    version = tmp_path / "updates" / "weight_v000002"
    found = list(version.glob("stitch-*.facts.json"))
    assert len(found) == (0 if fails else 1)
    index = (version / INDEX_NAME).read_text()
    manifest = next(p for p in version.glob("stitch-*.json") if p not in found).read_text()
    assert "facts" not in index + manifest
    if found:
        facts = json.loads(found[0].read_text())
        assert facts["ref"] == {"run_id": "a", "version": 2}
        assert set(facts["tensors"]) == set(json.loads(index)["weight_map"])
        assert facts["seconds"]["encode"] > 0
        found[0].write_text("{")
    assert state_of(open_store(str(tmp_path)), published.ref) == {
        name: array.tobytes() for name, array in model(1).items()
    }


def test_publications_are_counted(tmp_path: Path) -> None:
    watcher, store = watched(open_store(str(tmp_path)))
    with Publisher(store, run_id="a", anchor_ratio=100.0) as publisher:
        assert publisher.metrics_text() == ""
        publisher.publish(model()).wait(WAIT_S)
        watcher.fail_next("put", Unavailable("full"))
        with pytest.raises(Unavailable):
            publisher.publish(model(1)).wait(WAIT_S)
        publisher.publish(model(1)).wait(WAIT_S)
        page = publisher.metrics_text()
    for outcome in ("anchor", "failed", "delta"):
        assert f'stitch_publish_total{{outcome="{outcome}"}} 1\n' in page
    assert 'stitch_publish_version{run_id="a"} 2\n' in page
    assert "stitch_publish_encode_seconds_count 2\n" in page


def test_closing_finishes_what_is_under_way(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path), run_id="a")
    publication = publisher.publish(model())
    publisher.close()
    publisher.close()
    assert publication.done()
    assert publication.error is None
    assert (tmp_path / "latest").read_text() == "a/weight_v000001"
    with pytest.raises(Unavailable, match="closed"):
        publisher.publish(model())


def test_a_full_disk_is_one_line_and_the_next_publish_works() -> None:
    store = MemoryStore(free_bytes=300)
    with Publisher(store, run_id="a") as publisher:
        publisher.claim()
        publication = publisher.publish(model())
        with pytest.raises(Unavailable) as caught:
            publication.wait(WAIT_S)
        assert "free space" in caught.value.message
        assert publication.error is caught.value
        store.free_bytes = None
        assert publisher.publish(model()).wait(WAIT_S).ref == Ref("a", 1)


def test_two_first_claims_do_not_share_a_folder(tmp_path: Path) -> None:
    """Later runs keep their versions in their own folder; a superseded run is refused."""
    with Publisher(str(tmp_path), run_id="one") as one:
        one.publish(model()).wait(WAIT_S)
    with Publisher(str(tmp_path), run_id="two") as two:
        two.publish(model(1)).wait(WAIT_S)
    assert (tmp_path / "latest").read_text() == "two/weight_v000001"
    assert (tmp_path / "runs" / "two" / "updates" / "weight_v000001").is_dir()
    with (
        Publisher(str(tmp_path), run_id="one") as one,
        pytest.raises(Conflict, match="superseded"),
    ):
        one.publish(model(2))


class ClaimsBetween(MemoryStore):
    """While one run's record is about to be written, another run is claimed in full."""

    async def create(self, key: str, data: bytes) -> bool:
        if key == "runs/one/run.json":
            with Publisher(MemoryStore(self.cells), run_id="two") as two:
                await asyncio.to_thread(two.publish(model(1)).wait, WAIT_S)
        return await super().create(key, data)


def test_claims_at_once_do_not_share_a_folder() -> None:
    cells = Cells()
    with Publisher(ClaimsBetween(cells), run_id="one") as one, pytest.raises(Conflict):
        one.claim()
    store = MemoryStore(cells)
    folders = {asyncio.run(record_of(store, run_id)).updates_dir for run_id in ("one", "two")}
    assert len(folders) == 2
    found = asyncio.run(survey(store, Env()))
    assert not found.problems
    assert not any(run.problems for run in found.runs)


def test_a_run_that_died_while_claiming_gets_the_first_folder_when_it_returns() -> None:
    store = MemoryStore()
    asyncio.run(store.create(FIRST_RUN_KEY, b"one"))
    with Publisher(store, run_id="one") as one:
        one.claim()
    assert asyncio.run(record_of(store, "one")).updates_dir == "updates"


@pytest.mark.parametrize("way", ["retry", "close", "next"])
def test_a_pointer_that_could_not_move_moves_later(way: str) -> None:
    """A disk that is full at the swap leaves a sealed version that nobody may be left without."""
    watcher, store = watched(MemoryStore())
    with Publisher(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        watcher.fail_next("swap_pointer", Unavailable("full"))
        with pytest.raises(Unavailable, match="full"):
            publisher.publish(model(1)).wait(WAIT_S)
        assert asyncio.run(store.read_pointer()).text == "a/weight_v000001"
        if way == "retry":
            assert not publisher.publish(model(1), version=2).wait(WAIT_S).created
        if way == "next":
            publisher.publish(model(1)).wait(WAIT_S)
        if way != "close":
            wanted = {"retry": "a/weight_v000002", "next": "a/weight_v000003"}[way]
            assert asyncio.run(store.read_pointer()).text == wanted
    if way == "close":
        assert asyncio.run(store.read_pointer()).text == "a/weight_v000002"


@pytest.mark.parametrize("publisher", ["kept", "dropped"])
def test_a_process_that_ends_without_closing_says_what_is_lost(
    tmp_path: Path, publisher: str
) -> None:
    script = """
import sys, threading
import numpy as np
from stitch import Publisher, open_store
from stitch.testing.watched_store import watched
watcher, store = watched(open_store(sys.argv[1]))
publisher = Publisher(store, run_id="a")
publisher.publish({"w": np.zeros(3)}).wait()
watcher.gate.clear()
publisher.publish({"w": np.ones(3)})
if sys.argv[2] == "dropped":
    del publisher
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), publisher],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "ended before a/weight_v000002 was published" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"run_id": "a/b"},
        {"run_id": "a", "encoding": "gzip"},
        {"run_id": "a", "checksum": "md5"},
        {"run_id": "a", "anchor_every": 0},
        {"run_id": "a", "in_flight_max": 0},
        {"run_id": "a", "boot_version": -1},
    ],
)
def test_options_are_checked_before_anything_is_touched(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        Publisher(str(tmp_path / "store"), **options)
    assert not (tmp_path / "store").exists()


def test_replicas_are_woken_after_the_pointer_moved() -> None:
    cells = Cells()
    seen: list[str] = []

    class Looking(WakeCounter):
        async def wake(self) -> int:
            assert cells.pointer is not None
            seen.append(cells.pointer[0])
            return await super().wake()

    with Publisher(MemoryStore(cells), run_id="a", pool=Looking()) as publisher:
        publisher.publish(model()).wait(WAIT_S)
    assert seen == ["a/weight_v000001"]


def test_a_pool_that_hangs_holds_nobody_up() -> None:
    """Publishing never waits for replicas, dead or deaf ones included (B25)."""
    release = threading.Event()

    class Deaf(WakeCounter):
        async def wake(self) -> int:
            while not release.is_set():
                await asyncio.sleep(0.01)
            return await super().wake()

    pool = Deaf()
    with Publisher(MemoryStore(), run_id="a", pool=pool) as publisher:
        for seed in range(3):
            publisher.publish(model(seed)).wait(WAIT_S)
        assert publisher.ref == Ref("a", 3)
        assert pool.wakes == 0
        release.set()
    assert pool.wakes == 2, "wakes coalesce: one that hung, one for all that came meanwhile"
