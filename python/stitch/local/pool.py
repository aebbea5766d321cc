"""`LocalPool`: replicas and a gateway as processes here, gone without a trace at exit."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from stitch.env import Env
from stitch.errors import InvalidInput, Unavailable
from stitch.local.probe import probe
from stitch.local.processes import Child, Spawner, Warden, last_lines
from stitch.local.replica import LocalReplica, ready_facts, wait_gone
from stitch.pools.base import Member
from stitch.pools.local import FilePool, write_members
from stitch.stores.base import Store

__all__ = ["LocalPool", "LocalReplica"]

_MEMORY_DIRECTORY: Final = Path("/dev/shm")
_WATCH_S: Final = 0.1


class LocalPool:
    """Starts `replicas` sidecars with their engines, and a gateway, and waits until all are ready.

        with stitch.LocalPool("model", store="file:///runs/a", run_id="a", replicas=3) as pool:
            publisher = stitch.Publisher(store, run_id="a", pool=pool.pool)
            client = stitch.Client(pool.url)

    On exit, on an exception or interrupt, and when this process is killed, every process ends
    and every file of the pool goes, logs included unless `log_dir` is given. Methods may be
    called from any thread.

    Args:
        model_dir: the base checkpoint, which counts as the run's boot version.
        store: URL, path, or an open store on local files.
        run_id: the run to serve before its first publication; else the store's pointer decides.
        mode, destination: of the replicas (`stitch replica serve --help`).
        gateway: without one, `url` is the first replica's.
        log_dir: keep the logs here.
        ready_s: deadline for the pool, and for a replica that is added later.
        ready_min: how many replicas must be ready by then; all by default.
        replica_arguments, gateway_arguments: further flags of the two commands.
        environment: added to the children's.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        store: Store | Path | str,
        replicas: int = 3,
        run_id: str | None = None,
        mode: Literal["recompute", "in_place", "quiesce"] = "recompute",
        destination: Literal["cpu", "disk"] = "cpu",
        gateway: bool = True,
        log_dir: Path | str | None = None,
        ready_s: float = 180.0,
        ready_min: int | None = None,
        drain_s: float = 30.0,
        replica_arguments: tuple[str, ...] = (),
        gateway_arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        env: Env | None = None,
    ) -> None:
        if replicas < 1:
            raise InvalidInput(f"a pool needs at least one replica, not {replicas}")
        self._model_dir = Path(model_dir).absolute()
        self._store_url = _store_url(store)
        self._count = replicas
        self._run_id = run_id
        self._mode = mode
        self._destination = destination
        self._with_gateway = gateway
        self._log_dir = Path(log_dir).absolute() if log_dir is not None else None
        self._ready_s = ready_s
        self._ready_min = replicas if ready_min is None else ready_min
        self._drain_s = drain_s
        self._replica_arguments = replica_arguments
        self._gateway_arguments = gateway_arguments
        self._environment = {"OMP_NUM_THREADS": "1", **(environment or {})}
        self._env = env or Env()
        self._lock = threading.RLock()
        self._replicas: list[LocalReplica] = []
        self._made = 0
        self._gateway: Child | None = None
        self._gateway_url = ""
        self._directory: Path | None = None
        self._ram_dir: Path | None = None
        self._spawner: Spawner | None = None
        self._warden: Warden | None = None
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()
        self._pool: FilePool | None = None

    # What users see.

    @property
    def url(self) -> str:
        """The gateway's base URL, or the first replica's without a gateway."""
        return self._gateway_url if self._with_gateway else self.replicas[0].url

    @property
    def replicas(self) -> list[LocalReplica]:
        """The replicas whose process runs, in the order in which they joined."""
        with self._lock:
            return [replica for replica in self._replicas if replica.alive]

    @property
    def pool(self) -> FilePool:
        """The pool for `Publisher(pool=…)` or another gateway. Scaling adds and removes."""
        assert self._pool is not None, "start the pool first"
        return self._pool

    @property
    def log_dir(self) -> Path:
        """Where the logs are."""
        return self._log_dir or self._home / "logs"

    def start(self) -> Self:
        """What entering the context does. On any failure nothing is left behind.

        Raises: Unavailable if too few replicas are ready by the deadline: how many of how many,
            and the last lines of a log.
        """
        try:
            self._prepare()
            self._launch()
        except BaseException:
            self.close()
            raise
        return self

    def add(self) -> LocalReplica:
        """Start one more replica and wait until it is ready (caught up with the pointer)."""
        replica = self._spawn()
        self._await([replica], 1, self._env.clock.monotonic() + self._ready_s)
        return replica

    def kill(self, which: int | str) -> LocalReplica:
        """SIGKILL a sidecar and, by its death signal, its engine. No drain, no goodbye.

        Args: which: index into `replicas`, or a replica's id.
        """
        replica = self._find(which)
        engine_pid = replica.engine_pid
        replica.child.kill()
        wait_gone(engine_pid)
        self._forget(replica)
        return replica

    def remove(self, which: int | str) -> LocalReplica:
        """Take a replica out gracefully: it leaves discovery, drains, and ends."""
        replica = self._find(which)
        replica.leaving = True
        self._publish_members()
        replica.child.end(grace_s=self._drain_s + 10.0)
        self._forget(replica)
        return replica

    def close(self) -> None:
        """End every process and remove every file. Safe to repeat."""
        self._closing.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._lock:
            children = [self._gateway] if self._gateway is not None else []
            children += [replica.child for replica in self._replicas]
            engines = [replica.engine_pid for replica in self._replicas if replica.alive]
        for child in children:
            child.send(signal.SIGTERM)
        end = self._env.clock.monotonic() + 5.0
        for child in children:
            child.end(grace_s=max(0.1, end - self._env.clock.monotonic()))
        for pid in engines:
            wait_gone(pid)
        if self._spawner is not None:
            self._spawner.close()
        for directory in (self._directory, self._ram_dir):
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
        if self._warden is not None:
            self._warden.dismiss()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Starting.

    @property
    def _home(self) -> Path:
        assert self._directory is not None, "start the pool first"
        return self._directory

    def _prepare(self) -> None:
        self._spawner = Spawner()
        self._warden = Warden()
        self._directory = Path(tempfile.mkdtemp(prefix="stitch-pool-"))
        self._warden.watch_directory(self._directory)
        parent = _MEMORY_DIRECTORY if _MEMORY_DIRECTORY.is_dir() else self._directory
        self._ram_dir = Path(tempfile.mkdtemp(prefix="stitch-pool-", dir=parent))
        self._warden.watch_directory(self._ram_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        members = self._directory / "members.json"
        write_members(self._env, members, [])
        self._pool = FilePool(members, env=self._env, scale=self._scale)

    def _launch(self) -> None:
        end = self._env.clock.monotonic() + self._ready_s
        started = [self._spawn() for _ in range(self._count)]
        self._watcher = threading.Thread(target=self._watch, name="stitch-pool", daemon=True)
        self._watcher.start()
        if self._with_gateway:
            self._start_gateway()
        self._await(started, self._ready_min, end)
        if self._with_gateway:
            self._await_gateway(end)

    def _spawn(self) -> LocalReplica:
        assert self._spawner is not None, "start the pool first"
        assert self._warden is not None
        assert self._ram_dir is not None
        with self._lock:
            name = f"replica-{self._made}"
            self._made += 1
        work_dir = self._home / name
        ram_dir = self._ram_dir / name
        work_dir.mkdir()
        ram_dir.mkdir()
        ready_path = self._home / f"{name}.ready"
        command = [sys.executable, "-m", "stitch.cli", "replica", "serve"]
        command += ["--model", str(self._model_dir), "--store", self._store_url, "--port", "0"]
        command += ["--replica-id", name, "--mode", self._mode, "--ready-file", str(ready_path)]
        command += ["--destination", self._destination, "--drain-s", f"{self._drain_s:g}"]
        command += ["--work-dir", str(work_dir), "--ram-dir", str(ram_dir)]
        if self._run_id is not None:
            command += ["--run-id", self._run_id]
        child = self._spawner.spawn(
            name,
            [*command, *self._replica_arguments],
            log_path=self.log_dir / f"{name}.log",
            environment=self._environment,
        )
        self._warden.watch_process(child.pid)
        replica = LocalReplica(name, child, "", ready_path, work_dir, ram_dir)
        with self._lock:
            self._replicas.append(replica)
        return replica

    def _start_gateway(self) -> None:
        assert self._spawner is not None
        assert self._warden is not None
        command = [sys.executable, "-m", "stitch.cli", "gateway", "--port", "0"]
        command += ["--pool-file", str(self._home / "members.json")]
        command += ["--replicas-floor", str(self._count)]
        self._gateway = self._spawner.spawn(
            "gateway",
            [*command, *self._gateway_arguments],
            log_path=self.log_dir / "gateway.log",
            environment=self._environment,
        )
        self._warden.watch_process(self._gateway.pid)

    # Waiting.

    def _await(self, waited: list[LocalReplica], count: int, end: float) -> None:
        """Until `count` of `waited` are listening and say they are ready."""
        ready: set[str] = set()

        def enough() -> bool:
            for replica in waited:
                if replica.id not in ready and self._is_ready(replica):
                    ready.add(replica.id)
            dead = [r for r in waited if not r.alive]
            if len(waited) - len(dead) < count:
                raise self._too_few(waited, ready, f"{dead[0].id} ended")
            return len(ready) >= count

        if not self._poll(enough, end):
            raise self._too_few(waited, ready, "the deadline passed")

    def _is_ready(self, replica: LocalReplica) -> bool:
        if not replica.url:
            facts = ready_facts(replica.ready_path)
            if "url" not in facts:
                return False
            replica.url = str(facts["url"])
            self._publish_members()
        found = probe(replica.url, "/health")
        return found is not None and found[0] == 200

    def _too_few(self, waited: list[LocalReplica], ready: set[str], why: str) -> Unavailable:
        failed = next(
            (r for r in waited if not r.alive), next(r for r in waited if r.id not in ready)
        )
        info = failed.server_info() if failed.alive else None
        reason = f" ({json.dumps(info.get('reason'))})" if info else ""
        return Unavailable(
            f"{len(ready)} of {len(waited)} replicas are ready: {why}{reason}; the last lines of "
            f"{failed.log_path.name}:\n{last_lines(failed.log_path)}",
            ready=len(ready),
            wanted=len(waited),
        )

    def _await_gateway(self, end: float) -> None:
        gateway = self._gateway
        assert gateway is not None

        def healthy() -> bool:
            if gateway.exit_code is not None:
                return True
            self._gateway_url = self._gateway_url or _listening(gateway)
            found = probe(self._gateway_url, "/health") if self._gateway_url else None
            return found is not None and found[0] == 200

        if not self._poll(healthy, end) or gateway.exit_code is not None:
            raise Unavailable(
                f"the gateway is not ready; the last lines of {gateway.log_path.name}:\n"
                f"{last_lines(gateway.log_path)}"
            )

    def _poll(self, done: Callable[[], bool], end: float) -> bool:
        while not done():
            if self._env.clock.monotonic() >= end:
                return False
            if self._closing.wait(_WATCH_S):
                raise Unavailable("the pool is closing")
        return True

    # Membership.

    def _watch(self) -> None:
        """Take replicas whose process ended out of discovery, as a real one would notice."""
        while not self._closing.wait(_WATCH_S):
            with self._lock:
                ended = [r for r in self._replicas if not r.alive]
            for replica in ended:
                self._forget(replica)

    def _forget(self, replica: LocalReplica) -> None:
        with self._lock:
            if replica not in self._replicas:
                return
            if not self._closing.is_set() and not replica.url:
                return  # it never listened: whoever waits for it reports why
            self._replicas.remove(replica)
            self._publish_members()
        for directory in (replica.work_dir, replica.ram_dir):
            shutil.rmtree(directory, ignore_errors=True)

    def _publish_members(self) -> None:
        with self._lock:
            members = [
                Member(r.id, r.url) for r in self._replicas if r.url and r.alive and not r.leaving
            ]
            write_members(self._env, self._home / "members.json", members)

    def _find(self, which: int | str) -> LocalReplica:
        live = self.replicas
        for number, replica in enumerate(live):
            if which in (number, replica.id):
                return replica
        raise InvalidInput(f"no replica {which!r}; there are {', '.join(r.id for r in live)}")

    async def _scale(self, replicas: int) -> None:
        def act() -> None:
            while len(self.replicas) > max(1, replicas):
                self.remove(self.replicas[-1].id)
            while len(self.replicas) < replicas:
                self.add()

        await self._env.offload(act)


def _store_url(store: Store | Path | str) -> str:
    if isinstance(store, str):
        return store if "://" in store else Path(store).absolute().as_uri()
    if isinstance(store, Path):
        return store.absolute().as_uri()
    return store.url


def _listening(child: Child) -> str:
    """The base URL of the line `listening URL`, once the process has written it."""
    try:
        said = child.log_path.read_bytes()[child.log_start :]
    except OSError:
        return ""
    lines = said.decode("utf-8", "replace").splitlines()
    return next((line.split()[1] for line in lines if line.startswith("listening http")), "")
