"""What the tables of damages are written in: one damage, and ways to do damage."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from publication_forge import (
    INDEX,
    File,
    digest,
    edit_file,
    edit_index,
    edit_metadata,
    file_of,
    frame,
    put_index,
    read_index,
    unframe,
    version_dir,
)

EMBED = "model.embed_tokens.weight"  # v1, first file
NORM = "model.layers.0.input_layernorm.weight"  # F32 [192], v1, first file
MODE = "model.layers.0.mlp.experts.0.mode"  # one byte, v1, second file
SCALE = "model.layers.0.mlp.gate_proj.weight_scale_inv"  # 8 bytes, v1, second file
LM_HEAD = "lm_head.weight"  # v2

XOR = "xor-xxh3-128"
OVERWRITE = "overwrite-xxh3-128"
FULL = "full-in-the-middle"  # version 2 is full

Mutate = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    """`mutate` gets the directory of `weight_vNNNNNN` directories."""

    id: str
    rule: str
    mutate: Mutate
    stream: str = XOR
    version: int = 1
    code: int = 1
    retry: bool = False
    says: tuple[str, ...] = ()


def meta(number: int, /, **changes: object) -> Mutate:
    return lambda updates: edit_metadata(updates, number, **changes)


def raw_index(version: int, change: Callable[[bytes], bytes]) -> Mutate:
    def mutate(updates: Path) -> None:
        path = version_dir(updates, version) / INDEX
        put_index(updates, version, change(path.read_bytes()))

    return mutate


def weight_map(change: Callable[[dict[str, object]], object], version: int = 1) -> Mutate:
    return lambda updates: edit_index(updates, version, lambda index: change(index["weight_map"]))


def entry(name: str, version: int = 1, /, **changes: object) -> Mutate:
    def edit(file: File) -> None:
        for key, value in changes.items():
            if value is ...:
                del file.entry(name)[key]
            else:
                file.entry(name)[key] = value

    return lambda updates: edit_file(updates, version, name, edit)


def digests(change: Callable[[dict[str, object]], object], version: int = 1) -> Mutate:
    return lambda updates: edit_file(updates, version, EMBED, lambda file: change(file.metadata))


def blob(name: str, change: Callable[[bytes], bytes], version: int = 1) -> Mutate:
    return lambda updates: edit_file(
        updates, version, name, lambda file: file.set_bytes(name, change(file.bytes_of(name)))
    )


def payload(name: str, change: Callable[[bytes], bytes], version: int = 1) -> Mutate:
    return blob(name, lambda old: frame(change(unframe(old))), version)


def in_directory(version: int, act: Callable[[Path], object]) -> Mutate:
    return lambda updates: act(version_dir(updates, version))


def on_file(name: str, act: Callable[[Path], object], version: int = 1) -> Mutate:
    return lambda updates: act(file_of(updates, version, name).path)


def header(name: str, change: Callable[[bytes], bytes], version: int = 1) -> Mutate:
    def mutate(updates: Path) -> None:
        file = file_of(updates, version, name)
        file.save(change(file.header_text()))

    return mutate


def header_length(length: int) -> Mutate:
    return lambda updates: file_of(updates, 1, EMBED).save(length=length)


def renamed(old: str, new: str, version: int = 1) -> Mutate:
    """Give a tensor another name, consistently over index, header and digests."""

    def mutate(updates: Path) -> None:
        file = file_of(updates, version, old)
        file.pairs = [(new if key == old else key, value) for key, value in file.pairs]
        if old in file.metadata:
            file.metadata[new] = file.metadata.pop(old)
        file.save()
        edit_index(
            updates,
            version,
            lambda index: index["weight_map"].__setitem__(new, index["weight_map"].pop(old)),
        )

    return mutate


def same_tensor_in_two_files(updates: Path) -> None:
    first, second = file_of(updates, 1, EMBED), file_of(updates, 1, MODE)
    data = first.bytes_of(EMBED)
    second.add(EMBED, "U8", [len(data)], data)
    second.metadata[EMBED] = first.metadata[EMBED]
    second.save()


def moved(name: str) -> Mutate:
    """Move a tensor to the other file without telling the index."""

    def mutate(updates: Path) -> None:
        first, second = file_of(updates, 1, name), file_of(updates, 1, MODE)
        data = first.bytes_of(name)
        second.add(name, "U8", [len(data)], data)
        second.metadata[name] = first.metadata.pop(name)
        first.drop(name)
        first.save()
        second.save()

    return mutate


def swap_files(version: int) -> Mutate:
    def mutate(updates: Path) -> None:
        names = sorted(set(read_index(updates, version)["weight_map"].values()))[:2]
        first, second = (version_dir(updates, version) / name for name in names)
        size = max(first.stat().st_size, second.stat().st_size)
        for path in (first, second):
            # Equal sizes, so that only names can tell: pad the header with spaces.
            raw = path.read_bytes()
            (length,) = struct.unpack("<Q", raw[:8])
            pad = size - len(raw)
            head = struct.pack("<Q", length + pad) + raw[8 : 8 + length] + b" " * pad
            path.write_bytes(head + raw[8 + length :])
        assert first.stat().st_size == second.stat().st_size
        spare = first.with_name("spare")
        first.rename(spare)
        second.rename(first)
        spare.rename(second)

    return mutate


def linked_out(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.mkdir()
    target = outside / path.name
    path.rename(target)
    path.symlink_to(target)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def socket_instead(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


def huge_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 100 * 2**20 + 8))
        file.truncate(300 * 2**20)


def huge_index(updates: Path) -> None:
    with (version_dir(updates, 1) / INDEX).open("r+b") as file:
        file.truncate(2**30)


def truncate(size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def append(extra: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes() + extra)


def reshard(updates: Path) -> None:
    """Version 2 written anew in other files under the old names, the old index left behind."""
    names = sorted(set(read_index(updates, 2)["weight_map"].values()))
    first, second, third = (File(version_dir(updates, 2) / name) for name in names)
    for name in third.names:
        shape = third.entry(name)["shape"]
        second.add(name, third.entry(name)["dtype"], shape, third.bytes_of(name))
    first.save()
    second.save()
    third.path.unlink()


def reshard_renamed(updates: Path) -> None:
    for name in sorted(set(read_index(updates, 2)["weight_map"].values())):
        path = version_dir(updates, 2) / name
        path.rename(path.with_name(name.replace("of-00003", "of-00002")))


def drop_tensor(name: str, version: int) -> Mutate:
    return lambda updates: edit_file(updates, version, name, lambda file: file.drop(name))


def without_index(version: int) -> Mutate:
    return in_directory(version, lambda directory: (directory / INDEX).unlink())


def lone_delta(updates: Path) -> None:
    """A half-visible delta of one file with the name of a lone checkpoint, no index yet."""
    directory = version_dir(updates, 2)
    (path,) = directory.glob("*.safetensors")
    path.rename(directory / "model.safetensors")
    (directory / INDEX).unlink()


def with_digest(name: str, blob_of: Callable[[bytes], bytes], version: int = 1) -> Mutate:
    """A payload of other length whose digest is right for what a lax reader would get."""

    def edit(file: File) -> None:
        data = blob_of(unframe(file.bytes_of(name)))
        file.set_bytes(name, frame(data))
        file.metadata[name] = digest("xxh3-128", data)

    return lambda updates: edit_file(updates, version, name, edit)


def as_overwrite(name: str, change: Callable[[list[int], bytes], bytes]) -> Mutate:
    def edit(raw: bytes) -> bytes:
        (count,) = struct.unpack("<I", raw[:4])
        positions = list(struct.unpack(f"<{count}I", raw[4 : 4 + 4 * count]))
        return change(positions, raw[4 + 4 * count :])

    return payload(name, edit)
