"""The index of a publication, parsed strictly: what kind of version, against what, which files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from stitch.errors import CorruptData, Unsupported
from stitch.format.shards import INDEX_NAME, INDEX_SIZE_MAX, parse_weight_map
from stitch.format.strict_json import parse_object
from stitch.format.wire import MANIFEST_DIGEST_KEY, MANIFEST_KEY
from stitch.format.write import DELTA_ENCODINGS, DIGEST_HEX_DIGITS
from stitch.types import VERSION_MAX, Kind

__all__ = ["ParsedIndex", "parse_index"]

Buffer = bytes | bytearray | memoryview

_NUMBER = re.compile(r"[0-9]{1,32}")
_MANIFEST_NAME = re.compile(r"stitch-[A-Za-z0-9]{1,64}\.json")
_DELTA_KEYS: Final = ("base_version", "compression_format", "checksum_format")


@dataclass(frozen=True, slots=True)
class ParsedIndex:
    """What an index says. `version` is None only in a full version of a foreign writer.

    `manifest_name` and `manifest_blake3` are None in foreign publications.
    """

    kind: Kind
    version: int | None
    base_version: int | None
    encoding: str | None
    checksum_format: str | None
    weight_map: Mapping[str, str]
    manifest_name: str | None
    manifest_blake3: str | None


def parse_index(data: Buffer) -> ParsedIndex:
    """Decode an index.

    A version is a delta if `metadata` has the key `delta_encoding`, whatever its value; then an
    empty value is damage. The other delta keys without that one are damage too: the version
    would be taken for a full one.
    Raises: CorruptData; Unsupported for an unknown encoding, compression or checksum format.
    """
    raw = parse_object(data, where=INDEX_NAME, size_max=INDEX_SIZE_MAX)
    metadata = raw.get("metadata", {})
    if not isinstance(metadata, dict):
        _fail("metadata is not an object")
    weight_map = parse_weight_map(raw.get("weight_map"), where=INDEX_NAME)
    name, digest = _manifest_keys(metadata)
    if "delta_encoding" in metadata:
        encoding, checksum_format = _delta_formats(metadata)
        version = _number(metadata, "version")
        base_version = _number(metadata, "base_version")
        if base_version >= version:
            _fail(f"base_version {base_version} is not below version {version}")
        return ParsedIndex(
            Kind.DELTA, version, base_version, encoding, checksum_format, weight_map, name, digest
        )
    for key in _DELTA_KEYS:
        if key in metadata:
            _fail(f"metadata has {key} and no delta_encoding")
    if not weight_map:
        _fail("a full version without tensors")
    full_version = _number(metadata, "version") if "version" in metadata else None
    if full_version is None and name is not None:
        _fail("metadata has no version")
    return ParsedIndex(Kind.ANCHOR, full_version, None, None, None, weight_map, name, digest)


def _manifest_keys(metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    if MANIFEST_KEY not in metadata:
        if MANIFEST_DIGEST_KEY in metadata:
            _fail(f"metadata has {MANIFEST_DIGEST_KEY} and no {MANIFEST_KEY}")
        return None, None
    name, digest = metadata[MANIFEST_KEY], metadata.get(MANIFEST_DIGEST_KEY)
    if not isinstance(name, str) or not _MANIFEST_NAME.fullmatch(name):
        _fail(f"{MANIFEST_KEY} {str(name)[:100]!r} is not a manifest's name")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        _fail(f"{MANIFEST_DIGEST_KEY} is not a BLAKE3 digest")
    return name, digest


def _delta_formats(metadata: Mapping[str, Any]) -> tuple[str, str]:
    known = {
        "delta_encoding": DELTA_ENCODINGS,
        "compression_format": ("zstd",),
        "checksum_format": tuple(DIGEST_HEX_DIGITS),
    }
    for key, values in known.items():
        value = metadata.get(key)
        if not isinstance(value, str) or not value:
            _fail(f"metadata has no {key}, or an empty one")
        if value not in values:
            raise Unsupported(
                f"{INDEX_NAME}: {key} {value[:60]!r}; this Stitch reads {', '.join(values)}",
                file=INDEX_NAME,
                reason=f"unknown {key}",
            )
    return metadata["delta_encoding"], metadata["checksum_format"]


def _number(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= VERSION_MAX:
        _fail(f"metadata {key} {str(value)[:60]!r} is not a version number")
    return value


def _fail(reason: str) -> NoReturn:
    raise CorruptData(f"{INDEX_NAME}: {reason}", file=INDEX_NAME, reason=reason)
