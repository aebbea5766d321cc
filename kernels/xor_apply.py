"""XOR apply on a device: base ^= delta, in place.

Contract: `base` and `delta` are contiguous tensors of the same number of bytes on one device, of
any dtype; bits are XORed as integers, so NaN payloads survive. Exact, no tolerance. Its own undo.
Source: docs/publication-format.md, "A blob", encoding `xor`; csrc/core/xor_delta.cpp on CPU.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton here: the reference still works
    triton = None

__all__ = ["xor_apply", "xor_apply_ref"]

_BLOCK = 4096  # elements per program; fixed, so nothing is tuned inside a pause


def xor_apply_ref(base: torch.Tensor, delta: torch.Tensor) -> None:
    """The same in plain torch, on any device."""
    _as_bytes(base, "base").bitwise_xor_(_as_bytes(delta, "delta"))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _xor_apply(base_ptr, delta_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        start = tl.program_id(0).to(tl.int64) * BLOCK  # counts pass 2**31
        index = start + tl.arange(0, BLOCK)
        live = index < count
        base = tl.load(base_ptr + index, mask=live, other=0)
        delta = tl.load(delta_ptr + index, mask=live, other=0)
        tl.store(base_ptr + index, base ^ delta, mask=live)


def xor_apply(base: torch.Tensor, delta: torch.Tensor) -> None:
    """XOR `delta` into `base` on the current stream; neither allocates nor synchronises.

    Raises: ValueError if sizes, devices or contiguity do not fit, or the ranges overlap;
        RuntimeError without triton.
    """
    if triton is None:
        raise RuntimeError("xor_apply needs triton: install stitch-rl[kernels]")
    target, change = _as_bytes(base, "base"), _as_bytes(delta, "delta")
    if target.numel() != change.numel():
        raise ValueError(f"base has {target.numel()} bytes, delta has {change.numel()}")
    if target.device != change.device:
        raise ValueError(f"base is on {target.device}, delta on {change.device}")
    if _overlap(target, change):
        raise ValueError("base and delta overlap")
    # Words where both allow it; the last bytes, or unaligned tensors, byte by byte.
    aligned = target.data_ptr() % 4 == 0 and change.data_ptr() % 4 == 0
    word_bytes = target.numel() // 4 * 4 if aligned else 0
    if word_bytes:
        _launch(target[:word_bytes].view(torch.int32), change[:word_bytes].view(torch.int32))
    if word_bytes < target.numel():
        _launch(target[word_bytes:], change[word_bytes:])


def _launch(base: torch.Tensor, delta: torch.Tensor) -> None:
    grid = (triton.cdiv(base.numel(), _BLOCK),)
    _xor_apply[grid](base, delta, base.numel(), BLOCK=_BLOCK)


def _as_bytes(tensor: torch.Tensor, argument: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{argument} must be contiguous")
    # A tensor without dimensions can't be viewed as bytes; one with a dimension can.
    return tensor.reshape(-1).view(torch.uint8)


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    begin, other = left.data_ptr(), right.data_ptr()
    return bool(begin < other + right.numel() and other < begin + left.numel())
