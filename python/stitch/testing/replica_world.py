"""A replica in virtual time: store with faults, simulated engine, clients, and checkers.

The checkers hold at every step of every scenario: labels are true, nothing starts while the gate
is closed, a reported version is the one in the engine, served versions never go back, constraints
are met. `World.settle` adds convergence: once faults stop, the replica reaches the pointer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stitch.admission import GateConfig, Lease
from stitch.destinations.cpu import CpuDestination
from stitch.engines.base import Engine
from stitch.env import Env, OsFiles
from stitch.errors import EngineUnavailable, ReplicaLost, StitchError, Unavailable
from stitch.reconciler.config import ReplicaConfig
from stitch.reconciler.replica import Replica
from stitch.stores.base import ObjectInfo, PointerRead, StoreCapabilities
from stitch.stores.local import LocalStore
from stitch.testing.clock import InlineOffload, virtual_env
from stitch.testing.destination_suite import FillingFiles
from stitch.testing.engine import Generation, SimulatedEngine
from stitch.testing.publications import ScriptedRun, small_model, write_checkpoint
from stitch.types import UNCONSTRAINED, Constraint, GateState, Prefix, Ref, ReplicaState

__all__ = ["FaultyStore", "SlowOffload", "World", "world"]

T = TypeVar("T")


class SlowOffload(InlineOffload):
    """Work off the loop takes virtual time, so that other tasks run in between."""

    def __init__(self) -> None:
        self.env: Env | None = None
        self.seconds_max = 0.0

    async def __call__(self, work: Callable[[], T], /) -> T:
        if self.env is not None and self.seconds_max:
            await self.env.clock.sleep(self.env.random.uniform(0, self.seconds_max))
        return await super().__call__(work)


class FaultyStore(LocalStore):
    """A local store that reads like a remote one: no local paths, latency, failures.

    remote: versions are fetched rather than read in place. leases: kept here if not None.
    failing: every read fails. chance: probability that one read fails. latency_s: upper bound
    of each read's virtual time. pointer: text served instead of the stored pointer, if set.
    """

    def __init__(self, root: Path, env: Env) -> None:
        super().__init__(root, env=env)
        self._faults = env
        self.failing = False
        self.chance = 0.0
        self.latency_s = 0.0
        self.pointer: str | None = None
        self.reads = 0
        self.remote = True
        self.leases: dict[str, bytes] | None = None

    @property
    def capabilities(self) -> StoreCapabilities:
        return dataclasses.replace(super().capabilities, local_files=not self.remote)

    async def _strike(self) -> None:
        self.reads += 1
        if self.latency_s:
            await self._faults.clock.sleep(self._faults.random.uniform(0, self.latency_s))
        if self.failing or (self.chance and self._faults.random.random() < self.chance):
            raise Unavailable("the store does not answer")

    async def read_pointer(self) -> PointerRead:
        await self._strike()
        if self.pointer is not None:
            return PointerRead(self.pointer, "scripted")
        return await super().read_pointer()

    async def read(self, key: str, *, size_max: int) -> bytes | None:
        await self._strike()
        return await super().read(key, size_max=size_max)

    async def stat(self, key: str) -> ObjectInfo | None:
        await self._strike()
        return await super().stat(key)

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, *, expect_token: str | None = None
    ) -> int:
        await self._strike()
        return await super().read_into(key, offset, buffer, expect_token=expect_token)

    async def write_lease(self, name: str, data: bytes) -> None:
        if self.leases is None:
            await super().write_lease(name, data)
        else:
            self.leases[name] = data

    async def drop_lease(self, name: str) -> None:
        if self.leases is None:
            await super().drop_lease(name)
        else:
            self.leases.pop(name, None)


@dataclass
class Finished:
    """One request that ended: what it asked, its lease, and what the engine gave."""

    constraint: Constraint
    lease: Lease
    generation: Generation


@dataclass
class World:
    """Everything around one replica. `digests`: model digest of every version of every run."""

    env: Env
    root: Path
    store: FaultyStore
    plain: LocalStore
    engine: SimulatedEngine
    files: FillingFiles
    offload: SlowOffload
    config: ReplicaConfig
    replica: Replica
    digests: dict[Ref, str] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    refused: list[StitchError] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    history: list[tuple[str, Ref]] = field(default_factory=list)
    states: list[ReplicaState] = field(default_factory=list)
    lost: ReplicaLost | None = None
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    _rids: int = 0

    async def claim(self, run_id: str = "run-a", **options: Any) -> ScriptedRun:
        """A run on the base checkpoint, or on `tensors`."""
        tensors = options.pop("tensors", small_model())
        run = await ScriptedRun.claim(self.plain, self.env, run_id, tensors, **options)
        self.digests.update(run.digests)
        run.digests = self.digests
        return run

    def change(self, run: ScriptedRun, index: int, value: int) -> dict[str, bytes]:
        """A change of one tensor, for `run.publish`."""
        name = sorted(run.tensors)[index % len(run.tensors)]
        return {name: bytes([value % 256]) * run.tensors[name].nbytes}

    async def publish(self, run: ScriptedRun, count: int = 1, *, wake: bool = True) -> Ref:
        """Publish `count` versions that each change something."""
        for _ in range(count):
            await run.publish(self.change(run, run.version, 3 * run.version + 17))
            if wake:
                self.replica.wake()
        return run.ref

    def start(self) -> None:
        """Run the replica and the checkers."""
        self._tasks.append(asyncio.create_task(self._run(), name="replica"))
        self._tasks.append(asyncio.create_task(self._follow(), name="follow"))

    async def stop_replica(self) -> None:
        """The sidecar process ends; the engine stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def client(
        self,
        constraint: Constraint = UNCONSTRAINED,
        *,
        token_count: int = 20,
        pause_s: float = 0.05,
    ) -> asyncio.Task[None]:
        """A client that asks again and again until the world ends."""

        async def loop() -> None:
            while True:
                with contextlib.suppress(StitchError):
                    await self.request(constraint, token_count=token_count)
                await self.env.clock.sleep(pause_s)

        task = asyncio.create_task(loop(), name="client")
        self._tasks.append(task)
        return task

    async def request(
        self,
        constraint: Constraint = UNCONSTRAINED,
        *,
        token_count: int = 20,
        wait_s: float | None = 5.0,
        prompt: str = "the prompt everybody asks",
    ) -> Generation:
        """One request through the gate, as a sidecar would run it. Raises what a client gets."""
        self._rids += 1
        rid = f"request-{self._rids}"
        try:
            lease = await self.replica.gate.admit(constraint, wait_s=wait_s)
        except StitchError as error:
            self.refused.append(error)
            raise
        self._check_admission()
        lease.on_abort = lambda _: self._abort(rid)
        try:
            body: dict[str, Any] = {}
            self.engine.stamp_request("/generate", body, rid=rid, label=lease.label)
            generation = await self.engine.generate(
                rid, prompt, token_count, cache_key=body["cache_key"]
            )
        finally:
            self.replica.gate.release(lease)
        if lease.error is not None:
            raise lease.error
        if generation.aborted:
            raise EngineUnavailable("the engine ended the request")
        done = Finished(constraint, lease, generation)
        self.finished.append(done)
        self._check_finished(done)
        return generation

    async def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Virtual time passes until `condition`, at most `seconds`."""
        end = self.env.clock.monotonic() + seconds
        while not condition():
            assert self.env.clock.monotonic() < end, f"not within {seconds:g} s: {self.info()}"
            await self.env.clock.sleep(0.01)

    async def settle(self, ref: Ref, seconds: float = 120.0) -> None:
        """Convergence: the replica serves `ref` with exactly its bytes, and is ready."""
        await self.until(lambda: self.serves(ref), seconds)
        self.check()

    def serves(self, ref: Ref) -> bool:
        """Whether `ref` is served, labelled, open and ready, with the right bytes on all ranks."""
        gate = self.replica.gate
        return (
            gate.served == ref
            and gate.state is GateState.OPEN
            and self.replica.health()[0]
            and self.engine.fingerprint() == self.digests[ref]
            and not self.engine.paused
        )

    def check(self) -> None:
        """Raise for the first broken invariant."""
        assert not self.problems, self.problems[0]

    def info(self) -> dict[str, Any]:
        return self.replica.server_info()

    def _abort(self, rid: str) -> None:
        self._tasks.append(asyncio.create_task(self.engine.abort(rid), name="abort"))

    async def _run(self) -> None:
        try:
            await self.replica.run()
        except ReplicaLost as error:
            self.lost = error
        except AssertionError as error:
            self.problems.append(f"assertion in the replica: {error}")
            raise

    async def _follow(self) -> None:
        last: dict[tuple[str, str], int] = {}
        seqs: dict[str, int] = {}
        async for report in self.replica.reports():
            if report.seq <= seqs.get(report.incarnation, 0):
                self.problems.append(f"seq {report.seq} repeats")
            seqs[report.incarnation] = report.seq
            self.states.append(report.state)
            if report.served is None:
                continue
            key = (report.incarnation, report.served.run_id)
            if report.served.version < last.get(key, 0):
                self.problems.append(f"{report.served} after {last[key]}: served went back")
            last[key] = report.served.version
            self.history.append((report.incarnation, report.served))
            if report.state in {ReplicaState.UNKNOWN, ReplicaState.FAILED, ReplicaState.BOOTING}:
                self.problems.append(f"{report.state.value} reports {report.served}")

    def _check_admission(self) -> None:
        gate = self.replica.gate
        if gate.state is GateState.CLOSED:
            self.problems.append("a request was admitted while the gate is closed")
        if not self._engine_is_ours():
            return
        if self.engine.paused:
            self.problems.append("a request was admitted while the engine is paused")
        served = gate.served
        if served is not None and self.engine.fingerprint() != self.digests[served]:
            self.problems.append(f"{served} was reported, other weights are in the engine")

    def _engine_is_ours(self) -> bool:
        """The engine is the process the replica knows; it may have died a moment ago."""
        return self.engine.alive and self.engine.members[0].label is not None

    def _check_finished(self, done: Finished) -> None:
        tokens = done.generation.tokens
        for at, token in enumerate(tokens):
            if token.label is None:
                if self._engine_is_ours():
                    self.problems.append(f"token {at} has no label")
                continue
            if token.fingerprint != self.digests[token.label.ref]:
                self.problems.append(f"token {at} says {token.label.ref}: not its weights")
            exact = token.prefix is Prefix.EXACT
            if exact and token.state_fingerprint != token.fingerprint:
                self.problems.append(f"token {at} says exact, its state is of other weights")
        labels = [token.label for token in tokens if token.label is not None]
        wanted = done.constraint
        for label in labels:
            ref, exact_version = label.ref, wanted.exact_version
            if wanted.run_id not in (None, ref.run_id):
                self.problems.append(f"a request for run {wanted.run_id} got {ref}")
            if exact_version is not None and ref.version != exact_version:
                self.problems.append(f"a pin on {exact_version} got {ref}")
            elif exact_version is None and ref.version < (wanted.min_version or 0):
                self.problems.append(f"a minimum of {wanted.min_version} got {ref}")


@contextlib.asynccontextmanager
async def world(
    root: Path,
    *,
    seed: int = 1,
    engine: dict[str, Any] | None = None,
    gate: GateConfig | None = None,
    **config: Any,
) -> AsyncIterator[World]:
    """A world ready to `start()`; checked and torn down at the end. Use under `run_virtual`."""
    files, offload = FillingFiles(), SlowOffload()
    env = dataclasses.replace(virtual_env(seed), files=files, offload=offload)
    offload.env = env
    plain_env = dataclasses.replace(env, files=OsFiles(), offload=InlineOffload())
    model_dir, work_dir = _directories(root, env.random.nonce())
    simulated = SimulatedEngine(model_dir, env, **(engine or {}))
    settings: dict[str, Any] = {"replica_id": "replica-0", "run_id": "run-a", "scrub_s": 0.0}
    settings |= {"work_dir": work_dir, "gate": gate or GateConfig()} | config
    made = World(
        env=env,
        root=root,
        store=FaultyStore(root / "store", plain_env),
        plain=LocalStore(root / "store", env=plain_env),
        engine=simulated,
        files=files,
        offload=offload,
        config=ReplicaConfig(**settings),
        replica=None,  # type: ignore[arg-type]
    )
    if made.config.boot is not None:
        made.digests[made.config.boot] = simulated.fingerprint()
    made.replica = make_replica(made)
    try:
        yield made
        made.check()
    finally:
        await made.stop_replica()
        simulated.die()
        await simulated.close()
        await asyncio.sleep(0)
        files.remove_tree(work_dir)


def _directories(root: Path, nonce: str) -> tuple[Path, Path]:
    """The engine's checkpoint, shared by all worlds under `root`, and a work directory."""
    root.mkdir(parents=True, exist_ok=True)
    model_dir, work_dir = root / "model", root / f"work-{nonce}"
    if not model_dir.exists():
        write_checkpoint(model_dir, small_model())
    work_dir.mkdir(exist_ok=True)
    return model_dir, work_dir


def make_replica(made: World, engine: Engine | None = None) -> Replica:
    """A (further) sidecar for the world's engine."""

    def destination(driven: Engine, incarnation: str) -> CpuDestination:
        return CpuDestination(
            driven,
            incarnation,
            base_dir=made.engine.model_dir,
            work_dir=made.config.work_dir,
            ram_dir=made.config.work_dir,
            env=made.env,
        )

    return Replica(made.store, engine or made.engine, destination, made.config, made.env)


def served_versions(history: Sequence[tuple[str, Ref]]) -> list[int]:
    """Distinct versions in the order in which they were reported."""
    found: list[int] = []
    for _, ref in history:
        if not found or found[-1] != ref.version:
            found.append(ref.version)
    return found
