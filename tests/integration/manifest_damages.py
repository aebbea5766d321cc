"""Damages of Stitch's own publications: the manifest, and what it vouches for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
from publication_damage_builders import (
    Damage,
    Mutate,
    entry,
    fifo,
    in_directory,
    link_loop,
    linked_out,
    meta,
)
from publication_forge import File, digest, frame, put_index, read_index, unframe, version_dir

KEY = "stitch_manifest"
DIGEST_KEY = "stitch_manifest_blake3"
CHAIN = "stitch"


def manifest_path(updates: Path, version: int) -> Path:
    return version_dir(updates, version) / read_index(updates, version)["metadata"][KEY]


def put_manifest(updates: Path, version: int, raw: bytes) -> None:
    """Write the manifest and seal it anew."""
    manifest_path(updates, version).write_bytes(raw)
    index = read_index(updates, version)
    index["metadata"][DIGEST_KEY] = blake3.blake3(raw).hexdigest()
    put_index(updates, version, index)


def sealed(version: int, edit: Callable[[dict[str, Any]], object]) -> Mutate:
    """Edit the manifest and seal it anew, so that only its meaning is damaged."""

    def mutate(updates: Path) -> None:
        manifest = json.loads(manifest_path(updates, version).read_bytes())
        edit(manifest)
        put_manifest(updates, version, json.dumps(manifest).encode())

    return mutate


def set_key(version: int, key: str, value: Any) -> Mutate:
    return sealed(version, lambda manifest: manifest.__setitem__(key, value))


def raw_sealed(version: int, change: Callable[[bytes], bytes]) -> Mutate:
    return lambda updates: put_manifest(
        updates, version, change(manifest_path(updates, version).read_bytes())
    )


def first_tensor(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"][min(manifest["tensors"])]


def files_as_found(updates: Path, version: int) -> None:
    """Make the manifest's sizes and BLAKE3 those of the files that are there, and seal it."""

    def edit(manifest: dict[str, Any]) -> None:
        for file in manifest["files"]:
            raw = (version_dir(updates, version) / file["name"]).read_bytes()
            file["size"], file["blake3"] = len(raw), blake3.blake3(raw).hexdigest()

    sealed(version, edit)(updates)


def some_file(updates: Path, version: int) -> File:
    name = min(read_index(updates, version)["weight_map"].values())
    return File(version_dir(updates, version) / name)


def flip_data(version: int, *, sealed_anew: bool) -> Mutate:
    """Flip one bit of an anchor's data."""

    def mutate(updates: Path) -> None:
        file = some_file(updates, version)
        file.data = bytes([file.data[0] ^ 1]) + file.data[1:]
        file.save()
        if sealed_anew:
            files_as_found(updates, version)

    return mutate


def forge_payload(version: int, *, sealed_anew: bool) -> Mutate:
    """Other bytes with a digest that fits them."""

    def mutate(updates: Path) -> None:
        file = some_file(updates, version)
        state = {
            path: File(path) for path in sorted((updates.parent / "base").glob("*.safetensors"))
        }
        name = file.names[0]
        held = next(f.bytes_of(name) for f in state.values() if name in f.names)
        pattern = unframe(file.bytes_of(name))
        pattern = bytes([pattern[0] ^ 1]) + pattern[1:]
        file.set_bytes(name, frame(pattern))
        target = bytes(a ^ b for a, b in zip(held, pattern, strict=True))
        file.metadata[name] = digest("xxh3-128", target)
        file.save()
        if sealed_anew:
            files_as_found(updates, version)

    return mutate


def of(
    name: str,
    rule: str,
    mutate: Mutate,
    version: int = 1,
    retry: bool = False,
    says: tuple[str, ...] = (),
    code: int = 1,
) -> Damage:
    return Damage(name, rule, mutate, CHAIN, version, code, retry, says)


SEAL = [
    of("gone", "manifest named by the index", lambda u: manifest_path(u, 1).unlink(), retry=True),
    of(
        "torn",
        "its BLAKE3 is in the index",
        lambda u: manifest_path(u, 1).write_bytes(manifest_path(u, 1).read_bytes()[:-9]),
        says=("BLAKE3",),
    ),
    of(
        "other-bytes",
        "its BLAKE3 is in the index",
        lambda u: manifest_path(u, 1).write_bytes(manifest_path(u, 1).read_bytes() + b" "),
        says=("BLAKE3",),
    ),
    of(
        "of-another-version",
        "its BLAKE3 is in the index",
        lambda u: manifest_path(u, 1).write_bytes(manifest_path(u, 3).read_bytes()),
    ),
    of("key-without-digest", "index keys", meta(1, **{DIGEST_KEY: ...})),
    of("digest-without-key", "index keys", meta(1, **{KEY: ...})),
    of("key-path", "bare name", meta(1, **{KEY: "../stitch-a.json"})),
    of("key-other-name", "bare name", meta(1, **{KEY: "config.json"})),
    of("key-number", "bare name", meta(1, **{KEY: 3})),
    of(
        "digest-upper",
        "lower-case hex",
        lambda u: meta(1, **{DIGEST_KEY: read_index(u, 1)["metadata"][DIGEST_KEY].upper()})(u),
    ),
    of("linked-out", "inside the directory", lambda u: linked_out(manifest_path(u, 1))),
]

DOCUMENT = [
    of("not-json", "one JSON object", raw_sealed(1, lambda raw: raw[:-1])),
    of(
        "key-twice",
        "each key once",
        raw_sealed(1, lambda raw: raw.replace(b'"kind":', b'"kind":"anchor","kind":', 1)),
        says=("duplicate name",),
    ),
    of(
        "major-2",
        "unknown major",
        set_key(1, "format", {"major": 2, "minor": 0}),
        says=("format 2",),
    ),
    of("major-missing", "format", set_key(1, "format", {})),
    of("major-bool", "format", set_key(1, "format", {"major": True})),
    of("format-missing", "format", sealed(1, lambda m: m.pop("format"))),
    of("ref-version", "ref = directory", set_key(1, "ref", {"run_id": "run-s", "version": 2})),
    of("ref-text", "ref", set_key(1, "ref", {"run_id": "run-s", "version": "1"})),
    of("ref-negative", "ref", set_key(1, "ref", {"run_id": "run-s", "version": -1})),
    of("ref-run", "run id", set_key(1, "ref", {"run_id": "../run", "version": 1})),
    of(
        "ref-other-run",
        "one run",
        sealed(3, lambda m: m["ref"].update(run_id="other")),
        version=3,
        says=("run",),
    ),
    of("kind-other", "kind = index", set_key(1, "kind", "anchor")),
    of("kind-unknown", "kind", set_key(1, "kind", "diff")),
    of("encoding-other", "encoding = index", set_key(1, "encoding", "overwrite")),
    of("encoding-missing", "encoding = index", set_key(1, "encoding", None)),
    of("checksum-other", "checksum format = index", set_key(1, "checksum_format", "blake3")),
    of("base-other", "base = index", set_key(5, "base", {"run_id": "run-s", "version": 3}), 5),
    of("base-missing", "base = index", set_key(1, "base", None)),
    of("base-digest-missing", "base_digest", set_key(3, "base_digest", None), version=3),
    of("attempt", "attempt = its name", set_key(1, "attempt", "0" * 16), says=("attempt",)),
    of(
        "base-run",
        "base of its run",
        sealed(1, lambda m: m["base"].update(run_id="other")),
        says=("of run 'other'",),
    ),
    of(
        "rollback-newer",
        "rollback_of is older",
        set_key(1, "rollback_of", {"run_id": "run-s", "version": 1}),
        says=("not older",),
    ),
    of(
        "alias-stored",
        "an alias is not stored",
        sealed(1, lambda m: m["aliases"].update({min(m["tensors"]): "model.other"})),
        says=("alias",),
    ),
    of(
        "alias-of-nothing",
        "an alias of a stored name",
        set_key(2, "aliases", {"model.tied": "model.absent"}),
        version=2,
        says=("model.absent",),
    ),
]

CONTENT = [
    of("manifest-fifo", "a regular file", lambda updates: fifo(manifest_path(updates, 1))),
    of("manifest-loop", "a regular file", lambda updates: link_loop(manifest_path(updates, 1))),
    of("file-not-listed", "files", sealed(1, lambda m: m["files"].pop())),
    of("file-listed-twice", "files", sealed(1, lambda m: m["files"].append(m["files"][0]))),
    of(
        "file-extra",
        "files",
        sealed(
            1,
            lambda m: m["files"].append(
                {"name": "more.safetensors", "size": 1, "blake3": "0" * 64}
            ),
        ),
    ),
    of("file-path", "bare names", sealed(1, lambda m: m["files"][0].update(name="../x"))),
    of("file-size", "sizes", sealed(1, lambda m: m["files"][0].update(size=1)), says=("bytes",)),
    of("file-size-text", "sizes", sealed(1, lambda m: m["files"][0].update(size="1"))),
    of("file-blake3", "BLAKE3", sealed(1, lambda m: m["files"][0].update(blake3="0" * 64))),
    of("tensor-not-listed", "tensors", sealed(1, lambda m: m["tensors"].pop(min(m["tensors"])))),
    of(
        "tensor-extra",
        "tensors",
        sealed(1, lambda m: m["tensors"].update({"model.more": first_tensor(m)})),
        says=("model.more",),
    ),
    of(
        "tensor-dtype",
        "dtype = base's (B43)",
        sealed(
            1,
            lambda m: (
                m["tensors"]["lm_head.weight"].update(dtype="F16")
                if "lm_head.weight" in m["tensors"]
                else first_tensor(m).update(dtype="I8", shape=[1])
            ),
        ),
    ),
    of(
        "tensor-dtype-unknown",
        "dtype (B58)",
        sealed(1, lambda m: first_tensor(m).update(dtype="F4_X")),
    ),
    of(
        "tensor-shape",
        "shape = base's (B22)",
        sealed(1, lambda m: first_tensor(m).update(shape=[3])),
    ),
    of(
        "tensor-checksum",
        "checksums",
        sealed(
            1, lambda m: first_tensor(m).update(checksum=first_tensor(m)["checksum"][:-1] + "g")
        ),
    ),
    of(
        "tensor-checksum-wrong",
        "checksums",
        sealed(
            1, lambda m: first_tensor(m).update(checksum=first_tensor(m)["checksum"][:7] + "0" * 32)
        ),
        says=("tensor",),
    ),
    of(
        "tensor-checksum-lane",
        "lanes",
        sealed(
            1,
            lambda m: [
                t.update(
                    checksum=t["checksum"].replace(
                        t["checksum"][:7], "add1/1/" if "/1/" not in t["checksum"] else "add1/8/"
                    )
                )
                for t in m["tensors"].values()
            ],
        ),
    ),
    of(
        "target-digest",
        "target_digest",
        set_key(1, "target_digest", "0" * 64),
        says=("target_digest",),
    ),
    of(
        "target-digest-empty-delta",
        "target_digest",
        set_key(4, "target_digest", "1" * 64),
        version=4,
    ),
    of("base-digest", "base_digest", set_key(3, "base_digest", "0" * 64), version=3),
    of("parent", "parent", set_key(3, "parent", "0" * 64), version=3, says=("parent",)),
    of("anchor-target-digest", "target_digest", set_key(2, "target_digest", "0" * 64), version=2),
    of(
        "anchor-tensor-missing",
        "all tensors (B94)",
        sealed(2, lambda m: m["tensors"].pop("lm_head.weight")),
        version=2,
        says=("lm_head.weight",),
    ),
    of(
        "anchor-dtype",
        "dtype = header's",
        sealed(2, lambda m: m["tensors"]["lm_head.weight"].update(dtype="F16")),
        version=2,
    ),
    of(
        "anchor-bit",
        "BLAKE3 of files",
        flip_data(2, sealed_anew=False),
        version=2,
        says=("BLAKE3",),
    ),
    of(
        "anchor-bit-sealed",
        "checksums",
        flip_data(2, sealed_anew=True),
        version=2,
        says=("checksum",),
    ),
    of(
        "payload-forged", "BLAKE3 of files", forge_payload(1, sealed_anew=False), says=("manifest",)
    ),
    of(
        "payload-forged-sealed", "checksums", forge_payload(1, sealed_anew=True), says=("checksum",)
    ),
    of(
        "side-file-gone",
        "files",
        sealed(
            2, lambda m: m["files"].append({"name": "config.json", "size": 2, "blake3": "0" * 64})
        ),
        version=2,
        retry=True,
    ),
    of(
        "directory-gone",
        "a version is a directory",
        in_directory(3, lambda d: d.rename(d.with_name("gone"))),
        version=5,
        retry=True,
    ),
    of(
        "payload-i8",
        "entries U8",
        lambda u: (entry(some_file(u, 1).names[0], 1, dtype="I8")(u), files_as_found(u, 1)),
        says=("U8",),
    ),
]

MANIFEST_DAMAGES = [
    Damage(f"manifest-{d.id}", d.rule, d.mutate, d.stream, d.version, d.code, d.retry, d.says)
    for d in [*SEAL, *DOCUMENT, *CONTENT]
]
