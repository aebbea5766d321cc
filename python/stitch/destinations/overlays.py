"""Overlay directories: the changed tensors of staged versions, in immutable safetensors files.

One directory per process, locked while it lives, so that a later one can tell what a dead
process left behind. Under it one directory per stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stitch.engines.base import TensorSlice
from stitch.env import Env
from stitch.errors import Unavailable

__all__ = ["OverlayRoot", "OverlayWriter", "no_space"]

Buffer = bytes | bytearray | memoryview

_PREFIX: Final = "stitch-overlays-"
_FILE_BYTES: Final = 64 * 2**20
_CREATE_TRIES: Final = 16


class OverlayRoot:
    """This process's directory for overlays, under `parent`. `sync` makes its files durable."""

    def __init__(self, parent: Path, env: Env, *, sync: bool) -> None:
        self._parent = parent
        self._files = env.files
        self._nonce = env.random.nonce
        self._sync = sync
        self._path: Path | None = None
        self._release: Callable[[], None] | None = None

    @property
    def path(self) -> Path:
        assert self._path is not None, "open the overlay root first"
        return self._path

    def open(self) -> None:
        """Create the directory; remove those that dead processes left. Blocking.

        Raises: OSError if `parent` cannot be written.
        """
        if self._path is not None:
            return
        self._remove_left_overs()
        for _ in range(_CREATE_TRIES):
            path = self._parent / f"{_PREFIX}{self._nonce()}"
            self._files.make_directory(path)
            release = self._files.try_lock(path)
            if release is not None and self._files.is_directory(path):
                self._path, self._release = path, release
                return
            if release is not None:
                release()
        raise OSError(f"cannot keep a directory in {self._parent}: others remove it")

    def begin(self, name: str) -> OverlayWriter:
        """Start one stage's directory."""
        directory = self.path / name
        self._files.make_directory(directory)
        return OverlayWriter(directory, self)

    def write_file(self, path: Path, chunks: list[Buffer]) -> None:
        """Write one immutable file."""
        handle = self._files.create(path)
        try:
            for chunk in chunks:
                handle.write(chunk)
            if self._sync:
                handle.sync()
        finally:
            handle.close()

    def seal(self, directory: Path) -> None:
        """Make the names in a finished directory durable."""
        if self._sync:
            self._files.sync_directory(directory)
            self._files.sync_directory(self.path)

    def keep_only(self, used: set[Path]) -> None:
        """Remove every stage directory that is not in `used`."""
        for name in self._files.names(self.path):
            if self.path / name not in used:
                self._files.remove_tree(self.path / name)

    def close(self) -> None:
        """Remove everything. Safe to repeat."""
        if self._path is not None:
            self._files.remove_tree(self._path)
        if self._release is not None:
            self._release()
        self._path = self._release = None

    def _remove_left_overs(self) -> None:
        for name in self._files.names(self._parent):
            if not name.startswith(_PREFIX):
                continue
            try:
                release = self._files.try_lock(self._parent / name)
            except OSError:
                continue  # gone, or another user's
            if release is not None:
                try:
                    self._files.remove_tree(self._parent / name)
                except OSError:
                    continue
                finally:
                    release()


class OverlayWriter:
    """Collects tensors into files of about 64 MiB; a larger tensor gets a file of its own."""

    def __init__(self, directory: Path, root: OverlayRoot) -> None:
        self.directory = directory
        self.slices: dict[str, TensorSlice] = {}
        self.bytes_written = 0
        self._root = root
        self._pending: list[tuple[TensorSlice, Buffer]] = []
        self._pending_bytes = 0
        self._count = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Buffer, sum: str) -> None:
        """Take one tensor; `data` is held until its file is written. `sum`: checksum text."""
        nbytes = len(data)
        self._pending.append((TensorSlice(name, "", 0, nbytes, dtype, shape, sum), data))
        self._pending_bytes += nbytes
        if self._pending_bytes >= _FILE_BYTES:
            self._flush()

    def finish(self) -> dict[str, TensorSlice]:
        """Write what is left; the slices by name."""
        self._flush()
        self._root.seal(self.directory)
        return self.slices

    def _flush(self) -> None:
        if not self._pending:
            return
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor, _ in self._pending:
            end = at + tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
        raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
        raw += b" " * (-(8 + len(raw)) % 64)
        path = self.directory / f"overlay-{self._count:05d}.safetensors"
        self._root.write_file(
            path, [len(raw).to_bytes(8, "little"), raw, *(data for _, data in self._pending)]
        )
        at = 8 + len(raw)
        for tensor, _ in self._pending:
            self.slices[tensor.name] = TensorSlice(
                tensor.name,
                str(path),
                at,
                tensor.nbytes,
                tensor.dtype,
                tensor.shape,
                tensor.checksum,
            )
            at += tensor.nbytes
        self.bytes_written += at
        self._pending, self._pending_bytes = [], 0
        self._count += 1


def no_space(error: OSError) -> Unavailable:
    """The error of a stage that could not be written or read."""
    where = f"{error.filename}: " if error.filename else ""
    return Unavailable(
        f"cannot stage weights: {where}{error.strerror or error}; free space there or give "
        "another directory",
        errno=error.errno,
    )
