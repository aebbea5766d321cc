"""SIGKILL in every phase of a publish, many times over; the run goes on to 100 versions."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch.stores import open_store
from stitch.stores.base import INDEX_NAME
from stitch.stores.versions import load_run, resolve_pointer, verify_version
from stitch.testing.publisher_process import PublishPhase, publish_until_stopped, tensors_of
from stitch.testing.publisher_suite import state_of
from stitch.types import Ref

KILLS_PER_PHASE = 15
VERSIONS = 100

QUIET = {PublishPhase.WAKE, PublishPhase.IDLE}
MOMENTS = {
    *(f"files: {what}" for what in ("create", "write", "sync")),
    *(f"index: {what}" for what in ("create", "write", "sync", "before", "after")),
    *(f"pointer: {what}" for what in ("create", "write", "sync", "before", "after")),
    "wake: wake",
    "idle: idle",
}

CONTEXT = multiprocessing.get_context("forkserver")


def sealed_digests(root: Path) -> dict[str, str]:
    """Digest of every sealed directory: names and bytes."""
    found = {}
    for index in root.glob(f"**/{INDEX_NAME}"):
        if index.parent.name.startswith(".tmp-"):
            continue
        hasher = hashlib.sha256()
        for path in sorted(index.parent.iterdir()):
            hasher.update(path.name.encode() + path.read_bytes())
        found[index.parent.name] = hasher.hexdigest()
    return found


def run_and_kill(root: Path, phase: PublishPhase | None, skip: int) -> str:
    """One life of the publisher. Returns what it was about to do when it was killed."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=publish_until_stopped, args=(str(root), phase, skip, VERSIONS, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise AssertionError(f"nothing heard in phase {phase}")
        said: str = ours.recv()
    finally:
        if process.pid is not None and phase is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        ours.close()
    return said


async def check_pointer(root: Path) -> Ref | None:
    """The pointer resolves at once to a version that verifies."""
    store = open_store(str(root))
    ref = await resolve_pointer(store, None, deadline_s=0)
    if ref is not None:
        record = await load_run(store, ref.run_id)
        assert record is not None
        if ref.version > record.boot_version:
            await verify_version(store, record, ref.version)
    return ref


@pytest.mark.slow
async def test_kills_in_every_phase_lose_and_change_nothing(
    tmp_path: Path, say: Callable[[str], None]
) -> None:
    CONTEXT.set_forkserver_preload(["stitch.testing.publisher_process"])
    root = tmp_path / "store"
    digests: dict[str, str] = {}
    killed: Counter[PublishPhase] = Counter()
    moments: set[str] = set()
    seen: Ref | None = None
    for turn in range(KILLS_PER_PHASE):
        for phase in PublishPhase:
            # A later moment each turn: phases have 1 to 9 moments a version.
            said = run_and_kill(root, phase, turn % (2 if phase in QUIET else 8))
            assert said != "done", "the publisher was through before it could be killed"
            killed[phase] += 1
            moments.add(f"{phase.value}: {said.split(' ')[0]}")
            ref = await check_pointer(root)
            if seen is not None:
                assert ref is not None, f"after a kill at {said!r} the pointer is gone"
                assert ref.version >= seen.version, f"after a kill at {said!r} it went back"
            seen = ref or seen
            now = sealed_digests(root)
            changed = [name for name, digest in digests.items() if now.get(name) != digest]
            assert not changed, f"a kill at {said!r} changed {changed}"
            digests = now
    counts = ", ".join(f"{phase.value} {count}" for phase, count in killed.items())
    say(f"publisher: SIGKILLs by phase: {counts}")
    assert min(killed[phase] for phase in PublishPhase) >= KILLS_PER_PHASE
    assert moments >= MOMENTS, f"no kill came at {sorted(MOMENTS - moments)}"
    assert run_and_kill(root, None, 0) == "done"
    assert await check_pointer(root) == Ref("a", VERSIONS)
    now = sealed_digests(root)
    assert all(now[name] == digest for name, digest in digests.items())
    assert sorted(now) == [f"weight_v{number:06d}" for number in range(1, VERSIONS + 1)]
    left = [path.name for path in root.rglob(".tmp-*")]
    assert not left, f"nobody removed {left}"


@pytest.mark.slow
def test_what_the_killed_ones_published_is_right(tmp_path: Path) -> None:
    """Every version reads back as the model of its number, whatever was killed on the way."""
    CONTEXT.set_forkserver_preload(["stitch.testing.publisher_process"])
    root = tmp_path / "store"
    for turn, phase in enumerate([PublishPhase.INDEX, PublishPhase.POINTER] * 4):
        run_and_kill(root, phase, 5 + turn)
    store = open_store(str(root))
    count = len(sealed_digests(root))
    assert count >= 8
    for version in range(1, count):
        found = state_of(store, Ref("a", version))
        want = {name: array.tobytes() for name, array in tensors_of(version).items()}
        assert found == want, f"version {version} reads back wrong"
