"""What a careful reader accepts: every liberty that the publication format leaves to writers."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from publication_damage_builders import EMBED, FULL, OVERWRITE, XOR
from publication_forge import (
    INDEX,
    File,
    edit_index,
    edit_metadata,
    file_of,
    frame,
    overwrite,
    put_index,
    read_index,
    tensors_of,
    unframe,
    version_dir,
)

from stitch.cli import main

SLIME = Path(__file__).resolve().parents[1] / "data" / "slime"
Change = Callable[[Path], object]


def materialize(base: Path, updates: Path, version: int, out: Path) -> int:
    arguments = ["--base", str(base), "--updates", str(updates), "--out", str(out), "--quiet"]
    return main(["materialize", *arguments, "--version", str(version)])


def all_files(updates: Path, version: int) -> list[File]:
    return [File(path) for path in sorted(version_dir(updates, version).glob("*.safetensors"))]


def each_blob(change: Callable[[bytes], bytes]) -> Change:
    def act(updates: Path) -> None:
        for version in (1, 2, 3):
            for file in all_files(updates, version):
                for name in file.names:
                    file.set_bytes(name, change(file.bytes_of(name)))
                file.save()

    return act


def shuffled(blob: bytes) -> bytes:
    raw = unframe(blob)
    (count,) = struct.unpack("<I", raw[:4])
    positions = struct.unpack(f"<{count}I", raw[4 : 4 + 4 * count])
    pairs = list(zip(positions, raw[4 + 4 * count :], strict=True))
    random.Random(5).shuffle(pairs)
    return frame(overwrite([p for p, _ in pairs], bytes(v for _, v in pairs)))


def reversed_data(updates: Path) -> None:
    """Blobs in another order than the header lists them: offsets alone decide."""
    for file in all_files(updates, 1):
        blobs = {name: file.bytes_of(name) for name in file.names}
        file.data = b""
        for name in reversed(file.names):
            begin = len(file.data)
            file.data += blobs[name]
            file.entry(name)["data_offsets"] = [begin, len(file.data)]
        file.save()


def renamed_files(updates: Path) -> None:
    """A peer keeps the source shards' names in its deltas."""
    for name in sorted(set(read_index(updates, 1)["weight_map"].values())):
        new = "Shard (α) " + name
        path = version_dir(updates, 1) / name
        path.rename(path.with_name(new))
        edit_index(
            updates,
            1,
            lambda index, name=name, new=new: index["weight_map"].update(
                {k: new for k, v in index["weight_map"].items() if v == name}
            ),
        )


def strays(updates: Path) -> None:
    """B46: an older copy of a shard, temporary files, folders; none is named by the index."""
    for version in (1, 2, 3, 4):
        directory = version_dir(updates, version)
        shutil.copy(SLIME / "base/model-00001-of-00002.safetensors", directory / "zz.safetensors")
        (directory / "model-00000-of-00009.safetensors.tmp").write_bytes(b"half")
        (directory / (INDEX + ".tmp")).write_bytes(b"{")
        (directory / "old").mkdir()
        os.mkfifo(directory / "pipe.safetensors")
    (updates / "weight_v000009").mkdir()
    (updates / "notes.txt").write_text("x")


def linked_within(updates: Path) -> None:
    path = file_of(updates, 1, EMBED).path
    inner = path.parent / "blobs"
    inner.mkdir()
    path.rename(inner / "0001")
    path.symlink_to(Path("blobs") / "0001")


def plain_index(updates: Path) -> None:
    """Keys in another order, indented, a byte of white space at the end."""
    index = read_index(updates, 1)
    index = {"weight_map": index["weight_map"], "metadata": index["metadata"], "more": [1, {}]}
    put_index(updates, 1, json.dumps(index, indent=4).encode() + b"\n")


def more_keys(updates: Path) -> None:
    extra = {"synthetic_generator": "g", "synthetic_spec": {"a": [1]}, "synthetic_seed": 7}
    for version in (1, 2, 3, 4):
        edit_metadata(updates, version, **extra)


def numbers(updates: Path) -> None:
    for version in (1, 2, 3, 4):
        edit_metadata(updates, version, version=version, base_version=version - 1)


def unpadded(updates: Path) -> None:
    for version in (1, 2, 3, 4):
        edit_metadata(updates, version, version=str(version), base_version=str(version - 1))


def wide_header(updates: Path) -> None:
    file = file_of(updates, 1, EMBED)
    file.save(file.header_text() + b" " * 4096)


LIBERTIES: list[tuple[str, str, Change]] = [
    ("number-versions", XOR, numbers),
    ("unpadded-versions", XOR, unpadded),
    ("unknown-metadata", XOR, more_keys),
    ("index-layout", XOR, plain_index),
    ("file-names", XOR, renamed_files),
    ("data-order", XOR, reversed_data),
    ("header-padding", XOR, wide_header),
    ("strays-xor", XOR, strays),
    ("strays-full", FULL, strays),
    ("link-within", XOR, linked_within),
    ("xor-without-content-size", XOR, each_blob(lambda b: frame(unframe(b), size=False))),
    ("xor-level-19", XOR, each_blob(lambda b: frame(unframe(b), level=19))),
    ("xor-level-minus-5", XOR, each_blob(lambda b: frame(unframe(b), level=-5))),
    ("xor-frame-checksum", XOR, each_blob(lambda b: frame(unframe(b), checksum=True))),
    ("overwrite-any-order", OVERWRITE, each_blob(shuffled)),
    ("overwrite-level-19", OVERWRITE, each_blob(lambda b: frame(unframe(b), level=19))),
    (
        "overwrite-without-content-size",
        OVERWRITE,
        each_blob(lambda b: frame(unframe(b), size=False)),
    ),
    ("full-with-version", FULL, lambda u: edit_metadata(u, 2, version="000002")),
    ("full-without-metadata", FULL, lambda u: edit_index(u, 2, lambda i: i.pop("metadata"))),
    ("lower-gone-below-full", FULL, lambda u: shutil.rmtree(version_dir(u, 1))),
]


@pytest.mark.parametrize(
    ("stream", "act"), [c[1:] for c in LIBERTIES], ids=[c[0] for c in LIBERTIES]
)
def test_a_liberty_changes_nothing(stream: str, act: Change, tmp_path: Path) -> None:
    updates = tmp_path / "updates"
    shutil.copytree(SLIME / "streams" / stream, updates)
    act(updates)
    first = 2 if stream == FULL else 1
    for version in range(first, 5):
        out, plain = tmp_path / f"out{version}", tmp_path / f"plain{version}"
        assert materialize(SLIME / "base", updates, version, out) == 0
        assert materialize(SLIME / "base", SLIME / "streams" / stream, version, plain) == 0
        assert tensors_of(out) == tensors_of(plain)
        assert {p.name for p in out.iterdir()} == {p.name for p in plain.iterdir()}


def lone_version(updates: Path, version: int) -> None:
    """A full version as one file without an index."""
    directory = version_dir(updates, version)
    directory.mkdir(parents=True)
    tensors = tensors_of(SLIME / "base")
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    file = File(path)
    for name, (dtype, shape, data) in tensors.items():
        file.add(name, dtype, list(shape), data)
    file.save()


def test_a_lone_file_without_an_index_is_a_full_version(tmp_path: Path) -> None:
    updates = tmp_path / "updates"
    lone_version(updates, 7)
    assert materialize(SLIME / "base", updates, 7, tmp_path / "out") == 0
    assert tensors_of(tmp_path / "out") == tensors_of(SLIME / "base")
    # Weights alone: config and tokenizer are the base's.
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", INDEX, "model.safetensors"}
    shutil.copy(SLIME / "base/model-00001-of-00002.safetensors", version_dir(updates, 7))
    assert materialize(SLIME / "base", updates, 7, tmp_path / "out2") == 1


def test_a_base_of_links_and_of_one_file_will_do(tmp_path: Path) -> None:
    """Model caches are directories of links; small models are one file without an index."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in (SLIME / "base").iterdir():
        (linked / path.name).symlink_to(path)
    (linked / ".gitattributes").write_text("x")
    (linked / "pytorch_model.bin").write_text("old weights of another format")
    (linked / "tokenizer.model").write_bytes(b"\0tokens")
    lone_version(tmp_path / "lone", 0)
    lone = version_dir(tmp_path / "lone", 0)
    for base, side in ((linked, {"config.json", "tokenizer.model"}), (lone, set())):
        for version in (0, 4):
            out = tmp_path / f"{base.name}-{version}"
            assert materialize(base, SLIME / "streams" / XOR, version, out) == 0
            assert {p.name for p in out.iterdir() if not p.name.endswith(".safetensors")} == {
                INDEX,
                *side,
            }
            assert not any(path.is_symlink() for path in out.iterdir())
    assert tensors_of(tmp_path / "snapshot-4") == tensors_of(tmp_path / f"{lone.name}-4")


def test_shard_names_headers_and_order_are_the_seeds(tmp_path: Path) -> None:
    assert materialize(SLIME / "base", SLIME / "streams" / XOR, 3, tmp_path / "out") == 0
    for seed in (SLIME / "base").glob("*.safetensors"):
        made = (tmp_path / "out" / seed.name).read_bytes()
        (length,) = struct.unpack("<Q", made[:8])
        assert made[: 8 + length] == seed.read_bytes()[: 8 + length]
        assert not seed.samefile(tmp_path / "out" / seed.name)
