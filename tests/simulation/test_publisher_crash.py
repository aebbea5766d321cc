"""A power cut at every call of a whole publish, over files that forget what was not synced.

After each cut the pointer names a complete version, never an older one than was acknowledged;
the publisher goes on from there. And every single sync is needed: with any one of them removed,
a check here fails.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from stitch.env import Env
from stitch.errors import StitchError
from stitch.publisher import Publisher
from stitch.stores import durable
from stitch.stores.local import LocalStore
from stitch.stores.versions import load_run, parse_stored_pointer, verify_version
from stitch.testing.files import Call, CrashFiles, Survival
from stitch.types import Ref

T = TypeVar("T")

ROOT = Path("/data/stitch/store")
# Two cuts where nothing or everything unsynced survived, and some in between.
OUTCOMES = [
    (Survival.LOST, 0),
    (Survival.TORN, 0),
    *((Survival.MIXED, seed) for seed in range(1, 5)),
]
CHANGES_NOTHING = {"read", "read_into", "close"}


class Inline:
    """Work runs in the loop's thread, so that calls come in one fixed order."""

    async def __call__(self, work: Callable[[], T], /) -> T:
        return work()


def store_over(files: CrashFiles) -> LocalStore:
    return LocalStore(ROOT, Env(files=files, offload=Inline()), mappable=False)


def tensors(version: int) -> dict[str, np.ndarray[Any, Any]]:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    return {"w": base + version, "u": base[0] * (version // 2)}


@dataclass
class Acknowledged:
    """What the caller has been told is done, and so must survive."""

    pointer: Ref | None = None
    records: set[str] = field(default_factory=set)
    leases: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> Acknowledged:
        return Acknowledged(self.pointer, set(self.records), dict(self.leases))


@dataclass
class Disk:
    """One machine's files during one scenario, and what each cut would leave."""

    files: CrashFiles
    told: Acknowledged = field(default_factory=Acknowledged)
    cuts: list[tuple[Call, Acknowledged, list[CrashFiles]]] = field(default_factory=list)
    killed_at: int | None = None
    # Take cuts only where something new was acknowledged.
    sparse: bool = False

    def watch(self) -> None:
        self.files.on_call = self._on_call

    def _on_call(self, call: Call) -> None:
        if self.killed_at is not None and call.number >= self.killed_at:
            raise OSError(errno.EIO, "the process is dead", str(call.path))
        if self.sparse and self.cuts and self.cuts[-1][1] == self.told:
            return
        if call.operation not in CHANGES_NOTHING:
            self.cuts.append((call, self.told.copy(), outcomes(self.files)))


def outcomes(files: CrashFiles) -> list[CrashFiles]:
    return [files.crashed(survival, seed) for survival, seed in OUTCOMES]


def publisher_over(files: CrashFiles, run_id: str = "a", **options: Any) -> Publisher:
    env = Env(offload=Inline())
    return Publisher(store_over(files), run_id=run_id, threads=1, env=env, **options)


def publish_versions(disk: Disk, first: int, last: int, run_id: str = "a", **options: Any) -> None:
    """Claim, then publish: every answer of the publisher is something that must survive."""
    with publisher_over(disk.files, run_id, **options) as publisher:
        ref = publisher.claim()
        disk.told.pointer = ref
        disk.told.records.add(run_id)
        for version in range(max(first, ref.version + 1), last + 1):
            published = publisher.publish(tensors(version)).wait()
            disk.told.pointer = published.ref


def write_leases(disk: Disk) -> None:
    store = store_over(disk.files)
    for data in (b"1", b"2"):
        asyncio.run(store.write_lease("replica-1", data))
        disk.told.leases["replica-1"] = data


def whole_life(disk: Disk) -> None:
    """A run with anchor and deltas, leases, then a fork with a publication of its own."""
    publish_versions(disk, 1, 3)
    write_leases(disk)
    publish_versions(disk, 4, 4, run_id="b", fork_from="pointer")


async def check_async(files: CrashFiles, told: Acknowledged) -> None:
    store = store_over(files)
    ref = parse_stored_pointer((await store.read_pointer()).text)
    for run_id in told.records:
        assert await load_run(store, run_id) is not None, f"the record of run {run_id} is gone"
    leases = await store.read_leases()
    for name, data in told.leases.items():
        assert leases.get(name, b"") >= data, f"lease {name} is {leases.get(name)!r}"
    if told.pointer is not None:
        assert ref is not None, f"the pointer is gone; it was at {told.pointer}"
        assert ref.run_id >= told.pointer.run_id, f"the pointer went back to {ref}"
        assert ref.version >= told.pointer.version, f"the pointer went back to {ref}"
    if ref is None:
        return
    record = await load_run(store, ref.run_id)
    assert record is not None, f"the pointer names {ref}, which has no record"
    if record.forked_from is not None:
        parent = await load_run(store, record.forked_from.run_id)
        assert parent is not None, "the run forked from has no record"
        for version in range(1, record.forked_from.version + 1):
            await verify_version(store, parent, version)
    for version in range(record.boot_version + 1, ref.version + 1):
        await verify_version(store, record, version)


def check(files: CrashFiles, told: Acknowledged) -> str | None:
    """What is wrong after a cut, or None."""
    try:
        asyncio.run(check_async(files, told))
    except (AssertionError, StitchError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def first_fault(disk: Disk) -> str | None:
    """The first cut of a finished scenario after which something is wrong."""
    cuts = [*disk.cuts, (None, disk.told, outcomes(disk.files))]
    for call, told, survivors in cuts:
        for (survival, seed), files in zip(OUTCOMES, survivors, strict=True):
            wrong = check(files, told)
            if wrong is not None:
                at = (
                    "the end"
                    if call is None
                    else f"call {call.number}, {call.operation} {call.path}"
                )
                return f"cut at {at} ({survival.value} {seed}): {wrong}"
    return None


def place(site: str) -> str:
    """The line that syncs. `write_file` syncs for several writers, so there it is two lines."""
    lines = site.split(" < ")
    return " < ".join(lines[:2] if WRITE_FILE_SYNC in lines[0] else lines[:1])


def line_of(text: str) -> str:
    lines = Path(durable.__file__ or "").read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.strip() == text)
    return f"stores/durable.py:{number}"


WRITE_FILE_SYNC = line_of("handle.sync()")


def files_without(removed: str | None) -> CrashFiles:
    return CrashFiles(ignored=None if removed is None else lambda site: place(site) == removed)


def run_whole_life(removed: str | None = None) -> Disk:
    disk = Disk(files_without(removed))
    disk.watch()
    whole_life(disk)
    return disk


def kill_then_go_on(killed_at: int, removed: str | None = None) -> Disk:
    """The process dies at a call and the machine does not; another goes on, then a cut."""
    dying = Disk(files_without(removed), killed_at=killed_at)
    dying.watch()
    with pytest.raises((StitchError, OSError)):
        publish_versions(dying, 1, 2)
    after = Disk(dying.files.killed(), dying.told, sparse=True)
    after.files.ignored = dying.files.ignored
    after.files.sync_sites = dying.files.sync_sites
    after.watch()
    publish_versions(after, 1, 3)
    return after


def calls_of_two_versions() -> list[Call]:
    calls: list[Call] = []
    disk = Disk(CrashFiles(on_call=calls.append))
    publish_versions(disk, 1, 2)
    return calls


KILLS = [call.number for call in calls_of_two_versions() if call.operation == "sync_directory"]


def test_every_cut_leaves_a_complete_version() -> None:
    disk = run_whole_life()
    assert len(disk.cuts) > 100, "the scenario has grown thin"
    assert first_fault(disk) is None


def test_the_publisher_goes_on_after_every_cut() -> None:
    disk = Disk(CrashFiles())
    disk.watch()
    publish_versions(disk, 1, 2)
    for call, _, survivors in disk.cuts:
        for files in survivors[:3]:
            after = Disk(files)
            publish_versions(after, 1, 3)
            wrong = check(after.files, after.told)
            assert wrong is None, f"after a cut at {call}: {wrong}"
            assert after.told.pointer == Ref("a", 3)
            left = [name for name in files.names(ROOT / "updates") if name.startswith(".tmp")]
            assert not left, f"after a cut at {call}, {left} was never removed"


@pytest.mark.parametrize("killed_at", KILLS)
def test_a_kill_then_a_cut_lose_nothing_acknowledged(killed_at: int) -> None:
    after = kill_then_go_on(killed_at)
    assert first_fault(after) is None


def sync_places() -> list[str]:
    """Every place in the stores that syncs, found by running all scenarios."""
    sites = set(run_whole_life().files.sync_sites)
    for killed_at in KILLS:
        sites |= kill_then_go_on(killed_at).files.sync_sites
    return sorted({place(site) for site in sites})


PLACES = sync_places()


@pytest.mark.parametrize("removed", PLACES, ids=lambda place: place.replace("stores/", ""))
def test_no_sync_can_be_removed(removed: str) -> None:
    assert needed(removed), f"nothing fails without the sync at {removed}"


def needed(removed: str) -> bool:
    if first_fault(run_whole_life(removed)) is not None:
        return True
    return any(first_fault(kill_then_go_on(at, removed)) is not None for at in KILLS)


def test_the_scenarios_reach_every_sync_line() -> None:
    """A sync line that no scenario runs would be one that nothing proves."""
    lines = Path(durable.__file__ or "").read_text().splitlines()
    wanted = {
        f"stores/durable.py:{number}"
        for number, text in enumerate(lines, 1)
        if "sync_directory(" in text or ".sync()" in text
    }
    reached = {found.split(" < ")[0] for found in PLACES}
    assert wanted == reached, f"no scenario runs the syncs in {sorted(wanted - reached)}"
    assert len(wanted) >= 8
