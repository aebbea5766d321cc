"""One damage for each rule of the publication format: a table, used by the damage tests.

`rule` is the sentence or table row that the damage breaks. Every damage is done on a fresh copy
of a chain; materializing `version` from it must end with `code` and `retry`, say each of `says`,
and leave nothing behind.
"""

from __future__ import annotations

import os
import shutil
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
    lying_frame,
    overwrite,
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


A_VERSION = [
    Damage("no-updates", "a version is a directory", shutil.rmtree, retry=True),
    Damage(
        "no-directory",
        "a version is a directory",
        in_directory(1, shutil.rmtree),
        retry=True,
        says=("weight_v000001",),
    ),
    Damage(
        "directory-is-a-file",
        "a version is a directory",
        in_directory(1, lambda d: (shutil.rmtree(d), d.write_text("x"))),
        says=("not a directory",),
    ),
    Damage(
        "directory-unpadded",
        "number padded with zeros to at least 6 digits",
        in_directory(1, lambda d: d.rename(d.with_name("weight_v1"))),
        retry=True,
    ),
    Damage(
        "no-index", "without an index: not there yet", without_index(1), retry=True, says=(INDEX,)
    ),
    Damage("no-index-empty-delta", "without an index", without_index(4), version=4, retry=True),
    Damage(
        "no-index-many-shards", "without an index", without_index(2), FULL, version=2, retry=True
    ),
    Damage("no-index-lone-delta", "a half-visible delta", lone_delta, version=2, retry=True),
    Damage("encoding-empty", "never the key with an empty value", meta(1, delta_encoding="")),
    Damage("encoding-null", "never the key with an empty value", meta(1, delta_encoding=None)),
    Damage("encoding-false", "never the key with an empty value", meta(1, delta_encoding=False)),
    Damage("encoding-removed", "delta if the key is there", meta(1, delta_encoding=...)),
    Damage(
        "all-delta-keys-removed",
        "a full version holds tensors, not payloads",
        meta(1, delta_encoding=..., base_version=..., compression_format=..., checksum_format=...),
        says=("full version",),
    ),
    Damage(
        "empty-delta-made-full",
        "a full version holds all tensors",
        meta(4, delta_encoding=..., base_version=..., compression_format=..., checksum_format=...),
        version=4,
    ),
    Damage(
        "metadata-removed", "index keys", lambda u: edit_index(u, 1, lambda i: i.pop("metadata"))
    ),
]

THE_INDEX = [
    Damage("index-empty", "one JSON object", raw_index(1, lambda raw: b"")),
    Damage("index-torn", "one JSON object", raw_index(1, lambda raw: raw[: len(raw) // 2])),
    Damage("index-array", "one JSON object", raw_index(1, lambda raw: b"[" + raw + b"]")),
    Damage("index-two", "one JSON object", raw_index(1, lambda raw: raw + raw)),
    Damage("index-zeros", "one JSON object", raw_index(1, lambda raw: bytes(len(raw)))),
    Damage("index-latin1", "UTF-8", raw_index(1, lambda raw: raw.replace(b"norm", b"n\xf6rm"))),
    Damage("index-utf16", "UTF-8", raw_index(1, lambda raw: raw.decode().encode("utf-16"))),
    Damage("index-nan", "JSON", raw_index(1, lambda raw: raw.replace(b'"zstd"', b"NaN"))),
    Damage(
        "index-deep", "JSON", raw_index(1, lambda raw: b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    ),
    Damage("index-huge", "bounded size", huge_index),
    Damage("index-fifo", "a regular file", in_directory(1, lambda d: fifo(d / INDEX))),
    Damage("index-link-loop", "a regular file", in_directory(1, lambda d: link_loop(d / INDEX))),
    Damage(
        "index-directory", "a regular file", in_directory(1, lambda d: directory_instead(d / INDEX))
    ),
    Damage(
        "index-linked-out", "inside the directory", in_directory(1, lambda d: linked_out(d / INDEX))
    ),
    Damage(
        "index-twice-metadata",
        "each key once",
        raw_index(1, lambda raw: raw.replace(b'{"metadata"', b'{"metadata": {}, "metadata"')),
        says=("duplicate name",),
    ),
    Damage(
        "index-twice-version",
        "each key once",
        raw_index(1, lambda raw: raw.replace(b'"version"', b'"version": "000001", "version"', 1)),
        says=("duplicate name",),
    ),
    Damage(
        "index-twice-tensor",
        "each tensor once (B56)",
        raw_index(
            1, lambda raw: raw.replace(b"}}", b', "' + EMBED.encode() + b'": "x.safetensors"}}')
        ),
        says=("duplicate name", EMBED),
    ),
    Damage("version-missing", "version: text", meta(1, version=...)),
    Damage("version-other", "version = directory number", meta(1, version="000002")),
    Damage("version-other-number", "version = directory number", meta(1, version=2)),
    Damage("version-negative", "version: a number", meta(1, version="-00001")),
    Damage("version-float", "version: a number", meta(1, version=1.0)),
    Damage("version-bool", "version: a number", meta(1, version=True)),
    Damage("version-null", "version: a number", meta(1, version=None)),
    Damage("version-words", "version: a number", meta(1, version="one")),
    Damage("version-underscore", "version: a number", meta(1, version="00_001")),
    Damage("version-signed", "version: a number", meta(1, version="+00001")),
    Damage("version-space", "version: a number", meta(1, version=" 000001")),
    Damage("version-arabic", "version: a number", meta(1, version="٠٠٠٠٠١")),
    Damage("version-huge", "version: a number", meta(1, version="9" * 5000)),
    Damage("base-missing", "base_version: text", meta(1, base_version=...)),
    Damage("base-words", "base_version: a number", meta(1, base_version="zero")),
    Damage("base-null", "base_version: a number", meta(1, base_version=None)),
    Damage("encoding-unknown", "xor or overwrite", meta(1, delta_encoding="rsync")),
    Damage("encoding-case", "xor or overwrite", meta(1, delta_encoding="XOR")),
    Damage("encoding-list", "xor or overwrite", meta(1, delta_encoding=["xor"])),
    Damage("encoding-swapped", "xor or overwrite", meta(1, delta_encoding="overwrite")),
    Damage("encoding-swapped-2", "xor or overwrite", meta(1, delta_encoding="xor"), OVERWRITE),
    Damage("compression-missing", "always zstd", meta(1, compression_format=...)),
    Damage("compression-other", "always zstd", meta(1, compression_format="lz4")),
    Damage("compression-null", "always zstd", meta(1, compression_format=None)),
    Damage("checksum-missing", "checksum_format", meta(1, checksum_format=...)),
    Damage("checksum-other", "checksum_format", meta(1, checksum_format="md5")),
    Damage("checksum-swapped", "checksum_format", meta(1, checksum_format="blake3")),
    Damage("map-missing", "weight_map", lambda u: edit_index(u, 1, lambda i: i.pop("weight_map"))),
    Damage(
        "map-null", "weight_map", lambda u: edit_index(u, 1, lambda i: i.update(weight_map=None))
    ),
    Damage("map-list", "weight_map", lambda u: edit_index(u, 1, lambda i: i.update(weight_map=[]))),
    Damage(
        "map-long-name",
        "a bare file name of at most 255 bytes",
        weight_map(lambda m: m.update({EMBED: "é" * 130 + ".safetensors"})),
        says=("bare name",),
    ),
    Damage("map-number", "a bare file name", weight_map(lambda m: m.update({EMBED: 1}))),
    Damage("map-empty-name", "a bare file name", weight_map(lambda m: m.update({EMBED: ""}))),
    Damage("map-no-tensor-name", "names", weight_map(lambda m: m.update({"": m[EMBED]}))),
    Damage(
        "map-metadata-name", "names", weight_map(lambda m: m.update({"__metadata__": m[EMBED]}))
    ),
    Damage("map-file-gone", "files named are there", on_file(EMBED, Path.unlink), retry=True),
]

PATHS = [
    Damage(
        f"path-{i}",
        "relative, without .., inside the directory",
        weight_map(lambda m, name=name: m.update({EMBED: name})),
    )
    for i, name in enumerate(
        [
            "../weight_v000002/model-00000-of-00001.safetensors",
            "/etc/model.safetensors",
            "inner/model.safetensors",
            "./model-00000-of-00002.safetensors",
            "..",
            "a\\b.safetensors",
            "a\0b.safetensors",
            ".hidden.safetensors",
            "model.bin",
            "model-00000-of-00002.safetensors.tmp",
            "x" * 300 + ".safetensors",
        ]
    )
] + [
    Damage("file-linked-out", "resolving inside the directory", on_file(EMBED, linked_out)),
    Damage("file-fifo", "regular files", on_file(EMBED, fifo)),
    Damage("file-directory", "regular files", on_file(EMBED, directory_instead)),
    Damage("file-socket", "regular files", on_file(EMBED, socket_instead)),
    Damage("file-link-loop", "regular files", on_file(EMBED, link_loop)),
    Damage(
        "full-side-file-linked-out",
        "resolving inside the directory",
        in_directory(2, lambda d: linked_out(d / "config.json")),
        FULL,
        version=2,
    ),
]

HEADERS = [
    Damage("file-empty", "8 bytes of length (B55)", on_file(EMBED, truncate(0))),
    Damage("file-7-bytes", "8 bytes of length (B55)", on_file(EMBED, truncate(7))),
    Damage("file-8-bytes", "header length within the file (B55)", on_file(EMBED, truncate(8))),
    Damage("file-cut", "file size = header's", on_file(EMBED, truncate(-1))),
    Damage("file-longer", "file size = header's", on_file(EMBED, append(b"\0"))),
    Damage("header-longer-than-file", "header length > file (B55)", header_length(1 << 30)),
    Damage("header-wraps", "header length near 2^64 (B55)", header_length(2**64 - 8)),
    Damage("header-signed", "header length near 2^63 (B55)", header_length(2**63)),
    Damage("header-zero", "header JSON", header_length(0)),
    Damage("header-cut", "header JSON", header_length(40)),
    Damage("header-over-100-mib", "at most 100 MiB", on_file(EMBED, huge_header)),
    Damage("header-not-json", "header JSON", header(EMBED, lambda h: h.replace(b"{", b"<"))),
    Damage("header-array", "header JSON", header(EMBED, lambda h: b"[" + h + b"]")),
    Damage("header-not-utf8", "UTF-8", header(EMBED, lambda h: h.replace(b"embed", b"emb\xe9d"))),
    Damage("header-tail", "spaces only", header(EMBED, lambda h: h + b"x")),
    Damage("begin-after-end", "begin > end (B55)", entry(EMBED, data_offsets=[40, 8])),
    Damage("end-past-eof", "end past EOF (B55)", entry(EMBED, data_offsets=[0, 2**40])),
    Damage("offsets-three", "3 offsets (B55)", entry(EMBED, data_offsets=[0, 1, 2])),
    Damage("offsets-one", "2 offsets (B55)", entry(EMBED, data_offsets=[0])),
    Damage("offsets-negative", "negative numbers (B55)", entry(EMBED, data_offsets=[-1, 9])),
    Damage("offsets-float", "integers (B55)", entry(EMBED, data_offsets=[0.0, 9.5])),
    Damage("offsets-text", "integers (B55)", entry(EMBED, data_offsets=["0", "9"])),
    Damage("offsets-huge", "integers (B55)", entry(EMBED, data_offsets=[0, 2**70])),
    Damage("offsets-missing", "data_offsets", entry(EMBED, data_offsets=...)),
    Damage("shape-span", "shape*dtype != span (B55)", entry(EMBED, shape=[3])),
    Damage("shape-negative", "shape (B55)", entry(EMBED, shape=[-1])),
    Damage("shape-float", "shape (B55)", entry(EMBED, shape=[1.5])),
    Damage("shape-overflow", "shape (B55)", entry(EMBED, shape=[2**33, 2**33])),
    Damage("shape-missing", "shape", entry(EMBED, shape=...)),
    Damage("dtype-missing", "dtype", entry(EMBED, dtype=...)),
    Damage("dtype-unknown-f4x", "unknown dtype (B58)", entry(EMBED, dtype="F4_X"), says=("F4_X",)),
    Damage("dtype-unknown-empty", "unknown dtype (B58)", entry(EMBED, dtype="")),
    Damage("dtype-lower", "unknown dtype (B58)", entry(EMBED, dtype="u8")),
    Damage("dtype-e8m0", "a payload is U8 (B58)", entry(EMBED, dtype="F8_E8M0")),
    Damage("overlap", "overlapping spans (B55)", lambda u: _shift(u, -1)),
    Damage("gap", "gapped spans (B55)", lambda u: _shift(u, 1)),
    Damage(
        "name-twice-in-header",
        "same name twice (B56)",
        header(EMBED, lambda h: h.replace(NORM.encode(), EMBED.encode())),
        says=("duplicate name",),
    ),
    Damage(
        "same-tensor-in-two-files",
        "each tensor once (B56)",
        same_tensor_in_two_files,
        says=("duplicate name", EMBED),
    ),
    Damage(
        "full-dtype-unknown",
        "unknown dtype (B58)",
        entry(LM_HEAD, 2, dtype="F4_X"),
        FULL,
        version=2,
    ),
    Damage(
        "full-shape-span",
        "shape*dtype != span (B55)",
        entry(LM_HEAD, 2, shape=[1]),
        FULL,
        version=2,
    ),
]


def _shift(updates: Path, by: int) -> None:
    file = file_of(updates, 1, EMBED)
    ordered = sorted(file.names, key=lambda name: file.entry(name)["data_offsets"])
    second = file.entry(ordered[1])
    begin, end = second["data_offsets"]
    second["data_offsets"] = [begin + by, end]
    second["shape"] = [end - begin - by]
    file.save()


DELTA_FILES = [
    Damage("payload-not-u8", "entries U8", entry(EMBED, dtype="I8"), says=(EMBED, "I8")),
    Damage("payload-2d", "shape [n]", lambda u: _reshape(u, lambda n: [1, n]), says=(EMBED,)),
    Damage("payload-2d-column", "shape [n]", lambda u: _reshape(u, lambda n: [n, 1])),
    Damage(
        "tensor-not-in-index",
        "weight_map names = names in files",
        weight_map(lambda m: m.pop(EMBED)),
    ),
    Damage(
        "tensor-not-in-file",
        "weight_map names = names in files",
        drop_tensor(EMBED, 1),
        says=(EMBED,),
    ),
    Damage("tensor-in-other-file", "file by file", moved(EMBED), says=(EMBED,)),
    Damage(
        "index-says-other-file",
        "file by file",
        weight_map(lambda m: m.update({EMBED: m[MODE]})),
        says=(EMBED,),
    ),
    Damage("digest-missing", "digest present", digests(lambda d: d.pop(EMBED)), says=(EMBED,)),
    Damage("digest-no-metadata", "digest present", lambda u: _drop_metadata(u)),
    Damage("digest-extra", "exactly those names", digests(lambda d: d.update({"x": d[EMBED]}))),
    Damage("digest-format-pt", "no other key", digests(lambda d: d.update({"format": "pt"}))),
    Damage(
        "digest-upper", "lower-case hex", digests(lambda d: d.update({EMBED: d[EMBED].upper()}))
    ),
    Damage("digest-short", "32 hex digits", digests(lambda d: d.update({EMBED: d[EMBED][:-1]}))),
    Damage("digest-long", "32 hex digits", digests(lambda d: d.update({EMBED: d[EMBED] + "0"}))),
    Damage("digest-prefix", "hex", digests(lambda d: d.update({EMBED: "0x" + d[EMBED][2:]}))),
    Damage("digest-words", "hex", digests(lambda d: d.update({EMBED: "g" * 32}))),
    Damage("digest-empty", "digest present", digests(lambda d: d.update({EMBED: ""}))),
    Damage("digest-number", "text", digests(lambda d: d.update({EMBED: 7}))),
    Damage("digest-null", "text", digests(lambda d: d.update({EMBED: None}))),
    Damage(
        "digest-wrong",
        "of the tensor after the version",
        digests(lambda d: d.update({EMBED: "0" * 32})),
        says=(EMBED, "weight_v000001", "0" * 32),
    ),
    Damage(
        "digest-swapped",
        "of the tensor",
        digests(lambda d: d.update({EMBED: d[NORM], NORM: d[EMBED]})),
    ),
    Damage(
        "digest-of-blob",
        "not of the blob",
        lambda u: edit_file(
            u, 1, EMBED, lambda f: f.metadata.update({EMBED: digest("xxh3-128", f.bytes_of(EMBED))})
        ),
    ),
    Damage(
        "digest-of-abc",
        "of the raw bytes",
        digests(lambda d: d.update({EMBED: "06b05ab6733a618578af5f94892f3950"})),
    ),
    Damage("swapped-files", "swapped shards of equal size (B41)", swap_files(1)),
    Damage("swapped-files-overwrite", "swapped shards (B41)", swap_files(1), OVERWRITE),
    Damage("swapped-full-shards", "swapped shards (B41)", swap_files(2), FULL, version=2),
    Damage(
        "permuted-blobs", "bytes under wrong names (B41)", lambda u: _permute(u), says=("tensor",)
    ),
]


def _reshape(updates: Path, shape: Callable[[int], list[int]]) -> None:
    file = file_of(updates, 1, EMBED)
    file.entry(EMBED)["shape"] = shape(file.entry(EMBED)["shape"][0])
    file.save()


def _drop_metadata(updates: Path) -> None:
    file = file_of(updates, 1, EMBED)
    file.pairs = [pair for pair in file.pairs if pair[0] != "__metadata__"]
    file.save()


def _permute(updates: Path) -> None:
    file = file_of(updates, 1, EMBED)
    data = {name: file.bytes_of(name) for name in file.names}
    names = list(data)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        file.set_bytes(name, data[other])
    file.save()


def _as_overwrite(name: str, change: Callable[[list[int], bytes], bytes]) -> Mutate:
    def edit(raw: bytes) -> bytes:
        (count,) = struct.unpack("<I", raw[:4])
        positions = list(struct.unpack(f"<{count}I", raw[4 : 4 + 4 * count]))
        return change(positions, raw[4 + 4 * count :])

    return payload(name, edit)


BLOBS = [
    Damage("blob-empty", "one zstd frame", blob(EMBED, lambda b: b""), says=(EMBED,)),
    Damage("blob-magic", "magic", blob(EMBED, lambda b: b"\0" + b[1:]), says=(EMBED,)),
    Damage("blob-raw", "one zstd frame", blob(EMBED, unframe)),
    Damage("blob-cut", "one zstd frame", blob(EMBED, lambda b: b[:-1])),
    Damage("blob-magic-only", "one zstd frame", blob(EMBED, lambda b: b[:4])),
    Damage("blob-trailing-zero", "the frame fills the blob", blob(EMBED, lambda b: b + b"\0")),
    Damage("blob-two-frames", "one frame per blob", blob(EMBED, lambda b: b + b)),
    Damage("blob-empty-frame-after", "nothing after it", blob(EMBED, lambda b: b + frame(b""))),
    Damage(
        "blob-skippable-after",
        "nothing after it",
        blob(EMBED, lambda b: b + b"\x50\x2a\x4d\x18\x04\0\0\0abcd"),
    ),
    Damage(
        "blob-skippable-before",
        "magic 28 b5 2f fd",
        blob(EMBED, lambda b: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + b),
    ),
    Damage(
        "blob-two-halves",
        "one frame per blob",
        blob(EMBED, lambda b: frame(unframe(b)[:100]) + frame(unframe(b)[100:])),
    ),
    Damage("xor-short", "exactly n bytes", payload(EMBED, lambda p: p[:-1])),
    Damage("xor-long", "exactly n bytes", payload(EMBED, lambda p: p + b"\0")),
    Damage("xor-none", "exactly n bytes", payload(EMBED, lambda p: b"")),
    Damage("xor-half-element", "exactly n bytes", payload(NORM, lambda p: p[:2])),
    Damage("xor-bit", "digest of the result", payload(EMBED, lambda p: bytes([p[0] ^ 1]) + p[1:])),
    Damage(
        "size-huge",
        "lying content size (B74)",
        blob(SCALE, lambda b: lying_frame(unframe(b), 2**40)),
    ),
    Damage(
        "size-max",
        "lying content size (B74)",
        blob(SCALE, lambda b: lying_frame(unframe(b), 2**63)),
    ),
    Damage(
        "size-zero", "lying content size (B74)", blob(SCALE, lambda b: lying_frame(unframe(b), 0))
    ),
    Damage(
        "size-short", "lying content size (B74)", blob(SCALE, lambda b: lying_frame(unframe(b), 7))
    ),
    Damage("bomb", "expands beyond the tensor (B74)", blob(SCALE, lambda b: frame(bytes(1 << 26)))),
    Damage(
        "bomb-without-size",
        "expands beyond the tensor (B74)",
        blob(SCALE, lambda b: frame(bytes(1 << 26), size=False)),
    ),
    Damage(
        "overwrite-empty",
        "u4 count",
        _as_overwrite(EMBED, lambda p, v: b""),
        OVERWRITE,
        says=(EMBED,),
    ),
    Damage(
        "overwrite-3-bytes", "u4 count", _as_overwrite(EMBED, lambda p, v: b"\1\0\0"), OVERWRITE
    ),
    Damage(
        "overwrite-value-missing",
        "exactly c value bytes",
        _as_overwrite(EMBED, lambda p, v: overwrite(p, v[:-1])),
        OVERWRITE,
    ),
    Damage(
        "overwrite-value-extra",
        "exactly c value bytes",
        _as_overwrite(EMBED, lambda p, v: overwrite(p, v + b"\0")),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-low",
        "4 + 5c bytes in all",
        _as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=len(p) - 1)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-high",
        "4 + 5c bytes in all",
        _as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=len(p) + 1)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-max",
        "4 + 5c bytes in all",
        _as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=2**32 - 1)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-over-n",
        "count <= n",
        payload(MODE, lambda p: overwrite([0, 0], p[-1:] * 2)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-position-n",
        "every position < n",
        _as_overwrite(EMBED, lambda p, v: overwrite([*p[:-1], 49152], v)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-position-far",
        "every position < n",
        _as_overwrite(EMBED, lambda p, v: overwrite([*p[:-1], 2**32 - 1], v)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-position-twice",
        "duplicated positions",
        _as_overwrite(EMBED, lambda p, v: overwrite([*p, p[0]], v + v[:1])),
        OVERWRITE,
    ),
    Damage(
        "overwrite-element-numbers",
        "byte positions, not element numbers",
        _as_overwrite(EMBED, lambda p, v: overwrite([i // 2 for i in p], v)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-big-endian",
        "little-endian",
        payload(MODE, lambda p: struct.pack(">II", 1, 0) + p[-1:]),
        OVERWRITE,
    ),
    Damage(
        "overwrite-bomb",
        "expands beyond the tensor (B74)",
        blob(MODE, lambda b: frame(bytes(1 << 26), size=False)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-size-huge",
        "lying content size (B74)",
        blob(MODE, lambda b: lying_frame(unframe(b), 2**40)),
        OVERWRITE,
    ),
]

CHANGES = [
    Damage(
        "unknown-tensor",
        "in the trainer, not in the checkpoint",
        renamed(EMBED, "model.extra.weight"),
        says=("model.extra.weight",),
    ),
    Damage(
        "unknown-tensor-overwrite",
        "in the trainer, not in the checkpoint",
        renamed(EMBED, "model.extra.weight"),
        OVERWRITE,
        says=("model.extra.weight",),
    ),
    Damage(
        "renamed-over-another",
        "no renaming in a delta",
        renamed(EMBED, "lm_head.weight"),
    ),
    Damage(
        "other-size", "shape changes, other number of bytes", with_digest(NORM, lambda p: p * 2)
    ),
    Damage("one-byte-to-more", "old has 1 byte, new one more", with_digest(MODE, lambda p: p * 4)),
    Damage(
        "fewer-bytes", "shape changes, other number of bytes", with_digest(SCALE, lambda p: p[:4])
    ),
    Damage(
        "empty-tensor-listed-with-bytes",
        "tensor has 0 elements",
        renamed(SCALE, "model.layers.0.self_attn.pad"),
    ),
    Damage("replicated", "the same tensor on two ranks", same_tensor_in_two_files),
    Damage(
        "applied-twice",
        "exactly once to the right base",
        lambda u: _copy_version(u, 1, 2),
        version=2,
        says=("weight_v000002",),
    ),
    Damage(
        "wrong-base",
        "applied to the right base",
        lambda u: _copy_version(u, 3, 1),
        says=("weight_v000001",),
    ),
    Damage(
        "full-tensor-missing",
        "all tensors",
        drop_tensor(LM_HEAD, 2),
        FULL,
        version=3,
        says=(LM_HEAD,),
    ),
    Damage(
        "full-lacks-what-a-delta-changes",
        "name not in the checkpoint",
        lambda u: _drop_everywhere(u, LM_HEAD, 2),
        FULL,
        version=3,
        says=(LM_HEAD, "weight_v000003"),
    ),
]


def _copy_version(updates: Path, source: int, target: int) -> None:
    shutil.rmtree(version_dir(updates, target))
    shutil.copytree(version_dir(updates, source), version_dir(updates, target))
    edit_metadata(updates, target, version=f"{target:06d}", base_version=f"{target - 1:06d}")


def _drop_everywhere(updates: Path, name: str, version: int) -> None:
    drop_tensor(name, version)(updates)
    edit_index(updates, version, lambda index: index["weight_map"].pop(name))


CHAIN = [
    Damage(
        "chain-gap",
        "a missing directory on the way is an error",
        in_directory(2, shutil.rmtree),
        version=4,
        retry=True,
        says=("weight_v000002",),
    ),
    Damage(
        "gap-first", "a missing directory", in_directory(1, shutil.rmtree), version=3, retry=True
    ),
    Damage(
        "gap-above-full",
        "a missing directory",
        in_directory(3, shutil.rmtree),
        FULL,
        version=4,
        retry=True,
    ),
    Damage(
        "base-older", "base_version = the version before", meta(3, base_version="000001"), version=3
    ),
    Damage(
        "base-zero", "base_version = the version before", meta(3, base_version="000000"), version=4
    ),
    Damage("base-self", "base_version = local version", meta(3, base_version="000003"), version=3),
    Damage("base-above", "base_version = local version", meta(3, base_version="000009"), version=3),
    Damage(
        "directories-swapped",
        "believe neither: version = directory",
        lambda u: _swap_versions(u, 2, 3),
        version=4,
    ),
    Damage(
        "intermediate-damage",
        "check digests after each",
        payload(EMBED, lambda p: bytes([p[0] ^ 1]) + p[1:]),
        version=4,
        says=(EMBED, "weight_v000001"),
    ),
    Damage(
        "full-version-other",
        "version = directory number",
        meta(2, version="000003"),
        FULL,
        version=2,
    ),
    Damage(
        "full-not-there-yet",
        "files named are there",
        on_file(LM_HEAD, Path.unlink, 2),
        FULL,
        version=2,
        retry=True,
    ),
    Damage("full-cut", "file size = header's", on_file(LM_HEAD, truncate(-1), 2), FULL, version=4),
    Damage(
        "full-longer", "file size = header's", on_file(LM_HEAD, append(b"\0"), 2), FULL, version=2
    ),
    Damage(
        "full-resharded-old-index",
        "stale index (B47)",
        lambda u: (reshard(u), _restore_third(u)),
        FULL,
        version=2,
        says=("duplicate name",),
    ),
    Damage("full-resharded-file-gone", "stale index (B47)", reshard, FULL, version=2, retry=True),
    Damage(
        "full-resharded-renamed", "stale index (B47)", reshard_renamed, FULL, version=2, retry=True
    ),
    Damage(
        "full-index-lists-more",
        "stale index (B47)",
        weight_map(lambda m: m.update({"model.gone": m[LM_HEAD]}), 2),
        FULL,
        version=2,
        says=("model.gone",),
    ),
    Damage(
        "full-index-lists-less",
        "stale index (B47)",
        weight_map(lambda m: m.pop(LM_HEAD), 2),
        FULL,
        version=2,
        says=(LM_HEAD,),
    ),
    Damage(
        "full-with-delta-keys",
        "a full version has no delta key",
        meta(2, checksum_format="xxh3-128"),
        FULL,
        version=2,
    ),
]


def _swap_versions(updates: Path, first: int, second: int) -> None:
    spare = updates / "spare"
    version_dir(updates, first).rename(spare)
    version_dir(updates, second).rename(version_dir(updates, first))
    spare.rename(version_dir(updates, second))


def _restore_third(updates: Path) -> None:
    """The old third shard left behind as well: its tensors are now in two files."""
    name = sorted(set(read_index(updates, 2)["weight_map"].values()))[2]
    source = Path(__file__).resolve().parents[1] / "data/slime/streams" / FULL
    shutil.copy(version_dir(source, 2) / name, version_dir(updates, 2) / name)


DAMAGES = [
    *A_VERSION,
    *THE_INDEX,
    *PATHS,
    *HEADERS,
    *DELTA_FILES,
    *BLOBS,
    *CHANGES,
    *CHAIN,
]
