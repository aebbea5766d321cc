"""The stored documents: manifest and run record, explained in `docs/publication-format.md`.

Our own writers emit exactly these fields. Readers refuse an unknown format major and ignore
unknown fields of a known one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from stitch.errors import Unsupported
from stitch.types import VERSION_MAX, Ref

__all__ = [
    "FILE_NAME",
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "MANIFEST_DIGEST_KEY",
    "MANIFEST_KEY",
    "FileEntry",
    "ForkPoint",
    "FormatVersion",
    "Manifest",
    "RefModel",
    "RunRecord",
    "TensorEntry",
]

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 0

# Keys in the index's `metadata` by which Stitch recognises its own publications.
MANIFEST_KEY: Final = "stitch_manifest"
MANIFEST_DIGEST_KEY: Final = "stitch_manifest_blake3"

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Version = Annotated[int, Field(strict=True, ge=0, le=VERSION_MAX)]
# What a file must be called to be listed in a manifest.
FILE_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
FileName = Annotated[str, StringConstraints(pattern=f"^{FILE_NAME}$", strict=True)]
ChecksumText = Annotated[str, StringConstraints(pattern=r"^add1/[1248]/[0-9a-f]{32}$")]


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class FormatVersion(_Document):
    """Readers refuse another major; a minor only adds fields."""

    major: Annotated[int, Field(strict=True, ge=0)]
    minor: Annotated[int, Field(strict=True, ge=0)] = 0


class RefModel(_Document):
    """A ref as stored."""

    run_id: RunId
    version: Version

    def to_ref(self) -> Ref:
        """The vocabulary's form."""
        return Ref(self.run_id, self.version)

    @classmethod
    def of(cls, ref: Ref) -> RefModel:
        """The stored form of `ref`."""
        return cls(run_id=ref.run_id, version=ref.version)


class FileEntry(_Document):
    """One data file of the publication: bare name, size in bytes, BLAKE3 of its bytes."""

    name: FileName
    size: Annotated[int, Field(strict=True, ge=0)]
    blake3: Hex64


class TensorEntry(_Document):
    """One canonical tensor after this version: safetensors dtype, shape, additive checksum."""

    dtype: str
    shape: list[Annotated[int, Field(strict=True, ge=0)]]
    checksum: ChecksumText


class Manifest(_Document):
    """The record of one version. Its bytes' BLAKE3 is in the index; a signature is detached."""

    format: FormatVersion
    ref: RefModel
    kind: Literal["anchor", "delta"]
    attempt: str
    base: RefModel | None
    base_digest: Hex64 | None
    target_digest: Hex64
    parent: Hex64 | None
    rollback_of: RefModel | None = None
    encoding: Literal["xor", "overwrite", "sparse"] | None = None
    checksum_format: Literal["xxh3-128", "blake3", "adler32"] | None = None
    files: list[FileEntry]
    # A delta lists the tensors it changes, an anchor all of them.
    tensors: dict[str, TensorEntry]
    # Model parts this publication covers: "target", "draft", "vision" …; aliases are tied names.
    parts: list[str] = ["target"]
    aliases: dict[str, str] = {}


class ForkPoint(_Document):
    """Where a run forked from another."""

    run_id: RunId
    version: Version
    manifest_digest: Hex64 | None


class RunRecord(_Document):
    """`runs/<run_id>/run.json`: the create-only claim of a run."""

    format: FormatVersion
    run_id: RunId
    boot_version: Version
    base_digest: Hex64 | None
    forked_from: ForkPoint | None
    writer: str
    # Where this run's versions lie, relative to the root, without a trailing slash.
    updates_dir: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"),
    ]


def to_json_bytes(document: BaseModel) -> bytes:
    """Serialize one document: UTF-8, keys in field order, no trailing newline."""
    return document.model_dump_json().encode("utf-8")


def refuse_other_major(raw: Any, *, where: str) -> None:
    """Refuse a decoded document of another format major. One without a readable major passes:
    the model that parses it says what is wrong.

    Raises: Unsupported naming `where`.
    """
    try:
        major = raw["format"]["major"]
    except (KeyError, TypeError):
        return
    if isinstance(major, int) and not isinstance(major, bool) and major != FORMAT_MAJOR:
        raise Unsupported(
            f"{where} has format {major}; this Stitch reads format {FORMAT_MAJOR}", file=where
        )
