"""Any model, any change, any encoding: written, rebuilt, and read by the independent reader."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import independent_reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publication_forge import tensors_of, version_dir
from stitch_tree import State, digest_of, publish_anchor, publish_delta, write_base

from stitch.env import Env
from stitch.format.dtypes import DTYPE_BITS
from stitch.format.materialize import materialize
from stitch.format.tensors import RawTensor
from stitch.types import Ref

DTYPES = sorted(
    dtype for dtype, bits in DTYPE_BITS.items() if bits in independent_reader.BITS.values()
)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> State:
    found: State = {}
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from([d for d in DTYPES if d in independent_reader.BITS]))
        shape = draw(shapes)
        bits = independent_reader.BITS[dtype]
        for extent in shape:
            bits *= extent
        if bits % 8:
            shape, bits = (2, *shape), 2 * bits
        data = draw(st.binary(min_size=bits // 8, max_size=bits // 8))
        found[name] = RawTensor(name, dtype, shape, data)
    return found


@st.composite
def chains(draw: st.DrawFn) -> list[State]:
    states = [draw(tensors())]
    for _ in range(draw(st.integers(1, 3))):
        after = dict(states[-1])
        for name, tensor in after.items():
            if tensor.nbytes and draw(st.booleans()):
                data = bytearray(tensor.data)
                for _ in range(draw(st.integers(1, 4))):
                    data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
                after[name] = RawTensor(name, tensor.dtype, tensor.shape, bytes(data))
        states.append(after)
    return states


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chain=chains(),
    encoding=st.sampled_from(["xor", "overwrite"]),
    kind=st.sampled_from(["xxh3-128", "blake3", "adler32"]),
    anchor_at=st.integers(0, 3),
)
def test_round_trip(chain: list[State], encoding: str, kind: str, anchor_at: int) -> None:
    if not chain[0]:
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_base(root / "base", chain[0], files=1)
        found = independent_reader.read_base(root / "base")
        for version, (before, after) in enumerate(itertools.pairwise(chain), 1):
            ref = Ref("r", version)
            if version == anchor_at:
                publish_anchor(root / "updates", ref, after, files=1)
            else:
                publish_delta(
                    root / "updates", ref, before, after, encoding=encoding, checksum_format=kind
                )
            found = independent_reader.read_version(version_dir(root / "updates", version), found)
        expected = {n: (t.dtype, t.shape, bytes(t.data)) for n, t in chain[-1].items()}
        assert {n: (d, s, v.tobytes()) for n, (d, s, v) in found.items()} == expected
        report = materialize(
            base=root / "base",
            updates=root / "updates",
            version=len(chain) - 1,
            out=root / "out",
            env=Env(),
        )
        assert tensors_of(root / "out") == expected
        assert report.model_digest == digest_of(chain[-1])
