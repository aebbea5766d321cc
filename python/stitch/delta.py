"""One tensor's change as bytes: encode against a base, apply to it. The interop encodings.

`xor` and `overwrite` are defined in `docs/format.md`; both are blind to the dtype. The sparse
encoding is not part of this release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stitch import _core
from stitch.checksum import DIGEST_FORMATS, Checksum, blake3, digest
from stitch.errors import CorruptData, InvalidInput, Unsupported

__all__ = ["ENCODINGS", "apply", "check_encoding", "encode", "lane_digest"]

Buffer = bytes | bytearray | memoryview

ENCODINGS: Final[Sequence[str]] = ("xor", "overwrite")


def check_encoding(encoding: str) -> str:
    """Return `encoding` if this release writes and reads it. Raises: Unsupported, InvalidInput."""
    if encoding == "sparse":
        raise Unsupported(
            "encoding 'sparse' comes with a later release; use 'xor' (the default) or 'overwrite'",
            param="encoding",
        )
    if encoding not in ENCODINGS:
        raise InvalidInput(f"encoding {encoding!r} is not 'xor' or 'overwrite'", param="encoding")
    return encoding


def encode(base: Buffer, target: Buffer, *, encoding: str = "xor", level: int = 1) -> bytes | None:
    """The payload that turns `base` into `target`, or None when they are equal.

    Args: base, target: raw bytes of one tensor, of the same length. level: zstd level.
    Raises: InvalidInput for lengths that differ, or `overwrite` of 2**32 bytes and more;
        Unsupported for `sparse`.
    """
    if check_encoding(encoding) == "xor":
        return _core.xor_encode(base, target, level)
    return _core.overwrite_encode(base, target, level)


def apply(
    blob: Buffer, base: Buffer, *, encoding: str = "xor", expect: tuple[str, str] | None = None
) -> bytearray:
    """The target bytes that `blob` makes of `base`, which stays as it is.

    Args: expect: digest format and text that the target must have.
    Raises: CorruptData for a bad payload or another digest; Unsupported; InvalidInput.
    """
    run = _core.xor_apply if check_encoding(encoding) == "xor" else _core.overwrite_apply
    out = bytearray(memoryview(base).nbytes)
    run(blob, base, out, "none", 0)
    if expect is not None:
        found = digest(expect[0], out)
        if found != expect[1]:
            raise CorruptData(
                f"{expect[0]} of the result is {found}, expected {expect[1]}",
                found=found,
                expected=expect[1],
            )
    return out


def lane_digest(
    source: Buffer, out: bytearray | memoryview | None, *, kind: str | None, lane_bytes: int
) -> tuple[str | None, Checksum]:
    """Digest of `kind` (None for none) and additive checksum, copying into `out` in one pass."""
    if kind is not None and kind not in DIGEST_FORMATS:
        raise InvalidInput(f"checksum format {kind!r} is not one of {', '.join(DIGEST_FORMATS)}")
    native = kind if kind in {"xxh3-128", "adler32"} else "none"
    text, sums = _core.copy_digest(source, out, native or "none", lane_bytes)
    if kind == "blake3":
        text = blake3(source if out is None else out)
    assert sums is not None
    return text, Checksum(lane_bytes, *sums)
