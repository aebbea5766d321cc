"""Quality of the additive checksum: structured changes, cancelling sums, avalanche, collisions.

None of these prove that a change is always seen; each is a family of accidents that a careless
position key or a careless lane function would miss (docs/format.md, "Limits").
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from stitch import _core, checksum

MASK = 2**64 - 1
LANES = (1, 2, 4, 8)
BLOCK = 512

Words = NDArray[np.uint64]


def sums(data: bytes, lane_bytes: int) -> tuple[int, int]:
    return _core.additive(data, lane_bytes)


def lane_terms(value: int, lane_bytes: int, lane_count: int) -> list[tuple[int, int]]:
    """What one lane of `value` adds over a lane of zero, at every position."""
    one, zero = value.to_bytes(lane_bytes, "little"), bytes(lane_bytes)
    terms = []
    for lane in range(lane_count):
        held, empty = (_core.additive(raw, lane_bytes, lane) for raw in (one, zero))
        terms.append(((held[0] - empty[0]) & MASK, (held[1] - empty[1]) & MASK))
    return terms


@pytest.mark.parametrize("lane_bytes", LANES)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x5A])
def test_every_single_bit_changes_both_sums(lane_bytes: int, fill: int) -> None:
    size = 24 * lane_bytes
    data = bytes([fill]) * size
    before = sums(data, lane_bytes)
    seen = set()
    for bit in range(size * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        after = _core.additive_update(before, data, changed, lane_bytes)
        assert after[0] != before[0]
        assert after[1] != before[1]
        seen.add(after)
    assert len(seen) == size * 8


@pytest.mark.parametrize("lane_bytes", LANES)
def test_swapped_lanes_change_both_sums(lane_bytes: int) -> None:
    rng = random.Random(lane_bytes)
    lanes = [rng.randbytes(lane_bytes) for _ in range(3 * BLOCK)]
    before = sums(b"".join(lanes), lane_bytes)
    pairs = [(i, j) for i, j in itertools.combinations(range(24), 2)]
    pairs += [(i, i + BLOCK) for i in range(0, BLOCK, 9)]
    pairs += [tuple(rng.sample(range(3 * BLOCK), 2)) for _ in range(200)]  # type: ignore[misc]
    for i, j in pairs:
        if lanes[i] == lanes[j]:
            continue
        swapped = lanes.copy()
        swapped[i], swapped[j] = lanes[j], lanes[i]
        after = sums(b"".join(swapped), lane_bytes)
        assert after[0] != before[0]
        assert after[1] != before[1]


def test_swapped_tensors_change_the_model_digest() -> None:
    rng = random.Random(1)
    first, second = (
        checksum.additive_lanes(rng.randbytes(4096), lane_bytes=8, first_lane=0) for _ in range(2)
    )

    def digest(a: checksum.Checksum, b: checksum.Checksum) -> str:
        return checksum.model_digest(
            [
                checksum.tensor_term("a.weight", "BF16", (32, 64), a),
                checksum.tensor_term("b.weight", "BF16", (32, 64), b),
            ]
        )

    assert digest(first, second) != digest(second, first)
    assert digest(first, second) != digest(first, first)


@pytest.mark.parametrize("lane_bytes", LANES)
def test_shifted_data_differs(lane_bytes: int) -> None:
    data = random.Random(2).randbytes(4 * BLOCK * lane_bytes)
    distances = [1, lane_bytes, 2 * lane_bytes, 64, BLOCK * lane_bytes, 2 * BLOCK * lane_bytes]
    seen = {sums(data, lane_bytes)}
    for distance in dict.fromkeys(distances):
        seen.add(sums(data[distance:] + data[:distance], lane_bytes))
        seen.add(sums(bytes(distance) + data[:-distance], lane_bytes))
    assert len(seen) == 1 + 2 * len(dict.fromkeys(distances))


@pytest.mark.parametrize("lane_bytes", LANES)
def test_repeated_patterns_differ(lane_bytes: int) -> None:
    """Constant fills, and one block repeated with one copy replaced, are all told apart."""
    size = 2 * BLOCK * lane_bytes
    assert len({sums(bytes([fill]) * size, lane_bytes) for fill in range(256)}) == 256
    rng = random.Random(3)
    block, other = (rng.randbytes(BLOCK * lane_bytes) for _ in range(2))
    seen = {sums(block * 16, lane_bytes)}
    for place in range(16):
        blocks = [block] * 16
        blocks[place] = other
        seen.add(sums(b"".join(blocks), lane_bytes))
    assert len(seen) == 17


@pytest.mark.parametrize("lane_bytes", LANES)
def test_low_entropy_data_differs(lane_bytes: int) -> None:
    """Zeros with one or two ones: all 2 million placements over 2,000 lanes are told apart."""
    lane_count = 2000
    terms = lane_terms(1, lane_bytes, lane_count)
    assert len(set(terms)) == lane_count
    singles0, singles1 = (np.array(column, dtype=np.uint64) for column in zip(*terms, strict=True))
    i, j = np.triu_indices(lane_count, k=1)
    folded = [  # 128 bits to 64, one to one but for chance
        s0 * np.uint64(0x9E3779B97F4A7C15) ^ s1
        for s0, s1 in ((singles0, singles1), (singles0[i] + singles0[j], singles1[i] + singles1[j]))
    ]
    assert len(np.unique(np.concatenate(folded))) == lane_count + len(i)


@pytest.mark.parametrize("lane_bytes", LANES)
def test_changes_that_cancel_as_integers_are_seen(lane_bytes: int) -> None:
    """+d in one lane and -d in another keep a plain sum, whatever the distance."""
    rng = random.Random(4)
    top = 1 << (8 * lane_bytes)
    lanes = [rng.randrange(top) for _ in range(4 * BLOCK)]
    data = b"".join(v.to_bytes(lane_bytes, "little") for v in lanes)
    before = sums(data, lane_bytes)
    for _ in range(600):
        d = rng.choice([1, 2, 3, top // 2, rng.randrange(1, top)])
        i, j = rng.sample(range(4 * BLOCK), 2)
        changed = bytearray(data)
        for lane, value in ((i, lanes[i] + d), (j, lanes[j] - d)):
            at = lane * lane_bytes
            changed[at : at + lane_bytes] = (value % top).to_bytes(lane_bytes, "little")
        after = _core.additive_update(before, data, changed, lane_bytes)
        assert after[0] != before[0]
        assert after[1] != before[1]


@pytest.mark.parametrize("lane_bytes", LANES)
def test_rectangles_do_not_cancel(lane_bytes: int) -> None:
    """+d, -d, -d, +d over two offsets and two blocks defeats any key that is a sum of an offset
    part and a block part."""
    rng = random.Random(5)
    top = 1 << (8 * lane_bytes)
    blocks = 64
    base = rng.randrange(top).to_bytes(lane_bytes, "little")
    data = base * (blocks * BLOCK)
    value = int.from_bytes(base, "little")
    before = sums(data, lane_bytes)
    rectangles = [(r, r + 1, b, b + 1) for r in range(0, BLOCK - 1, 17) for b in (0, 5, 62)]
    rectangles += [
        (*sorted(rng.sample(range(BLOCK), 2)), *sorted(rng.sample(range(blocks), 2)))  # type: ignore[misc]
        for _ in range(300)
    ]
    for r1, r2, b1, b2 in rectangles:
        d = rng.choice([1, 2, top // 2, rng.randrange(1, top)])
        changed = bytearray(data)
        for b, r, sign in ((b1, r1, 1), (b1, r2, -1), (b2, r1, -1), (b2, r2, 1)):
            at = (b * BLOCK + r) * lane_bytes
            changed[at : at + lane_bytes] = ((value + sign * d) % top).to_bytes(
                lane_bytes, "little"
            )
        after = _core.additive_update(before, data, changed, lane_bytes)
        assert after[0] != before[0]
        assert after[1] != before[1]


@pytest.mark.parametrize("lane_bytes", LANES)
def test_avalanche(lane_bytes: int) -> None:
    """A flipped bit moves many of the 128 bits, for every bit of a lane.

    A change of bit k of a half adds +-2**k times the other half: bits below k of that sum stay,
    bits above k + 32 move by carries alone, and about 17 of 64 bits move on average, not 32. The
    model digest hashes the sums and has the full effect.
    """
    rng = random.Random(6)
    moved = np.zeros(8 * lane_bytes)
    rounds = 200
    for _ in range(rounds):
        lane = rng.randrange(2**30)
        value = rng.randbytes(lane_bytes)
        before = _core.additive(value, lane_bytes, lane)
        for bit in range(8 * lane_bytes):
            changed = bytearray(value)
            changed[bit // 8] ^= 1 << (bit % 8)
            after = _core.additive(changed, lane_bytes, lane)
            moved[bit] += sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True))
    moved /= rounds
    assert moved.min() > 20
    assert 30 < moved.mean() < 70


class _Narrow:
    """The checksum with halves of 8 bits instead of 32: lanes of 16 bits, two 16-bit sums."""

    def __init__(self, rng: np.random.Generator, lane_count: int) -> None:
        self.keys = rng.integers(0, 2**16, (2, lane_count), dtype=np.uint64)

    def sums(self, values: Words) -> Words:
        """`values` (messages, lanes) of 16 bits to 32-bit digests (messages,)."""
        z0, z1 = values ^ self.keys[0], values ^ self.keys[1]
        turned = ((values << np.uint64(8)) | (values >> np.uint64(8))) & np.uint64(0xFFFF)
        low, shift = np.uint64(0xFF), np.uint64(8)
        s0 = ((z0 & low) * (z0 >> shift) + values).sum(axis=1) & np.uint64(0xFFFF)
        s1 = ((z1 & low) * (z1 >> shift) + turned).sum(axis=1) & np.uint64(0xFFFF)
        return s1 << np.uint64(16) | s0


def _collisions(digests: Words) -> int:
    """Pairs with equal digests."""
    _, counts = np.unique(digests, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def test_random_messages_collide_as_often_as_chance_at_reduced_width() -> None:
    rng = np.random.default_rng(7)
    found, messages, rounds = 0, 1 << 16, 12
    for _ in range(rounds):
        narrow = _Narrow(rng, 6)
        values = rng.integers(0, 2**16, (messages, 6), dtype=np.uint64)
        found += _collisions(narrow.sums(values))
    expected = rounds * messages * (messages - 1) / 2 / 2**32
    assert 0.3 * expected < found < 2.0 * expected


@pytest.mark.parametrize("change", ["low half", "both halves", "one ulp"])
def test_two_lane_changes_collide_no_more_than_the_bound_at_reduced_width(change: str) -> None:
    """For halves of w bits, two changed lanes go unseen at most about once in 2**(2w) keys."""
    rng = np.random.default_rng(8)
    keys = 1 << 21
    before = rng.integers(0, 2**16, (1, 2), dtype=np.uint64)
    step = {"low half": [0x0003, 0x0003], "both halves": [0x0101, 0x0101], "one ulp": [1, 1]}
    after = before ^ np.array([step[change]], dtype=np.uint64)
    narrow = _Narrow(rng, 2)
    narrow.keys = rng.integers(0, 2**16, (2, keys, 2), dtype=np.uint64)
    same = narrow.sums(np.repeat(before, keys, axis=0)) == narrow.sums(
        np.repeat(after, keys, axis=0)
    )
    assert int(same.sum()) <= 4 * keys / 2**16
