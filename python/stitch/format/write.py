"""Writing publications: data files, index and file names, as every known reader accepts them.

`docs/publication-format.md`, section "What a writer keeps", is the rule book. Nothing here
touches a disk: the store decides how bytes become durable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import blake3

from stitch.errors import InvalidInput, Unsupported
from stitch.format.dtypes import bits_of, nbytes_of
from stitch.format.tensors import RawTensor, as_raw_tensors, check_tensor_name
from stitch.format.wire import MANIFEST_DIGEST_KEY, MANIFEST_KEY
from stitch.types import Kind, Ref

__all__ = [
    "DELTA_ENCODINGS",
    "DataFile",
    "EncodedTensor",
    "RawTensor",
    "anchor_file",
    "as_raw_tensors",
    "data_file_name",
    "delta_file",
    "encode_index",
    "facts_name",
    "manifest_name",
    "number_text",
]

Buffer = bytes | bytearray | memoryview

HEADER_BYTES_MAX: Final = 100 * 2**20
DELTA_ENCODINGS: Final = ("xor", "overwrite")
# Length of each digest format's text.
DIGEST_HEX_DIGITS: Final = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
_ATTEMPT = re.compile(r"[A-Za-z0-9]{1,64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One changed tensor of a delta.

    `dtype` and `shape` are the canonical tensor's (they go into the manifest only); `blob` is
    the payload; `digest` is of the complete target bytes, in the version's checksum format.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blob: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class DataFile:
    """One safetensors file ready to write: the concatenation of `chunks`, which are views."""

    name: str
    size: int
    blake3: str
    chunks: list[Buffer]


def delta_file(name: str, tensors: Sequence[EncodedTensor]) -> DataFile:
    """One delta file: a U8 entry per blob in name order, digests as `__metadata__`.

    Raises: InvalidInput for no tensors, a repeated or impossible name, or an empty digest.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    _check_names([tensor.name for tensor in ordered], name)
    for tensor in ordered:
        if not re.fullmatch(r"[0-9a-f]{8,64}", tensor.digest):
            raise InvalidInput(
                f"tensor {tensor.name!r}: digest {tensor.digest[:80]!r} is not lower-case hex",
                tensor=tensor.name,
            )
    header: dict[str, Any] = {"__metadata__": {tensor.name: tensor.digest for tensor in ordered}}
    at = 0
    for tensor in ordered:
        end = at + len(tensor.blob)
        header[tensor.name] = {
            "dtype": "U8",
            "shape": [len(tensor.blob)],
            "data_offsets": [at, end],
        }
        at = end
    return _data_file(name, header, [tensor.blob for tensor in ordered])


def anchor_file(name: str, tensors: Sequence[RawTensor]) -> DataFile:
    """One shard of a full version: an ordinary checkpoint file.

    Wider elements come first, then names, so that every element lies aligned.
    Raises: InvalidInput for no tensors, a repeated or impossible name, or a length that dtype
        and shape do not give.
    """
    ordered = sorted(tensors, key=lambda tensor: (-bits_of(tensor.dtype), tensor.name))
    _check_names([tensor.name for tensor in ordered], name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        end = at + nbytes_of(tensor.dtype, tensor.shape)
        if tensor.nbytes != end - at:
            raise InvalidInput(
                f"tensor {tensor.name!r} has {tensor.nbytes} bytes; {tensor.dtype} of shape "
                f"{list(tensor.shape)} needs {end - at}",
                tensor=tensor.name,
            )
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    return _data_file(name, header, [tensor.data for tensor in ordered])


def encode_index(
    *,
    ref: Ref,
    kind: Kind,
    base_version: int | None,
    encoding: str | None,
    checksum_format: str | None,
    weight_map: Mapping[str, str],
    total_size: int | None,
    manifest_name: str,
    manifest_blake3: str,
) -> bytes:
    """The index: the commit of one version. One ASCII JSON object, no newline at the end.

    An anchor has `total_size` and no delta key; a delta has base, encoding and checksum format.
    Raises: InvalidInput if the arguments do not fit the kind or a file name is not bare;
        Unsupported for an encoding or checksum format that the index cannot name.
    """
    metadata: dict[str, Any]
    if kind == Kind.ANCHOR:
        if total_size is None or base_version is not None or encoding is not None:
            raise InvalidInput("an anchor's index has total_size, and no base or encoding")
        metadata = {"total_size": total_size, "version": number_text(ref.version)}
    else:
        if base_version is None or encoding is None or checksum_format is None:
            raise InvalidInput("a delta's index has base_version, encoding and checksum_format")
        if not 0 <= base_version < ref.version:
            raise InvalidInput(f"base {base_version} is not below version {ref.version}")
        if encoding not in DELTA_ENCODINGS:
            raise Unsupported(f"delta encoding {encoding!r}; one of {', '.join(DELTA_ENCODINGS)}")
        if checksum_format not in DIGEST_HEX_DIGITS:
            raise Unsupported(f"checksum format {checksum_format!r}")
        metadata = {
            "version": number_text(ref.version),
            "base_version": number_text(base_version),
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum_format,
        }
    metadata[MANIFEST_KEY] = _bare(manifest_name)
    metadata[MANIFEST_DIGEST_KEY] = manifest_blake3
    for tensor, file in weight_map.items():
        check_tensor_name(tensor)
        _bare(file)
    document = {"metadata": metadata, "weight_map": dict(weight_map)}
    return json.dumps(document, ensure_ascii=True, separators=(", ", ": ")).encode("ascii")


def number_text(version: int) -> str:
    """A version in an index: decimal, padded with zeros to at least six digits."""
    return f"{version:06d}"


def manifest_name(attempt: str) -> str:
    """`stitch-<attempt>.json`. `attempt` is a fresh nonce of letters and digits."""
    return f"stitch-{_attempt(attempt)}.json"


def facts_name(attempt: str) -> str:
    """`stitch-<attempt>.facts.json`: measurements of the encoder, which nothing refers to."""
    return f"stitch-{_attempt(attempt)}.facts.json"


def data_file_name(attempt: str, i: int, n: int, kind: Kind) -> str:
    """Name of data file `i` of `n`, `i` counted from 0 here.

    Delta files are numbered from 0 and shards of a full version from 1, as public writers do.
    """
    if not 0 <= i < n <= 99_999:
        raise InvalidInput(f"data file {i} of {n}: out of range")
    number = i + 1 if kind == Kind.ANCHOR else i
    return f"model-{_attempt(attempt)}-{number:05d}-of-{n:05d}.safetensors"


def _attempt(attempt: str) -> str:
    if not _ATTEMPT.fullmatch(attempt):
        raise InvalidInput(f"attempt {attempt!r} must be 1 to 64 letters and digits")
    return attempt


def _bare(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise InvalidInput(f"file name {name!r} must match {_FILE_NAME.pattern}", file=name)
    return name


def _check_names(names: Sequence[str], file: str) -> None:
    if not names:
        raise InvalidInput(f"data file {file!r} would hold no tensor", file=file)
    for name in names:
        check_tensor_name(name)
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"duplicate name {repeated!r} in {file!r}", file=file, tensor=repeated)


def _data_file(name: str, header: Mapping[str, Any], payloads: Sequence[Buffer]) -> DataFile:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidInput(f"the header of {name!r} would pass 100 MiB; use more files", file=name)
    head = len(text).to_bytes(8, "little") + text
    chunks: list[Buffer] = [head, *payloads]
    hasher = blake3.blake3()
    size = 0
    for chunk in chunks:
        hasher.update(chunk)
        size += memoryview(chunk).nbytes
    return DataFile(_bare(name), size, hasher.hexdigest(), chunks)
