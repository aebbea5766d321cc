"""Bring one version to a local directory, verified. A local store's version is used in place."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import blake3

from stitch.env import Env
from stitch.errors import CorruptData, NotVisibleYet, StitchError, Unavailable
from stitch.format.checkpoint import LONE_FILE_NAME
from stitch.format.publication import PublicationReader
from stitch.format.records import version_prefix
from stitch.format.wire import Manifest, RunRecord
from stitch.stores.base import INDEX_NAME, Store
from stitch.stores.documents import read_index, read_manifest
from stitch.types import Ref, version_name

__all__ = ["fetch_version"]

T = TypeVar("T")

_CHUNK: Final = 4 * 2**20
_TEMPORARY: Final = ".tmp-fetch-"


async def fetch_version(
    store: Store, record: RunRecord, version: int, cache_dir: Path, env: Env
) -> Path:
    """The version's directory on the local disk, with sizes and BLAKE3 checked.

    A store with local files is read in place; otherwise index, manifest and named files go to
    `cache_dir/<run_id>/weight_vNNNNNN`, which appears complete or not at all. A second call
    downloads nothing: what is cached is verified again, so nothing here needs a sync.
    Raises: NotVisibleYet for anything missing; CorruptData for anything that differs;
        Unavailable for the store, or a full or closed cache directory.
    """
    ref = Ref(record.run_id, version)
    prefix = version_prefix(record, version)
    local = store.local_path(prefix) if store.capabilities.local_files else None
    if local is not None:
        await _offload(env, lambda: _check(local, ref))
        return local
    home = cache_dir / record.run_id
    target = home / version_name(version)
    if env.files.is_directory(target):
        try:
            await _offload(env, lambda: _check(target, ref))
            return target
        except (CorruptData, NotVisibleYet):
            await _offload(env, lambda: env.files.remove_tree(target))
    await _offload(env, lambda: _make_directories(env, home))
    temporary, release = await _offload(env, lambda: _open_temporary(env, home, version))
    try:
        await _download(store, record, version, temporary, env)
        await _offload(env, lambda: _check(temporary, ref))
        await _offload(env, lambda: _move_into_place(env, temporary, target))
    finally:
        await _offload(env, lambda: env.files.remove_tree(temporary))
        release()
    return target


async def _download(
    store: Store, record: RunRecord, version: int, directory: Path, env: Env
) -> None:
    prefix = version_prefix(record, version)
    try:
        index, index_bytes = await read_index(store, record, version)
    except NotVisibleYet:
        if await store.stat(f"{prefix}/{LONE_FILE_NAME}") is None:
            raise
        await _copy(store, f"{prefix}/{LONE_FILE_NAME}", directory / LONE_FILE_NAME, None, env)
        return
    manifest, _ = await read_manifest(store, record, version)
    expected = _expected_files(manifest)
    for name in sorted({*index.weight_map.values(), *expected}):
        await _copy(store, f"{prefix}/{name}", directory / name, expected.get(name), env)
    if index.manifest_name is not None:
        name = index.manifest_name
        await _copy(store, f"{prefix}/{name}", directory / name, None, env)
    await _offload(env, lambda: _write(env, directory / INDEX_NAME, index_bytes))


def _expected_files(manifest: Manifest | None) -> dict[str, tuple[int, str]]:
    if manifest is None:
        return {}
    return {entry.name: (entry.size, entry.blake3) for entry in manifest.files}


async def _copy(
    store: Store, key: str, target: Path, expected: tuple[int, str] | None, env: Env
) -> None:
    found = await store.stat(key)
    if found is None:
        raise NotVisibleYet(f"{key} is not there", file=key)
    if expected is not None and found.size != expected[0]:
        raise CorruptData(f"{key} has {found.size} bytes, expected {expected[0]}", file=key)
    handle = await _offload(env, lambda: env.files.create(target))
    hasher, at = blake3.blake3(), 0
    buffer = memoryview(bytearray(max(1, min(_CHUNK, found.size))))
    try:
        while at < found.size:
            count = await store.read_into(key, at, buffer, expect_token=found.token)
            if count == 0:
                raise CorruptData(f"{key} ends at {at} of {found.size} bytes", file=key)
            chunk = buffer[: min(count, found.size - at)]
            await _offload(env, lambda chunk=chunk: handle.write(chunk))  # type: ignore[misc]
            hasher.update(chunk)
            at += len(chunk)
    finally:
        handle.close()
    if expected is not None and hasher.hexdigest() != expected[1]:
        raise CorruptData(f"{key} is not the file that the manifest names", file=key)


def _write(env: Env, path: Path, data: bytes) -> None:
    handle = env.files.create(path)
    try:
        handle.write(data)
    finally:
        handle.close()


def _check(directory: Path, ref: Ref) -> None:
    PublicationReader.open(directory, expect=ref, verify_files=True).close()


def _make_directories(env: Env, path: Path) -> None:
    for directory in (*reversed(path.parents), path):
        if not env.files.is_directory(directory):
            try:
                env.files.make_directory(directory)
            except FileExistsError:
                continue


def _open_temporary(env: Env, home: Path, version: int) -> tuple[Path, Callable[[], None]]:
    for name in env.files.names(home):
        if name.startswith(_TEMPORARY):
            free = env.files.try_lock(home / name)
            if free is not None:
                env.files.remove_tree(home / name)
                free()
    temporary = home / f"{_TEMPORARY}{env.random.nonce()}-{version_name(version)}"
    env.files.make_directory(temporary)
    release = env.files.try_lock(temporary, shared=True)
    if release is None:
        raise Unavailable(f"{home} is being cleaned by another process; try again")
    return temporary, release


def _move_into_place(env: Env, temporary: Path, target: Path) -> None:
    try:
        env.files.rename(temporary, target)
    except OSError:
        if not env.files.is_directory(target):
            raise  # else another fetch of the same version was first


async def _offload(env: Env, work: Callable[[], T]) -> T:
    try:
        return await env.offload(work)
    except StitchError:
        raise
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise Unavailable(f"the disk of {error.filename} is full: free space") from error
        raise Unavailable(f"{error.filename}: {error.strerror or error}") from error
