"""LocalStore at its edges: URLs, full and closed disks, links, orphans, locks, processes."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch.env import Env, FileHandle, OsFiles
from stitch.errors import Conflict, InvalidInput, NotVisibleYet, Unavailable, Unsupported
from stitch.stores import open_store
from stitch.stores.base import Lost, Unknown, Won
from stitch.stores.keys import check_key
from stitch.stores.local import LocalStore
from stitch.testing.clock import InlineOffload, run_virtual, virtual_env
from stitch.testing.files import CrashFiles

V1 = "updates/weight_v000001"


def over(files: CrashFiles | OsFiles, root: str = "/store") -> LocalStore:
    return LocalStore(Path(root), Env(files=files, offload=InlineOffload()), mappable=False)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("/a/b", "/a/b"),
        ("file:///a%20b/c", "/a b/c"),
    ],
)
def test_urls_of_local_stores(url: str, path: str) -> None:
    store = open_store(url)
    assert isinstance(store, LocalStore)
    assert store.root == Path(path)
    again = open_store(store.url)
    assert isinstance(again, LocalStore)
    assert again.root == Path(path), "the URL does not open the same store again"


@pytest.mark.parametrize(
    "url",
    ["", "relative/path", "https://host/x", "file://host/x", "file:///a?b", "file:///a#b", "file:"],
)
def test_urls_that_name_no_store(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store(url)
    assert caught.value.fields["param"] == "store"


@pytest.mark.parametrize(
    ("url", "extra"), [("s3://bucket/x", "[s3]"), ("modal-volume://v", "[modal]")]
)
def test_urls_of_stores_to_come_name_their_extra(url: str, extra: str) -> None:
    with pytest.raises(Unsupported) as caught:
        open_store(url)
    assert extra in caught.value.message
    assert "later" in caught.value.message


@pytest.mark.parametrize(
    "key", ["a/.tmp-x", "a//b", "a/../b", "/a", "a\nb", "x" * 2000, "a/" + "y" * 256]
)
def test_keys_that_no_store_takes(key: str) -> None:
    with pytest.raises(InvalidInput):
        check_key(key)


async def test_opening_and_reading_make_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "absent" / "store"))
    assert (await store.read_pointer()).token is None
    assert list(await store.list("")) == []
    assert await store.read_leases() == {}
    assert not (tmp_path / "absent").exists()


async def test_the_pointer_is_plain_text_without_a_newline(tmp_path: Path) -> None:
    await open_store(str(tmp_path)).swap_pointer(None, "a/weight_v000007")
    assert (tmp_path / "latest").read_bytes() == b"a/weight_v000007"


async def test_a_full_disk_says_what_to_do_and_leaves_nothing_visible() -> None:
    files = CrashFiles(free_bytes=100)
    store = over(files)
    staging = await store.begin(V1, attempt="aa")
    with pytest.raises(Unavailable) as caught:
        await staging.put("f.safetensors", [b"x" * 60, b"y" * 60])
    assert "full" in caught.value.message
    assert "free space" in caught.value.message
    assert "\n" not in caught.value.message
    await staging.abandon()
    assert list(await store.list("")) == []
    files.free_bytes = None
    staging = await store.begin(V1, attempt="bb")
    await staging.put("f.safetensors", [b"x" * 60, b"y" * 60])
    assert (await staging.seal(b"{}")).created


class Refusing(OsFiles):
    """A file system that this process may not write."""

    def __init__(self, number: int) -> None:
        self.number = number

    def create(self, path: Path) -> FileHandle:
        raise OSError(self.number, "refused", str(path))

    def make_directory(self, path: Path) -> None:
        raise OSError(self.number, "refused", str(path))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
async def test_a_root_that_is_not_writable(tmp_path: Path, number: int) -> None:
    store = LocalStore(tmp_path / "store", Env(files=Refusing(number)))
    with pytest.raises(Unavailable) as caught:
        await store.swap_pointer(None, "a/weight_v000000")
    assert "not writable" in caught.value.message
    assert str(tmp_path / "store") in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_file_where_the_root_should_be(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(Unavailable, match="cannot"):
        await store.create("runs/a/run.json", b"{}")
    assert (await store.read_pointer()).token is None


async def test_links_that_leave_the_root_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    (root / "runs").mkdir(parents=True)
    (root / "runs" / "a").symlink_to(outside)
    store = open_store(str(root))
    with pytest.raises(InvalidInput, match="link"):
        await store.read("runs/a/secret", size_max=9)
    with pytest.raises(InvalidInput, match="link"):
        await store.create("runs/a/run.json", b"{}")
    with pytest.raises(InvalidInput, match="link"):
        await store.begin("runs/a/weight_v000001", attempt="aa")
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def test_a_listing_follows_no_link_that_leads_out_or_round(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    (root / "runs" / "a").mkdir(parents=True)
    (root / "runs" / "a" / "run.json").write_text("{}")
    outside.mkdir()
    (outside / "secret").write_text("x")
    (root / "runs" / "b").symlink_to(outside)
    (root / "runs" / "a" / "one").symlink_to(outside / "secret")
    (root / "runs" / "a" / "up").symlink_to("..")
    (root / "runs" / "a" / "self").symlink_to("self")
    (root / "runs" / "c").symlink_to("a")
    store = open_store(str(root))
    records = ["runs/a/run.json", "runs/c/run.json"]
    for prefix in ("", "runs"):
        found = await store.list(prefix)
        assert [key for key in found if key.endswith("json")] == records
        assert {"runs/b", "runs/a/one"} < set(found)
        assert not any("secret" in key or "/up" in key for key in found)
    with pytest.raises(InvalidInput, match="link"):
        await store.list("runs/b")


async def test_leases_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    (leases / "folder").mkdir(parents=True)
    (leases / "good").write_bytes(b"{}")
    (leases / "huge").write_bytes(bytes(2**16 + 1))
    (leases / "not a lease").write_bytes(b"x")
    os.mkfifo(leases / "pipe")
    store = open_store(str(tmp_path))
    want = {"folder": b"", "good": b"{}", "huge": b"", "pipe": b""}
    assert await store.read_leases() == want


async def test_a_root_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    store = open_store(str(tmp_path / "store"))
    assert await store.create("runs/a/run.json", b"{}")
    assert (tmp_path / "real" / "runs" / "a" / "run.json").read_bytes() == b"{}"


async def test_orphans_go_when_their_owner_is_gone() -> None:
    files = CrashFiles()
    dead, living = over(files), over(files)
    await (await dead.begin(V1, attempt="dead")).put("f.safetensors", [b"1"])
    files = files.killed()
    living = over(files)
    held = await living.begin("updates/weight_v000002", attempt="held")
    await held.put("g.safetensors", [b"2"])
    staging = await over(files).begin(V1, attempt="new")
    names = [name for name in files.names(Path("/store/updates")) if name.startswith(".tmp-")]
    assert names == [".tmp-held-weight_v000002", ".tmp-new-weight_v000001"], (
        "the dead attempt must go, the living one must stay"
    )
    await staging.seal(b"{}")
    assert (await held.seal(b"{}")).created


async def test_a_folder_with_files_and_no_index_is_not_taken_over(tmp_path: Path) -> None:
    theirs = tmp_path / V1
    theirs.mkdir(parents=True)
    (theirs / "model-00000-of-00001.safetensors").write_bytes(b"half")
    store = open_store(str(tmp_path))
    staging = await store.begin(V1, attempt="aa")
    with pytest.raises(Conflict, match="somebody else"):
        await staging.seal(b"{}")
    await staging.abandon()
    assert [path.name for path in theirs.iterdir()] == ["model-00000-of-00001.safetensors"]
    assert [path.name for path in (tmp_path / "updates").iterdir()] == ["weight_v000001"]


async def test_a_pointer_that_was_renamed_but_not_synced_is_unknown(tmp_path: Path) -> None:
    class Flaky(OsFiles):
        failures = 0

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            self.failures += 1

        def sync_directory(self, path: Path) -> None:
            if self.failures == 1:
                self.failures += 1
                raise OSError(errno.EIO, "input/output error", str(path))
            super().sync_directory(path)

    store = LocalStore(tmp_path, Env(files=Flaky()))
    result = await store.swap_pointer(None, "a/weight_v000000")
    assert isinstance(result, Unknown), result
    found = await store.read_pointer()
    assert isinstance(await store.swap_pointer(found.token, found.text), Won)


async def test_a_seal_whose_sync_failed_can_be_tried_again(tmp_path: Path) -> None:
    class Flaky(OsFiles):
        failures = 0

        def sync_directory(self, path: Path) -> None:
            if self.failures and path.name == "updates":
                self.failures -= 1
                raise OSError(errno.EIO, "input/output error", str(path))
            super().sync_directory(path)

    files = Flaky()
    store = LocalStore(tmp_path, Env(files=files))
    staging = await store.begin(V1, attempt="aa")
    await staging.put("f.safetensors", [b"1"])
    files.failures = 1
    with pytest.raises(Unavailable):
        await staging.seal(b"{}")
    assert not (await staging.seal(b"{}")).created
    assert await store.confirm(V1)
    assert (tmp_path / V1 / "f.safetensors").read_bytes() == b"1"


@pytest.mark.parametrize("shared", [True, False])
def test_a_released_lock_is_free_though_a_forked_child_has_the_descriptor(
    tmp_path: Path, shared: bool
) -> None:
    path = tmp_path / ".stitch.lock"
    release = OsFiles().try_lock(path, shared=shared)
    assert release is not None
    links = {int(entry.name): entry for entry in Path("/proc/self/fd").iterdir()}
    held = next(number for number, entry in links.items() if entry.resolve() == path)
    copy = os.dup(held)  # what a child of a fork has
    try:
        assert OsFiles().try_lock(path) is None
        release()
        again = OsFiles().try_lock(path)
        assert again is not None
        again()
    finally:
        os.close(copy)


def test_a_lock_that_is_never_released_is_reported() -> None:
    files = CrashFiles()
    store = LocalStore(Path("/store"), virtual_env(1, files=files), mappable=False)

    async def scenario() -> str:
        await store.create("runs/a/run.json", b"{}")
        release = files.try_lock(Path("/store/.stitch.lock"))
        assert release is not None
        with pytest.raises(Unavailable) as caught:
            await store.swap_pointer(None, "a/weight_v000000")
        release()
        assert isinstance(await store.swap_pointer(None, "a/weight_v000000"), Won)
        return caught.value.message

    assert ".stitch.lock" in run_virtual(scenario)


async def test_a_range_of_an_absent_object(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with pytest.raises(NotVisibleYet):
        await store.read_into("updates/x", 0, memoryview(bytearray(4)))
    with pytest.raises(InvalidInput):
        await store.read_into("updates/x", -1, memoryview(bytearray(4)))


async def test_no_writer_leaves_temporary_files(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for number in range(3):
        found = await store.read_pointer()
        await store.swap_pointer(found.token, f"a/weight_v{number:06d}")
        await store.create("runs/a/run.json", b"{}")
        await store.write_lease("r", b"%d" % number)
    assert not list(tmp_path.rglob(".tmp-*"))


async def test_a_huge_pointer_is_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"a" * 1_000_000)
    assert len((await open_store(str(tmp_path)).read_pointer()).text) <= 4096


def _swap_many(root: str, name: str, rounds: int) -> None:
    async def work() -> int:
        store, won = open_store(root), 0
        while won < rounds:
            found = await store.read_pointer()
            number = int(found.text.rsplit("v", 1)[1]) + 1
            result = await store.swap_pointer(found.token, f"a/weight_v{number:06d}")
            won += isinstance(result, Won)
            assert isinstance(result, Won | Lost)
        return won

    assert asyncio.run(work()) == rounds


def test_processes_never_overwrite_each_others_swap(tmp_path: Path) -> None:
    """Three processes each add 20 to the number in the pointer: none is lost."""
    asyncio.run(open_store(str(tmp_path)).swap_pointer(None, "a/weight_v000000"))
    context = multiprocessing.get_context("fork")
    work: Callable[..., None] = _swap_many
    processes = [
        context.Process(target=work, args=(str(tmp_path), f"p{number}", 20)) for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "latest").read_text() == "a/weight_v000060"
