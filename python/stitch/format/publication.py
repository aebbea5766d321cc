"""Reading one publication, Stitch's own or a foreign trainer's, strictly.

A reader opens what the index names and nothing else. Everything that
`docs/publication-format.md` calls wrong is CorruptData; what may still appear is NotVisibleYet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import blake3

from stitch.errors import CorruptData, Forbidden, InvalidInput, NotVisibleYet, Unsupported
from stitch.format.checkpoint import LONE_FILE_NAME, Checkpoint, side_files_of
from stitch.format.index import ParsedIndex, parse_index
from stitch.format.manifest import check_manifest, load_manifest
from stitch.format.mapping import MappedFile, read_small_file, resolves_inside
from stitch.format.shards import INDEX_NAME, INDEX_SIZE_MAX, Shard, open_shard, open_shards
from stitch.format.wire import Manifest
from stitch.format.write import DIGEST_HEX_DIGITS
from stitch.types import Kind, Ref, parse_version_name

__all__ = ["Payload", "PublicationReader"]

Buffer = bytes | bytearray | memoryview

_HEX: Final = frozenset("0123456789abcdef")
_DIGEST = re.compile(r"[0-9A-Fa-f]{8}|[0-9A-Fa-f]{32}|[0-9A-Fa-f]{64}")


@dataclass(frozen=True, slots=True)
class Payload:
    """One changed tensor of a delta: where its blob lies, and the target's digest."""

    path: Path
    offset: int
    nbytes: int
    digest: str


class PublicationReader:
    """One version's directory, opened and checked. Close it when done.

    kind, version, base_version, encoding, checksum_format: what the index says (None where the
    kind has no such thing). manifest: None for a foreign publication. manifest_digest: BLAKE3
    hex of the manifest's bytes, of the index's for a foreign one. payloads: a delta's changed
    tensors; empty for an anchor. checkpoint: an anchor's tensors; None for a delta.
    """

    def __init__(
        self,
        directory: Path,
        version: int,
        index: ParsedIndex,
        manifest: Manifest | None,
        manifest_digest: str,
    ) -> None:
        self.directory = directory
        self.version = version
        self.kind = index.kind
        self.base_version = index.base_version
        self.encoding = index.encoding
        self.checksum_format = index.checksum_format
        self.manifest = manifest
        self.manifest_digest = manifest_digest
        self.payloads: Mapping[str, Payload] = {}
        self.checkpoint: Checkpoint | None = None
        self._shards: list[Shard] = []
        self._files: dict[Path, MappedFile] = {}

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        expect: Ref | int | None = None,
        trusted_only: bool = False,
        verify_files: bool = True,
    ) -> PublicationReader:
        """Open the publication in `directory`.

        Args:
            expect: the version it must be; with a Ref, a manifest's run must agree too. None
                takes the number from the directory's name, `weight_vNNNNNN`.
            trusted_only: refuse foreign publications.
            verify_files: read every file once to check its BLAKE3 against the manifest. Pass
                False only where the bytes were checked on arrival.
        Raises: NotVisibleYet for a missing directory, index, manifest or data file;
            CorruptData with `file`, `tensor` and `reason` for damage; Unsupported for an
            unknown format; Forbidden for a foreign one with `trusted_only`; OSError.
        """
        directory = Path(directory)
        number = _expected_number(directory, expect)
        if directory.exists() and not directory.is_dir():
            reason = "it is not a directory"
            raise CorruptData(f"{directory.name}: {reason}", file=directory.name, reason=reason)
        if not directory.is_dir():
            raise NotVisibleYet(
                f"{directory.name} is not there in {directory.parent}", file=str(directory)
            )
        try:
            return _Opener(directory, number, expect, verify_files).open(trusted_only)
        except (CorruptData, NotVisibleYet, Unsupported) as error:
            fields = {**error.fields, "version": number}
            raise type(error)(f"{directory.name}: {error.message}", **fields) from error

    def blob(self, name: str) -> memoryview:
        """The bytes of one payload, read into fresh memory. Raises: Unavailable; OSError."""
        payload = self.payloads[name]
        return self._files[payload.path].read(payload.offset, payload.nbytes)

    def adopt_shards(self, shards: list[Shard]) -> None:
        """Take ownership of opened files; payloads of a delta are built by the opener."""
        self._shards = shards
        self._files = {shard.file.path: shard.file for shard in shards}

    def close(self) -> None:
        """Unmap all files."""
        for shard in self._shards:
            shard.file.close()

    def __enter__(self) -> PublicationReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _expected_number(directory: Path, expect: Ref | int | None) -> int:
    if expect is None:
        try:
            return parse_version_name(directory.name)
        except CorruptData as error:
            raise InvalidInput(
                f"{directory.name!r} names no version; say which one is expected",
                file=str(directory),
            ) from error
    return expect.version if isinstance(expect, Ref) else expect


class _Opener:
    """The steps of opening, in the order in which damage is best explained."""

    def __init__(
        self, directory: Path, number: int, expect: Ref | int | None, verify_files: bool
    ) -> None:
        self.directory = directory
        self.number = number
        self.run_id = expect.run_id if isinstance(expect, Ref) else None
        self.verify_files = verify_files

    def open(self, trusted_only: bool) -> PublicationReader:
        path = self.directory / INDEX_NAME
        if path.is_symlink() and not resolves_inside(path, self.directory):
            _refuse(INDEX_NAME, None, "it is a link that leaves the version's directory")
        try:
            data = read_small_file(path, size_max=INDEX_SIZE_MAX, too_big=CorruptData)
        except FileNotFoundError:
            if trusted_only:
                raise NotVisibleYet(f"{INDEX_NAME} is not there", file=INDEX_NAME) from None
            return self._without_index()
        index = parse_index(data)
        if index.version is not None and index.version != self.number:
            _refuse(
                INDEX_NAME, None, f"it says version {index.version}, its directory {self.number}"
            )
        if index.manifest_name is None and trusted_only:
            raise Forbidden(f"{self.directory.name} is foreign: its index names no manifest")
        return self._with_index(index, data)

    def _with_index(self, index: ParsedIndex, data: Buffer) -> PublicationReader:
        manifest = None
        digest = blake3.blake3(data).hexdigest()
        if index.manifest_name is not None and index.manifest_blake3 is not None:
            manifest = load_manifest(self.directory, index, self.number, self.run_id)
            digest = index.manifest_blake3
        reader = PublicationReader(self.directory, self.number, index, manifest, digest)
        reader.adopt_shards(
            open_shards(self.directory, index.weight_map, confined=True, missing=NotVisibleYet)
        )
        try:
            self._fill(reader)
        except BaseException:
            reader.close()
            raise
        return reader

    def _fill(self, reader: PublicationReader) -> None:
        if reader.kind == Kind.DELTA:
            assert reader.checksum_format is not None
            digits = DIGEST_HEX_DIGITS[reader.checksum_format]
            reader.payloads = {
                name: payload
                for shard in reader._shards
                for name, payload in _payloads(shard, digits).items()
            }
        else:
            for shard in reader._shards:
                if looks_like_delta(shard):
                    _refuse(shard.name, None, "delta payloads in a full version")
            side_files = confined_side_files(self.directory)
            if reader.manifest is not None:
                listed = {entry.name for entry in reader.manifest.files}
                side_files = [path for path in side_files if path.name in listed]
            reader.checkpoint = Checkpoint(self.directory, reader._shards, side_files)
        if reader.manifest is not None:
            check_manifest(reader, reader._shards, verify_files=self.verify_files)

    def _without_index(self) -> PublicationReader:
        names = sorted(
            path.name for path in self.directory.iterdir() if path.name.endswith(".safetensors")
        )
        if names != [LONE_FILE_NAME]:
            raise NotVisibleYet(f"{INDEX_NAME} is not there", file=INDEX_NAME)
        shard = open_shard(self.directory, LONE_FILE_NAME, confined=True, missing=NotVisibleYet)
        if looks_like_delta(shard):
            # A delta of one file whose index, the sign of completeness, has not appeared.
            shard.file.close()
            raise NotVisibleYet(f"{INDEX_NAME} is not there", file=INDEX_NAME)
        if not shard.tensors:
            shard.file.close()
            _refuse(LONE_FILE_NAME, None, "a full version without tensors")
        index = ParsedIndex(Kind.ANCHOR, None, None, None, None, {}, None, None)
        digest = blake3.blake3(shard.header()).hexdigest()
        reader = PublicationReader(self.directory, self.number, index, None, digest)
        reader.adopt_shards([shard])
        reader.checkpoint = Checkpoint(self.directory, [shard], confined_side_files(self.directory))
        return reader


def confined_side_files(directory: Path) -> list[Path]:
    """A publication's side files. Raises: CorruptData for a link that leaves the directory."""
    found = side_files_of(directory)
    for path in found:
        if not resolves_inside(path, directory):
            _refuse(path.name, None, "it is a link that leaves the version's directory")
    return found


def looks_like_delta(shard: Shard) -> bool:
    """Whether a file holds delta payloads: U8 vectors, and a digest for each under its name."""
    return (
        bool(shard.tensors)
        and all(t.dtype == "U8" and len(t.shape) == 1 for t in shard.tensors)
        and all(_DIGEST.fullmatch(shard.metadata.get(t.name, "")) for t in shard.tensors)
    )


def _payloads(shard: Shard, digits: int) -> dict[str, Payload]:
    found = {}
    for tensor in shard.tensors:
        if tensor.dtype != "U8" or len(tensor.shape) != 1:
            _refuse(
                shard.name,
                tensor.name,
                f"a payload is a U8 vector, found {tensor.dtype} of shape {list(tensor.shape)[:8]}",
            )
        digest = shard.metadata.get(tensor.name)
        if digest is None:
            _refuse(shard.name, tensor.name, "it has no checksum in __metadata__")
        if len(digest) != digits or not _HEX.issuperset(digest):
            _refuse(shard.name, tensor.name, f"checksum {digest[:80]!r} is not {digits} hex digits")
        found[tensor.name] = Payload(shard.file.path, tensor.offset, tensor.nbytes, digest)
    for name in shard.metadata:
        if name not in found:
            _refuse(shard.name, name, "__metadata__ has a checksum for a tensor not in the file")
    return found


def _refuse(file: str, tensor: str | None, reason: str) -> NoReturn:
    at = file if tensor is None else f"{file}: tensor {tensor!r}"
    raise CorruptData(f"{at}: {reason}", file=file, tensor=tensor, reason=reason)
