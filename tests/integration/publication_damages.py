"""One damage for each rule of the publication format: a table, used by the damage tests.

`rule` is the sentence or table row that the damage breaks. Every damage is done on a fresh copy
of a chain; materializing `version` from it must end with `code` and `retry`, say each of `says`,
and leave nothing behind.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from publication_damage_builders import (
    EMBED,
    FULL,
    LM_HEAD,
    MODE,
    NORM,
    OVERWRITE,
    SCALE,
    Damage,
    append,
    as_overwrite,
    blob,
    digests,
    drop_tensor,
    entry,
    header,
    header_length,
    huge_header,
    moved,
    on_file,
    payload,
    renamed,
    same_tensor_in_two_files,
    swap_files,
    truncate,
    weight_map,
    with_digest,
)
from publication_forge import (
    digest,
    edit_file,
    edit_index,
    edit_metadata,
    file_of,
    frame,
    lying_frame,
    overwrite,
    unframe,
    version_dir,
)
from publication_version_damages import A_VERSION, CHAIN, PATHS, THE_INDEX


def _shift(updates: Path, by: int) -> None:
    file = file_of(updates, 1, EMBED)
    ordered = sorted(file.names, key=lambda name: file.entry(name)["data_offsets"])
    second = file.entry(ordered[1])
    begin, end = second["data_offsets"]
    second["data_offsets"] = [begin + by, end]
    second["shape"] = [end - begin - by]
    file.save()


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
        as_overwrite(EMBED, lambda p, v: b""),
        OVERWRITE,
        says=(EMBED,),
    ),
    Damage("overwrite-3-bytes", "u4 count", as_overwrite(EMBED, lambda p, v: b"\1\0\0"), OVERWRITE),
    Damage(
        "overwrite-value-missing",
        "exactly c value bytes",
        as_overwrite(EMBED, lambda p, v: overwrite(p, v[:-1])),
        OVERWRITE,
    ),
    Damage(
        "overwrite-value-extra",
        "exactly c value bytes",
        as_overwrite(EMBED, lambda p, v: overwrite(p, v + b"\0")),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-low",
        "4 + 5c bytes in all",
        as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=len(p) - 1)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-high",
        "4 + 5c bytes in all",
        as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=len(p) + 1)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-count-max",
        "4 + 5c bytes in all",
        as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=2**32 - 1)),
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
        as_overwrite(EMBED, lambda p, v: overwrite([*p[:-1], 49152], v)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-position-far",
        "every position < n",
        as_overwrite(EMBED, lambda p, v: overwrite([*p[:-1], 2**32 - 1], v)),
        OVERWRITE,
    ),
    Damage(
        "overwrite-position-twice",
        "duplicated positions",
        as_overwrite(EMBED, lambda p, v: overwrite([*p, p[0]], v + v[:1])),
        OVERWRITE,
    ),
    Damage(
        "overwrite-element-numbers",
        "byte positions, not element numbers",
        as_overwrite(EMBED, lambda p, v: overwrite([i // 2 for i in p], v)),
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


def _copy_version(updates: Path, source: int, target: int) -> None:
    shutil.rmtree(version_dir(updates, target))
    shutil.copytree(version_dir(updates, source), version_dir(updates, target))
    edit_metadata(updates, target, version=f"{target:06d}", base_version=f"{target - 1:06d}")


def _drop_everywhere(updates: Path, name: str, version: int) -> None:
    drop_tensor(name, version)(updates)
    edit_index(updates, version, lambda index: index["weight_map"].pop(name))


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
