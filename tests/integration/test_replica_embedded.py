"""A whole replica over the real embedded engine: both destinations, crossing, stops and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch.destinations.base import Destination
from stitch.destinations.copying import CopyingConfig
from stitch.destinations.cpu import CpuDestination
from stitch.destinations.disk import DiskDestination
from stitch.engines.base import Engine, RankOrder
from stitch.engines.embedded import EmbeddedEngine, EngineProcess
from stitch.engines.embedded.tiny import write_tiny_model
from stitch.env import Env
from stitch.reconciler.config import ReplicaConfig
from stitch.reconciler.replica import Replica
from stitch.stores.local import LocalStore
from stitch.testing.publications import ScriptedRun, checkpoint_tensors
from stitch.types import GateState, Kind, Ref, exactly

pytestmark = pytest.mark.engine


@dataclass
class Site:
    env: Env
    root: Path
    process: EngineProcess
    engine: EmbeddedEngine
    replica: Replica
    run: ScriptedRun
    task: asyncio.Task[None]

    async def publish(self, *, wake: bool = True, kind: Kind = Kind.DELTA) -> Ref:
        """Reverse the bytes' elements of two matrices: other weights, still finite."""
        names = [n for n, t in self.run.tensors.items() if len(t.shape) == 2][:2]
        changed = {}
        for name in names:
            data = bytes(self.run.tensors[name].data)
            changed[name] = b"".join(data[i : i + 2] for i in range(len(data) - 2, -2, -2))
        ref = await self.run.publish(changed, kind=kind)
        if wake:
            self.replica.wake()
        return ref

    async def settle(self, ref: Ref, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not (
                self.replica.gate.served == ref
                and self.replica.gate.state is GateState.OPEN
                and self.replica.health()[0]
            ):
                assert not self.task.done() or self.task.exception() is None
                await asyncio.sleep(0.01)
        life = self.replica._driver._life
        assert life is not None
        assert life.destination.digest == self.run.digests[ref]
        assert (await life.destination.scrub()).ok, f"the engine's bytes are not those of {ref}"


@contextlib.asynccontextmanager
async def site(root: Path, kind: type[CpuDestination] | type[DiskDestination]) -> Any:
    env = Env()
    model = root / "model"
    write_tiny_model(model, seed=1, hidden_size=32, layers=2)
    work = root / "work"
    work.mkdir()
    process = await EngineProcess.spawn(model, work_dir=work, env=env)
    engine = EmbeddedEngine(process.base_url, env)
    store = LocalStore(root / "store", env=env)
    run = await ScriptedRun.claim(store, env, "run-a", checkpoint_tensors(model))

    def destination(driven: Engine, incarnation: str) -> Destination:
        limits = CopyingConfig(rank_s=0.5, full_s=1.0)
        return kind(driven, incarnation, base_dir=model, work_dir=work, env=env, config=limits)

    config = ReplicaConfig(
        replica_id="replica-0",
        work_dir=work,
        run_id="run-a",
        poll_s=1.0,
        rank_s=0.5,
        control_s=0.5,
        probe_s=0.5,
    )
    replica = Replica(store, engine, destination, config, env)
    task = asyncio.create_task(replica.run())
    made = Site(env, root, process, engine, replica, run, task)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
        process.kill()


@pytest.fixture(params=[CpuDestination, DiskDestination], ids=["cpu", "disk"])
async def live(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async with site(tmp_path, request.param) as made:
        yield made


async def generate(made: Site, http: aiohttp.ClientSession, tokens: int) -> dict[str, Any]:
    """One request as a sidecar runs it."""
    lease = await made.replica.gate.admit(exactly(made.replica.gate.served.version))
    try:
        body: dict[str, Any] = {
            "text": "1 + 1 =",
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        made.engine.stamp_request("/generate", body, rid=f"rid-{lease.id}", label=lease.label)
        async with http.post(f"{made.process.base_url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return dict(await response.json())
    finally:
        made.replica.gate.release(lease)


async def test_versions_go_live_and_answers_say_so(live: Site) -> None:
    await live.settle(live.run.ref)
    async with aiohttp.ClientSession() as http:
        texts = {}
        for kind in (None, Kind.DELTA, Kind.DELTA, Kind.ANCHOR):
            if kind is not None:
                await live.publish(kind=kind)
            await live.settle(live.run.ref)
            answer = await generate(live, http, 8)
            spans = answer["meta_info"]["weight_versions"]
            assert [s["version"] for s in spans] == [live.run.version]
            texts[live.run.version] = answer["text"]
    # Reversing twice gives the first weights again: the same greedy answer, the cache aside.
    assert texts[0] == texts[2]
    assert texts[1] == texts[3] != texts[0]
    report = live.replica.report()
    assert report.swap_s is not None
    assert report.swap_s < 1.0


@pytest.mark.slow
async def test_an_engine_that_is_stopped_in_each_phase(tmp_path: Path) -> None:
    """SIGSTOP just before each call goes out, SIGCONT after its deadline: verified at the end."""
    async with site(tmp_path, CpuDestination) as made:
        await made.settle(made.run.ref)
        stop_before: list[str] = []
        stopped = asyncio.Event()

        def before(op: str) -> None:
            if stop_before == [op]:
                stop_before.clear()
                os.kill(made.process.child.pid, signal.SIGSTOP)
                stopped.set()

        intercept(made, before)
        for op in ("stage", "state", "pause", "commit", "verify", "label", "resume"):
            stopped.clear()
            stop_before.append(op)
            await made.publish()
            async with asyncio.timeout(30):
                await stopped.wait()
            await asyncio.sleep(1.6)
            os.kill(made.process.child.pid, signal.SIGCONT)
            await made.settle(made.run.ref)
        async with aiohttp.ClientSession() as http:
            answer = await generate(made, http, 4)
        assert answer["meta_info"]["weight_version_start"] == made.run.version


def intercept(made: Site, before: Callable[[str], None]) -> None:
    """Call `before` with its name ahead of every control call and rank order."""
    for op in ("pause", "resume"):
        setattr(made.engine, op, _ahead(getattr(made.engine, op), op, before))
    ranks = made.engine.ranks
    send = ranks.order

    async def order(order: RankOrder, *, deadline_s: float) -> Any:
        before(order.op)
        return await send(order, deadline_s=deadline_s)

    ranks.order = order  # type: ignore[method-assign]


def _ahead(call: Callable[..., Any], op: str, before: Callable[[str], None]) -> Any:
    async def wrapped(*arguments: Any, **options: Any) -> Any:
        before(op)
        return await call(*arguments, **options)

    return wrapped


async def test_an_engine_that_dies_fails_the_replica_in_the_end(tmp_path: Path) -> None:
    async with site(tmp_path, DiskDestination) as made:
        await made.settle(made.run.ref)
        made.process.kill()
        async with asyncio.timeout(30):
            while made.replica.health()[0]:
                await asyncio.sleep(0.05)
        assert made.replica.report().served is None
