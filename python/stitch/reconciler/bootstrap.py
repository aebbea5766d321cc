"""Write the newest version a store names as a checkpoint, before an engine starts.

A joiner that boots from the result loads its weights once, and counts as the version written.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stitch.destinations.canonical import chain_legs, fold_legs
from stitch.env import Env
from stitch.errors import InvalidInput, NotVisibleYet, StitchError, Unavailable
from stitch.format.atomic_directory import atomic_directory
from stitch.format.checkpoint import Checkpoint
from stitch.format.checkpoint_writer import CheckpointWriter
from stitch.format.materialize import open_base
from stitch.format.publication import PublicationReader
from stitch.format.shards import INDEX_NAME
from stitch.format.wire import RunRecord
from stitch.reconciler.decide import match_base
from stitch.reconciler.plan import Fetched, Held, StoreLease, fetch_path, run_record
from stitch.stores.base import Store
from stitch.stores.versions import resolve_pointer
from stitch.types import Ref

__all__ = ["Bootstrapped", "bootstrap"]

T = TypeVar("T")

_LINK_REFUSED = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """What was written. An engine started from `directory` counts as `ref`.

    base: `proven` if the run declares the base's digest and it agrees, `unproven` if it declares
    none, `unused` if an anchor made the base irrelevant. applied: publications folded in.
    """

    ref: Ref
    model_digest: str
    directory: Path
    base: str
    applied: int
    linked: bool


async def bootstrap(
    store: Store,
    base_dir: Path,
    out_dir: Path,
    env: Env,
    *,
    run_id: str | None = None,
    threads: int = 2,
    visible_deadline_s: float = 10.0,
    cache_dir: Path | None = None,
) -> Bootstrapped:
    """Materialize the version that the pointer names into `out_dir`, atomically.

    Args:
        base_dir: the run's base checkpoint.
        run_id: the run that the pointer must name; with it an empty pointer means the run's
            boot version, so the base itself is written.
        cache_dir: where publications of a remote store are kept meanwhile; default a sibling
            of `out_dir`, removed at the end.
    Raises: NotVisibleYet if nothing is published yet, or a version may still appear; CorruptData
        for a publication at fault; InvalidInput for a base that is not the run's, another run in
        the pointer, or an `out_dir` that exists; Unavailable for store and disk.
    """
    ref = await _target(store, env, run_id, visible_deadline_s)
    record = await run_record(store, ref.run_id)
    cache = cache_dir or out_dir.parent / f".stitch-fetch-{env.random.nonce()}"
    lease = StoreLease(store, f"bootstrap-{env.random.nonce()}", env, beat_s=10.0)
    try:
        async with lease.held("bootstrap", [ref]):
            held = await _offload(env, lambda: _digest_of(base_dir, threads))
            fetched = await fetch_path(
                store, ref, Held(None, held, held), cache, env, trust_base=True
            )
            return await _offload(
                env, lambda: _write(base_dir, out_dir, ref, record, held, fetched, env, threads)
            )
    finally:
        if cache_dir is None:
            await _offload(env, lambda: env.files.remove_tree(cache))


async def _target(store: Store, env: Env, run_id: str | None, deadline_s: float) -> Ref:
    seen = await resolve_pointer(store, None, env=env, deadline_s=deadline_s)
    if seen is None:
        if run_id is None:
            raise NotVisibleYet(
                "the store names no version yet; publish one, or name the run whose base to write"
            )
        return Ref(run_id, (await run_record(store, run_id)).boot_version)
    if run_id is not None and seen.run_id != run_id:
        raise InvalidInput(
            f"the store's pointer names run {seen.run_id!r}, not {run_id!r}", param="run_id"
        )
    return seen


def _digest_of(base_dir: Path, threads: int) -> str:
    with open_base(base_dir) as base:
        return base.model_digest(threads=threads)


def _write(
    base_dir: Path,
    out_dir: Path,
    ref: Ref,
    record: RunRecord,
    held: str,
    fetched: Fetched,
    env: Env,
    threads: int,
) -> Bootstrapped:
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(open_base(base_dir))
        readers = [stack.enter_context(PublicationReader.open(path)) for path in fetched.chain]
        if not readers:
            directory = stack.enter_context(atomic_directory(out_dir, env))
            if match_base(held, record.base_digest) == "differs":
                raise InvalidInput(
                    f"{base_dir} is not the base of run {ref.run_id!r}: its model digest differs",
                    param="base",
                )
            linked = _link_all(base, directory, env)
            if not linked:
                _rewrite(base, base, [], directory, ref, env, threads)
            return Bootstrapped(ref, held, out_dir, _base_word(held, record), 0, linked)
        anchored = readers[0].checkpoint is not None
        # Of the last run's anchors only: a fork goes on in the order of what it forked from.
        last = chain_legs(readers)[-1]
        anchor = next((r.checkpoint for r in reversed(last) if r.checkpoint is not None), None)
        seed = base if anchor is None else anchor
        if not seed.side_files:
            seed = Checkpoint(seed.directory, seed.shards, base.side_files)
        directory = stack.enter_context(atomic_directory(out_dir, env))
        digest = _rewrite(base, seed, readers, directory, ref, env, threads)
        word = "unused" if anchored else _base_word(held, record)
        return Bootstrapped(ref, digest, out_dir, word, len(readers), False)


def _base_word(held: str, record: RunRecord) -> str:
    # A base that differs got here by a fork's own lineage, whose digests were all checked.
    return "unproven" if record.base_digest is None else "proven"


def _rewrite(
    base: Checkpoint,
    seed: Checkpoint,
    readers: Sequence[PublicationReader],
    directory: Path,
    ref: Ref,
    env: Env,
    threads: int,
) -> str:
    writer = CheckpointWriter(env.files, directory, seed)
    try:
        report = fold_legs(
            base,
            chain_legs(readers),
            on_tensor=writer.add,
            threads=threads,
            everything=True,
        )
        writer.finish(ref.version)
    finally:
        writer.close()
    return report.model_digest


def _link_all(base: Checkpoint, directory: Path, env: Env) -> bool:
    """Hard-link the base's files; False, with nothing left, if the file system refuses."""
    paths = [shard.file.path for shard in base.shards] + list(base.side_files)
    index = base.directory / INDEX_NAME
    if env.files.exists(index):
        paths.append(index)
    linked: list[Path] = []
    try:
        for path in paths:
            env.files.link(env.files.resolve(path), directory / path.name)
            linked.append(directory / path.name)
    except OSError as error:
        if error.errno not in _LINK_REFUSED:
            raise
        for path in linked:
            env.files.unlink(path)
        return False
    return True


async def _offload(env: Env, work: Callable[[], T]) -> T:
    try:
        return await env.offload(work)
    except StitchError:
        raise
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise Unavailable(f"cannot write: {name}{error.strerror or error}") from error
