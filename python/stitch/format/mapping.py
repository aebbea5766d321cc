"""Published and canonical files: read into private memory, or mapped.

A mapping whose file is cut short kills the process that touches it (SIGBUS), so bytes from a
shared store or a user's directory are read. Mapping is for holders of many tensors of files that
nobody else writes. The `Files` port has neither identity nor mapping, so this module opens the
file itself.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from pathlib import Path
from typing import Final

import numpy as np

from stitch.errors import CorruptData, StitchError, Unavailable

__all__ = ["MappedFile", "read_small_file", "resolves_inside"]

# O_NONBLOCK: a FIFO under a data file's name must not hang the reader.
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class MappedFile:
    """One regular file, immutable as far as its owner keeps the rules.

    Nothing stays open between calls, so a chain may have more files than a process may have
    descriptors; the first `view` keeps its mapping. Every call opens the file anew and refuses
    one whose size or time of change is not what it was. Safe to use from many threads.
    """

    def __init__(self, path: Path) -> None:
        """Raises: FileNotFoundError; CorruptData if it is not a regular file; other OSError."""
        self.path = path
        descriptor = _open_regular(path)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self.size = found.st_size
        self._identity = _identity(found)
        self._lock = threading.Lock()
        self._view: memoryview | None = None
        self._map: mmap.mmap | None = None

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Bytes `[offset, offset + nbytes)` in fresh, writable memory.

        The range must lie inside the file.
        Raises: Unavailable if the file changed or vanished since it was opened; OSError.
        """
        out = np.empty(nbytes, np.uint8).data
        self.read_into(offset, out)
        return out

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on. As `read`; on error `out` is undefined."""
        self._check_range(offset, len(out))
        descriptor = self._reopen()
        try:
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], offset + done)
                if count == 0:
                    raise self._changed()
                done += count
            if _identity(os.fstat(descriptor)) != self._identity:
                raise self._changed()
        finally:
            os.close(descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes `[offset, offset + nbytes)` as a read-only view of the mapped file.

        The range must lie inside the file. If the file is cut short later, touching what was cut
        kills the process: only for files that nobody else writes.
        Raises: Unavailable if the file changed or vanished since it was opened; OSError.
        """
        self._check_range(offset, nbytes)
        with self._lock:
            if self._view is None:
                self._view = self._mapped()
            return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap once no view is left; a view still held keeps the mapping until it is dropped."""
        try:
            if self._view is not None:
                self._view.release()
            if self._map is not None:
                self._map.close()
        except BufferError:
            return

    def _mapped(self) -> memoryview:
        if self.size == 0:
            return memoryview(b"")
        descriptor = self._reopen()
        try:
            self._map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        return memoryview(self._map)

    def _check_range(self, offset: int, nbytes: int) -> None:
        assert min(offset, nbytes) >= 0, (offset, nbytes)
        assert offset + nbytes <= self.size, (offset, nbytes, self.size)

    def _reopen(self) -> int:
        try:
            descriptor = _open_regular(self.path)
        except (FileNotFoundError, CorruptData) as error:
            raise self._changed() from error
        if _identity(os.fstat(descriptor)) != self._identity:
            os.close(descriptor)
            raise self._changed()
        return descriptor

    def _changed(self) -> Unavailable:
        return Unavailable(
            f"{self.path}: it changed or vanished while it was in use", file=self.path.name
        )


def read_small_file(path: Path, *, size_max: int, too_big: type[StitchError]) -> memoryview:
    """The bytes of one regular file.

    Raises: FileNotFoundError; `too_big` if it holds more than `size_max` bytes; CorruptData if
        it is not a regular file; Unavailable if it changed meanwhile; OSError.
    """
    file = MappedFile(path)
    if file.size > size_max:
        raise too_big(
            f"{path.name}: {file.size} bytes; at most {size_max} are read",
            file=path.name,
            reason="too large",
        )
    return file.read(0, file.size)


def resolves_inside(path: Path, directory: Path) -> bool:
    """Whether `path`, symbolic links followed, lies below `directory`. A loop leads nowhere."""
    try:
        return path.resolve().is_relative_to(directory.resolve())
    except RuntimeError:  # how pathlib before Python 3.13 reports a loop of links
        return False


def _open_regular(path: Path) -> int:
    try:
        # Looked at before it is opened: opening some devices and sockets has effects or fails.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _irregular(path)
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _irregular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


def _irregular(path: Path) -> CorruptData:
    reason = "it is not a regular file"
    return CorruptData(f"{path.name}: {reason}", file=path.name, reason=reason)


def _identity(found: os.stat_result) -> tuple[int, int]:
    # No inode: some network file systems number a file anew whenever they look it up.
    return found.st_size, found.st_mtime_ns
