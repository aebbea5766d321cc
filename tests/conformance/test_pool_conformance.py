"""Every pool keeps the protocol's promises, and every broken pool is caught by its named case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stitch.env import Env
from stitch.pools import FilePool, Member, Pool, StaticPool
from stitch.pools.local import write_members
from stitch.testing.pool_suite import BROKEN, CASES, BrokenPool, run_case


class StaticHarness:
    async def make(self, members: Sequence[Member]) -> Pool:
        entries = [f"{m.id}={m.url}" for m in members]
        return StaticPool(entries, env=Env(), wake_deadline_s=0.6)

    async def change(self, members: Sequence[Member]) -> bool:
        return False

    async def break_discovery(self) -> bool:
        return False


class FileHarness:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "members.json"
        self.env = Env()

    async def make(self, members: Sequence[Member]) -> Pool:
        write_members(self.env, self.path, members)
        return FilePool(self.path, env=self.env, poll_s=0.01, wake_deadline_s=0.6)

    async def change(self, members: Sequence[Member]) -> bool:
        write_members(self.env, self.path, members)
        return True

    async def break_discovery(self) -> bool:
        self.path.unlink()
        return True


class ScalingHarness(FileHarness):
    async def make(self, members: Sequence[Member]) -> Pool:
        async def scale(replicas: int) -> None:
            write_members(self.env, self.path, members[:replicas])

        write_members(self.env, self.path, members)
        return FilePool(self.path, env=self.env, poll_s=0.01, wake_deadline_s=0.6, scale=scale)


class BrokenHarness(FileHarness):
    def __init__(self, directory: Path, broken: BrokenPool) -> None:
        super().__init__(directory)
        self.broken = broken

    async def make(self, members: Sequence[Member]) -> Pool:
        return self.broken.wrap(await super().make(members))


@pytest.mark.parametrize("name", CASES)
async def test_static_pool(name: str) -> None:
    await run_case(name, StaticHarness())


@pytest.mark.parametrize("name", CASES)
async def test_file_pool(name: str, tmp_path: Path) -> None:
    await run_case(name, FileHarness(tmp_path))


async def test_file_pool_that_scales(tmp_path: Path) -> None:
    await run_case("scale_acts_or_is_unsupported", ScalingHarness(tmp_path))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: b.name)
async def test_a_broken_pool_is_caught(broken: BrokenPool, tmp_path: Path) -> None:
    try:
        await run_case(broken.caught_by, BrokenHarness(tmp_path, broken))
    except (AssertionError, TimeoutError):
        return
    pytest.fail(f"{broken.caught_by} accepts the pool that is {broken.name}")
