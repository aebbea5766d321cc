"""LocalStore: a store in a directory of a local or shared POSIX file system.

It relies on fsync of files and directories, atomic rename, hard links, and flock between all
processes that write (`docs/stores.md`, section "LocalStore"). Small writes happen under one
lock file, so the pointer's compare-and-swap is atomic between processes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from stitch.checksum import blake3
from stitch.env import Env, Files
from stitch.errors import Conflict, InvalidInput, NotVisibleYet, StitchError, Unavailable
from stitch.stores.base import (
    INDEX_NAME,
    Lost,
    ObjectInfo,
    PointerRead,
    StoreCapabilities,
    SwapResult,
    Unknown,
    Won,
)
from stitch.stores.durable import DurableFiles
from stitch.stores.keys import (
    RESERVED_PREFIX,
    check_attempt,
    check_key,
    check_lease_name,
)
from stitch.stores.local_staging import LocalStaging

__all__ = ["LocalStore"]

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_POINTER: Final = "latest"
_LEASES: Final = "leases"
_LOCK: Final = ".stitch.lock"
_POINTER_BYTES_MAX: Final = 4096
_LEASE_BYTES_MAX: Final = 64 * 1024
_LOCK_WAIT_S_MAX: Final = 30.0
_LOCK_PAUSE_S: Final = (0.001, 0.02)


class LocalStore:
    """A store under one directory. Safe for any number of processes and tasks.

    Args:
        root: absolute path; made, durably, at the first write.
        mappable: whether paths may be handed out for mapping; False when `env.files` is not
            the operating system's.
    """

    def __init__(self, root: Path, env: Env | None = None, *, mappable: bool = True) -> None:
        if not root.is_absolute():
            raise InvalidInput(f"store path {str(root)!r} must be absolute", param="store")
        self.root = root
        self.env = env if env is not None else Env()
        self.files = self.env.files
        self.durable = DurableFiles(self.files, root)
        self._mappable = mappable
        self._closed = False

    @property
    def url(self) -> str:
        """`file://` and the root's path."""
        return f"file://{quote(str(self.root))}"

    @property
    def capabilities(self) -> StoreCapabilities:
        """Everything but server-side checksums."""
        return StoreCapabilities(
            atomic_swap=True,
            create_only=True,
            ranges=True,
            server_checksums=False,
            local_files=self._mappable,
        )

    # The pointer

    async def read_pointer(self) -> PointerRead:
        """Read `latest` without a lock: a rename is atomic for readers."""
        return await self.run(self._read_pointer)

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        """Compare, then replace by rename, under the root's lock."""

        def swap() -> SwapResult:
            found = self._read_pointer()
            if found.token != expect:
                return Lost(found.text, found.token)
            data = text.encode("utf-8")
            try:
                self.durable.replace(self.root / _POINTER, data, self.env.random.nonce())
            except OSError as error:
                if self._read_pointer() == found:
                    raise
                # The new text is visible, but may not survive a crash.
                return Unknown(f"the pointer was renamed but not synced: {error}")
            return Won(_token(data))

        return await self.locked(swap)

    def _read_pointer(self) -> PointerRead:
        buffer = memoryview(bytearray(_POINTER_BYTES_MAX))
        try:
            count = self.files.read_into(self.root / _POINTER, 0, buffer)
        except (FileNotFoundError, NotADirectoryError):
            return PointerRead("", None)
        data = bytes(buffer[:count])
        return PointerRead(data.decode("utf-8", errors="replace"), _token(data))

    # Objects

    async def create(self, key: str, data: bytes) -> bool:
        """Temporary file, sync, hard link, sync of the directory."""
        check_key(key)
        return await self.locked(
            lambda: self.durable.create_only(self.path(key), data, self.env.random.nonce())
        )

    async def read(self, key: str, *, size_max: int) -> bytes | None:
        """The whole object, or None if absent."""
        check_key(key)

        def work() -> bytes | None:
            path = self.path(key)
            size = self.files.size(path)
            if size is None:
                return None
            if size > size_max:
                raise InvalidInput(f"{key} has {size} bytes; at most {size_max} are read", key=key)
            try:
                return self.files.read(path)
            except FileNotFoundError:
                return None

        return await self.run(work)

    async def stat(self, key: str) -> ObjectInfo | None:
        """Size, and a token that names these contents of this file."""
        check_key(key)

        def work() -> ObjectInfo | None:
            path = self.path(key)
            size, token = self.files.size(path), self.files.fingerprint(path)
            return None if size is None or token is None else ObjectInfo(size, token)

        return await self.run(work)

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, *, expect_token: str | None = None
    ) -> int:
        """One positioned read; the token is checked after it, so a replaced file is noticed."""
        check_key(key)
        if offset < 0:
            raise InvalidInput(f"offset {offset} is negative", param="offset")

        def work() -> int:
            path = self.path(key)
            try:
                count = self.files.read_into(path, offset, buffer)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotVisibleYet(f"{key} is not in the store at {self.root}", key=key) from error
            if expect_token is not None and self.files.fingerprint(path) != expect_token:
                raise Conflict(f"{key} is not the object that was looked up before", key=key)
            return count

        return await self.run(work)

    async def list(self, prefix: str) -> Sequence[str]:
        """Walk the directory `prefix`; the pointer, leases and unfinished writes are left out."""
        check_key(prefix, empty_allowed=True)

        def work() -> list[str]:
            start = self.files.resolve(self.path(prefix) if prefix else self.root)
            return sorted(_walk(self.files, self.files.resolve(self.root), (start,), prefix))

        return await self.run(work)

    async def delete(self, key: str) -> None:
        """Unlink. A deletion that a crash undoes does no harm, so it is not synced."""
        check_key(key)
        if key.rsplit("/", 1)[-1] == INDEX_NAME:
            raise InvalidInput(f"{key} is the commit of a version and is kept for ever", key=key)

        def work() -> None:
            try:
                self.files.unlink(self.path(key))
            except (FileNotFoundError, NotADirectoryError):
                return

        await self.run(work)

    def local_path(self, key: str) -> Path | None:
        """The file itself."""
        check_key(key)
        return self.path(key) if self._mappable else None

    # Versions

    async def begin(self, prefix: str, *, attempt: str) -> LocalStaging:
        """Make or join `.tmp-<attempt>-<name>` beside the target, and lock it while it lives."""
        check_key(prefix)
        check_attempt(attempt)
        return await self.locked(lambda: self._begin(prefix, attempt))

    def _begin(self, prefix: str, attempt: str) -> LocalStaging:
        final = self.path(prefix)
        self.durable.directory(final.parent)
        staging = final.with_name(f"{RESERVED_PREFIX}{attempt}-{final.name}")
        self._remove_orphans(final.parent, keep=staging.name)
        if not self.files.is_directory(staging):
            self.files.make_directory(staging)
        release = self.files.try_lock(staging, shared=True)
        if release is None:
            raise Conflict(f"attempt {attempt} at {prefix} is being removed; begin a fresh one")
        return LocalStaging(self, prefix, staging, final, release)

    def _remove_orphans(self, directory: Path, *, keep: str) -> None:
        # A living attempt holds its directory's lock; beginning one is under the root's lock.
        for name in self.files.names(directory):
            if not name.startswith(RESERVED_PREFIX) or name == keep:
                continue
            path = directory / name
            if not self.files.is_directory(path):
                continue
            release = self.files.try_lock(path)
            if release is not None:
                try:
                    self.files.remove_tree(path)
                finally:
                    release()

    async def confirm(self, prefix: str) -> bool:
        """Sync the directory that names the version."""
        check_key(prefix)
        return await self.run(lambda: self.durable.confirm(self.path(prefix) / INDEX_NAME))

    # Leases

    async def write_lease(self, name: str, data: bytes) -> None:
        """Replace by rename, durably."""
        path = self.root / _LEASES / check_lease_name(name)
        if len(data) > _LEASE_BYTES_MAX:
            raise InvalidInput(f"lease {name!r} is over {_LEASE_BYTES_MAX} bytes", param="data")
        await self.locked(lambda: self.durable.replace(path, data, self.env.random.nonce()))

    async def read_leases(self) -> dict[str, bytes]:
        """All leases; one dropped meanwhile is left out, and files that are no lease."""

        def work() -> dict[str, bytes]:
            directory = self.root / _LEASES
            buffer = memoryview(bytearray(_LEASE_BYTES_MAX + 1))
            found = {}
            for name in self.files.names(directory):
                try:
                    count = self.files.read_into(directory / check_lease_name(name), 0, buffer)
                except (FileNotFoundError, InvalidInput):
                    continue
                except OSError:
                    count = 0
                found[name] = bytes(buffer[:count]) if count <= _LEASE_BYTES_MAX else b""
            return found

        return await self.run(work)

    async def drop_lease(self, name: str) -> None:
        """Unlink. A lease that a crash brings back stands still and dies of that."""
        path = self.root / _LEASES / check_lease_name(name)

        def work() -> None:
            try:
                self.files.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return

        await self.run(work)

    async def close(self) -> None:
        """Refuse further calls. Staged attempts keep their locks until they end."""
        self._closed = True

    # How work is done

    def path(self, key: str) -> Path:
        """Where `key` lies. Raises: InvalidInput if symbolic links lead out of the root."""
        path = self.root / key
        if not self.files.resolve(path).is_relative_to(self.files.resolve(self.root)):
            raise InvalidInput(f"{key} leads out of the store at {self.root} by a link", key=key)
        return path

    async def run(self, work: Callable[[], T]) -> T:
        """Do blocking work off the loop; an OSError becomes one line that says what to do."""
        if self._closed:
            raise Unavailable(f"the store at {self.root} is closed")
        try:
            return await self.env.offload(work)
        except StitchError:
            raise
        except FileNotFoundError as error:
            self.durable.forget()
            raise _unavailable(error, self.root) from error
        except OSError as error:
            raise _unavailable(error, self.root) from error

    async def locked(self, work: Callable[[], T]) -> T:
        """`run` under the root's lock.

        Raises: Unavailable if another process keeps the lock past the deadline.
        """

        def attempt() -> tuple[T] | None:
            self.durable.directory(self.root)
            release = self.files.try_lock(self.root / _LOCK)
            if release is None:
                return None
            try:
                return (work(),)
            finally:
                release()

        clock = self.env.clock
        deadline = clock.monotonic() + _LOCK_WAIT_S_MAX
        pause, pause_max = _LOCK_PAUSE_S
        while True:
            done = await self.run(attempt)
            if done is not None:
                return done[0]
            if clock.monotonic() >= deadline:
                raise Unavailable(
                    f"another process has held {self.root / _LOCK} for {_LOCK_WAIT_S_MAX:.0f} s; "
                    "find the process that hangs and end it"
                )
            await clock.sleep(pause * self.env.random.uniform(0.5, 1.0))
            pause = min(2 * pause, pause_max)


def _walk(files: Files, root: Path, above: tuple[Path, ...], prefix: str) -> Iterator[str]:
    """Keys below the last of `above`: resolved directories, each found in the one before it."""
    for name in files.names(above[-1]):
        key = f"{prefix}/{name}" if prefix else name
        if name.startswith(RESERVED_PREFIX) or key in {_POINTER, _LEASES, _LOCK}:
            continue
        path = files.resolve(above[-1] / name)
        if path in above:
            continue  # a link to what is above it
        if path.is_relative_to(root) and files.is_directory(path):
            yield from _walk(files, root, (*above, path), key)
        else:
            yield key


def _token(data: bytes) -> str:
    return blake3(data)


def _unavailable(error: OSError, root: Path) -> Unavailable:
    where = error.filename or root
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        advice = f"the store at {root} is full (at {where}): free space, then publish again"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        advice = f"the store at {root} is not writable here (at {where}): change its permissions"
    elif error.errno in {errno.ENOTDIR, errno.EEXIST}:
        advice = f"the store at {root} cannot use {where}: a file is in the way"
    else:
        reason = error.strerror or type(error).__name__
        advice = f"the store at {root} cannot be used (at {where}): {reason}"
    return Unavailable(advice, errno=error.errno, root=str(root))
