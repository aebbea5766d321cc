"""Safetensors files named by an index: headers validated in full, names matched file by file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch import _core
from stitch.errors import CorruptData, StitchError
from stitch.format.mapping import MappedFile, resolves_inside

__all__ = [
    "INDEX_NAME",
    "INDEX_SIZE_MAX",
    "Shard",
    "StoredTensor",
    "check_file_name",
    "open_shards",
    "parse_weight_map",
]

INDEX_NAME: Final = "model.safetensors.index.json"
INDEX_SIZE_MAX: Final = 64 * 2**20
# How the native header parser names the tensor at fault.
_NAMED_TENSOR = re.compile(r"tensor '(.*?)':")
_FILE_NAME = re.compile(r"[^/\\\0-\x1f\x7f]+")
FILE_NAME_BYTES_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes lie: `nbytes` at `offset` of the file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file; `tensors` in data order, `data_at` where data starts."""

    name: str
    file: MappedFile
    data_at: int
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]

    def header(self) -> memoryview:
        """The file's first bytes: length, header JSON and padding."""
        return self.file.read(0, self.data_at)

    def view(self, tensor: StoredTensor) -> memoryview:
        """The tensor's bytes, read-only and mapped (`MappedFile.view`)."""
        return self.file.view(tensor.offset, tensor.nbytes)


def check_file_name(name: object, *, where: str) -> str:
    """A bare `*.safetensors` name. Raises: CorruptData for anything else, paths above all."""
    if (
        not isinstance(name, str)
        or not _FILE_NAME.fullmatch(name)
        or name.startswith(".")
        or not name.endswith(".safetensors")
        or len(name.encode("utf-8", "surrogatepass")) > FILE_NAME_BYTES_MAX
    ):
        reason = f"{str(name)[:200]!r} is not the bare name of a safetensors file"
        raise CorruptData(f"{where}: {reason}", file=where, reason=reason)
    return name


def parse_weight_map(raw: object, *, where: str) -> dict[str, str]:
    """The index's `weight_map`: tensor name -> bare file name. Raises: CorruptData."""
    if not isinstance(raw, dict):
        reason = "weight_map is missing or not an object"
        raise CorruptData(f"{where}: {reason}", file=where, reason=reason)
    for tensor, file in raw.items():
        if not tensor or tensor == "__metadata__":
            reason = f"weight_map names a tensor {tensor!r}"
            raise CorruptData(f"{where}: {reason}", file=where, reason=reason)
        check_file_name(file, where=where)
    return dict(raw)


def open_shards(
    directory: Path,
    weight_map: Mapping[str, str],
    *,
    confined: bool,
    missing: type[StitchError],
) -> list[Shard]:
    """Open every file that `weight_map` names, sorted by file name, and match names exactly.

    Args: confined: refuse symbolic links that leave `directory`. missing: raised for an absent
        file.
    Raises: CorruptData naming file and tensor: header damage, a size other than the header's, a
        tensor that the index places elsewhere or nowhere, one that its file lacks.
    """
    shards: list[Shard] = []
    try:
        for name in sorted(set(weight_map.values())):
            shards.append(open_shard(directory, name, confined=confined, missing=missing))
        _match_names(shards, weight_map)
    except BaseException:
        for shard in shards:
            shard.file.close()
        raise
    return shards


def open_shard(directory: Path, name: str, *, confined: bool, missing: type[StitchError]) -> Shard:
    """Open one file and validate its header in full. Raises as `open_shards`."""
    path = directory / name
    if confined and not resolves_inside(path, directory):
        reason = "it is a link that leaves the version's directory"
        raise CorruptData(f"{name}: {reason}", file=name, reason=reason)
    try:
        file = MappedFile(path)
    except FileNotFoundError as error:
        raise missing(f"{name} is not there", file=name, reason="missing file") from error
    try:
        head_size = _core.header_size(file.read(0, min(8, file.size)), file.size)
        entries, metadata, data_at = _core.parse_safetensors_header(
            file.read(0, head_size), file.size
        )
    except CorruptData as error:
        named = _NAMED_TENSOR.search(error.message)
        raise CorruptData(
            f"{name}: {error.message}",
            file=name,
            tensor=named[1] if named else None,
            reason=error.message,
        ) from error
    tensors = tuple(
        StoredTensor(tensor, dtype, tuple(shape), path, data_at + begin, end - begin)
        for tensor, dtype, shape, begin, end in entries
    )
    return Shard(name, file, data_at, tensors, metadata)


def _match_names(shards: list[Shard], weight_map: Mapping[str, str]) -> None:
    placed: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            first = placed.setdefault(tensor.name, shard.name)
            if first != shard.name:
                _refuse(shard.name, tensor.name, f"duplicate name: it is also in {first}")
    for shard in shards:
        for tensor in shard.tensors:
            expected = weight_map.get(tensor.name)
            if expected is None:
                _refuse(shard.name, tensor.name, "the index does not list it")
            if expected != shard.name:
                _refuse(shard.name, tensor.name, f"the index places it in {expected}")
    for name, file in weight_map.items():
        if name not in placed:
            _refuse(file, name, "the index places it here, and the file lacks it")


def _refuse(file: str, tensor: str, reason: str) -> None:
    raise CorruptData(
        f"{file}: tensor {tensor!r}: {reason}", file=file, tensor=tensor, reason=reason
    )
