"""Typed face of the native core. Buffers are C-contiguous; every call releases the GIL.

Digest kinds: "xxh3-128", "adler32", "none". A sums pair is the additive checksum (s0, s1),
both modulo 2**64, as defined in docs/format.md. All failures raise from `stitch.errors`:
CorruptData for bad bytes, InvalidInput for caller mistakes, AssertionError for bugs.
"""

from typing import Final

Buffer = bytes | bytearray | memoryview
Sums = tuple[int, int]

ADDITIVE_VERSION: Final[int]

def isa() -> str:
    """The instruction-set variant in use: scalar, avx2, avx512 …; STITCH_ISA forces one."""

def isa_available() -> list[str]:
    """Variants this build has and this machine can run, best first; "scalar" is last."""

def set_isa(name: str) -> None:
    """Force a variant for this process (tests). InvalidInput if unknown or not runnable here."""

def xxh3_128(data: Buffer) -> str: ...
def adler32(data: Buffer) -> str: ...

class Hasher:
    """Streaming digest of kind "xxh3-128" or "adler32"; any chunking gives the same result."""

    def __init__(self, kind: str) -> None: ...
    def update(self, data: Buffer) -> None: ...
    def hexdigest(self) -> str: ...

def additive(data: Buffer, lane_bytes: int, first_lane: int = 0, threads: int = 1) -> Sums:
    """Sums over lanes first_lane, first_lane+1 …; len(data) must be a multiple of lane_bytes."""

def additive_update(
    sums: Sums, old: Buffer, new: Buffer, lane_bytes: int, first_lane: int = 0
) -> Sums:
    """Sums after lanes that held `old` hold `new` (same length): subtract and add."""

def zstd_compress(data: Buffer, level: int = 1) -> bytes:
    """One frame with content size, no checksum, no dictionary."""

def zstd_decompress(blob: Buffer, size_max: int) -> bytes:
    """One frame and nothing after it, at most size_max bytes out; no content size is fine.
    Memory stays within size_max plus a constant whatever the header claims."""

def xor_encode(base: Buffer, target: Buffer, level: int = 1) -> bytes | None:
    """zstd of base ^ target, or None when equal. Lengths must agree."""

def overwrite_encode(base: Buffer, target: Buffer, level: int = 1) -> bytes | None:
    """The `overwrite` payload, or None when equal. InvalidInput above 2**32 bytes."""

def xor_apply(
    blob: Buffer, base: Buffer, out: Buffer, digest: str, lane_bytes: int
) -> tuple[str | None, Sums | None]:
    """out = base ^ decoded blob, hashed in the same pass. lane_bytes 0 skips the sums.

    `out` is writable, as long as `base`, and either disjoint from it or exactly it. On
    CorruptData a disjoint `base` is untouched and `out` is unspecified; if `out` is `base`,
    it has been put back bit for bit.
    """

def overwrite_apply(
    blob: Buffer, base: Buffer, out: Buffer, digest: str, lane_bytes: int
) -> tuple[str | None, Sums | None]:
    """out = base with the blob's bytes put at its positions; the same promises as xor_apply."""

def copy_digest(
    source: Buffer, out: Buffer | None, digest: str, lane_bytes: int
) -> tuple[str | None, Sums | None]:
    """Hash `source`, copying it into `out` in the same pass when given."""

def parse_safetensors_header(
    head: Buffer, file_size: int
) -> tuple[list[tuple[str, str, tuple[int, ...], int, int]], dict[str, str], int]:
    """Validate a safetensors header in full.

    Args: head: at least 8 + header length bytes from the file's start. file_size in bytes.
    Returns: entries (name, dtype, shape, begin, end) in data order with offsets relative to the
        data, the `__metadata__` map, and the data's offset in the file.
    Raises: CorruptData naming the kind of damage: header length, JSON, duplicate name, unknown
        dtype, shape, overlap, gap, span, trailing bytes.
    """

def header_size(first8: Buffer, file_size: int) -> int:
    """8 + header length, checked against file_size and the 100 MiB limit."""
