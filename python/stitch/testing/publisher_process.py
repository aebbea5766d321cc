"""A publisher in a process of its own that stops at a chosen moment, to be killed there."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from stitch.env import Buffer, Env, FileHandle, OsFiles
from stitch.pools.base import Member
from stitch.publisher import Publisher
from stitch.stores.base import INDEX_NAME
from stitch.stores.local import LocalStore

__all__ = ["PublishPhase", "publish_until_stopped", "tensors_of"]


class PublishPhase(Enum):
    """Where a publish is."""

    FILES = "files"
    INDEX = "index"
    POINTER = "pointer"
    WAKE = "wake"
    IDLE = "idle"


def tensors_of(version: int) -> dict[str, np.ndarray[Any, Any]]:
    """The model at `version`: a function of the number, so that a restart can publish it again."""
    rng = np.random.default_rng(version)
    base = np.arange(64, dtype=np.float32).reshape(8, 8)
    base[version % 8] += rng.standard_normal(8).astype(np.float32)
    return {"w": base, "b": np.full(3, version // 3, np.float32), "still": np.ones(5, np.float16)}


class Stop:
    """Counts the calls of one phase; at the chosen one it reports and waits for ever."""

    def __init__(self, phase: PublishPhase | None, skip: int, connection: Connection) -> None:
        self._phase = phase
        self._left = skip
        self._connection = connection

    def at(self, phase: PublishPhase, what: str) -> None:
        """A moment of `phase` is about to come."""
        if phase is not self._phase:
            return
        if self._left > 0:
            self._left -= 1
            return
        self._connection.send(what)
        threading.Event().wait()


class _StoppingHandle:
    def __init__(self, inner: FileHandle, stop: Stop, phase: PublishPhase, name: str) -> None:
        self._inner = inner
        self._stop = stop
        self._phase = phase
        self._name = name

    def write(self, data: Buffer) -> None:
        # Half of the bytes are in the file when the kill comes.
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self._inner.write(view[: len(view) // 2])
        self._stop.at(self._phase, f"write {self._name}")
        self._inner.write(view[len(view) // 2 :])

    def sync(self) -> None:
        self._stop.at(self._phase, f"sync {self._name}")
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class StoppingFiles(OsFiles):
    """The operating system's files with the moments of a publish marked."""

    def __init__(self, root: Path, stop: Stop) -> None:
        self._root = root
        self._stop = stop

    def _phase_of(self, path: Path) -> PublishPhase:
        if path.name == INDEX_NAME:
            return PublishPhase.INDEX
        return PublishPhase.POINTER if path.parent == self._root else PublishPhase.FILES

    def create(self, path: Path) -> FileHandle:
        phase = self._phase_of(path)
        self._stop.at(phase, f"create {path.name}")
        return _StoppingHandle(super().create(path), self._stop, phase, path.name)

    def rename(self, source: Path, target: Path) -> None:
        phase = PublishPhase.POINTER if target.parent == self._root else PublishPhase.INDEX
        self._stop.at(phase, f"before rename to {target.name}")
        super().rename(source, target)
        self._stop.at(phase, f"after rename to {target.name}")


class _StoppingPool:
    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    async def members(self) -> Sequence[Member]:
        return []

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        yield []

    async def wake(self) -> int:
        self._stop.at(PublishPhase.WAKE, "wake")
        return 0

    async def scale(self, replicas: int) -> None:
        return None

    async def close(self) -> None:
        return None


def publish_until_stopped(
    root: str, phase: PublishPhase | None, skip: int, version_max: int, connection: Connection
) -> None:
    """Publish from where the store stands up to `version_max`, or stop at a moment of `phase`.

    Reports what it was about to do, or "done".
    """
    stop = Stop(phase, skip, connection)
    files = StoppingFiles(Path(root), stop)
    store = LocalStore(Path(root), Env(files=files))
    options: dict[str, Any] = {"threads": 1, "anchor_every": 8, "pool": _StoppingPool(stop)}
    with Publisher(store, run_id="a", **options) as publisher:
        version = publisher.claim().version
        while version < version_max:
            version += 1
            publisher.publish(tensors_of(version), version=version).wait()
            stop.at(PublishPhase.IDLE, f"idle at {version}")
    connection.send("done")
