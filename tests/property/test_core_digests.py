"""XXH3-128 and Adler-32 against independent libraries, per variant and for any chunking."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import _core
from stitch.errors import InvalidInput

EXPECTED = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


@pytest.fixture(params=_core.isa_available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


def test_published_values() -> None:
    assert _core.xxh3_128(b"") == "99aa06d3014798d86001c324468d497f"
    assert _core.xxh3_128(b"abc") == "06b05ab6733a618578af5f94892f3950"
    assert _core.adler32(b"") == "00000001"
    assert _core.adler32(b"abc") == "024d0127"


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_length_and_alignment(isa: str, kind: str) -> None:
    whole = {"xxh3-128": _core.xxh3_128, "adler32": _core.adler32}[kind]
    data = memoryview(random.Random(1).randbytes(6000))
    for length in [*range(300), *range(300, 5900, 97)]:
        piece = data[length % 65 : length % 65 + length]
        assert whole(piece) == EXPECTED[kind](bytes(piece)), length


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_adler_does_not_overflow_on_extreme_bytes(isa: str, fill: int) -> None:
    for length in (5552, 5553, 65521, 1 << 20):
        data = bytes([fill]) * length
        assert _core.adler32(data) == f"{zlib.adler32(data):08x}"


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 3000), max_size=6))
@pytest.mark.parametrize("kind", EXPECTED)
def test_any_chunking_gives_the_same_digest(kind: str, data: bytes, cuts: list[int]) -> None:
    hasher = _core.Hasher(kind)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        hasher.update(data[begin:end])
    assert hasher.hexdigest() == EXPECTED[kind](data)
    hasher.update(b"more")  # reading a digest does not end the stream
    assert hasher.hexdigest() == EXPECTED[kind](data + b"more")


@pytest.mark.parametrize("kind", ["none", "blake3", "XXH3-128", ""])
def test_hasher_refuses_other_kinds(kind: str) -> None:
    with pytest.raises(InvalidInput):
        _core.Hasher(kind)


@pytest.mark.parametrize("kind", ["xxh3-128", "adler32", "none"])
def test_copy_digest_copies_and_hashes(isa: str, kind: str) -> None:
    data = random.Random(2).randbytes((1 << 19) + 8)
    out = bytearray(len(data))
    digest, sums = _core.copy_digest(data, out, kind, 4)
    assert out == data
    assert digest == (None if kind == "none" else EXPECTED[kind](data))
    assert sums == _core.additive(data, 4)
    assert _core.copy_digest(data, None, kind, 0) == (digest, None)
    assert _core.copy_digest(b"", bytearray(), kind, 8)[1] == (0, 0)
    with pytest.raises(InvalidInput, match="bytes"):
        _core.copy_digest(data, bytearray(3), kind, 0)
