"""The stored documents of a run and of one version, read over any store and matched with
their place."""

from __future__ import annotations

from typing import Final

import blake3

from stitch.errors import CorruptData, NotVisibleYet
from stitch.format.index import ParsedIndex, parse_index
from stitch.format.manifest import MANIFEST_SIZE_MAX, parse_manifest
from stitch.format.records import (
    RUN_RECORD_SIZE_MAX,
    foreign_run_record,
    parse_run_record,
    run_record_key,
    version_prefix,
)
from stitch.format.shards import INDEX_SIZE_MAX
from stitch.format.wire import Manifest, RunRecord
from stitch.stores.base import INDEX_NAME, Store
from stitch.types import Ref

__all__ = ["load_run", "read_index", "read_manifest", "record_of", "verify_version"]

_HASH_CHUNK: Final = 4 * 2**20


async def load_run(store: Store, run_id: str) -> RunRecord | None:
    """The run's record, or None if nobody claimed it here.

    Raises: CorruptData, Unsupported for a record that cannot be read; Unavailable.
    """
    data = await store.read(run_record_key(run_id), size_max=RUN_RECORD_SIZE_MAX)
    return None if data is None else parse_run_record(data, run_id)


async def record_of(store: Store, run_id: str) -> RunRecord:
    """The run's record; for a run that has none, where a foreign trainer's versions lie."""
    found = await load_run(store, run_id)
    return found if found is not None else foreign_run_record(run_id)


async def read_index(store: Store, record: RunRecord, version: int) -> tuple[ParsedIndex, bytes]:
    """One version's index, parsed and matched with its place, and its bytes.

    Raises: NotVisibleYet if absent; CorruptData; Unsupported; Unavailable.
    """
    prefix = version_prefix(record, version)
    data = await store.read(f"{prefix}/{INDEX_NAME}", size_max=INDEX_SIZE_MAX)
    if data is None:
        raise NotVisibleYet(f"{prefix} has no index", file=f"{prefix}/{INDEX_NAME}")
    index = parse_index(data)
    if index.version is not None and index.version != version:
        raise CorruptData(f"{prefix}: its index says version {index.version}", file=prefix)
    return index, data


async def read_manifest(
    store: Store, record: RunRecord, version: int
) -> tuple[Manifest | None, str]:
    """One version's manifest and digest; for a foreign version None and its index's BLAKE3.

    Raises: NotVisibleYet if index or manifest is absent; CorruptData; Unsupported; Unavailable.
    """
    index, data = await read_index(store, record, version)
    if index.manifest_name is None:
        return None, blake3.blake3(data).hexdigest()
    key = f"{version_prefix(record, version)}/{index.manifest_name}"
    raw = await store.read(key, size_max=MANIFEST_SIZE_MAX)
    if raw is None:
        raise NotVisibleYet(f"{key} is not there", file=key)
    digest = blake3.blake3(raw).hexdigest()
    if digest != index.manifest_blake3:
        raise CorruptData(f"{key} is not the manifest that the index names", file=key)
    manifest = parse_manifest(raw, where=key)
    if manifest.ref.to_ref() != Ref(record.run_id, version):
        raise CorruptData(f"{key} is the manifest of {manifest.ref.to_ref()}", file=key)
    return manifest, digest


async def verify_version(store: Store, record: RunRecord, version: int) -> Manifest | None:
    """Check that a version is complete: index, manifest, and every file's size and BLAKE3.

    Tensor contents are not rebuilt. Returns the manifest, None for a foreign version (whose
    files are only checked to be there).
    Raises: NotVisibleYet for anything missing; CorruptData for anything that differs.
    """
    prefix = version_prefix(record, version)
    index, _ = await read_index(store, record, version)
    manifest, _ = await read_manifest(store, record, version)
    if manifest is None:
        for name in sorted(set(index.weight_map.values())):
            if await store.stat(f"{prefix}/{name}") is None:
                raise NotVisibleYet(f"{prefix}/{name} is not there", file=name)
        return None
    if not set(index.weight_map.values()) <= {entry.name for entry in manifest.files}:
        raise CorruptData(f"{prefix}: index and manifest name different files")
    for entry in manifest.files:
        hasher, at = blake3.blake3(), 0
        buffer = memoryview(bytearray(min(_HASH_CHUNK, entry.size + 1)))
        while count := await store.read_into(f"{prefix}/{entry.name}", at, buffer):
            hasher.update(buffer[:count])
            at += count
        if at != entry.size or hasher.hexdigest() != entry.blake3:
            raise CorruptData(f"{prefix}/{entry.name} is not what was published", file=entry.name)
    return manifest
