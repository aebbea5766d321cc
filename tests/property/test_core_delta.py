"""The interop deltas: round trips, independent readers and writers, and hostile payloads."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import _core
from stitch.errors import CorruptData, InvalidInput

Apply = Callable[[bytes, bytes, bytearray, str, int], tuple[str | None, tuple[int, int] | None]]

CODECS = {
    "xor": (_core.xor_encode, _core.xor_apply),
    "overwrite": (_core.overwrite_encode, _core.overwrite_apply),
}


@pytest.fixture(params=_core.isa_available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


def frame(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)  # type: ignore[arg-type]


def unsized_frame(data: bytes, level: int = 1) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


def positions_payload(changes: list[tuple[int, int]]) -> bytes:
    count = len(changes)
    where = struct.pack(f"<{count}I", *(p for p, _ in changes))
    return struct.pack("<I", count) + where + bytes(v for _, v in changes)


def changed_copy(data: bytes, seed: int, changes: int) -> bytes:
    rng = random.Random(seed)
    target = bytearray(data)
    for _ in range(changes):
        target[rng.randrange(len(target))] ^= rng.randrange(1, 256)
    return bytes(target)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**32), changes=st.integers(0, 40))
def test_apply_inverts_encode(codec: str, size: int, seed: int, changes: int) -> None:
    encode, apply = CODECS[codec]
    base = random.Random(seed).randbytes(size)
    target = changed_copy(base, seed + 1, changes)
    blob = encode(base, target)
    if base == target:
        assert blob is None
        return
    assert blob is not None
    out = bytearray(size)
    digest, sums = apply(blob, base, out, "xxh3-128", 1)
    assert bytes(out) == target
    assert digest == xxhash.xxh3_128_hexdigest(target)
    assert sums == _core.additive(target, 1)
    in_place = bytearray(base)
    assert apply(blob, in_place, in_place, "xxh3-128", 1) == (digest, sums)
    assert bytes(in_place) == target


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("density", [0.00001, 0.01, 1.0])
def test_large_tensors_round_trip(isa: str, codec: str, density: float) -> None:
    encode, apply = CODECS[codec]
    size = (1 << 20) + 40
    base = random.Random(1).randbytes(size)
    target = changed_copy(base, 2, int(size * density))
    blob = encode(base, target)
    assert blob is not None
    for out in (bytearray(size), bytearray(base)):
        source = base if out != base else out
        digest, sums = apply(blob, source, out, "adler32", 8)
        assert bytes(out) == target
        assert digest == _core.adler32(target)
        assert sums == _core.additive(target, 8)


def test_encoded_frames_are_what_other_readers_expect() -> None:
    base = random.Random(3).randbytes(200_000)
    target = changed_copy(base, 4, 900)
    xor_blob, overwrite_blob = _core.xor_encode(base, target), _core.overwrite_encode(base, target)
    assert xor_blob is not None
    assert overwrite_blob is not None
    for blob in (xor_blob, overwrite_blob):
        parameters = zstandard.get_frame_parameters(blob)
        assert not parameters.has_checksum
        assert parameters.dict_id == 0
    plain = zstandard.ZstdDecompressor().decompress(xor_blob)  # one-shot: needs the content size
    assert plain == bytes(a ^ b for a, b in zip(base, target, strict=True))
    changed = [(i, target[i]) for i in range(len(base)) if base[i] != target[i]]
    assert zstandard.ZstdDecompressor().decompress(overwrite_blob) == positions_payload(changed)


def test_worked_example_of_the_publication_format() -> None:
    base, target = bytes.fromhex("54c11d3c"), bytes.fromhex("53c01d3c")
    for codec, blob in (
        ("xor", "28b52ffd200421000007010000"),
        ("overwrite", "28b52ffd200e71000002000000000000000100000053c0"),
    ):
        encode, apply = CODECS[codec]
        assert encode(base, target) == bytes.fromhex(blob)
        out = bytearray(4)
        digest, _ = apply(bytes.fromhex(blob), base, out, "xxh3-128", 0)
        assert (digest, bytes(out)) == ("c1158ba5a35326bfebfa5ad83e060838", target)


@pytest.mark.parametrize("level", [1, 3, 19, 22])
def test_frames_of_other_levels_and_without_content_size_are_read(level: int) -> None:
    base = random.Random(5).randbytes(300_000)
    target = changed_copy(base, 6, 3000)
    delta = bytes(a ^ b for a, b in zip(base, target, strict=True))
    changes = [(i, target[i]) for i in range(len(base)) if delta[i]]
    for codec, payload in (("xor", delta), ("overwrite", positions_payload(changes))):
        out = bytearray(len(base))
        CODECS[codec][1](unsized_frame(payload, level), base, out, "none", 0)
        assert bytes(out) == target


def test_overwrite_takes_positions_in_any_order() -> None:
    base = bytes(100_000)
    changes = [(99_999, 1), (0, 2), (50_000, 3), (7, 4)]
    out = bytearray(base)
    digest, _ = _core.overwrite_apply(frame(positions_payload(changes)), out, out, "xxh3-128", 0)
    expected = bytearray(base)
    for position, value in changes:
        expected[position] = value
    assert out == expected
    assert digest == xxhash.xxh3_128_hexdigest(bytes(expected))


BASE = random.Random(9).randbytes(400_000)
GOOD_XOR = bytes(300_000) + b"\x01" * 100_000
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"
# A frame header that claims 2**40 bytes: single segment, 8-byte content size, one raw block.
HUGE_CLAIM = bytes.fromhex("28b52ffd e0") + struct.pack("<Q", 1 << 40) + bytes.fromhex("010000")
# A window descriptor of 2**41 bytes and no content size.
HUGE_WINDOW = bytes.fromhex("28b52ffd 00 f8") + bytes.fromhex("010000")
DICTIONARY_ID = bytes.fromhex("28b52ffd 21 2a 04 210000 07010000")


def zeros_frame(blocks: int, content_size: int | None) -> bytes:
    """`blocks` run-length blocks of 128 KiB of zeros, and whatever content size is claimed."""
    if content_size is None:
        header = bytes.fromhex("28b52ffd 00 50")  # window of 1 MiB
    else:
        header = bytes.fromhex("28b52ffd c0 50") + struct.pack("<Q", content_size)
    block = (128 << 10) << 3 | 1 << 1
    last = (block | 1).to_bytes(3, "little") + b"\0"
    return header + (block.to_bytes(3, "little") + b"\0") * (blocks - 1) + last


XOR_DAMAGE = {
    "empty blob": (b"", "magic"),
    "not zstd": (b"hello world, this is no frame", "magic"),
    "header only": (frame(GOOD_XOR)[:6], "frame"),
    "cut in the middle": (frame(GOOD_XOR)[: len(frame(GOOD_XOR)) // 2], "cut short"),
    "last byte missing": (unsized_frame(GOOD_XOR)[:-1], "cut short"),
    "byte after the frame": (frame(GOOD_XOR) + b"x", "follow"),
    "second frame": (frame(GOOD_XOR) + frame(b""), "follow"),
    "skippable frame first": (SKIPPABLE + frame(GOOD_XOR), "magic"),
    "skippable frame last": (frame(GOOD_XOR) + SKIPPABLE, "follow"),
    "dictionary id": (DICTIONARY_ID, "dictionary"),
    "one byte short": (frame(GOOD_XOR[:-1]), "399999"),
    "one byte long": (frame(GOOD_XOR + b"x"), "400001"),
    "short without content size": (unsized_frame(GOOD_XOR[:-1]), "399999"),
    "long without content size": (unsized_frame(GOOD_XOR + b"x"), "more bytes"),
    "bomb without content size": (unsized_frame(bytes(50_000_000)), "more bytes"),
    "content size claims 2**40": (HUGE_CLAIM, "claims"),
    "window of 2**41": (HUGE_WINDOW, "frame"),
    "content size claims 0": (zeros_frame(3, 0), "frame"),
    "content size claims too little": (zeros_frame(4, 400_000), "frame"),
    "content size claims too much": (zeros_frame(3, 400_000), "frame"),
}

OVERWRITE_DAMAGE = {
    "empty payload": (frame(b""), "4-byte count"),
    "count cut": (frame(b"\x01\x00\x00"), "4-byte count"),
    "count above the tensor": (frame(struct.pack("<I", 400_001)), "exceeds"),
    "values missing": (frame(positions_payload([(1, 2), (3, 4)])[:-1]), "need"),
    "extra byte": (frame(positions_payload([(1, 2)]) + b"x"), "need"),
    "position at the end": (frame(positions_payload([(400_000, 1)])), "past"),
    "position 2**32-1": (frame(positions_payload([(0, 1), (2**32 - 1, 1)])), "past"),
    "adjacent duplicate": (frame(positions_payload([(5, 1), (5, 2)])), "twice"),
    "distant duplicate": (frame(positions_payload([(5, 1), (9, 2), (5, 1)])), "twice"),
    "count of 2**32-1": (frame(b"\xff\xff\xff\xff"), "exceeds"),
    "payload larger than any": (frame(bytes(4 + 5 * 400_000 + 1)), "claims"),
    "bomb without content size": (unsized_frame(bytes(50_000_000)), "more bytes"),
    "cut in the middle": (frame(positions_payload([(1, 2)]))[:-2], "frame"),
    "byte after the frame": (frame(positions_payload([(1, 2)])) + b"x", "follow"),
    "content size claims 2**40": (HUGE_CLAIM, "claims"),
}


def damage_cases() -> list[object]:
    return [
        pytest.param(apply, blob, words, id=f"{codec}-{name}".replace(" ", "-"))
        for codec, apply, cases in (
            ("xor", _core.xor_apply, XOR_DAMAGE),
            ("overwrite", _core.overwrite_apply, OVERWRITE_DAMAGE),
        )
        for name, (blob, words) in cases.items()
    ]


@pytest.mark.parametrize(("apply", "blob", "words"), damage_cases())
def test_damaged_payloads_are_refused_and_undone(apply: Apply, blob: bytes, words: str) -> None:
    base = bytes(BASE)
    with pytest.raises(CorruptData, match=words):
        apply(blob, base, bytearray(len(base)), "xxh3-128", 8)
    assert base == BASE
    in_place = bytearray(BASE)
    with pytest.raises(CorruptData):
        apply(blob, in_place, in_place, "xxh3-128", 8)
    assert bytes(in_place) == BASE


def test_flipped_bits_never_leave_a_half_applied_target() -> None:
    rng = random.Random(11)
    target = changed_copy(BASE, 12, 4000)
    blob = _core.xor_encode(BASE, target)
    assert blob is not None
    refused = 0
    for _ in range(150):
        damaged = bytearray(blob)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        in_place = bytearray(BASE)
        try:
            digest, _ = _core.xor_apply(bytes(damaged), in_place, in_place, "xxh3-128", 0)
        except CorruptData:
            refused += 1
            assert bytes(in_place) == BASE
        else:
            assert digest == xxhash.xxh3_128_hexdigest(bytes(in_place))
    assert refused > 10


@pytest.mark.parametrize("codec", CODECS)
def test_empty_tensors(codec: str) -> None:
    encode, apply = CODECS[codec]
    assert encode(b"", b"") is None
    payload = b"" if codec == "xor" else bytes(4)
    assert apply(frame(payload), b"", bytearray(), "xxh3-128", 8) == (
        "99aa06d3014798d86001c324468d497f",
        (0, 0),
    )


@pytest.mark.parametrize("codec", CODECS)
def test_misuse_is_invalid_input(codec: str) -> None:
    encode, apply = CODECS[codec]
    blob = encode(b"abcd", b"abcx")
    assert blob is not None
    arena = bytearray(b"abcdefgh")
    overlapping = memoryview(arena)
    with pytest.raises(InvalidInput, match="overlaps"):
        apply(blob, overlapping[0:4], overlapping[2:6], "none", 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="agree"):
        apply(blob, b"abcd", bytearray(5), "none", 0)
    with pytest.raises(InvalidInput, match="digest"):
        apply(blob, b"abcd", bytearray(4), "sha256", 0)
    with pytest.raises(InvalidInput, match="lane"):
        apply(blob, b"abcd", bytearray(4), "none", 8)
    with pytest.raises(InvalidInput, match="equal lengths"):
        encode(b"abcd", b"abc")
    with pytest.raises(InvalidInput, match="level"):
        encode(b"abcd", b"abcx", 0)
    arena[4:] = bytes(4)
    joined = memoryview(bytearray(blob))
    with pytest.raises(InvalidInput, match="overlaps blob"):
        apply(joined, bytes(4), joined[:4], "none", 0)  # type: ignore[arg-type]
    # Neighbours in one allocation are disjoint.
    apply(blob, overlapping[0:4], overlapping[4:8], "none", 0)  # type: ignore[arg-type]
    assert bytes(arena) == b"abcdabcx"


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=5000), level=st.integers(1, 19))
def test_zstd_round_trip(data: bytes, level: int) -> None:
    blob = _core.zstd_compress(data, level)
    assert _core.zstd_decompress(blob, len(data)) == data
    assert zstandard.ZstdDecompressor().decompress(blob) == data
    assert _core.zstd_decompress(unsized_frame(data), len(data)) == data
    assert _core.zstd_decompress(unsized_frame(data), len(data) + 10_000_000) == data
    if data:
        for refused in (blob, unsized_frame(data)):
            with pytest.raises(CorruptData):
                _core.zstd_decompress(refused, len(data) - 1)


def test_zstd_decompress_grows_past_its_first_buffer() -> None:
    data = random.Random(13).randbytes(1 << 20) + bytes(3 << 20)
    assert _core.zstd_decompress(unsized_frame(data), 1 << 40) == data
    with pytest.raises(CorruptData, match="claims"):
        _core.zstd_decompress(HUGE_CLAIM, 1 << 50)
    with pytest.raises(InvalidInput, match="negative"):
        _core.zstd_decompress(frame(b"x"), -1)


BOMBS = """
import resource, struct, sys
from stitch import _core
from stitch.errors import CorruptData
from test_core_delta import zeros_frame

bombs = [zeros_frame(40_000, None), zeros_frame(40_000, 5 << 30), zeros_frame(40_000, 0)]
with open("/proc/self/statm") as statm:
    held = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (300 << 20), held + (300 << 20)))
tensor = bytearray(1 << 20)
for bomb in bombs:
    for decode in (
        lambda: _core.xor_apply(bomb, tensor, tensor, "none", 0),
        lambda: _core.overwrite_apply(bomb, tensor, tensor, "none", 0),
        lambda: _core.zstd_decompress(bomb, 1 << 20),
    ):
        try:
            decode()
        except CorruptData:
            continue
        raise AssertionError("accepted")
print("bounded")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space through Linux's rlimit")
def test_bombs_of_five_gigabytes_stay_within_the_memory_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMBS],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "bounded", done.stderr
