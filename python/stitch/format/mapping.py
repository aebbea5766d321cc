"""Read-only memory maps of immutable files.

Published and canonical files never change once named, so they are mapped, not read: tensors of
any size are views, and the page cache is the only copy. The `Files` port has no mapping, so
this module opens the file itself.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Final

from stitch.errors import StitchError

__all__ = ["MappedFile", "read_small_file", "resolves_inside"]

_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class MappedFile:
    """One regular file mapped read-only. Views stay valid until they are dropped.

    Safe to use from many threads.
    """

    def __init__(self, path: Path) -> None:
        """Raises: FileNotFoundError; OSError if it is not a regular file or cannot be read."""
        self.path = path
        # O_NONBLOCK: a FIFO under a data file's name must not hang the reader.
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path.name} is not a regular file")
            self.size = found.st_size
            self._map = (
                mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ) if self.size else None
            )
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes `[offset, offset + nbytes)`, read-only. The range must lie inside the file."""
        assert min(offset, nbytes) >= 0, (offset, nbytes)
        assert offset + nbytes <= self.size, (offset, nbytes, self.size)
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap once no view is left; a view still held keeps the mapping until it is dropped."""
        try:
            self._view.release()
            if self._map is not None:
                self._map.close()
        except BufferError:
            return


def read_small_file(path: Path, *, size_max: int, too_big: type[StitchError]) -> bytes:
    """The bytes of one regular file.

    Raises: FileNotFoundError; `too_big` if it holds more than `size_max` bytes; OSError.
    """
    mapped = MappedFile(path)
    try:
        if mapped.size > size_max:
            raise too_big(
                f"{path.name}: {mapped.size} bytes; at most {size_max} are read",
                file=path.name,
                reason="too large",
            )
        return bytes(mapped.view(0, mapped.size))
    finally:
        mapped.close()


def resolves_inside(path: Path, directory: Path) -> bool:
    """Whether `path`, symbolic links followed, lies below `directory`."""
    return path.resolve().is_relative_to(directory.resolve())
