"""Safetensors dtype names and their widths. A dtype not listed here is refused, never guessed."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from stitch.errors import CorruptData, Unsupported

__all__ = ["DTYPE_BITS", "bits_of", "nbytes_of"]

# Bits per element. Sub-byte elements are packed; a tensor must still fill whole bytes.
DTYPE_BITS: Final = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "I64": 64,
        "U64": 64,
        "F64": 64,
        "C64": 64,
    }
)
_NBYTES_MAX: Final = 2**62


def bits_of(dtype: str) -> int:
    """Bits per element. Raises: Unsupported for an unknown name."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise Unsupported(f"unknown dtype {dtype[:40]!r}", dtype=dtype[:40])
    return bits


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a row-major tensor.

    Raises: Unsupported for an unknown dtype; CorruptData if the size overflows or the elements
        do not fill whole bytes.
    """
    bits = bits_of(dtype)
    for extent in shape:
        bits *= extent
    if bits > _NBYTES_MAX or bits % 8:
        raise CorruptData(f"{dtype} of shape {list(shape)[:8]} is not a whole number of bytes")
    return bits // 8
