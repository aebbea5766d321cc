"""What every destination promises, as named cases over the protocol and a simulated engine.

A destination's own tests run every case of `CASES` against a `DestinationHarness`. A case
raises AssertionError naming the broken promise; each needs a fresh harness.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from stitch.destinations.base import Destination, Staged, StageRequest
from stitch.engines.base import RankOrder
from stitch.env import Env, FileHandle, OsFiles
from stitch.errors import ActivationFailed, CorruptData, StitchError, Unavailable
from stitch.format.records import version_prefix
from stitch.testing.engine import SimulatedEngine
from stitch.testing.publications import ScriptedRun
from stitch.types import ActivationMode, Kind, Ref

__all__ = ["CASES", "DestinationHarness", "FillingFiles"]


class FillingFiles(OsFiles):
    """A disk that is full while `full` is set."""

    def __init__(self) -> None:
        self.full = False

    def create(self, path: Path) -> FileHandle:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return super().create(path)


class DestinationHarness(Protocol):
    """One engine, a run whose base is its checkpoint, and destinations over them.

    `overlay_parent` is where the destination keeps files; `files` is the destination's disk.
    """

    env: Env
    files: FillingFiles
    engine: SimulatedEngine
    run: ScriptedRun
    overlay_parent: Path

    def make(self, incarnation: str) -> Destination:
        """A fresh destination for one incarnation."""
        ...


@dataclass
class _Driven:
    harness: DestinationHarness
    destination: Destination
    held: Ref
    attempt: int = 1
    before: list[dict[str, bytes]] = field(default_factory=list)

    @classmethod
    async def start(cls, harness: DestinationHarness) -> _Driven:
        destination = harness.make("incarnation-1")
        proof = await destination.prove()
        assert proof.covered == len(harness.run.tensors), f"{proof} does not cover the model"
        assert destination.digest == harness.run.digests[harness.run.ref], "another base digest"
        return cls(harness, destination, harness.run.ref)

    @property
    def engine(self) -> SimulatedEngine:
        return self.harness.engine

    async def publish(self, *changes: dict[str, bytes], **options: Any) -> list[Path]:
        """Publish one version per change set; their directories."""
        run, paths = self.harness.run, []
        for change in changes:
            ref = await run.publish(change, **options)
            path = run.store.local_path(version_prefix(run.record, ref.version))
            assert path is not None
            paths.append(path)
        return paths

    async def stage(self, chain: list[Path], *, target: Ref | None = None, **more: Any) -> Staged:
        self.attempt += 1
        request = StageRequest(
            base=self.held,
            target=target or self.harness.run.ref,
            chain=chain,
            attempt=self.attempt,
            **more,
        )
        return await self.destination.stage(request)

    async def commit(self, staged: Staged) -> None:
        await self.destination.preflight(staged)
        await self.engine.pause(ActivationMode.RECOMPUTE)
        await self.destination.commit(staged)

    async def activate(self, chain: list[Path], **more: Any) -> Staged:
        staged = await self.stage(chain, **more)
        await self.commit(staged)
        verified = await self.destination.verify(staged)
        assert verified.ok, f"a good commit did not verify: {verified}"
        await self.destination.adopt(staged)
        await self.engine.resume(recompute=True)
        self.held = staged.target
        return staged

    def snapshot(self) -> None:
        self.before = [{n: bytes(b) for n, b in rank.live.items()} for rank in self.engine.members]

    def unchanged(self, why: str) -> None:
        now = [{n: bytes(b) for n, b in rank.live.items()} for rank in self.engine.members]
        assert now == self.before, f"live bytes changed: {why}"

    def serves(self, ref: Ref) -> None:
        expected = self.harness.run.digests[ref]
        assert self.engine.fingerprint() == expected, f"the engine's bytes are not those of {ref}"
        assert self.destination.digest == expected, f"the digest held is not that of {ref}"

    def bytes_of(self, index: int, value: int) -> dict[str, bytes]:
        """A change of the tensor at `index` to all-`value` bytes."""
        tensors = self.harness.run.tensors
        name = sorted(tensors)[index]
        return {name: bytes([value]) * tensors[name].nbytes}

    def poke(self, index: int = 0, rank: int = 0) -> str:
        """Flip one live byte behind everybody's back."""
        target = self.engine.members[rank]
        name = sorted(target.live)[index]
        data = bytes(target.live[name])
        target.write(name, bytes([data[0] ^ 1]) + data[1:])
        return name


async def _fails(kind: type[StitchError], call: Awaitable[object], broken: str) -> StitchError:
    """The error of `call`, which must be a `kind`; `broken` says what its success means."""
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(broken)


async def proof_finds_a_wrong_byte(harness: DestinationHarness) -> None:
    target = harness.engine.members[-1]
    name = sorted(target.live)[-1]
    target.write(name, bytes(len(target.live[name])))
    proof = harness.make("incarnation-1").prove()
    await _fails(CorruptData, proof, "a rank with other bytes than the checkpoint was proven")


async def staging_touches_no_live_byte(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    driven.snapshot()
    chain = await driven.publish(driven.bytes_of(0, 7), driven.bytes_of(1, 9))
    staged = await driven.stage(chain)
    driven.unchanged("staging must not write")
    assert set(staged.changed) == {*driven.bytes_of(0, 0), *driven.bytes_of(1, 0)}
    assert staged.model_digest == harness.run.digests[harness.run.ref]
    await driven.destination.discard(staged)
    driven.unchanged("discarding must not write")


async def a_chain_goes_live_at_once(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    chain = await driven.publish(*[driven.bytes_of(i % 3, i + 1) for i in range(5)])
    await driven.activate(chain)
    driven.serves(harness.run.ref)
    chain = await driven.publish(driven.bytes_of(2, 99), encoding="overwrite")
    await driven.activate(chain)
    driven.serves(harness.run.ref)


async def an_anchor_goes_live(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    await driven.publish(driven.bytes_of(0, 1))
    chain = await driven.publish(driven.bytes_of(1, 2), kind=Kind.ANCHOR)
    chain += await driven.publish(driven.bytes_of(2, 3))
    await driven.activate(chain)
    driven.serves(harness.run.ref)


async def from_boot_untouched_tensors_go_back(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    run = harness.run
    boot = run.ref
    await driven.activate(await driven.publish(driven.bytes_of(0, 1), driven.bytes_of(1, 2)))
    await driven.activate([], target=boot, from_boot=True)
    driven.serves(boot)


async def verify_catches_a_wrong_live_byte(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    staged = await driven.stage(await driven.publish(driven.bytes_of(0, 5)))
    await driven.commit(staged)
    name = driven.poke(0, rank=len(driven.engine.members) - 1)
    verified = await driven.destination.verify(staged)
    assert verified.mismatched == (name,), f"{verified} after one rank's byte was flipped"


async def undo_restores_and_verifies_everything(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    base = harness.run.ref
    driven.snapshot()
    staged = await driven.stage(await driven.publish(driven.bytes_of(0, 5), driven.bytes_of(1, 6)))
    await driven.commit(staged)
    verified = await driven.destination.undo(staged)
    assert verified.ok, f"a clean undo did not verify: {verified}"
    assert verified.checked == len(harness.run.tensors), "undo verified only part of the model"
    driven.unchanged("undo must put back every byte")
    driven.serves(base)


async def undo_notices_untouched_tensors(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    staged = await driven.stage(await driven.publish(driven.bytes_of(0, 5)))
    await driven.commit(staged)
    name = driven.poke(2)
    verified = await driven.destination.undo(staged)
    assert verified.mismatched == (name,), f"{verified}: a tensor outside the stage is wrong"


async def a_failed_commit_can_be_undone(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    driven.snapshot()
    staged = await driven.stage(await driven.publish(driven.bytes_of(0, 5), driven.bytes_of(1, 6)))
    driven.engine.faults.add("commit", "fail_at", rank=len(driven.engine.members) - 1, at=1)
    commit = driven.commit(staged)
    await _fails(ActivationFailed, commit, "a rank failed half-way and commit said nothing")
    assert (await driven.destination.undo(staged)).ok
    driven.unchanged("undo of a half commit must put back every byte")


async def lost_replies_do_no_harm(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    for op in ("stage", "commit", "verify"):
        driven.engine.faults.add(op, "lose_reply")
    await driven.activate(await driven.publish(driven.bytes_of(0, 5), driven.bytes_of(2, 6)))
    driven.serves(harness.run.ref)


async def preflight_wants_every_rank_staged(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    staged = await driven.stage(await driven.publish(driven.bytes_of(0, 5)))
    driven.engine.members[-1].forget()
    preflight = driven.destination.preflight(staged)
    await _fails(ActivationFailed, preflight, "a rank without the stage passed preflight")


async def corrupt_data_changes_nothing(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    base = harness.run.ref
    driven.snapshot()
    chain = await driven.publish(driven.bytes_of(0, 5), damage=True)
    await _fails(CorruptData, driven.stage(chain), "a damaged payload was staged")
    driven.unchanged("a corrupt publication must not write")
    driven.serves(base)
    assert _files(harness) == [], "a failed stage left files behind"
    chain = await driven.publish(driven.bytes_of(1, 6), kind=Kind.ANCHOR)
    await driven.activate(chain)
    driven.serves(harness.run.ref)


async def another_base_is_refused(harness: DestinationHarness) -> None:
    """A delta whose base digest is not that of the bytes held is never applied."""
    driven = await _Driven.start(harness)
    driven.snapshot()
    await driven.publish(driven.bytes_of(0, 5))
    chain = await driven.publish(driven.bytes_of(0, 6))
    await _fails(CorruptData, driven.stage(chain), "version 2 was staged on version 0")
    driven.unchanged("a delta on another base must not write")


async def a_full_disk_changes_nothing(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    base = harness.run.ref
    driven.snapshot()
    chain = await driven.publish(driven.bytes_of(0, 5))
    harness.files.full = True
    error = await _fails(Unavailable, driven.stage(chain), "a stage succeeded on a full disk")
    harness.files.full = False
    assert "space" in error.message.lower(), f"{error.message!r} does not say what is full"
    driven.unchanged("a stage that found no room must not write")
    driven.serves(base)
    await driven.activate(chain)
    driven.serves(harness.run.ref)


async def a_discarded_stage_cannot_come_back(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    chain = await driven.publish(driven.bytes_of(0, 5))
    staged = await driven.stage(chain)
    await driven.destination.discard(staged)
    await driven.destination.discard(staged)
    assert _files(harness) == [], "a discarded stage left files behind"
    for rank in driven.engine.members:
        assert not rank.staged, "a rank still holds what was discarded"
    await driven.activate(chain)
    driven.serves(harness.run.ref)


async def a_fence_voids_what_was_staged(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    chain = await driven.publish(driven.bytes_of(0, 5))
    await driven.stage(chain)
    driven.attempt += 1
    await driven.destination.fence(driven.attempt)
    for rank in driven.engine.members:
        assert rank.attempt == driven.attempt, "a rank still obeys older attempts"
        assert not rank.staged, "a rank still holds what was fenced off"
    await driven.activate(chain)
    driven.serves(harness.run.ref)


async def a_scrub_finds_and_a_repair_heals(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    await driven.activate(await driven.publish(driven.bytes_of(0, 5)))
    assert (await driven.destination.scrub()).ok
    names = {driven.poke(0), driven.poke(2, rank=len(driven.engine.members) - 1)}
    verified = await driven.destination.scrub()
    assert set(verified.mismatched) == names, f"{verified} after {names} were flipped"
    await driven.activate([], target=driven.held)
    assert (await driven.destination.scrub()).ok, "a repair left wrong bytes"
    driven.serves(driven.held)


async def a_label_in_between_makes_nothing_stale(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    await driven.activate(await driven.publish(driven.bytes_of(0, 5)))
    driven.attempt += 1
    order = RankOrder("incarnation-1", driven.attempt, "label")
    assert all(reply.ok for reply in await driven.engine.order(order, deadline_s=5.0))
    driven.destination.advance(driven.attempt)
    assert (await driven.destination.scrub()).ok, "a scrub after a label was stale"
    await driven.activate(await driven.publish(driven.bytes_of(0, 6)))


async def a_new_sidecar_repairs_what_it_finds(harness: DestinationHarness) -> None:
    """A sidecar attaches to an engine that serves a later version: proof fails, repair heals."""
    driven = await _Driven.start(harness)
    base = harness.run.ref
    await driven.activate(await driven.publish(driven.bytes_of(0, 5)))
    after = _Driven(harness, harness.make("incarnation-2"), base)
    proof = after.destination.prove()
    await _fails(CorruptData, proof, "an engine at a later version was proven to be at its base")
    await after.activate([], target=base)
    after.serves(base)
    stage = driven.stage(await driven.publish(driven.bytes_of(1, 6)))
    await _fails(StitchError, stage, "the former incarnation still drives the ranks")
    await after.destination.close()


async def a_misfit_is_refused(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    driven.snapshot()
    run = harness.run
    dropped = sorted(run.tensors)[0]
    del run.tensors[dropped]
    chain = await driven.publish({}, kind=Kind.ANCHOR)
    broken = "an anchor without one of the model's tensors was staged"
    await _fails(CorruptData, driven.stage(chain), broken)
    driven.unchanged("an anchor of another model must not write")


async def files_stay_bounded_and_go_at_close(harness: DestinationHarness) -> None:
    driven = await _Driven.start(harness)
    for index in range(30):
        await driven.activate(await driven.publish(driven.bytes_of(index % 4, index)))
    size = sum(tensor.nbytes for tensor in harness.run.tensors.values())
    files = _files(harness)
    assert len(files) <= 12, f"{len(files)} files are kept after 30 versions"
    assert sum(f.stat().st_size for f in files) <= 4 * size + 12 * 4096, "bytes pile up"
    driven.serves(harness.run.ref)
    await driven.destination.close()
    await driven.destination.close()
    assert list(harness.overlay_parent.iterdir()) == [], "close left something behind"


async def left_overs_of_the_dead_are_removed(harness: DestinationHarness) -> None:
    dead = harness.overlay_parent / "stitch-overlays-00000000deadbeef"
    dead.mkdir()
    (dead / "overlay.safetensors").write_bytes(b"x" * 64)
    other = harness.overlay_parent / "somebody-elses"
    other.mkdir()
    await _Driven.start(harness)
    assert not dead.exists(), "a dead process's overlays stayed"
    assert other.exists(), "a directory that is not ours was removed"


def _files(harness: DestinationHarness) -> list[Path]:
    return sorted(path for path in harness.overlay_parent.rglob("*") if path.is_file())


CASES: Final[dict[str, Callable[[DestinationHarness], Awaitable[None]]]] = {
    case.__name__: case
    for case in (
        proof_finds_a_wrong_byte,
        staging_touches_no_live_byte,
        a_chain_goes_live_at_once,
        an_anchor_goes_live,
        from_boot_untouched_tensors_go_back,
        verify_catches_a_wrong_live_byte,
        undo_restores_and_verifies_everything,
        undo_notices_untouched_tensors,
        a_failed_commit_can_be_undone,
        lost_replies_do_no_harm,
        preflight_wants_every_rank_staged,
        corrupt_data_changes_nothing,
        another_base_is_refused,
        a_full_disk_changes_nothing,
        a_discarded_stage_cannot_come_back,
        a_fence_voids_what_was_staged,
        a_scrub_finds_and_a_repair_heals,
        a_label_in_between_makes_nothing_stale,
        a_new_sidecar_repairs_what_it_finds,
        a_misfit_is_refused,
        files_stay_bounded_and_go_at_close,
        left_overs_of_the_dead_are_removed,
    )
}
