"""One rank's tensors against the state before: what changed, as payloads and as copies.

Runs in the caller's thread before `publish` returns. Every input byte is compared, and copied
if it changed; nothing of the input is kept. Payload, digest and checksum are all made of the copy,
so a tensor that is written meanwhile by somebody else may be torn, but never published with a
digest that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from stitch.checksum import lane_bytes_for
from stitch.delta import encode, lane_digest
from stitch.errors import InvalidInput
from stitch.format.dtypes import bits_of
from stitch.format.tensors import RawTensor
from stitch.format.write import EncodedTensor
from stitch.publisher.state import TensorState

__all__ = ["Change", "copy_all", "encode_changes"]

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
R = TypeVar("R")

# 256 KiB: what comparing makes of it stays in a core's cache.
_COMPARE_WORDS: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Change:
    """One changed tensor: its new state, and its payload against the old one if it has one."""

    state: TensorState
    encoded: EncodedTensor | None


def encode_changes(
    tensors: Sequence[RawTensor],
    look_up: Callable[[str], TensorState | None],
    *,
    encoding: str,
    checksum_format: str,
    executor: Executor | None,
) -> list[Change]:
    """Compare every byte with the state before; encode and copy what differs.

    Raises: InvalidInput naming the tensor for a name, dtype or shape that the state lacks.
    """

    def one(raw: RawTensor) -> Change | None:
        old = look_up(raw.name)
        if old is None:
            raise InvalidInput(
                f"tensor {raw.name!r} is not in the published model; a new name needs an anchor "
                "with rebase=True (a tied alias must be left out)",
                tensor=raw.name,
            )
        if not old.same_kind(raw.dtype, raw.shape):
            raise InvalidInput(
                f"tensor {raw.name!r} is {raw.dtype} {list(raw.shape)}, published as {old.dtype} "
                f"{list(old.shape)}; convert it, or publish all with rebase=True",
                tensor=raw.name,
            )
        before = old.data
        if _equal(before, raw.data):
            return None
        state, digest = _copied(raw, checksum_format)
        blob = encode(before, state.data, encoding=encoding)
        if blob is None:
            return None  # it was put back before it was copied
        return Change(state, EncodedTensor(raw.name, raw.dtype, raw.shape, blob, digest or ""))

    return [change for change in _each(one, tensors, executor) if change is not None]


def copy_all(tensors: Sequence[RawTensor], *, executor: Executor | None) -> list[Change]:
    """Every tensor as a change without a payload: an anchor that depends on nothing."""
    return _each(lambda raw: Change(_copied(raw, None)[0], None), tensors, executor)


def _equal(one: Buffer, other: Buffer) -> bool:
    """Whether two buffers of one length are equal; leaves at the first chunk that differs."""
    words = memoryview(one).nbytes // 8
    for at in range(0, words, _COMPARE_WORDS):
        count = min(_COMPARE_WORDS, words - at)
        left = np.frombuffer(one, np.uint64, count, 8 * at)
        if not np.array_equal(left, np.frombuffer(other, np.uint64, count, 8 * at)):
            return False
    return bytes(memoryview(one)[8 * words :]) == bytes(memoryview(other)[8 * words :])


def _copied(raw: RawTensor, digest_kind: str | None) -> tuple[TensorState, str | None]:
    lane = lane_bytes_for(raw.shape, bits_of(raw.dtype))
    copy = np.empty(raw.nbytes, np.uint8).data  # a bytearray would be zeroed first
    digest, checksum = lane_digest(raw.data, copy, kind=digest_kind, lane_bytes=lane)
    state = TensorState(raw.name, raw.dtype, raw.shape, copy.toreadonly(), checksum)
    return state, digest


def _each(work: Callable[[T], R], items: Iterable[T], executor: Executor | None) -> list[R]:
    return list(map(work, items) if executor is None else executor.map(work, items))
