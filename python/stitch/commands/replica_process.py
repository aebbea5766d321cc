"""The parts of one replica's process put together, and kept together until a signal ends them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch.destinations.base import Destination
from stitch.destinations.cpu import CpuDestination
from stitch.destinations.disk import DiskDestination
from stitch.engines.base import Engine, Health
from stitch.engines.embedded import EmbeddedEngine, EngineProcess
from stitch.env import Env
from stitch.errors import InvalidInput, ReplicaLost, StitchError
from stitch.format.materialize import open_base
from stitch.reconciler.bootstrap import bootstrap
from stitch.reconciler.config import ReplicaConfig
from stitch.reconciler.replica import Replica
from stitch.sidecar.server import SidecarServer, serve_sidecar
from stitch.stores import Store, open_store
from stitch.stores.versions import resolve_pointer
from stitch.types import ActivationMode, ReplicaState

__all__ = ["EngineSupervisor", "ReplicaProcess"]

log = logging.getLogger(__name__)

_NO_POINTER: Final = "the store has no pointer yet; serving the base"
_NO_RUN: Final = "the store names no run and there is no --run-id; not ready until a run is claimed"
_LOOK_S: Final = 0.2
_RESTARTS_MAX: Final = 5
_RESTART_WINDOW_S: Final = 300.0


class EngineSupervisor:
    """Keeps one engine process alive on one port.

    A dead engine is started again from the checkpoint the replica booted from; a hung one is
    killed first. The reconciler notices the new life by itself and proves it from nothing.
    """

    def __init__(
        self,
        model: Path,
        *,
        work_dir: Path,
        env: Env,
        arguments: list[str],
        hang_s: float,
        on_start: Callable[[], None],
    ) -> None:
        self._model = model
        self._work_dir = work_dir
        self._env = env
        self._arguments = arguments
        self._hang_s = hang_s
        self._on_start = on_start
        self._process: EngineProcess | None = None
        self._starts: list[float] = []

    @property
    def process(self) -> EngineProcess:
        """The engine's present process."""
        assert self._process is not None, "start the engine first"
        return self._process

    async def start(self) -> None:
        """Start the engine. Raises: InvalidInput, EngineUnavailable with its reason."""
        port = 0 if self._process is None else self._process.port
        self._process = await EngineProcess.spawn(
            self._model,
            work_dir=self._work_dir,
            env=self._env,
            port=port,
            arguments=self._arguments,
        )
        self._on_start()

    async def run(self, replica: Replica, engine: Engine) -> None:
        """Watch until cancelled. Raises: ReplicaLost if the engine keeps dying."""
        clock = self._env.clock
        silent_since: float | None = None
        while True:
            await clock.sleep(_LOOK_S)
            if not self.process.alive:
                await self._restart()
                silent_since = None
            elif replica.report().state is not ReplicaState.UNKNOWN or (
                await engine.health() is Health.HEALTHY
            ):
                silent_since = None
            elif silent_since is None:
                silent_since = clock.monotonic()
            elif clock.monotonic() - silent_since > self._hang_s:
                log.error("engine hangs; killing it", extra={"pid": self.process.pid})
                self.process.kill()

    async def _restart(self) -> None:
        now = self._env.clock.monotonic()
        self._starts = [at for at in self._starts if now - at < _RESTART_WINDOW_S] + [now]
        log.error(
            "engine ended",
            extra={"code": self.process.child.poll(), "line": self.process.last_log_line()},
        )
        if len(self._starts) > _RESTARTS_MAX:
            raise ReplicaLost(
                f"the engine ended {len(self._starts)} times in {_RESTART_WINDOW_S:g} s: "
                f"{self.process.last_log_line()}"
            )
        try:
            await self.start()
        except StitchError as error:
            log.error("engine not restarted", extra={"why": error.message})
            await self._env.clock.sleep(min(10.0, 0.5 * 2.0 ** len(self._starts)))

    async def stop(self) -> None:
        """End the engine and reap it. Safe to repeat."""
        if self._process is not None:
            await self._process.terminate(grace_s=2.0)


@dataclass(frozen=True, slots=True)
class _Boot:
    """What the engine loads, and what that counts as; no run where the store named none yet."""

    directory: Path
    run_id: str | None
    version: int


class ReplicaProcess:
    """One replica from the command line's options. `serve` runs it to its end."""

    def __init__(self, options: argparse.Namespace, *, announce: Callable[[str], None]) -> None:
        self._options = options
        self._announce = announce
        self._env = Env()
        self._url = ""
        self._stop = asyncio.Event()
        self._supervisor: EngineSupervisor | None = None

    async def serve(self) -> int:
        """Run until a signal. Returns the exit code: 1 if the replica was lost.

        Raises: StitchError, OSError with the reason if it cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        with _work_directory(self._options.work_dir) as work_dir:
            starting = asyncio.ensure_future(self._start(work_dir))
            stopped = asyncio.ensure_future(self._stop.wait())
            try:
                await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    return 0
                replica, sidecar, engine = starting.result()
                return await self._run(replica, sidecar, engine)
            finally:
                for task in (starting, stopped):
                    task.cancel()
                await asyncio.gather(starting, stopped, return_exceptions=True)
                if self._supervisor is not None:
                    await self._supervisor.stop()

    async def _start(self, work_dir: Path) -> tuple[Replica, SidecarServer, EmbeddedEngine]:
        options, env = self._options, self._env
        store = open_store(options.store)
        await _check_store(store, env)
        boot = await self._boot(store, work_dir)
        threads = str(options.engine_threads)
        arguments = ["--labelled-only", "--threads", threads, *options.engine_argument]
        self._supervisor = EngineSupervisor(
            boot.directory,
            work_dir=work_dir,
            env=env,
            arguments=arguments,
            hang_s=options.engine_hang_s,
            on_start=self._write_ready,
        )
        await self._supervisor.start()
        engine = EmbeddedEngine(self._supervisor.process.base_url, env)
        replica = Replica(
            store,
            engine,
            self._destination_of(boot, work_dir),
            self._config(boot, work_dir),
            env,
        )
        sidecar = await serve_sidecar(replica, host=options.host, port=options.port, env=env)
        self._url = f"http://{options.host}:{sidecar.port}"
        self._write_ready()
        if boot.directory == options.model.absolute():
            log.info(_NO_POINTER if boot.run_id else _NO_RUN, extra={"store": store.url})
        self._announce(self._url)
        return replica, sidecar, engine

    async def _run(self, replica: Replica, sidecar: SidecarServer, engine: EmbeddedEngine) -> int:
        assert self._supervisor is not None
        running = asyncio.ensure_future(replica.run())
        watching = asyncio.ensure_future(self._supervisor.run(replica, engine))
        stopped = asyncio.ensure_future(self._stop.wait())
        tasks = {running, watching, stopped}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            lost = next((t.exception() for t in done if t is not stopped), None)
            if lost is not None:
                log.error("replica lost", extra={"why": str(lost)})
                if not isinstance(lost, ReplicaLost):
                    raise lost
                return 1
            log.info("draining", extra={"deadline_s": self._options.drain_s})
            await sidecar.drain(self._options.drain_s)
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await sidecar.close()
            await engine.close()

    async def _boot(self, store: Store, work_dir: Path) -> _Boot:
        """The checkpoint to load: the pointer's version, materialized, so that a joiner loads
        once; the base itself while no version is pointed to."""
        options, env = self._options, self._env
        if await resolve_pointer(store, None, env=env) is None:
            await env.offload(lambda: open_base(options.model).close())
            return _Boot(options.model.absolute(), options.run_id, options.boot_version)
        made = await bootstrap(store, options.model, work_dir / "boot", env, run_id=options.run_id)
        log.info("bootstrapped", extra={"ref": str(made.ref), "applied": made.applied})
        return _Boot(made.directory, made.ref.run_id, made.ref.version)

    def _config(self, boot: _Boot, work_dir: Path) -> ReplicaConfig:
        options = self._options
        return ReplicaConfig(
            replica_id=options.replica_id or f"{socket.gethostname()}-{self._env.random.nonce()}",
            work_dir=work_dir,
            run_id=boot.run_id,
            boot_version=boot.version,
            mode=ActivationMode(options.mode),
            poll_s=options.poll_s,
        )

    def _destination_of(self, boot: _Boot, work_dir: Path) -> Callable[[Engine, str], Destination]:
        ram_dir: Path = self._options.ram_dir

        def make(engine: Engine, incarnation: str) -> Destination:
            if self._options.destination == "disk":
                return DiskDestination(
                    engine, incarnation, base_dir=boot.directory, work_dir=work_dir, env=self._env
                )
            return CpuDestination(
                engine,
                incarnation,
                base_dir=boot.directory,
                work_dir=work_dir,
                ram_dir=ram_dir,
                env=self._env,
            )

        return make

    def _write_ready(self) -> None:
        """Tell whoever started this process where it serves, and the engine's process id."""
        path: Path | None = self._options.ready_file
        if path is None or self._supervisor is None or not self._url:
            return
        facts = {"url": self._url, "pid": os.getpid(), "engine_pid": self._supervisor.process.pid}
        attempt = path.with_name(path.name + ".new")
        attempt.write_text(json.dumps(facts))
        attempt.replace(path)


@contextlib.contextmanager
def _work_directory(given: Path | None) -> Iterator[Path]:
    """The directory to work in: the given one, made if absent, or a temporary one."""
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
            (given / ".stitch-probe").write_bytes(b"")
            (given / ".stitch-probe").unlink()
        except OSError as error:
            raise InvalidInput(
                f"work directory {given} cannot be written ({error.strerror}); choose another "
                "--work-dir"
            ) from error
        yield given
        return
    made = Path(tempfile.mkdtemp(prefix="stitch-replica-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


async def _check_store(store: Store, env: Env) -> None:
    """Write and drop one lease: a replica that cannot hold leases should not start.

    Raises: Unavailable saying what is wrong with the store.
    """
    name = f"probe-{env.random.nonce()}"
    await store.write_lease(name, b"{}")
    await store.drop_lease(name)
