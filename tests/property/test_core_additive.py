"""The additive checksum `add1`: golden vectors, every variant against an independent model.

The model below is written from docs/format.md, "Additive checksum", with Python integers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import _core
from stitch.errors import InvalidInput

MASK = 2**64 - 1
LANES = (1, 2, 4, 8)


def mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


SEEDS = (0x5354495443480000, 0x5354495443480001)
TABLES = [[mix(mix((seed + r * 0x9E3779B97F4A7C15) & MASK)) for r in range(512)] for seed in SEEDS]


def model(data: bytes, lane_bytes: int, first_lane: int = 0) -> tuple[int, int]:
    sums = [0, 0]
    for offset in range(0, len(data), lane_bytes):
        lane = first_lane + offset // lane_bytes
        block, r = lane >> 9, lane & 511
        shift = mix(block ^ 0xA5A5A5A5A5A5A5A5) & 511
        value = int.from_bytes(data[offset : offset + lane_bytes], "little")
        x = value if lane_bytes == 8 else value * 0x0000000100000001
        for j in (0, 1):
            key = TABLES[j][(r + shift) & 511] ^ mix(mix(block) ^ SEEDS[j])
            z = x ^ key
            linear = x if j == 0 else ((x << 32) | (x >> 32)) & MASK
            sums[j] = (sums[j] + (z & 0xFFFFFFFF) * (z >> 32) + linear) & MASK
    return sums[0], sums[1]


def pattern(size: int) -> bytes:
    return bytes((i * 131 + (i >> 8) * 17 + 7) & 0xFF for i in range(size))


# (bytes of pattern, lane bytes, first lane, s0, s1); docs/format.md prints the same numbers.
GOLDEN = [
    (0, 8, 0, 0x0000000000000000, 0x0000000000000000),
    (1, 1, 0, 0x6B25C47DEC43639F, 0x8DA0935493B11387),
    (8, 8, 0, 0x131CFA7E68132DB7, 0x962627158A9CF523),
    (8, 4, 0, 0xE49861630272DC93, 0x300633C51A1B932E),
    (8, 2, 0, 0xD09A34FF0E45ECB7, 0x84B0A6EE4A7CE4D6),
    (8, 1, 0, 0x1644536D36DC3D29, 0x5A06B4C2C1330C4D),
    (4096, 8, 0, 0x696F04597E16ECC6, 0x703894FBC8A79D4F),
    (4104, 8, 0, 0x1832995F6CBC7D77, 0x70DDF11F1265A192),
    (1024, 2, 300, 0xC036FC6AE42369E0, 0x45D56511090488B6),
    (24, 8, 510, 0xF3018F6B66478309, 0x7CB90B1EB432E3B4),
    (5000, 4, 8589934585, 0xF1076DA4583BD75F, 0xB198188FAC6D877E),
    (777, 1, 1099511627776, 0x2331ABB44F0A8F75, 0x94BBEC498A878744),
]


@pytest.fixture(params=_core.isa_available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.isa()
    _core.set_isa(request.param)
    assert _core.isa() == request.param
    yield request.param
    _core.set_isa(before)


@pytest.mark.parametrize(("size", "lane_bytes", "first_lane", "s0", "s1"), GOLDEN)
def test_golden_vectors(
    isa: str, size: int, lane_bytes: int, first_lane: int, s0: int, s1: int
) -> None:
    assert model(pattern(size), lane_bytes, first_lane) == (s0, s1)
    assert _core.additive(pattern(size), lane_bytes, first_lane) == (s0, s1)


def test_version_is_the_documented_one() -> None:
    assert _core.ADDITIVE_VERSION == 1


@pytest.mark.parametrize("lane_bytes", LANES)
def test_variant_equals_model_at_every_length_and_alignment(isa: str, lane_bytes: int) -> None:
    rng = random.Random(lane_bytes)
    backing = rng.randbytes(80 * lane_bytes + 64)
    for lane_count in range(70):
        start = lane_count % 67
        first_lane = rng.choice([0, 1, 500, 511, 512, 2**40 + 509])
        piece = memoryview(backing)[start : start + lane_count * lane_bytes]
        expected = model(bytes(piece), lane_bytes, first_lane)
        assert _core.additive(piece, lane_bytes, first_lane) == expected


@pytest.mark.parametrize("lane_bytes", LANES)
def test_variants_agree_over_lengths_to_a_few_thousand(lane_bytes: int) -> None:
    rng = random.Random(17)
    data = rng.randbytes(4200 * lane_bytes)
    before = _core.isa()
    try:
        for lane_count in [*range(0, 1100, 7), *range(1100, 4200, 61)]:
            first_lane = rng.randrange(2**20)
            piece = memoryview(data)[: lane_count * lane_bytes]
            found = set()
            for name in _core.isa_available():
                _core.set_isa(name)
                found.add(_core.additive(piece, lane_bytes, first_lane))
            assert len(found) == 1, (lane_count, first_lane)
    finally:
        _core.set_isa(before)


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=4000),
    lane_bytes=st.sampled_from(LANES),
    cut=st.integers(0, 500),
    first_lane=st.integers(0, 2**60),
)
def test_parts_add_up_in_any_order(data: bytes, lane_bytes: int, cut: int, first_lane: int) -> None:
    data = data[: len(data) // lane_bytes * lane_bytes]
    cut = min(cut, len(data) // lane_bytes)
    left = _core.additive(data[: cut * lane_bytes], lane_bytes, first_lane)
    right = _core.additive(data[cut * lane_bytes :], lane_bytes, first_lane + cut)
    whole = _core.additive(data, lane_bytes, first_lane)
    assert whole == ((left[0] + right[0]) & MASK, (left[1] + right[1]) & MASK)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lane_bytes=st.sampled_from(LANES),
    lane_count=st.integers(0, 3000),
    changes=st.integers(0, 20),
    first_lane=st.integers(0, 2**40),
)
def test_update_equals_full_sum(
    seed: int, lane_bytes: int, lane_count: int, changes: int, first_lane: int
) -> None:
    rng = random.Random(seed)
    old = rng.randbytes(lane_count * lane_bytes)
    new = bytearray(old)
    for _ in range(changes if new else 0):
        new[rng.randrange(len(new))] ^= rng.randrange(256)
    sums = _core.additive(old, lane_bytes, first_lane)
    updated = _core.additive_update(sums, old, new, lane_bytes, first_lane)
    assert updated == _core.additive(new, lane_bytes, first_lane)
    assert _core.additive_update(updated, new, old, lane_bytes, first_lane) == sums


def test_threads_do_not_change_the_sum(isa: str) -> None:
    data = random.Random(3).randbytes((5 << 20) + 8)
    for lane_bytes in LANES:
        expected = _core.additive(data, lane_bytes, 77)
        for threads in (2, 3, 7, 1000):
            assert _core.additive(data, lane_bytes, 77, threads) == expected


def test_empty_data_has_zero_sums(isa: str) -> None:
    assert _core.additive(b"", 8) == (0, 0)


@pytest.mark.parametrize(
    ("data", "lane_bytes", "first_lane", "threads", "words"),
    [
        (b"abc", 2, 0, 1, "whole number"),
        (b"abc", 3, 0, 1, "1, 2, 4 or 8"),
        (b"", 0, 0, 1, "1, 2, 4 or 8"),
        (b"", -8, 0, 1, "negative"),
        (b"a", 1, -1, 1, "negative"),
        (b"a", 1, 2**63 - 1, 0, "threads"),
        (b"ab", 1, 2**63 - 1, 1, "2**63"),
    ],
)
def test_bad_arguments_are_invalid_input(
    data: bytes, lane_bytes: int, first_lane: int, threads: int, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words.replace("*", r"\*")):
        _core.additive(data, lane_bytes, first_lane, threads)


def test_update_refuses_unequal_lengths() -> None:
    with pytest.raises(InvalidInput, match="equally long"):
        _core.additive_update((0, 0), b"12", b"1", 1)


def test_concurrent_callers_agree() -> None:
    data = random.Random(5).randbytes(1 << 20)
    expected = _core.additive(data, 8)
    found: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(_core.additive(data, 8, 0, 2)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8
