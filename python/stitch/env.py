"""Ports to the outside: clock, randomness, files, thread offload.

Everything else in `stitch` takes an `Env`; `time.*`, `random.*`, `open` and
`asyncio.to_thread` are banned elsewhere, so the same code runs in production and under
the simulator.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

__all__ = [
    "Clock",
    "Env",
    "FileHandle",
    "Files",
    "Offload",
    "OsFiles",
    "Randomness",
    "SystemClock",
    "SystemRandomness",
    "ThreadOffload",
]

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


class Clock(Protocol):
    """Time. Monotonic seconds decide; wall seconds are only ever shown to people."""

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Cancel the block after `seconds` and raise TimeoutError; None means never."""
        ...


class Randomness(Protocol):
    """Random numbers: jitter and nonces."""

    def random(self) -> float: ...
    def uniform(self, low: float, high: float) -> float: ...
    def nonce(self) -> str:
        """16 fresh lower-case hex digits."""
        ...


class FileHandle(Protocol):
    """A file opened for writing once, front to back."""

    def write(self, data: Buffer) -> None:
        """Append all of `data`."""
        ...

    def sync(self) -> None:
        """fsync: the file's bytes (not its name) survive a crash on return."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """The file system. Raises OSError as the operating system does."""

    def read(self, path: Path) -> bytes:
        """All bytes of a regular file; anything else under the name is OSError, and no wait."""
        ...

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> int: ...
    def size(self, path: Path) -> int | None:
        """Bytes of a regular file, None if absent or not regular."""
        ...

    def create(self, path: Path) -> FileHandle:
        """Create a new file; FileExistsError if the name is taken."""
        ...

    def sync_directory(self, path: Path) -> None:
        """fsync a directory: names created, renamed or removed in it survive a crash."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Atomic rename, replacing a file `target`. A non-empty directory target is OSError."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Hard link; FileExistsError if `target` is taken. The atomic create-only."""
        ...

    def unlink(self, path: Path) -> None: ...
    def remove_tree(self, path: Path) -> None: ...
    def make_directory(self, path: Path) -> None:
        """Create one directory; FileExistsError if the name is taken."""
        ...

    def names(self, path: Path) -> list[str]:
        """Sorted entry names of a directory; empty if absent."""
        ...

    def is_directory(self, path: Path) -> bool: ...
    def exists(self, path: Path) -> bool: ...
    def lock(self, path: Path) -> AbstractContextManager[None]:
        """Exclusive lock between processes (and threads) on a lock file, created if absent."""
        ...

    def try_lock(self, path: Path, *, shared: bool = False) -> Callable[[], None] | None:
        """Lock a directory, or a lock file that is created if absent, without waiting.

        Returns: a call that releases the lock, or None if somebody's lock is in the way. The
        lock also ends with its process.
        """
        ...

    def fingerprint(self, path: Path) -> str | None:
        """Opaque identity of a regular file's present contents, None if absent."""
        ...

    def resolve(self, path: Path) -> Path:
        """The path with every symbolic link followed; a missing tail is kept as it is."""
        ...


class Offload(Protocol):
    """Runs blocking work off the event loop."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)


class SystemRandomness:
    """The machine's randomness."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def random(self) -> float:
        return self._random.random()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def nonce(self) -> str:
        return secrets.token_hex(8)


class _OsHandle:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _open_regular(path: Path) -> int:
    # O_NONBLOCK: a FIFO under the name must not hang the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a loop of links leads to no file
            return None
        raise


class OsFiles:
    """The operating system's files."""

    def read(self, path: Path) -> bytes:
        with open(_open_regular(path), "rb") as file:
            return file.read()

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> int:
        descriptor = _open_regular(path)
        try:
            done = 0
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            os.close(descriptor)

    def size(self, path: Path) -> int | None:
        found = _stat_or_none(path)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def create(self, path: Path) -> FileHandle:
        return _OsHandle(path)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - iterdir makes a Path of each name
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def exists(self, path: Path) -> bool:
        return path.exists()

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    break
                except OSError as error:
                    if error.errno != errno.EINTR:
                        raise
            yield
        finally:
            _unlock(descriptor)

    def try_lock(self, path: Path, *, shared: bool = False) -> Callable[[], None] | None:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return lambda: _unlock(descriptor)

    def fingerprint(self, path: Path) -> str | None:
        found = _stat_or_none(path)
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return f"{found.st_dev:x}-{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"

    def resolve(self, path: Path) -> Path:
        # Path.resolve raises RuntimeError for a loop of links before Python 3.13.
        return Path(os.path.realpath(path))


def _unlock(descriptor: int) -> None:
    # Closing alone would leave the lock with a child that was forked meanwhile: it has a copy.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


class ThreadOffload:
    """Offload to one thread pool that belongs to the process."""

    def __init__(self, *, threads_max: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="stitch-offload")

    async def __call__(self, work: Callable[[], T], /) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@dataclass(frozen=True, slots=True)
class Env:
    """All ports together. The defaults are the real machine."""

    clock: Clock = field(default_factory=SystemClock)
    random: Randomness = field(default_factory=SystemRandomness)
    files: Files = field(default_factory=OsFiles)
    offload: Offload = field(default_factory=ThreadOffload)
