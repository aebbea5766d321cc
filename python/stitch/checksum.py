"""Digests: the additive, position-keyed checksum, and the interop formats' tensor digests.

The additive checksum is defined in `docs/format.md`, section "Additive checksum". It detects
accidental corruption; it is not a MAC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import blake3 as _blake3

from stitch import _core
from stitch.errors import CorruptData, InvalidInput

__all__ = [
    "DIGEST_FORMATS",
    "TP_SIZE_MAX",
    "Checksum",
    "additive_lanes",
    "adler32",
    "blake3",
    "digest",
    "lane_bytes_for",
    "model_digest",
    "model_digest_updated",
    "tensor_term",
    "xxh3_128",
]

Buffer = bytes | bytearray | memoryview

DIGEST_FORMATS: Final = ("xxh3-128", "blake3", "adler32")
TP_SIZE_MAX: Final = 64
_MASK64: Final = (1 << 64) - 1
_MASK256: Final = (1 << 256) - 1
_TERM_CONTEXT: Final = "stitch 2026-12 model_digest term v1"


@dataclass(frozen=True, slots=True)
class Checksum:
    """Additive checksum of one tensor: two sums modulo 2**64 over lanes of `lane_bytes`.

    `+` and `-` combine partial sums over disjoint lanes of the same tensor.
    """

    lane_bytes: int
    s0: int
    s1: int

    def __add__(self, other: Checksum) -> Checksum:
        self._check(other)
        return Checksum(
            self.lane_bytes, (self.s0 + other.s0) & _MASK64, (self.s1 + other.s1) & _MASK64
        )

    def __sub__(self, other: Checksum) -> Checksum:
        self._check(other)
        return Checksum(
            self.lane_bytes, (self.s0 - other.s0) & _MASK64, (self.s1 - other.s1) & _MASK64
        )

    def _check(self, other: Checksum) -> None:
        if self.lane_bytes != other.lane_bytes:
            raise InvalidInput(
                f"checksums over {self.lane_bytes}- and {other.lane_bytes}-byte lanes do not mix"
            )

    def to_text(self) -> str:
        """`add1/<lane bytes>/<s1 then s0, 32 hex digits>`."""
        return f"add1/{self.lane_bytes}/{self.s1:016x}{self.s0:016x}"

    @classmethod
    def from_text(cls, text: str) -> Checksum:
        """Parse `to_text`'s form. Raises: CorruptData."""
        parts = text.split("/")
        if len(parts) != 3 or parts[0] != "add1" or parts[1] not in {"1", "2", "4", "8"}:
            raise CorruptData(f"{text[:60]!r} is not an additive checksum")
        digits = parts[2]
        if len(digits) != 32 or any(c not in "0123456789abcdef" for c in digits):
            raise CorruptData(f"{text[:60]!r} is not an additive checksum")
        return cls(int(parts[1]), int(digits[16:], 16), int(digits[:16], 16))


def lane_bytes_for(shape: Sequence[int], itemsize_bits: int) -> int:
    """The lane of a tensor: the largest of 8, 4, 2, 1 bytes dividing every rank cut's runs.

    A cut along the last dimension into t parts (t up to TP_SIZE_MAX, t dividing it) leaves
    runs of `last / t` elements; cuts along other dimensions leave whole rows. `shape` in
    elements of `itemsize_bits` bits (the checkpoint's elements: a packed FP4 byte is one).
    """
    if not shape:
        bits = itemsize_bits
    else:
        last = shape[-1]
        parts = max(
            (t for t in range(1, TP_SIZE_MAX + 1) if last % t == 0), default=1, key=_odd_part_free
        )
        bits = itemsize_bits * (last // parts)
    for lane in (8, 4, 2):
        if bits > 0 and bits % (8 * lane) == 0:
            return lane
    return 1


def _odd_part_free(t: int) -> int:
    # Only powers of two matter for divisibility by 8, 4 and 2.
    return t & -t


def additive_lanes(
    data: Buffer, *, lane_bytes: int, first_lane: int = 0, threads: int = 1
) -> Checksum:
    """Checksum of contiguous lanes starting at `first_lane`. O(bytes), GIL released."""
    s0, s1 = _core.additive(data, lane_bytes, first_lane, threads)
    return Checksum(lane_bytes, s0, s1)


def xxh3_128(data: Buffer) -> str:
    """XXH3 128-bit, seed 0, 32 lower-case hex digits, most significant first."""
    return _core.xxh3_128(data)


def blake3(data: Buffer) -> str:
    """BLAKE3, 64 lower-case hex digits, no key."""
    return _blake3.blake3(data).hexdigest()


def adler32(data: Buffer) -> str:
    """zlib's Adler-32, start value 1, 8 lower-case hex digits."""
    return _core.adler32(data)


def digest(kind: str, data: Buffer) -> str:
    """The tensor digest of one of `DIGEST_FORMATS`. Raises: InvalidInput for another kind."""
    if kind == "xxh3-128":
        return xxh3_128(data)
    if kind == "blake3":
        return blake3(data)
    if kind == "adler32":
        return adler32(data)
    raise InvalidInput(f"unknown checksum format {kind!r}; one of {', '.join(DIGEST_FORMATS)}")


def tensor_term(name: str, dtype: str, shape: Sequence[int], checksum: Checksum) -> int:
    """One tensor's share of `model_digest`: a 256-bit integer.

    BLAKE3 in derive-key mode over length-prefixed name, dtype, dimensions and checksum
    (docs/format.md, "Model digest").
    """
    hasher = _blake3.blake3(derive_key_context=_TERM_CONTEXT)
    for text in (name, dtype, ",".join(str(n) for n in shape), checksum.to_text()):
        raw = text.encode("utf-8")
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return int.from_bytes(hasher.digest(), "little")


def model_digest(terms: Iterable[int]) -> str:
    """Sum of `tensor_term`s modulo 2**256, 64 hex digits. Order-free."""
    return f"{sum(terms) & _MASK256:064x}"


def model_digest_updated(digest_text: str, *, removed: Iterable[int], added: Iterable[int]) -> str:
    """`model_digest` after some tensors changed, in O(changed)."""
    value = int(digest_text, 16) - sum(removed) + sum(added)
    return f"{value & _MASK256:064x}"
