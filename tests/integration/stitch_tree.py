"""A chain written by Stitch's own writers: deltas of both encodings, an anchor, an empty delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stitch import _core
from stitch.checksum import (
    Checksum,
    additive_lanes,
    digest,
    lane_bytes_for,
    model_digest,
    tensor_term,
)
from stitch.format.dtypes import bits_of
from stitch.format.tensors import RawTensor
from stitch.format.wire import (
    FileEntry,
    FormatVersion,
    Manifest,
    RefModel,
    TensorEntry,
    to_json_bytes,
)
from stitch.format.write import (
    DataFile,
    EncodedTensor,
    anchor_file,
    data_file_name,
    delta_file,
    encode_index,
    manifest_name,
)
from stitch.types import Kind, Ref, version_name

State = dict[str, RawTensor]
ATTEMPT = "a1b2c3d4e5f60718"


def checksum_of(tensor: RawTensor) -> Checksum:
    return additive_lanes(
        tensor.data, lane_bytes=lane_bytes_for(tensor.shape, bits_of(tensor.dtype))
    )


def digest_of(state: Mapping[str, RawTensor]) -> str:
    return model_digest(
        tensor_term(t.name, t.dtype, t.shape, checksum_of(t)) for t in state.values()
    )


def changed_state(state: State, seed: int, *, share: float = 0.5, density: float = 0.02) -> State:
    """A later state: some bytes of some tensors differ."""
    random = np.random.default_rng(seed)
    found = dict(state)
    for name, tensor in state.items():
        if tensor.nbytes == 0 or random.random() > share:
            continue
        data = np.frombuffer(tensor.data, np.uint8).copy()
        hits = random.integers(0, len(data), max(1, int(len(data) * density)))
        data[hits] ^= random.integers(1, 256, len(hits)).astype(np.uint8)
        found[name] = RawTensor(name, tensor.dtype, tensor.shape, data.tobytes())
    return found


def publish_delta(
    updates: Path,
    ref: Ref,
    before: State,
    after: State,
    *,
    encoding: str = "xor",
    checksum_format: str = "xxh3-128",
    parent: str | None = None,
    files: int = 2,
) -> str:
    """Write one delta version. Returns its manifest's digest."""
    encode = _core.xor_encode if encoding == "xor" else _core.overwrite_encode
    changed = []
    for name, tensor in after.items():
        blob = encode(before[name].data, tensor.data)
        if blob is not None:
            target = digest(checksum_format, tensor.data)
            changed.append(EncodedTensor(name, tensor.dtype, tensor.shape, blob, target))
    groups = [changed[i::files] for i in range(files)]
    groups = [group for group in groups if group]
    written = [
        delta_file(data_file_name(ATTEMPT, i, len(groups), Kind.DELTA), group)
        for i, group in enumerate(groups)
    ]
    weight_map = {
        tensor.name: file.name
        for file, group in zip(written, groups, strict=True)
        for tensor in group
    }
    manifest = Manifest(
        format=FormatVersion(major=1),
        ref=RefModel.of(ref),
        kind="delta",
        attempt=ATTEMPT,
        base=RefModel(run_id=ref.run_id, version=ref.version - 1),
        base_digest=digest_of(before),
        target_digest=digest_of(after),
        parent=parent,
        encoding=encoding,
        checksum_format=checksum_format,
        files=[FileEntry(name=f.name, size=f.size, blake3=f.blake3) for f in written],
        tensors={t.name: _entry(after[t.name]) for t in changed},
    )
    return _seal(updates, ref, Kind.DELTA, manifest, written, weight_map, None)


def publish_anchor(
    updates: Path, ref: Ref, state: State, *, parent: str | None = None, files: int = 3
) -> str:
    """Write one full version. Returns its manifest's digest."""
    tensors = list(state.values())
    groups = [tensors[i::files] for i in range(files)]
    written = [
        anchor_file(data_file_name(ATTEMPT, i, files, Kind.ANCHOR), group)
        for i, group in enumerate(groups)
    ]
    weight_map = {
        tensor.name: file.name
        for file, group in zip(written, groups, strict=True)
        for tensor in group
    }
    manifest = Manifest(
        format=FormatVersion(major=1),
        ref=RefModel.of(ref),
        kind="anchor",
        attempt=ATTEMPT,
        base=None,
        base_digest=None,
        target_digest=digest_of(state),
        parent=parent,
        files=[FileEntry(name=f.name, size=f.size, blake3=f.blake3) for f in written],
        tensors={name: _entry(tensor) for name, tensor in state.items()},
    )
    total = sum(tensor.nbytes for tensor in tensors)
    return _seal(updates, ref, Kind.ANCHOR, manifest, written, weight_map, total)


def _entry(tensor: RawTensor) -> TensorEntry:
    return TensorEntry(
        dtype=tensor.dtype, shape=list(tensor.shape), checksum=checksum_of(tensor).to_text()
    )


def _seal(
    updates: Path,
    ref: Ref,
    kind: Kind,
    manifest: Manifest,
    files: Sequence[DataFile],
    weight_map: Mapping[str, str],
    total_size: int | None,
) -> str:
    directory = updates / version_name(ref.version)
    directory.mkdir(parents=True)
    for file in files:
        (directory / file.name).write_bytes(b"".join(bytes(chunk) for chunk in file.chunks))
    raw = to_json_bytes(manifest)
    (directory / manifest_name(ATTEMPT)).write_bytes(raw)
    digest_hex = digest("blake3", raw)
    index = encode_index(
        ref=ref,
        kind=kind,
        base_version=ref.version - 1 if kind == Kind.DELTA else None,
        encoding=manifest.encoding,
        checksum_format=manifest.checksum_format,
        weight_map=weight_map,
        total_size=total_size,
        manifest_name=manifest_name(ATTEMPT),
        manifest_blake3=digest_hex,
    )
    (directory / "model.safetensors.index.json").write_bytes(index)
    return digest_hex


def write_base(directory: Path, state: State, *, files: int = 2) -> None:
    """A base checkpoint as model hubs lay it out, with a config."""
    import json

    directory.mkdir(parents=True)
    tensors = list(state.values())
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        group = tensors[i::files]
        file = anchor_file(name, group)
        (directory / name).write_bytes(b"".join(bytes(chunk) for chunk in file.chunks))
        weight_map |= {tensor.name: name for tensor in group}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"model_type": "llama"}')


def small_state(seed: int = 7) -> State:
    """Tensors of many dtypes and shapes, a scalar, an empty one and a non-ASCII name among them."""
    random = np.random.default_rng(seed)
    shapes = {
        "lm_head.weight": ("BF16", (16, 24)),
        "model.norm.weight": ("F32", (24,)),
        "model.q.weight": ("F8_E4M3", (32, 8)),
        "model.q.weight_scale_inv": ("F32", (1, 2)),
        "model.experts.0.packed": ("U8", (8, 12)),
        "model.experts.0.scale": ("F8_E4M3", (8, 2)),
        "model.flag": ("U8", (1,)),
        "model.pad": ("BF16", (0, 24)),
        "model.scalar": ("F32", ()),
        "model.größe.weight": ("F16", (5, 3)),
    }
    widths = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
    state = {}
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape)) * widths[dtype]
        data = random.integers(0, 256, count).astype(np.uint8).tobytes()
        state[name] = RawTensor(name, dtype, shape, data)
    return state


def write_chain(root: Path, *, run_id: str = "run-s") -> list[State]:
    """`base/` and `updates/` below `root`: v1 xor, v2 anchor, v3 overwrite, v4 empty, v5 xor."""
    states = [small_state()]
    write_base(root / "base", states[0])
    updates = root / "updates"
    for version in range(1, 6):
        last = states[-1]
        states.append(last if version in (2, 4) else changed_state(last, version))
    digest_hex = publish_delta(updates, Ref(run_id, 1), states[0], states[1])
    digest_hex = publish_anchor(updates, Ref(run_id, 2), states[2], parent=digest_hex)
    digest_hex = publish_delta(
        updates,
        Ref(run_id, 3),
        states[2],
        states[3],
        encoding="overwrite",
        checksum_format="blake3",
        parent=digest_hex,
    )
    digest_hex = publish_delta(updates, Ref(run_id, 4), states[3], states[4], parent=digest_hex)
    publish_delta(
        updates,
        Ref(run_id, 5),
        states[4],
        states[5],
        checksum_format="adler32",
        parent=digest_hex,
    )
    return states
