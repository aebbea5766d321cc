"""One rank's tensors against the state before: what changed, as payloads and as copies.

Runs in the caller's thread before `publish` returns. Every input byte is compared, and copied
if it changed; nothing of the input is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from stitch.checksum import lane_bytes_for
from stitch.delta import encode, lane_digest
from stitch.errors import InvalidInput
from stitch.format.dtypes import bits_of
from stitch.format.tensors import RawTensor
from stitch.format.write import EncodedTensor
from stitch.publisher.state import TensorState

__all__ = ["Change", "copy_all", "encode_changes"]

T = TypeVar("T")
R = TypeVar("R")


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
                f"{list(old.shape)}; a change of kind needs an anchor with rebase=True",
                tensor=raw.name,
            )
        blob = encode(old.data, raw.data, encoding=encoding)
        if blob is None:
            return None
        state, digest = _copied(raw, checksum_format)
        return Change(state, EncodedTensor(raw.name, raw.dtype, raw.shape, blob, digest or ""))

    return [change for change in _each(one, tensors, executor) if change is not None]


def copy_all(tensors: Sequence[RawTensor], *, executor: Executor | None) -> list[Change]:
    """Every tensor as a change without a payload: an anchor that depends on nothing."""
    return _each(lambda raw: Change(_copied(raw, None)[0], None), tensors, executor)


def _copied(raw: RawTensor, digest_kind: str | None) -> tuple[TensorState, str | None]:
    lane = lane_bytes_for(raw.shape, bits_of(raw.dtype))
    copy = bytearray(raw.nbytes)
    digest, checksum = lane_digest(raw.data, copy, kind=digest_kind, lane_bytes=lane)
    view = memoryview(copy).toreadonly()
    return TensorState(raw.name, raw.dtype, raw.shape, view, checksum), digest


def _each(work: Callable[[T], R], items: Iterable[T], executor: Executor | None) -> list[R]:
    return list(map(work, items) if executor is None else executor.map(work, items))
