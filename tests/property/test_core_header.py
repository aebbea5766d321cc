"""The safetensors header parser: every kind of damage is named, and good headers round-trip."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import _core
from stitch.errors import CorruptData, InvalidInput

BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"], 8),
    **dict.fromkeys(["F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


def head(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def parse(text: str | bytes, data_size: int) -> object:
    raw = head(text)
    return _core.parse_safetensors_header(raw, len(raw) + data_size)


def entry(dtype: str, shape: Sequence[object], begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def document(**tensors: dict[str, object]) -> str:
    return json.dumps(tensors)


U8_4 = entry("U8", [4], 0, 4)


def test_a_good_header_gives_entries_in_data_order() -> None:
    text = json.dumps(
        {
            "__metadata__": {"format": "pt", "ключ": "値"},
            "b": entry("BF16", [2, 3], 4, 16),
            "a": entry("F32", [], 0, 4),
            "empty": entry("I64", [0, 7], 16, 16),
        },
        ensure_ascii=False,
    )
    raw = head(text + "   ")
    entries, metadata, offset = _core.parse_safetensors_header(raw + b"ignored", len(raw) + 16)
    assert entries == [
        ("a", "F32", (), 0, 4),
        ("b", "BF16", (2, 3), 4, 16),
        ("empty", "I64", (0, 7), 16, 16),
    ]
    assert metadata == {"format": "pt", "ключ": "値"}
    assert offset == len(raw)


def test_a_file_without_tensors_is_good() -> None:
    assert parse("{}", 0) == ([], {}, 10)
    assert parse('{"__metadata__":{}}   ', 0) == ([], {}, 30)


@pytest.mark.parametrize("dtype", BITS)
def test_dtype_widths(dtype: str) -> None:
    count = 8
    size = BITS[dtype] * count // 8
    entries, _, _ = parse(document(x=entry(dtype, [2, 4], 0, size)), size)  # type: ignore[misc]
    assert entries[0][1:] == (dtype, (2, 4), 0, size)
    with pytest.raises(CorruptData, match=r"'x'.*does not fit"):
        parse(document(x=entry(dtype, [2, 4], 0, size + 1)), size + 1)


STRUCTURE = {
    "not an object": ("[]", 0, "start with"),
    "space first": (" {}", 0, "start with"),
    "byte order mark": ("\ufeff{}", 0, "start with"),
    "empty": ("", 0, "start with"),
    "cut": ('{"a":', 0, "JSON"),
    "text after": ("{} x", 0, "JSON"),
    "NUL padding": ("{}\0\0", 0, "JSON"),
    "text after a NUL": ('{}\0{"a": 1}', 0, "JSON"),
    "trailing comma": ("{},", 0, "JSON"),
    "comment": ("{/* */}", 0, "JSON"),
    "bad utf-8": (b'{"\xff": 1}', 0, "JSON"),
    "overlong utf-8": (b'{"\xc0\xaf": 1}', 0, "JSON"),
    "lone surrogate": (r'{"\ud800": 1}', 0, "JSON"),
    "NUL in a name": (r'{"a\u0000b": {}}', 0, "NUL"),
    "NUL in a key of metadata": (r'{"__metadata__": {"a\u0000": "b"}}', 0, "NUL"),
    "entry is a number": ('{"a": 1}', 0, "'a' is a number"),
    "entry is null": ('{"a": null}', 0, "'a' is null"),
    "entry is a list": ('{"a": []}', 0, "'a' is an array"),
    "deep nesting": ('{"a":' + "[" * 100_000, 0, "'a' is an array"),
    "deep objects": ('{"a":' * 100_000, 0, "unexpected key"),
    "deep in shape": ('{"a":{"shape":' + "[" * 100_000, 0, "shape holds an array"),
    "duplicate tensor": (
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "duplicate name 'a'",
    ),
    "duplicate field": ('{"a":{"dtype":"U8","dtype":"U8"}}', 0, "duplicate name 'dtype'"),
    "duplicate metadata": ('{"__metadata__":{},"__metadata__":{}}', 0, "duplicate name"),
    "duplicate metadata key": ('{"__metadata__":{"k":"1","k":"2"}}', 0, "duplicate name 'k'"),
    "escaped duplicate": (
        r'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        r'"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "duplicate name 'a'",
    ),
    "metadata number": ('{"__metadata__":{"k":1}}', 0, "'k' is a number"),
    "metadata object": ('{"__metadata__":{"k":{}}}', 0, "'k' is an object"),
    "metadata null": ('{"__metadata__":{"k":null}}', 0, "'k' is null"),
    "metadata list": ('{"__metadata__":[]}', 0, "is an array"),
    "unknown key": ('{"a":{"dtype":"U8","strides":[1]}}', 0, "unexpected key 'strides'"),
    "no dtype": ('{"a":{"shape":[0],"data_offsets":[0,0]}}', 0, "'a': lacks dtype"),
    "no shape": ('{"a":{"dtype":"U8","data_offsets":[0,0]}}', 0, "'a': lacks shape"),
    "no offsets": ('{"a":{"dtype":"U8","shape":[0]}}', 0, "'a': lacks data_offsets"),
    "dtype is a number": ('{"a":{"dtype":8}}', 0, "dtype is a number"),
    "shape is a string": ('{"a":{"shape":"4"}}', 0, "shape is a string"),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_broken_structure_is_named(case: str) -> None:
    text, data_size, words = STRUCTURE[case]
    with pytest.raises(CorruptData, match=words):
        parse(text, data_size)


SPANS = {
    "negative dim": (document(a=entry("U8", [-4], 0, 4)), 4, "shape holds a negative"),
    "negative zero": ('{"a":{"shape":[-0]}}', 0, "shape holds a negative"),
    "float dim": (document(a=entry("U8", [4.0], 0, 4)), 4, "shape holds a number that is no"),
    "boolean dim": (document(a=entry("U8", [True], 0, 1)), 1, "shape holds a boolean"),
    "text dim": (document(a=entry("U8", ["4"], 0, 4)), 4, "shape holds a string"),
    "dim of 2**64": (document(a=entry("U8", [2**64], 0, 4)), 4, "no 64-bit integer"),
    "negative offset": (document(a=entry("U8", [4], -4, 0)), 4, "data_offsets holds a negative"),
    "float offset": (document(a=entry("U8", [4], 0, 4.0)), 4, "data_offsets holds a number"),
    "three offsets": ('{"a":{"data_offsets":[0,4,4]}}', 4, "more than 2"),
    "one offset": ('{"a":{"data_offsets":[0]}}', 4, "it needs 2"),
    "begin after end": (document(a=entry("U8", [4], 4, 0)), 4, "begins after"),
    "end past the file": (document(a=entry("U8", [8], 0, 8)), 4, "past the file"),
    "span too short": (document(a=entry("U8", [4], 0, 3)), 3, "'a'.*does not fit"),
    "shape overflow": (document(a=entry("F64", [2**62, 2**62], 0, 4)), 4, "overflow"),
    "bits overflow": (document(a=entry("F64", [2**60], 0, 4)), 4, "overflow"),
    "65 dimensions": (document(a=entry("U8", [1] * 65, 0, 1)), 1, "more than 64 dim"),
    "unknown dtype": (document(a=entry("F4_X", [4], 0, 2)), 2, "unknown dtype 'F4_X'"),
    "lower-case dtype": (document(a=entry("u8", [4], 0, 4)), 4, "unknown dtype 'u8'"),
    "half a byte": (document(a=entry("F4", [3], 0, 2)), 2, "inside a byte"),
    "gap first": (document(a=entry("U8", [4], 1, 5)), 5, "gap of 1"),
    "gap between": (document(a=U8_4, b=entry("U8", [2], 5, 7)), 7, "'b': gap of 1"),
    "overlap": (document(a=U8_4, b=entry("U8", [4], 3, 7)), 7, "'b'.*overlaps"),
    "same span twice": (document(a=U8_4, b=U8_4), 4, "overlaps"),
    "trailing bytes": (document(a=U8_4), 5, "1 trailing"),
    "data without tensors": ("{}", 3, "3 trailing"),
}


@pytest.mark.parametrize("case", SPANS)
def test_broken_spans_are_named(case: str) -> None:
    text, data_size, words = SPANS[case]
    with pytest.raises(CorruptData, match=words):
        parse(text, data_size)


def test_hostile_names_are_shown_bounded_and_printable() -> None:
    name = "x\x1b[31m" + "é" * 4000
    with pytest.raises(CorruptData) as caught:
        parse(json.dumps({name: entry("NOPE", [4], 0, 4)}), 4)
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("length", "file_size", "words"),
    [
        (0, 7, "only 7 bytes"),
        (100, 107, "exceeds the file"),
        (2**64 - 1, 2**40, "100 MiB"),
        ((100 << 20) + 1, 2**40, "100 MiB"),
        (2**63, 8, "100 MiB"),
    ],
)
def test_header_length_is_checked(length: int, file_size: int, words: str) -> None:
    with pytest.raises(CorruptData, match=words):
        _core.header_size(struct.pack("<Q", length), file_size)
    with pytest.raises(CorruptData, match=words):
        _core.parse_safetensors_header(struct.pack("<Q", length), file_size)


def test_header_size_gives_the_data_offset() -> None:
    assert _core.header_size(struct.pack("<Q", 100), 108) == 108
    assert _core.header_size(struct.pack("<Q", 100 << 20), 2**40) == 8 + (100 << 20)


def test_too_few_bytes_given_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidInput, match="8 bytes"):
        _core.header_size(b"1234567", 100)
    with pytest.raises(InvalidInput, match="only 12"):
        _core.parse_safetensors_header(struct.pack("<Q", 50) + b"{   ", 58)
    with pytest.raises(InvalidInput, match="negative"):
        _core.header_size(b"12345678", -1)


@settings(max_examples=100, deadline=None)
@given(
    tensors=st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
            st.sampled_from([name for name, bits in BITS.items() if bits % 8 == 0]),
            st.lists(st.integers(0, 5), max_size=4),
        ),
        max_size=8,
        unique_by=lambda tensor: tensor[0],
    ),
    shuffle=st.randoms(),
)
def test_generated_headers_round_trip(
    tensors: list[tuple[str, str, list[int]]], shuffle: object
) -> None:
    tensors = [tensor for tensor in tensors if tensor[0] != "__metadata__"]
    expected, at = [], 0
    for name, dtype, shape in tensors:
        size = BITS[dtype] // 8
        for dim in shape:
            size *= dim
        expected.append((name, dtype, tuple(shape), at, at + size))
        at += size
    listed = list(expected)
    shuffle.shuffle(listed)  # type: ignore[attr-defined]
    text = json.dumps({n: entry(d, s, b, e) for n, d, s, b, e in listed})
    entries, _, _ = parse(text, at)  # type: ignore[misc]
    assert [e for e in entries if e[3] != e[4]] == [e for e in expected if e[3] != e[4]]
    assert sorted(entries) == sorted(expected)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60), at=st.integers(0, 200), file_size=st.integers(0, 400))
def test_arbitrary_damage_gives_only_corrupt_data(raw: bytes, at: int, file_size: int) -> None:
    good = head(document(a=U8_4, b=entry("F32", [1], 4, 8)))
    at = min(at, len(good))
    damaged = good[:at] + raw + good[at + len(raw) :]
    try:
        _core.parse_safetensors_header(damaged, max(file_size, len(damaged)))
    except (CorruptData, InvalidInput):
        pass
