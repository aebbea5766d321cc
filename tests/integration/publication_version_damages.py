"""Damages of versions: directory, index, the paths in it, the chain of versions."""

from __future__ import annotations

import shutil
from pathlib import Path

from publication_damage_builders import (
    EMBED,
    FULL,
    LM_HEAD,
    OVERWRITE,
    Damage,
    append,
    directory_instead,
    fifo,
    huge_index,
    in_directory,
    link_loop,
    linked_out,
    lone_delta,
    meta,
    on_file,
    payload,
    raw_index,
    reshard,
    reshard_renamed,
    socket_instead,
    truncate,
    weight_map,
    without_index,
)
from publication_forge import (
    INDEX,
    edit_index,
    read_index,
    version_dir,
)

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
