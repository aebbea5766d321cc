"""A manifest as read: its bytes, its place, and whether the files and headers bear it out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import blake3
from pydantic import ValidationError

from stitch.checksum import Checksum, lane_bytes_for
from stitch.errors import CorruptData, NotVisibleYet
from stitch.format.dtypes import bits_of
from stitch.format.index import ParsedIndex
from stitch.format.mapping import MappedFile, read_small_file, resolves_inside
from stitch.format.records import first_fault
from stitch.format.shards import Shard
from stitch.format.strict_json import parse_object
from stitch.format.wire import Manifest, refuse_other_major
from stitch.types import Kind

if TYPE_CHECKING:
    from stitch.format.publication import PublicationReader

__all__ = ["MANIFEST_SIZE_MAX", "check_manifest", "load_manifest", "parse_manifest"]

Buffer = bytes | bytearray | memoryview

MANIFEST_SIZE_MAX: Final = 128 * 2**20
_HASH_CHUNK: Final = 16 * 2**20


def parse_manifest(data: Buffer, *, where: str) -> Manifest:
    """Decode a manifest. Raises: Unsupported for another major; CorruptData."""
    raw = parse_object(data, where=where, size_max=MANIFEST_SIZE_MAX)
    refuse_other_major(raw, where=where)
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        _refuse(where, None, first_fault(error), error)


def load_manifest(directory: Path, index: ParsedIndex, number: int, run_id: str | None) -> Manifest:
    """Read the manifest that `index` names and match it with the index and its place.

    Raises: NotVisibleYet if it is absent; CorruptData; Unsupported.
    """
    name = index.manifest_name
    assert name is not None
    if not resolves_inside(directory / name, directory):
        _refuse(name, None, "it is a link that leaves the version's directory")
    try:
        data = read_small_file(directory / name, size_max=MANIFEST_SIZE_MAX, too_big=CorruptData)
    except FileNotFoundError as error:
        raise NotVisibleYet(f"{name} is not there", file=name) from error
    found = blake3.blake3(data).hexdigest()
    if found != index.manifest_blake3:
        _refuse(name, None, f"BLAKE3 is {found}, the index says {index.manifest_blake3}")
    manifest = parse_manifest(data, where=name)
    says: dict[str, tuple[object, object]] = {
        "version": (manifest.ref.version, number),
        "kind": (manifest.kind, index.kind.value),
        "base version": (manifest.base.version if manifest.base else None, index.base_version),
        "encoding": (manifest.encoding, index.encoding),
        "checksum format": (manifest.checksum_format, index.checksum_format),
    }
    if index.kind == Kind.ANCHOR:
        # An anchor may name the version it follows, and needs neither encoding nor digests.
        says = {key: says[key] for key in ("version", "kind")}
    if run_id is not None:
        says["run"] = (manifest.ref.run_id, run_id)
    for what, (manifest_says, expected) in says.items():
        if manifest_says != expected:
            _refuse(name, None, f"its {what} is {manifest_says!r}, expected {expected!r}")
    if index.kind == Kind.DELTA and manifest.base_digest is None:
        _refuse(name, None, "a delta without base_digest")
    _check_refs(manifest, name)
    return manifest


def _check_refs(manifest: Manifest, name: str) -> None:
    if name != f"stitch-{manifest.attempt}.json":
        _refuse(name, None, f"it is the manifest of attempt {manifest.attempt[:80]!r}")
    base, older = manifest.base, manifest.rollback_of
    if base is not None and base.run_id != manifest.ref.run_id:
        _refuse(name, None, f"its base is of run {base.run_id!r}; a run goes on from itself")
    if older is not None and older.version >= manifest.ref.version:
        _refuse(name, None, f"it rolls back to version {older.version}, which is not older")


def check_manifest(
    reader: PublicationReader, shards: Sequence[Shard], *, verify_files: bool
) -> None:
    """Match a manifest with the opened files: names, sizes, BLAKE3, tensors, dtypes, shapes.

    Side files that an anchor's manifest lists are checked like data files.
    Raises: CorruptData naming the first file or tensor that differs; NotVisibleYet.
    """
    manifest = reader.manifest
    assert manifest is not None
    named = reader.directory.name
    files = {shard.name: shard.file for shard in shards}
    listed = {entry.name: entry for entry in manifest.files}
    if len(listed) != len(manifest.files):
        _refuse(named, None, "the manifest lists a file twice")
    for name in sorted(files.keys() - listed.keys()):
        _refuse(name, None, "the index names it, the manifest does not")
    for name, entry in listed.items():
        mapped = files.get(name)
        if mapped is None and (reader.kind == Kind.DELTA or name.endswith(".safetensors")):
            _refuse(name, None, "the manifest lists it, the index does not")
        if mapped is None:
            mapped = _side_file(reader.directory, name)
        if mapped.size != entry.size:
            _refuse(name, None, f"it has {mapped.size} bytes, the manifest says {entry.size}")
        if verify_files and _blake3_of(mapped) != entry.blake3:
            _refuse(name, None, "its BLAKE3 is not the manifest's")
    _check_tensors(reader, manifest)


def _check_tensors(reader: PublicationReader, manifest: Manifest) -> None:
    entries = manifest.tensors
    stored = reader.checkpoint.tensors if reader.checkpoint is not None else {}
    names = stored.keys() if reader.checkpoint is not None else reader.payloads.keys()
    for name in sorted(names ^ entries.keys()):
        reason = "the manifest does not list it" if name in names else "the files lack it"
        _refuse(reader.directory.name, name, reason)
    for alias, carrier in manifest.aliases.items():
        if alias in entries:
            _refuse(reader.directory.name, alias, "it is stored, and an alias of another")
        if reader.kind == Kind.ANCHOR and carrier not in entries:
            _refuse(reader.directory.name, alias, f"it is an alias of {carrier!r}, which is absent")
    for name, entry in entries.items():
        tensor = stored.get(name)
        shape = tuple(entry.shape)
        if tensor is not None and (tensor.dtype, tensor.shape) != (entry.dtype, shape):
            _refuse(
                tensor.path.name,
                name,
                f"it is {tensor.dtype} {list(tensor.shape)}, the manifest says "
                f"{entry.dtype} {entry.shape}",
            )
        lane = lane_bytes_for(shape, bits_of(entry.dtype))
        if Checksum.from_text(entry.checksum).lane_bytes != lane:
            _refuse(reader.directory.name, name, f"its checksum's lanes are not {lane} bytes")


def _side_file(directory: Path, name: str) -> MappedFile:
    if not resolves_inside(directory / name, directory):
        _refuse(name, None, "it is a link that leaves the version's directory")
    try:
        return MappedFile(directory / name)
    except FileNotFoundError as error:
        raise NotVisibleYet(f"{name} is not there", file=name) from error


def _blake3_of(mapped: MappedFile) -> str:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    chunk = memoryview(bytearray(min(_HASH_CHUNK, mapped.size)))
    for at in range(0, mapped.size, _HASH_CHUNK):
        part = chunk[: mapped.size - at]
        mapped.read_into(at, part)
        hasher.update(part)
    return hasher.hexdigest()


def _refuse(
    file: str, tensor: str | None, reason: str, cause: BaseException | None = None
) -> NoReturn:
    at = file if tensor is None else f"{file}: tensor {tensor!r}"
    raise CorruptData(f"{at}: {reason}", file=file, tensor=tensor, reason=reason) from cause
