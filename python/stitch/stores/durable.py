"""The order of writes that survives a crash, over the `Files` port. Blocking; no locks here.

Each call that acknowledges something first syncs the file, then the directory that names it.
A name found already taken is synced as well: whoever made it may have died before its own sync.
`docs/stores.md`, section "What survives a crash", states the rules; the crash tests remove
each sync in turn and must fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stitch.env import Files
from stitch.stores.keys import RESERVED_PREFIX

__all__ = ["DurableFiles"]

Buffer = bytes | bytearray | memoryview


class DurableFiles:
    """Durable creation, replacement and sealing below one root. Not thread-safe for one path."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._root = root
        self._durable: set[Path] = set()

    def forget(self) -> None:
        """Assume nothing about directories any more (somebody removed one behind our back)."""
        self._durable.clear()

    def directory(self, path: Path) -> None:
        """Make a directory and its parents, each durable in its own parent.

        Parents that exist are synced too, up to the file system's root: whoever made them may
        have died before the sync.
        """
        if path in self._durable or path == path.parent:
            return
        self.directory(path.parent)
        existed = self._files.is_directory(path)
        if not existed:
            try:
                self._files.make_directory(path)
            except FileExistsError:
                if not self._files.is_directory(path):
                    raise
        try:
            self._files.sync_directory(path.parent)
        except OSError:
            # Above the root, what an operator prepared may be closed to us, or not a disk.
            if not existed or path.parent.is_relative_to(self._root):
                raise
        self._durable.add(path)

    def write_file(self, path: Path, chunks: Iterable[Buffer]) -> int:
        """Create a new file and sync its bytes, not its name. Returns its size in bytes."""
        size = 0
        handle = self._files.create(path)
        try:
            for chunk in chunks:
                handle.write(chunk)
                size += memoryview(chunk).nbytes
            handle.sync()
        finally:
            handle.close()
        return size

    def replace(self, path: Path, data: bytes, nonce: str) -> None:
        """Give `path` new contents: readers see the old or the new bytes, whole."""
        self.directory(path.parent)
        temporary = self._temporary(path, nonce)
        self.write_file(temporary, [data])
        self._files.rename(temporary, path)
        self._files.sync_directory(path.parent)

    def create_only(self, path: Path, data: bytes, nonce: str) -> bool:
        """Create `path` with all of `data`, or return False and change nothing."""
        self.directory(path.parent)
        if self._files.exists(path):
            self._files.sync_directory(path.parent)
            return False
        temporary = self._temporary(path, nonce)
        self.write_file(temporary, [data])
        try:
            self._files.link(temporary, path)
            created = True
        except FileExistsError:
            created = False
        self._files.unlink(temporary)
        self._files.sync_directory(path.parent)
        return created

    def seal_directory(self, staging: Path, final: Path, index: Path) -> bool:
        """Rename a directory whose files are synced into place; False if `final` is sealed.

        Raises: FileExistsError if `final` has contents but no index.
        """
        created = False
        if not self._files.exists(index):
            self._files.sync_directory(staging)
            created = self._renamed(staging, final, index)
        self._files.sync_directory(final.parent)
        return created

    def _renamed(self, staging: Path, final: Path, index: Path) -> bool:
        try:
            self._files.rename(staging, final)
        except OSError as error:
            if self._files.exists(index):
                return False
            if self._files.names(final):
                raise FileExistsError(
                    f"{final} holds files but no index; it is no sealed version"
                ) from error
            raise
        return True

    def confirm(self, index: Path) -> bool:
        """Whether a version is sealed, made durable if so."""
        if not self._files.exists(index):
            return False
        self.directory(index.parent.parent)
        self._files.sync_directory(index.parent.parent)
        return True

    def sweep(self, directory: Path, kind: str) -> None:
        """Remove temporary files that dead writers left. The caller holds the root's lock."""
        for name in self._files.names(directory):
            if name.startswith(f"{RESERVED_PREFIX}{kind}-"):
                self._files.unlink(directory / name)

    def _temporary(self, path: Path, nonce: str) -> Path:
        self.sweep(path.parent, "object")
        return path.with_name(f"{RESERVED_PREFIX}object-{nonce}")
