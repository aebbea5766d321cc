"""Payload, digest and kept copy of a changed tensor agree, whoever writes to it meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch import delta
from stitch.checksum import additive_lanes, digest, lane_bytes_for
from stitch.format.tensors import RawTensor
from stitch.publisher import encode
from stitch.publisher.state import TensorState


@pytest.mark.parametrize("encoding", delta.ENCODINGS)
def test_an_input_that_is_written_meanwhile_is_never_published_with_a_digest_of_other_bytes(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    lane = lane_bytes_for((64,), 8)
    before = memoryview(bytes(64))
    old = TensorState("w", "U8", (64,), before, additive_lanes(before, lane_bytes=lane))
    given = bytearray(range(64))

    def then_write(name: str) -> None:
        inner = getattr(encode, name)

        def call(*args: Any, **options: Any) -> Any:
            result = inner(*args, **options)
            given[:] = bytes((byte + 1) % 256 for byte in given)
            return result

        monkeypatch.setattr(encode, name, call)

    for step in ("_equal", "lane_digest", "encode"):
        then_write(step)
    (change,) = encode.encode_changes(
        [RawTensor("w", "U8", (64,), given)],
        lambda name: old,
        encoding=encoding,
        checksum_format="xxh3-128",
        executor=None,
    )
    assert change.encoded is not None
    expect = ("xxh3-128", change.encoded.digest)
    target = delta.apply(change.encoded.blob, before, encoding=encoding, expect=expect)
    assert bytes(target) == bytes(change.state.data)
    assert digest("xxh3-128", change.state.data) == change.encoded.digest
    assert change.state.checksum == additive_lanes(change.state.data, lane_bytes=lane)


def test_an_input_put_back_meanwhile_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memoryview(bytes(8))
    old = TensorState("w", "U8", (8,), before, additive_lanes(before, lane_bytes=1))
    given = np.ones(8, np.uint8)

    def differs(one: Any, other: Any) -> bool:
        given[:] = 0
        return False

    monkeypatch.setattr(encode, "_equal", differs)
    assert not encode.encode_changes(
        [RawTensor("w", "U8", (8,), given.data)],
        lambda name: old,
        encoding="xor",
        checksum_format="xxh3-128",
        executor=None,
    )


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 2**18 - 1, 2**18, 2**18 + 5])
def test_every_byte_is_compared(size: int) -> None:
    one = memoryview(bytes(size))
    assert encode._equal(one, bytearray(size))
    for at in {0, size // 2, size - 1} if size else ():
        other = bytearray(size)
        other[at] = 1
        assert not encode._equal(one, other), at
