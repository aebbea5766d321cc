"""Writing a rebuilt checkpoint: the seed's shards, headers and side files, with new bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from stitch.env import FileHandle, Files
from stitch.errors import CorruptData, Unavailable
from stitch.format.checkpoint import Checkpoint
from stitch.format.mapping import MappedFile
from stitch.format.rebuild import RebuiltTensor
from stitch.format.shards import INDEX_NAME, Shard, StoredTensor
from stitch.format.write import number_text

__all__ = ["CheckpointWriter"]

Buffer = bytes | bytearray | memoryview

_COPY_CHUNK: Final = 16 << 20


class CheckpointWriter:
    """Writes `seed`'s files into an empty directory, every tensor replaced by what `add` gets.

    Shard names, tensor order and header bytes are the seed's. `add` takes every tensor once, in
    the seed's order, and writes straight through; `finish` writes side files and index. Every
    file is synced; the directory is not. One task at a time.
    """

    def __init__(self, files: Files, directory: Path, seed: Checkpoint) -> None:
        self._files = files
        self._directory = directory
        self._seed = seed
        self._pending: list[tuple[Shard, StoredTensor]] = [
            (shard, tensor) for shard in seed.shards for tensor in shard.tensors
        ]
        self._pending.reverse()
        self._handle: FileHandle | None = None
        self._shard: Shard | None = None
        self.bytes_written = 0

    def add(self, tensor: RebuiltTensor) -> None:
        """Write the next tensor. Raises: OSError."""
        shard, expected = self._pending.pop()
        assert (tensor.name, len(tensor.data)) == (expected.name, expected.nbytes)
        if shard is not self._shard:
            self._close_shard()
            self._handle = self._files.create(self._directory / shard.name)
            self._shard = shard
            self._write(self._handle, shard.header())
        assert self._handle is not None
        self._write(self._handle, tensor.data)

    def finish(self, version: int) -> None:
        """Write what is not a shard. Raises: OSError."""
        assert not self._pending, "every tensor of the seed is written before the index"
        self._close_shard()
        for path in self._seed.side_files:
            self.copy(path)
        total_size = sum(tensor.nbytes for tensor in self._seed.tensors.values())
        index = {
            "metadata": {"total_size": total_size, "version": number_text(version)},
            "weight_map": {
                tensor.name: shard.name for shard in self._seed.shards for tensor in shard.tensors
            },
        }
        self._write_file(INDEX_NAME, json.dumps(index, indent=2).encode("ascii"))

    def copy(self, path: Path) -> None:
        """Copy one side file; a link is followed, so the copy stands alone.

        Raises: Unavailable if it is no longer the file that was listed; OSError.
        """
        try:
            source = MappedFile(path)
        except CorruptData as error:
            raise Unavailable(f"{path}: it changed while it was in use") from error
        handle = self._files.create(self._directory / path.name)
        try:
            for at in range(0, source.size, _COPY_CHUNK):
                self._write(handle, source.read(at, min(_COPY_CHUNK, source.size - at)))
            handle.sync()
        finally:
            handle.close()

    def close(self) -> None:
        """Close what an exception left open."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _write_file(self, name: str, data: Buffer) -> None:
        handle = self._files.create(self._directory / name)
        try:
            self._write(handle, data)
            handle.sync()
        finally:
            handle.close()

    def _write(self, handle: FileHandle, data: Buffer) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _COPY_CHUNK):
            handle.write(view[at : at + _COPY_CHUNK])
        self.bytes_written += len(view)

    def _close_shard(self) -> None:
        if self._handle is not None:
            self._handle.sync()
            self._handle.close()
            self._handle = None
