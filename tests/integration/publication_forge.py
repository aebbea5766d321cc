"""Takes publications apart and puts them together, damaged. Uses nothing of stitch."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
MAGIC = b"\x28\xb5\x2f\xfd"


def version_dir(updates: Path, version: int) -> Path:
    return updates / f"weight_v{version:06d}"


def read_index(updates: Path, version: int) -> dict[str, Any]:
    return json.loads((version_dir(updates, version) / INDEX).read_bytes())


def put_index(updates: Path, version: int, index: dict[str, Any] | bytes) -> None:
    raw = index if isinstance(index, bytes) else json.dumps(index).encode()
    (version_dir(updates, version) / INDEX).write_bytes(raw)


def edit_index(updates: Path, version: int, edit: Callable[[dict[str, Any]], object]) -> None:
    index = read_index(updates, version)
    edit(index)
    put_index(updates, version, index)


def edit_metadata(updates: Path, number: int, /, **changes: Any) -> None:
    """Set metadata keys; `...` removes one."""
    index = read_index(updates, number)
    for key, value in changes.items():
        if value is ...:
            del index["metadata"][key]
        else:
            index["metadata"][key] = value
    put_index(updates, number, index)


class File:
    """A safetensors file in pieces: header pairs in order (duplicates allowed), data bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.pairs: list[tuple[str, Any]] = json.loads(
            raw[8 : 8 + length], object_pairs_hook=lambda pairs: pairs
        )
        self.pairs = [
            (key, dict(value) if isinstance(value, list) else value) for key, value in self.pairs
        ]
        self.data = raw[8 + length :]

    @property
    def names(self) -> list[str]:
        return [key for key, _ in self.pairs if key != "__metadata__"]

    def entry(self, name: str) -> dict[str, Any]:
        return next(value for key, value in self.pairs if key == name)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.entry("__metadata__")

    def bytes_of(self, name: str) -> bytes:
        begin, end = self.entry(name)["data_offsets"]
        return self.data[begin:end]

    def set_bytes(self, name: str, data: bytes, *, shape: list[int] | None = None) -> None:
        """Replace one payload and lay the data out anew."""
        payloads = {key: self.bytes_of(key) for key in self.names} | {name: data}
        self.entry(name)["shape"] = [len(data)] if shape is None else shape
        self.data = b""
        for key in self.names:
            begin = len(self.data)
            self.data += payloads[key]
            self.entry(key)["data_offsets"] = [begin, len(self.data)]

    def drop(self, name: str) -> None:
        payloads = {key: self.bytes_of(key) for key in self.names}
        self.pairs = [pair for pair in self.pairs if pair[0] != name]
        self.data = b""
        for key in self.names:
            begin = len(self.data)
            self.data += payloads[key]
            self.entry(key)["data_offsets"] = [begin, len(self.data)]

    def add(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        begin = len(self.data)
        self.data += data
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(self.data)]}
        self.pairs.append((name, entry))

    def header_text(self) -> bytes:
        def text(value: object) -> str:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

        inner = ",".join(f"{text(key)}:{text(value)}" for key, value in self.pairs)
        return ("{" + inner + "}").encode()

    def save(self, header: bytes | None = None, *, length: int | None = None) -> None:
        text = self.header_text() if header is None else header
        text += b" " * (-len(text) % 8)
        size = len(text) if length is None else length
        self.path.write_bytes(struct.pack("<Q", size) + text + self.data)


def file_of(updates: Path, version: int, tensor: str) -> File:
    """The file of `tensor` by the index."""
    name = read_index(updates, version)["weight_map"][tensor]
    return File(version_dir(updates, version) / name)


def edit_file(updates: Path, version: int, tensor: str, edit: Callable[[File], object]) -> None:
    file = file_of(updates, version, tensor)
    edit(file)
    file.save()


def digest(kind: str, data: bytes) -> str:
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(data)
    if kind == "blake3":
        return blake3.blake3(data).hexdigest()
    return f"{zlib.adler32(data):08x}"


def frame(data: bytes, *, level: int = 1, size: bool = True, checksum: bool = False) -> bytes:
    return zstandard.ZstdCompressor(
        level=level, write_content_size=size, write_checksum=checksum
    ).compress(data)


def unframe(blob: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(blob)


def lying_frame(data: bytes, claimed: int) -> bytes:
    """One raw-block frame whose header claims `claimed` bytes of content, eight bytes wide."""
    # Frame_Header_Descriptor 0xC0: 8-byte content size, no single segment; window 128 KiB.
    assert len(data) < 1 << 17
    block = struct.pack("<I", len(data) << 3 | 1)[:3] + data
    return MAGIC + bytes([0xC0, 0x38]) + struct.pack("<Q", claimed) + block


def overwrite(positions: list[int], values: bytes, *, count: int | None = None) -> bytes:
    found = len(positions) if count is None else count
    return struct.pack(f"<I{len(positions)}I", found, *positions) + values


def tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint directory: dtype, shape, bytes."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = File(path)
        for name in file.names:
            entry = file.entry(name)
            assert name not in found
            found[name] = (entry["dtype"], tuple(entry["shape"]), file.bytes_of(name))
    return found


def snapshot(*directories: Path) -> dict[str, str]:
    """SHA-256 of every file below, so that a test can tell that nothing was touched."""
    found = {}
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.stat().st_size < 1 << 26:
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[str(path)] = "-"
    return found
