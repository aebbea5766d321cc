"""What Stitch writes, read by an independent reader, byte for byte."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import independent_reader
import numpy as np
import pytest
from publication_forge import File, tensors_of, version_dir
from stitch_tree import State, changed_state, publish_anchor, publish_delta, small_state, write_base

from stitch.cli import main
from stitch.errors import InvalidInput, Unsupported
from stitch.format.tensors import RawTensor
from stitch.publisher import Publisher
from stitch.types import Ref

KINDS = ("xxh3-128", "blake3", "adler32")


def same(found: independent_reader.State, state: State) -> None:
    assert found.keys() == state.keys()
    for name, (dtype, shape, values) in found.items():
        assert (dtype, shape) == (state[name].dtype, state[name].shape)
        assert values.tobytes() == bytes(state[name].data), name


def test_the_reader_is_independent() -> None:
    source = ast.parse(Path(independent_reader.__file__).read_text())
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name.startswith("stitch") for name in imported)


@pytest.mark.parametrize(("encoding", "kind"), list(itertools.product(("xor", "overwrite"), KINDS)))
def test_deltas_and_anchors_read_back(encoding: str, kind: str, tmp_path: Path) -> None:
    state = small_state()
    write_base(tmp_path / "base", state)
    found = independent_reader.read_base(tmp_path / "base")
    same(found, state)
    for version in range(1, 9):
        ref = Ref("run-w", version)
        if version == 4:
            publish_anchor(tmp_path, ref, state)
        else:
            # Version 6 changes nothing, version 7 every byte of every tensor, 8 goes back.
            share, density = {6: (-1.0, 0.0), 7: (1.0, 3.0)}.get(version, (0.6, 0.03))
            after = changed_state(state, version, share=share, density=density)
            publish_delta(
                tmp_path, ref, state, after, encoding=encoding, checksum_format=kind, files=version
            )
            state = after
        found = independent_reader.read_version(version_dir(tmp_path, version), found)
        same(found, state)


def special_changes() -> list[tuple[str, RawTensor, RawTensor]]:
    """B95: high byte only, the sign of zero, a NaN's payload, an fp32 low bit among bf16 (B43)."""
    zero = np.zeros(4, "<f4")
    minus = zero.copy()
    minus[2] = -0.0
    nan = np.frombuffer(b"\x01\x00\xc0\x7f" * 4, "<u4")
    other_nan = nan.copy()
    other_nan[1] ^= 2
    half = np.arange(4, dtype="<u2")
    high = half.copy()
    high[3] ^= 0x8000
    one = np.ones(4, "<f4").view("<u4")
    low = one.copy()
    low[0] ^= 1
    pairs = {
        "zero": (zero, minus),
        "nan": (nan, other_nan),
        "high": (half, high),
        "low": (one, low),
    }
    dtypes = {"zero": "F32", "nan": "F32", "high": "BF16", "low": "F32"}
    return [
        (name, *(RawTensor(name, dtypes[name], (4,), array.tobytes()) for array in arrays))
        for name, arrays in pairs.items()
    ]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_changes_that_proxies_miss_ship(encoding: str, tmp_path: Path) -> None:
    before = {name: old for name, old, _ in special_changes()}
    after = {name: new for name, _, new in special_changes()}
    write_base(tmp_path / "base", before, files=1)
    publish_delta(tmp_path, Ref("run-w", 1), before, after, encoding=encoding, files=1)
    (path,) = version_dir(tmp_path, 1).glob("*.safetensors")
    assert sorted(File(path).names) == sorted(before)
    found = independent_reader.read_base(tmp_path / "base")
    same(independent_reader.read_version(version_dir(tmp_path, 1), found), after)


def test_the_worked_example() -> None:
    """One F32 element, `54c11d3c` to `53c01d3c`."""
    from stitch import _core
    from stitch.checksum import digest

    old, new = bytes.fromhex("54c11d3c"), bytes.fromhex("53c01d3c")
    assert digest("xxh3-128", new) == "c1158ba5a35326bfebfa5ad83e060838"
    xor = _core.xor_encode(old, new)
    overwrite = _core.overwrite_encode(old, new)
    assert xor is not None
    assert xor.hex() == "28b52ffd200421000007010000"
    assert overwrite is not None
    assert overwrite.hex() == "28b52ffd200e71000002000000000000000100000053c0"


def test_writers_refuse_what_no_reader_takes() -> None:
    from stitch.format import write
    from stitch.types import Kind

    good = write.EncodedTensor("a", "F32", (1,), b"x", "0" * 32)
    for bad in (
        [],
        [good, good],
        [write.EncodedTensor("__metadata__", "F32", (1,), b"x", "0" * 32)],
        [write.EncodedTensor("", "F32", (1,), b"x", "0" * 32)],
        [write.EncodedTensor("a", "F32", (1,), b"x", "")],
        [write.EncodedTensor("a", "F32", (1,), b"x", "A" * 32)],
    ):
        with pytest.raises(InvalidInput):
            write.delta_file("model-a-00000-of-00001.safetensors", bad)
    with pytest.raises(InvalidInput):
        write.delta_file("../model.safetensors", [good])
    with pytest.raises(InvalidInput):
        write.anchor_file("m.safetensors", [RawTensor("a", "F32", (2,), b"1234")])
    facts = {
        "ref": Ref("r", 2),
        "kind": Kind.DELTA,
        "base_version": 1,
        "encoding": "xor",
        "checksum_format": "xxh3-128",
        "weight_map": {"a": "m.safetensors"},
        "total_size": None,
        "manifest_name": "stitch-a.json",
        "manifest_blake3": "0" * 64,
    }
    write.encode_index(**facts)
    for change in (
        {"base_version": None},
        {"base_version": 2},
        {"encoding": ""},
        {"encoding": "rsync"},
        {"checksum_format": "md5"},
        {"weight_map": {"a": "../m.safetensors"}},
        {"weight_map": {"": "m.safetensors"}},
        {"kind": Kind.ANCHOR},
        {"manifest_name": "../x"},
    ):
        with pytest.raises((InvalidInput, Unsupported)):
            write.encode_index(**{**facts, **change})
    for attempt in ("", "a/b", "a.b", "x" * 65):
        with pytest.raises(InvalidInput):
            write.manifest_name(attempt)
    assert write.data_file_name("ab", 0, 2, Kind.DELTA) == "model-ab-00000-of-00002.safetensors"
    assert write.data_file_name("ab", 0, 2, Kind.ANCHOR) == "model-ab-00001-of-00002.safetensors"


@pytest.mark.parametrize(("encoding", "kind"), list(itertools.product(("xor", "overwrite"), KINDS)))
def test_what_the_publisher_seals_reads_back(encoding: str, kind: str, tmp_path: Path) -> None:
    """The real publisher on a real store, small files, an anchor among the deltas."""
    state = small_state()
    write_base(tmp_path / "base", state)
    found = independent_reader.read_base(tmp_path / "base")
    root = tmp_path / "root"
    with Publisher(
        f"file://{root}",
        run_id="run-p",
        base=tmp_path / "base",
        encoding=encoding,
        checksum=kind,
        anchor_every=3,
        anchor_ratio=100.0,
        file_bytes_max=600,
        threads=1,
    ) as publisher:
        for version in range(1, 7):
            state = changed_state(state, version, share=-1.0 if version == 5 else 0.6)
            publisher.publish(state).wait(timeout=60)
            directory = version_dir(root / "updates", version)
            found = independent_reader.read_version(directory, found)
            same(found, state)
    assert (root / "latest").read_text() == "run-p/weight_v000006"
    places = ["--base", str(tmp_path / "base"), "--updates", str(root / "updates")]
    out = ["--out", str(tmp_path / "out"), "--run-id", "run-p", "--quiet"]
    assert main(["materialize", *places, "--version", "6", *out]) == 0
    expected = {name: (t.dtype, t.shape, bytes(t.data)) for name, t in state.items()}
    assert tensors_of(tmp_path / "out") == expected
