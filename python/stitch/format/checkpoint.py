"""An ordinary HF-style checkpoint directory: tensors, side files, checksums."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from stitch.checksum import Checksum, additive_lanes, lane_bytes_for, model_digest, tensor_term
from stitch.errors import CorruptData, InvalidInput
from stitch.format.dtypes import bits_of
from stitch.format.mapping import read_small_file
from stitch.format.shards import (
    INDEX_NAME,
    INDEX_SIZE_MAX,
    Shard,
    StoredTensor,
    open_shard,
    open_shards,
    parse_weight_map,
)
from stitch.format.strict_json import parse_object

__all__ = ["LONE_FILE_NAME", "Checkpoint", "StoredTensor", "side_files_of"]

LONE_FILE_NAME: Final = "model.safetensors"
# Weights in other formats, and what belongs to a publication rather than to the model.
_NOT_A_SIDE_FILE = re.compile(
    r"\..*|.*\.(tmp|safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz)"
    r"|.*\.index\.json|stitch-[A-Za-z0-9]+(\.facts)?\.json"
)
# A multiple of every lane.
_CHECKSUM_CHUNK: Final = 8 << 20
_SHARD_NAME = re.compile(r".*-of-[0-9]+\.safetensors")


class Checkpoint:
    """All tensors of one model state, read-only. Safe to use from many threads.

    tensors: name -> StoredTensor, in shard order, then data order. side_files: config and
    tokenizer files, sorted by name.
    """

    def __init__(
        self, directory: Path, shards: Sequence[Shard], side_files: Sequence[Path]
    ) -> None:
        self.directory = directory
        self.shards = tuple(shards)
        self.side_files = tuple(side_files)
        self.tensors: Mapping[str, StoredTensor] = {
            tensor.name: tensor for shard in shards for tensor in shard.tensors
        }
        self._shard_of = {tensor.name: shard for shard in shards for tensor in shard.tensors}

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Open a base checkpoint: an index with its shards, or `model.safetensors` alone.

        Symbolic links are followed: the directory is the user's own, and model caches are made
        of links. Only files that the index names are read; others change nothing.
        Raises: InvalidInput if it is no checkpoint or a file is missing; CorruptData for damage.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise InvalidInput(f"{directory} is not a directory", file=str(directory))
        shards = _open_base_shards(directory)
        checkpoint = cls(directory, shards, side_files_of(directory))
        if not checkpoint.tensors:
            checkpoint.close()
            raise InvalidInput(f"{directory} is a checkpoint without tensors", file=str(directory))
        return checkpoint

    def view(self, name: str) -> memoryview:
        """The tensor's bytes, read-only and mapped: only while nobody cuts the file short.

        Raises: KeyError; Unavailable if the file changed since it was opened; OSError.
        """
        return self._shard_of[name].view(self.tensors[name])

    def read(self, name: str) -> memoryview:
        """The tensor's bytes in fresh, writable memory. Raises: as `view`."""
        tensor = self.tensors[name]
        return self._shard_of[name].file.read(tensor.offset, tensor.nbytes)

    def checksums(
        self, *, threads: int = 1, names: Iterable[str] | None = None
    ) -> dict[str, Checksum]:
        """Additive checksum of each tensor (of `names`, or all). O(bytes)."""

        def one(name: str) -> Checksum:
            tensor = self.tensors[name]
            lane = lane_bytes_for(tensor.shape, bits_of(tensor.dtype))
            file = self._shard_of[name].file
            chunk = memoryview(bytearray(min(_CHECKSUM_CHUNK, tensor.nbytes)))
            total = Checksum(lane, 0, 0)
            for at in range(0, tensor.nbytes, _CHECKSUM_CHUNK):
                part = chunk[: tensor.nbytes - at]
                file.read_into(tensor.offset + at, part)
                total += additive_lanes(part, lane_bytes=lane, first_lane=at // lane)
            return total

        wanted = list(self.tensors) if names is None else list(names)
        with ThreadPoolExecutor(max(1, threads), thread_name_prefix="stitch-checksum") as pool:
            return dict(zip(wanted, pool.map(one, wanted), strict=True))

    def model_digest(self, *, threads: int = 1) -> str:
        """The keyed sum over all tensors (docs/format.md, "Model digest"). O(bytes)."""
        sums = self.checksums(threads=threads)
        return model_digest(
            tensor_term(name, self.tensors[name].dtype, self.tensors[name].shape, checksum)
            for name, checksum in sums.items()
        )

    def close(self) -> None:
        """Unmap all files; views still held stay valid until dropped."""
        for shard in self.shards:
            shard.file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def side_files_of(directory: Path) -> list[Path]:
    """The directory's regular files that hold no weights: config, tokenizer, chat template."""
    return sorted(
        path
        for path in directory.iterdir()
        if not _NOT_A_SIDE_FILE.fullmatch(path.name) and path.is_file()
    )


def _open_base_shards(directory: Path) -> list[Shard]:
    try:
        data = read_small_file(directory / INDEX_NAME, size_max=INDEX_SIZE_MAX, too_big=CorruptData)
    except FileNotFoundError:
        names = [path.name for path in directory.iterdir() if _SHARD_NAME.fullmatch(path.name)]
        if names:
            raise InvalidInput(
                f"{directory} has shards such as {min(names)} and no {INDEX_NAME}",
                file=str(directory),
            ) from None
        if not (directory / LONE_FILE_NAME).exists():
            raise InvalidInput(
                f"{directory} is not a checkpoint: neither {INDEX_NAME} nor {LONE_FILE_NAME}",
                file=str(directory),
            ) from None
        return [open_shard(directory, LONE_FILE_NAME, confined=False, missing=InvalidInput)]
    index: dict[str, Any] = parse_object(data, where=INDEX_NAME, size_max=INDEX_SIZE_MAX)
    weight_map = parse_weight_map(index.get("weight_map"), where=INDEX_NAME)
    return open_shards(directory, weight_map, confined=False, missing=InvalidInput)
