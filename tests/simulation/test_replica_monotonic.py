"""B68, invariant 4: one activation at a time, and served versions only grow, however passes fall.

A thousand seeded interleavings of wakes, polls, a moving pointer, slow and fast stages, lost
calls, and readers. The store is written once; each interleaving moves a scripted pointer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from stitch.testing.clock import run_virtual
from stitch.testing.publications import ScriptedRun
from stitch.testing.replica_world import World, served_versions, world
from stitch.types import Constraint, Ref

INTERLEAVINGS = 1000
VERSIONS = 4


def publish_once(root: Path) -> dict[Ref, str]:
    async def run() -> dict[Ref, str]:
        async with world(root) as made:
            written: ScriptedRun = await made.claim()
            await made.publish(written, VERSIONS, wake=False)
            return dict(made.digests)

    return run_virtual(run)


async def interleave(made: World) -> None:
    """The pointer moves while wakes come from two sides; requests run across."""
    random = made.env.random
    made.store.remote, made.store.leases = False, {}
    made.offload.seconds_max = random.uniform(0.0, 0.05)
    made.store.latency_s = random.uniform(0.0, 0.02)
    made.engine.faults.chance = 0.03 if random.random() < 0.3 else 0.0
    made.engine.faults.actions = ("lose_reply", "drop", "fail_at")
    made.store.pointer = str(Ref("run-a", 0))
    made.start()
    made.client(Constraint(), token_count=4, pause_s=0.02)
    version = 0
    while version < VERSIONS:
        version += 1 if random.random() < 0.7 else min(2, VERSIONS - version)
        made.store.pointer = str(Ref("run-a", min(version, VERSIONS)))
        for _ in range(int(random.uniform(0, 4))):
            made.replica.wake()
            await made.env.clock.sleep(random.uniform(0, 0.05))
    made.engine.faults.chance = 0.0
    await made.settle(Ref("run-a", VERSIONS), seconds=120)
    versions = served_versions(made.history)
    assert versions == sorted(set(versions)), f"served {versions}"


def test_served_versions_only_grow_in_1000_interleavings(tmp_path: Path) -> None:
    digests = publish_once(tmp_path)

    async def run() -> int:
        tokens = 0
        for seed in range(INTERLEAVINGS):
            async with world(tmp_path, seed=seed, rank_s=2.0, recover_tries=50) as made:
                made.digests.update(digests)
                await interleave(made)
                tokens += sum(len(done.generation.tokens) for done in made.finished)
            await asyncio.sleep(0)
        return tokens

    assert run_virtual(run) > INTERLEAVINGS
