"""The cpu and disk destinations keep every promise; every broken destination is caught by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch.destinations.base import Destination, Proof, Staged, StageRequest, Verified
from stitch.destinations.copying import CopyingDestination
from stitch.destinations.cpu import CpuDestination
from stitch.destinations.disk import DiskDestination
from stitch.engines.base import RankOrder
from stitch.errors import StitchError
from stitch.stores.local import LocalStore
from stitch.testing.clock import run_virtual, virtual_env
from stitch.testing.destination_suite import CASES, FillingFiles
from stitch.testing.engine import SimulatedEngine
from stitch.testing.publications import ScriptedRun, small_model, write_checkpoint

MakeDestination = Callable[["Harness", str], Destination]


class Harness:
    def __init__(self, root: Path, make: MakeDestination) -> None:
        self.files = FillingFiles()
        self.env = virtual_env(11, files=self.files)
        self.root = root
        self.model_dir = write_checkpoint(root / "model", small_model())
        self.overlay_parent = root / "overlays"
        self.overlay_parent.mkdir()
        self.engine = SimulatedEngine(self.model_dir, self.env)
        self.run: ScriptedRun
        self._make = make

    async def start(self) -> Harness:
        clean = virtual_env(12)
        store = LocalStore(self.root / "store", clean)
        self.run = await ScriptedRun.claim(store, clean, "suite", small_model())
        return self

    def make(self, incarnation: str) -> Destination:
        return self._make(self, incarnation)


def disk(harness: Harness, incarnation: str, kind: Any = DiskDestination) -> Destination:
    made: Destination = kind(
        harness.engine,
        incarnation,
        base_dir=harness.model_dir,
        work_dir=harness.overlay_parent,
        env=harness.env,
    )
    return made


def cpu(harness: Harness, incarnation: str) -> Destination:
    return CpuDestination(
        harness.engine,
        incarnation,
        base_dir=harness.model_dir,
        work_dir=harness.root,
        ram_dir=harness.overlay_parent,
        env=harness.env,
    )


def cpu_without_memory(harness: Harness, incarnation: str) -> Destination:
    return CpuDestination(
        harness.engine,
        incarnation,
        base_dir=harness.model_dir,
        work_dir=harness.overlay_parent,
        ram_dir=harness.root / "absent",
        env=harness.env,
    )


def check(name: str, root: Path, make: MakeDestination) -> None:
    async def run() -> None:
        await CASES[name](await Harness(root, make).start())

    run_virtual(run)


@pytest.mark.parametrize("make", [disk, cpu, cpu_without_memory], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", CASES)
def test_destination(name: str, make: MakeDestination, tmp_path: Path) -> None:
    check(name, tmp_path, make)


# Broken destinations. Each overrides one thing, and the case that must notice is named.


class ProvesUnseen(DiskDestination):
    async def prove(self) -> Proof:
        try:
            return await super().prove()
        except StitchError:
            return Proof(len(self._state.slices), {})


class StagingCommits(DiskDestination):
    async def stage(self, request: StageRequest) -> Staged:
        staged = await super().stage(request)
        await self.commit(staged)
        return staged


class VerifyTrusts(DiskDestination):
    async def verify(self, staged: Staged) -> Verified:
        return Verified(len(staged.changed), ())


class VerifiesOneRank(DiskDestination):
    async def verify(self, staged: Staged) -> Verified:
        self._ranks.coverage = {0: self._ranks.coverage[0]}
        return await super().verify(staged)


class UndoSkipsTheFullPass(DiskDestination):
    async def undo(self, staged: Staged) -> Verified:
        await self._ranks.send(RankOrder("", 0, "undo"))
        return Verified(len(self._state.slices), ())


class UndoForgets(DiskDestination):
    async def undo(self, staged: Staged) -> Verified:
        return Verified(len(self._state.slices), ())


class PreflightNods(DiskDestination):
    async def preflight(self, staged: Staged) -> None:
        return


class IgnoresAFailedRank(DiskDestination):
    async def commit(self, staged: Staged) -> None:
        try:
            await super().commit(staged)
        except StitchError:
            return


class SendsOnce(DiskDestination):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks.tries = 1


class ForgetsTheBoot(DiskDestination):
    async def stage(self, request: StageRequest) -> Staged:
        return await super().stage(replace(request, from_boot=False))


class KeepsEveryOverlay(DiskDestination):
    async def _drop_unused(self) -> None:
        return


class LeavesFiles(DiskDestination):
    async def close(self) -> None:
        return


class RepairsNothing(DiskDestination):
    async def scrub(self) -> Verified:
        found = await super().scrub()
        self._dirty = frozenset()
        return found


class AdoptsTheOldDigest(DiskDestination):
    async def adopt(self, staged: Staged) -> None:
        held = self._state
        await super().adopt(staged)
        self._held = replace(self._state, digest=held.digest)


class DiscardsOnlyHere(DiskDestination):
    async def discard(self, staged: Staged) -> None:
        self._pending = None
        await self._drop_unused()


class FencesNothing(DiskDestination):
    async def fence(self, attempt: int) -> None:
        self._pending = None


class IgnoresOrdersInBetween(DiskDestination):
    def advance(self, attempt: int) -> None:
        return


class SwallowsAFullDisk(DiskDestination):
    async def stage(self, request: StageRequest) -> Staged:
        try:
            return await super().stage(request)
        except StitchError:
            return Staged(request.base, request.target, request.attempt, {}, self.digest, 0, 0.0)


BROKEN: dict[type[CopyingDestination], str] = {
    ProvesUnseen: "proof_finds_a_wrong_byte",
    StagingCommits: "staging_touches_no_live_byte",
    VerifyTrusts: "verify_catches_a_wrong_live_byte",
    VerifiesOneRank: "verify_catches_a_wrong_live_byte",
    UndoSkipsTheFullPass: "undo_notices_untouched_tensors",
    UndoForgets: "undo_restores_and_verifies_everything",
    PreflightNods: "preflight_wants_every_rank_staged",
    IgnoresAFailedRank: "a_failed_commit_can_be_undone",
    SendsOnce: "lost_replies_do_no_harm",
    ForgetsTheBoot: "from_boot_untouched_tensors_go_back",
    KeepsEveryOverlay: "files_stay_bounded_and_go_at_close",
    LeavesFiles: "files_stay_bounded_and_go_at_close",
    RepairsNothing: "a_scrub_finds_and_a_repair_heals",
    AdoptsTheOldDigest: "a_chain_goes_live_at_once",
    DiscardsOnlyHere: "a_discarded_stage_cannot_come_back",
    FencesNothing: "a_fence_voids_what_was_staged",
    IgnoresOrdersInBetween: "a_label_in_between_makes_nothing_stale",
    SwallowsAFullDisk: "a_full_disk_changes_nothing",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_destination_is_caught(kind: type[CopyingDestination], tmp_path: Path) -> None:
    # A lost call that nobody repeats surfaces as the error itself.
    with pytest.raises((AssertionError, StitchError)):
        check(BROKEN[kind], tmp_path, lambda harness, life: disk(harness, life, kind))
