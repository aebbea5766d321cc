"""A second reader of publications, written from `docs/publication-format.md` alone.

It shares no code with Stitch: numpy, zstandard, xxhash, blake3 and json. It asserts the writer's
rules as it goes, by number, so that a writer who breaks one is found out here.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

State = dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
DIGITS = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
HEADER_MAX = 100 * 2**20


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs), "a key twice"
    return dict(pairs)


def digest_of(kind: str, data: bytes) -> str:
    if kind == "xxh3-128":
        return xxhash.xxh3_128(data).hexdigest()
    if kind == "blake3":
        return blake3.blake3(data).hexdigest()
    return f"{zlib.adler32(data, 1):08x}"


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, str], bytes]:
    """Entries, `__metadata__` and data of one safetensors file (rules 4 and 6)."""
    assert not path.is_symlink()
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length <= HEADER_MAX
    assert (8 + length) % 8 == 0
    entries = json.loads(raw[8 : 8 + length].decode("utf-8"), object_pairs_hook=once)
    assert raw[8 : 8 + length].rstrip(b" ").endswith(b"}")
    metadata = entries.pop("__metadata__", {})
    data = raw[8 + length :]
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == at, f"gap or overlap before {name}"
        bits = BITS[entry["dtype"]] * int(np.prod(entry["shape"], dtype=np.int64))
        assert bits == 8 * (end - begin), name
        at = end
    assert at == len(data), "file size = what the header says"
    return entries, metadata, data


def unpack_frame(blob: bytes) -> bytes:
    """One frame that fills its entry, with content size, no dictionary, no checksum (rule 5)."""
    assert blob[:4] == b"\x28\xb5\x2f\xfd"
    parameters = zstandard.get_frame_parameters(blob)
    assert parameters.content_size not in (
        zstandard.CONTENTSIZE_UNKNOWN,
        zstandard.CONTENTSIZE_ERROR,
    )
    assert parameters.dict_id == 0
    assert not parameters.has_checksum
    decoder = zstandard.ZstdDecompressor().decompressobj()
    raw = decoder.decompress(blob)
    assert decoder.eof
    assert decoder.unused_data == b""
    assert len(raw) == parameters.content_size
    return raw


def apply_payload(encoding: str, blob: bytes, old: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raw = unpack_frame(blob)
    if encoding == "xor":
        assert len(raw) == len(old)
        return old ^ np.frombuffer(raw, np.uint8)
    (count,) = struct.unpack("<I", raw[:4])
    assert len(raw) == 4 + 5 * count
    assert count <= len(old)
    positions = np.frombuffer(raw, "<u4", count, 4).astype(np.int64)
    assert np.all(np.diff(positions) > 0), "rising positions"
    assert count == 0 or positions[-1] < len(old)
    new = old.copy()
    new[positions] = np.frombuffer(raw, np.uint8, count, 4 + 4 * count)
    return new


def read_checkpoint(directory: Path, weight_map: dict[str, str]) -> State:
    state: State = {}
    for file in sorted(set(weight_map.values())):
        entries, _, data = read_file(directory / file)
        assert {n for n, f in weight_map.items() if f == file} == entries.keys()
        for name, entry in entries.items():
            assert name not in state
            begin, end = entry["data_offsets"]
            values = np.frombuffer(data, np.uint8)[begin:end]
            state[name] = (entry["dtype"], tuple(entry["shape"]), values)
    return state


def read_base(directory: Path) -> State:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return read_checkpoint(directory, index["weight_map"])


def read_version(directory: Path, state: State) -> State:
    """The state after the version in `directory`, given the one before it."""
    number = int(directory.name.removeprefix("weight_v"))
    assert directory.name == f"weight_v{number:06d}"
    raw = (directory / "model.safetensors.index.json").read_bytes()
    assert raw.isascii()
    assert not raw.endswith(b"\n")
    index = json.loads(raw, object_pairs_hook=once)
    metadata, weight_map = index["metadata"], index["weight_map"]
    assert metadata["version"] == f"{number:06d}"
    for file in weight_map.values():
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", file)
    manifest = read_manifest(directory, metadata, number)
    if "delta_encoding" not in metadata:
        assert not {"base_version", "compression_format", "checksum_format"} & metadata.keys()
        full = read_checkpoint(directory, weight_map)
        assert metadata["total_size"] == sum(len(values) for _, _, values in full.values())
        assert manifest["tensors"].keys() == full.keys()
        assert full.keys() == state.keys()
        return full
    assert metadata["base_version"] == f"{number - 1:06d}"
    assert metadata["delta_encoding"] in ("xor", "overwrite")
    assert metadata["compression_format"] == "zstd"
    assert manifest["tensors"].keys() == weight_map.keys()
    result = dict(state)
    seen: set[str] = set()
    for file in sorted(set(weight_map.values())):
        entries, digests, data = read_file(directory / file)
        assert entries.keys() == digests.keys()
        assert {n for n, f in weight_map.items() if f == file} == entries.keys()
        assert not seen & entries.keys()
        seen |= entries.keys()
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            assert entry == {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            dtype, shape, old = state[name]
            new = apply_payload(metadata["delta_encoding"], data[begin:end], old)
            assert not np.array_equal(old, new), "only changed tensors are listed"
            kind = metadata["checksum_format"]
            assert re.fullmatch(f"[0-9a-f]{{{DIGITS[kind]}}}", digests[name])
            assert digest_of(kind, new.tobytes()) == digests[name]
            described = manifest["tensors"][name]
            assert (described["dtype"], tuple(described["shape"])) == (dtype, shape)
            result[name] = (dtype, shape, new)
    return result


def read_manifest(directory: Path, metadata: dict[str, Any], number: int) -> dict[str, Any]:
    """The manifest: its BLAKE3 is in the index, its files are there with size and BLAKE3."""
    raw = (directory / metadata["stitch_manifest"]).read_bytes()
    assert blake3.blake3(raw).hexdigest() == metadata["stitch_manifest_blake3"]
    manifest: dict[str, Any] = json.loads(raw, object_pairs_hook=once)
    assert manifest["format"]["major"] == 1
    assert manifest["ref"]["version"] == number
    named = {metadata["stitch_manifest"], "model.safetensors.index.json"}
    for entry in manifest["files"]:
        data = (directory / entry["name"]).read_bytes()
        assert (len(data), blake3.blake3(data).hexdigest()) == (entry["size"], entry["blake3"])
        named.add(entry["name"])
    measurements = {f"stitch-{manifest['attempt']}.facts.json"}
    found = {path.name for path in directory.iterdir()} - measurements
    assert found == named, "nothing else in the directory"
    return manifest
