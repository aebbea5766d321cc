"""Pointers that may be taken, chains, verification and fetches, over any store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, NotVisibleYet, StitchError, Unavailable
from stitch.format.records import encode_run_record, new_run_record, run_record_key
from stitch.publisher import Publisher
from stitch.stores import Store, open_store
from stitch.stores.base import INDEX_NAME, PointerRead
from stitch.stores.versions import (
    BARE_RUN_ID,
    chain_for,
    fetch_version,
    load_run,
    parse_stored_pointer,
    record_of,
    resolve_pointer,
    verify_version,
)
from stitch.testing.clock import run_virtual, virtual_env
from stitch.testing.memory_store import Cells, MemoryStore
from stitch.types import Ref

SLIME = Path(__file__).resolve().parents[1] / "data" / "slime"


class Scripted(MemoryStore):
    """Its pointer reads give these texts in turn, the last one for ever."""

    def __init__(self, cells: Cells, texts: list[str]) -> None:
        super().__init__(cells)
        self.texts = texts
        self.reads = 0

    async def read_pointer(self) -> PointerRead:
        self.reads += 1
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return PointerRead(text, f"t{self.reads}")


@pytest.fixture(scope="module")
def cells() -> Cells:
    """A store with run `a`, versions 1 to 4; 1 and 3 are anchors."""
    cells = Cells()
    tensors = {"w": np.zeros((8, 64), np.float32)}
    with Publisher(MemoryStore(cells), run_id="a", anchor_ratio=100.0) as publisher:
        for number in range(1, 5):
            tensors["w"][number] += 1
            publisher.publish(tensors, anchor=number in (1, 3)).wait()
    return cells


NEW, OLD, BACK = "a/weight_v000004", "a/weight_v000003", "a/weight_v000001"
ABSENT = "a/weight_v000009"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "\0" * 16,
        NEW[:9],
        "a/weight_v00",
        "junk",
        "a/weight_v000009",
        "a/weight_v000001",
        "/",
        "-1",
        "4",
        "weight_v000004",
    ],
    ids=[
        "empty",
        "NUL",
        "half",
        "digits",
        "junk",
        "absent",
        "back",
        "slash",
        "minus",
        "bare",
        "name",
    ],
)
def test_a_pointer_that_cannot_be_taken_is_tried_again(cells: Cells, bad: str) -> None:
    """Never `no version`, never version 0: the next read decides."""
    seen = Ref("a", 3)
    store = Scripted(cells, [bad, bad, NEW])
    found = run_virtual(lambda: resolve_pointer(store, seen, env=virtual_env(1)))
    assert found == Ref("a", 4)
    assert store.reads == 3
    for_ever = Scripted(cells, [bad])
    with pytest.raises(NotVisibleYet, match="the pointer"):
        run_virtual(lambda: resolve_pointer(for_ever, seen, env=virtual_env(1), deadline_s=2.0))
    assert for_ever.reads > 3, "it gave up before the deadline"


def test_a_pointer_as_it_was_or_newer_is_taken_at_once(cells: Cells) -> None:
    for text, seen, want in (
        (NEW, None, Ref("a", 4)),
        (f" {NEW}\n", Ref("a", 3), Ref("a", 4)),
        (OLD, Ref("a", 3), Ref("a", 3)),
        ("a/weight_v000000", None, Ref("a", 0)),
        ("", None, None),
        ("a/weight_v000001", Ref("z", 9), Ref("a", 1)),
    ):
        store = Scripted(cells, [text])
        found = run_virtual(lambda s=store, n=seen: resolve_pointer(s, n, env=virtual_env(1)))  # type: ignore[misc]
        assert (found, store.reads) == (want, 1), f"{text!r} after {seen}"


def test_an_unreachable_store_is_reported_as_such(cells: Cells) -> None:
    class Gone(MemoryStore):
        async def read_pointer(self) -> PointerRead:
            raise Unavailable("no route")

    with pytest.raises(Unavailable, match="no route"):
        run_virtual(lambda: resolve_pointer(Gone(cells), None, env=virtual_env(1), deadline_s=1.0))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("7", Ref(BARE_RUN_ID, 7)),
        ("000007\n", Ref(BARE_RUN_ID, 7)),
        ("weight_v000007", Ref(BARE_RUN_ID, 7)),
        ("run/weight_v1000000", Ref("run", 1_000_000)),
        ("  ", None),
    ],
)
def test_old_forms_of_the_pointer(text: str, want: Ref | None) -> None:
    assert parse_stored_pointer(text) == want


@pytest.mark.parametrize("text", ["weight_v7", "9" * 40, "a/7", "a/b/weight_v000001", "x", "١"])
def test_texts_that_are_no_pointer(text: str) -> None:
    with pytest.raises(StitchError):
        parse_stored_pointer(text)


@pytest.mark.parametrize(
    ("target", "have", "want"),
    [
        (4, None, [3, 4]),
        (2, None, [1, 2]),
        (4, 3, [4]),
        (4, 1, [3, 4]),
        (2, 1, [2]),
        (4, 4, []),
        (0, None, []),
    ],
)
async def test_chains(cells: Cells, target: int, have: int | None, want: list[int]) -> None:
    store = MemoryStore(cells)
    record = await record_of(store, "a")
    assert await chain_for(store, record, target, have) == want


async def test_chains_that_do_not_exist(cells: Cells) -> None:
    store = MemoryStore(cells)
    record = await record_of(store, "a")
    with pytest.raises(InvalidInput):
        await chain_for(store, record, 2, 3)
    with pytest.raises(NotVisibleYet):
        await chain_for(store, record, 6, 4)


def copied(cells: Cells) -> MemoryStore:
    return MemoryStore(Cells(cells.pointer, cells.swaps, dict(cells.objects)))


async def test_a_version_is_verified_file_by_file(cells: Cells) -> None:
    good = copied(cells)
    record = await record_of(good, "a")
    for version in range(1, 5):
        assert await verify_version(good, record, version) is not None
    keys = [key for key in cells.objects if "weight_v000002" in key and "facts" not in key]
    assert len(keys) == 3
    for key in keys:
        for damage in ("gone", "short", "changed"):
            store = copied(cells)
            data, token = store.cells.objects.pop(key)
            if damage == "short":
                store.cells.objects[key] = (data[:-1], token)
            elif damage == "changed":
                store.cells.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), token)
            with pytest.raises((CorruptData, NotVisibleYet)):
                await verify_version(store, record, 2)


class Counting(MemoryStore):
    """Counts bytes that were read."""

    bytes_read = 0

    async def read_into(self, key: str, offset: int, buffer: memoryview, **options: Any) -> int:
        count = await super().read_into(key, offset, buffer, **options)
        self.bytes_read += count
        return count


async def test_a_second_fetch_downloads_nothing(cells: Cells, tmp_path: Path) -> None:
    store, env = Counting(cells), Env()
    record = await record_of(store, "a")
    path = await fetch_version(store, record, 3, tmp_path, env)
    names = {found.name for found in path.iterdir()}
    assert len(names) == 3
    assert INDEX_NAME in names
    first, store.bytes_read = store.bytes_read, 0
    assert first > 2048
    assert await fetch_version(store, record, 3, tmp_path, env) == path
    assert store.bytes_read == 0
    assert [found.name for found in path.parent.iterdir()] == ["weight_v000003"]


async def test_a_damaged_cache_is_fetched_again(cells: Cells, tmp_path: Path) -> None:
    store, env = MemoryStore(cells), Env()
    record = await record_of(store, "a")
    path = await fetch_version(store, record, 3, tmp_path, env)
    (data,) = path.glob("*.safetensors")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + b"\xff")
    again = await fetch_version(store, record, 3, tmp_path, env)
    assert (again / data.name).read_bytes() == whole


async def test_a_damaged_version_is_never_cached(cells: Cells, tmp_path: Path) -> None:
    store = copied(cells)
    record = await record_of(store, "a")
    (key,) = (k for k in store.cells.objects if "v000003" in k and k.endswith("safetensors"))
    data, token = store.cells.objects[key]
    store.cells.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), token)
    with pytest.raises(CorruptData):
        await fetch_version(store, record, 3, tmp_path, Env())
    assert not list(tmp_path.rglob("*.safetensors"))


async def test_a_local_version_is_used_in_place(tmp_path: Path) -> None:
    with Publisher(str(tmp_path / "store"), run_id="a") as publisher:
        publisher.publish({"w": np.ones(4, np.float32)}).wait()
    store = open_store(str(tmp_path / "store"))
    record = await record_of(store, "a")
    path = await fetch_version(store, record, 1, tmp_path / "cache", Env())
    assert path == tmp_path / "store" / "updates" / "weight_v000001"
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def foreign(tmp_path: Path) -> Store:
    """A root that another trainer writes: a pointer, versions, no run record."""
    shutil.copytree(SLIME / "store" / "run-a1", tmp_path / "store")
    return open_store(str(tmp_path / "store"))


async def test_a_foreign_root_is_read(foreign: Store, tmp_path: Path) -> None:
    ref = await resolve_pointer(foreign, None, deadline_s=0)
    assert ref is not None
    assert ref.version == 4
    assert await load_run(foreign, ref.run_id) is None
    record = await record_of(foreign, ref.run_id)
    assert record.updates_dir == "updates"
    assert await chain_for(foreign, record, 4) == [1, 2, 3, 4]
    for version in range(1, 5):
        assert await verify_version(foreign, record, version) is None
        await fetch_version(foreign, record, version, tmp_path / "cache", Env())


async def test_a_new_run_leaves_a_foreign_root_its_folder(foreign: Store) -> None:
    before = list(await foreign.list("updates"))
    with Publisher(foreign, run_id="ours", base=SLIME / "base") as publisher:
        publisher.publish({}).wait()
    assert list(await foreign.list("updates")) == before
    record = await load_run(foreign, "ours")
    assert record is not None
    assert record.updates_dir == "runs/ours/updates"


async def test_a_foreign_run_can_be_forked(foreign: Store) -> None:
    with Publisher(foreign, run_id="b", base=SLIME / "base", fork_from="pointer") as publisher:
        assert publisher.claim() == Ref("b", 4)
        assert publisher.publish({}).wait().ref == Ref("b", 5)
    record = await load_run(foreign, "b")
    assert record is not None
    assert record.forked_from is not None
    assert record.forked_from.version == 4


async def test_a_record_of_another_run_is_damage(cells: Cells) -> None:
    store = MemoryStore()
    record = new_run_record("b", first=True, boot_version=0, base_digest=None, writer="w")
    await store.create(run_record_key("a"), encode_run_record(record))
    with pytest.raises(CorruptData):
        await load_run(store, "a")
