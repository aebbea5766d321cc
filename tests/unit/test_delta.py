"""The typed face of the delta codecs: both encodings, their errors, and what is not here yet."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import delta
from stitch.checksum import Checksum, additive_lanes, digest
from stitch.errors import CorruptData, InvalidInput, Unsupported

pairs = st.binary(max_size=300).flatmap(
    lambda base: st.tuples(st.just(base), st.binary(min_size=len(base), max_size=len(base)))
)


@pytest.mark.parametrize("encoding", delta.ENCODINGS)
@given(pair=pairs)
@settings(max_examples=60, deadline=None)
def test_apply_inverts_encode(encoding: str, pair: tuple[bytes, bytes]) -> None:
    base, target = pair
    blob = delta.encode(base, target, encoding=encoding)
    assert (blob is None) == (base == target)
    if blob is not None:
        expect = ("xxh3-128", digest("xxh3-128", target))
        assert bytes(delta.apply(blob, base, encoding=encoding, expect=expect)) == target


def test_another_digest_is_corrupt_data() -> None:
    blob = delta.encode(b"aaaa", b"aaba")
    assert blob is not None
    with pytest.raises(CorruptData):
        delta.apply(blob, b"aaaa", expect=("blake3", digest("blake3", b"aaaa")))
    with pytest.raises(CorruptData):
        delta.apply(b"no frame", b"aaaa")


def test_sparse_says_that_it_comes_later() -> None:
    for call in (
        lambda: delta.encode(b"a", b"b", encoding="sparse"),
        lambda: delta.apply(b"", b"b", encoding="sparse"),
    ):
        with pytest.raises(Unsupported, match="later release"):
            call()


def test_unknown_encodings_and_lengths_are_the_callers_fault() -> None:
    with pytest.raises(InvalidInput):
        delta.encode(b"a", b"b", encoding="gzip")
    with pytest.raises(InvalidInput):
        delta.encode(b"a", b"bb")
    with pytest.raises(InvalidInput):
        delta.lane_digest(b"a", None, kind="crc32", lane_bytes=1)


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3", "adler32", None])
def test_lane_digest_copies_and_sums_in_one_pass(kind: str | None) -> None:
    source = bytes(range(64))
    out = bytearray(64)
    text, checksum = delta.lane_digest(source, out, kind=kind, lane_bytes=4)
    assert bytes(out) == source
    assert text == (None if kind is None else digest(kind, source))
    assert checksum == additive_lanes(source, lane_bytes=4)
    assert isinstance(checksum, Checksum)
