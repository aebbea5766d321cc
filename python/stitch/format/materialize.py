"""Rebuilding one version as a checkpoint on disk, from a base and a folder of publications."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, Unavailable, Unsupported
from stitch.format.atomic_directory import atomic_directory
from stitch.format.checkpoint import Checkpoint
from stitch.format.checkpoint_writer import CheckpointWriter
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import RebuiltTensor, rebuild
from stitch.types import VERSION_MAX, Kind, Ref, version_name

__all__ = ["MaterializeReport", "materialize", "open_base", "open_chain"]


@dataclass(frozen=True, slots=True)
class MaterializeReport:
    """What was written: the version, the one it was seeded from (None: the base), and sizes."""

    version: int
    seed_version: int | None
    applied: tuple[int, ...]
    tensors: int
    changed: int
    model_digest: str
    bytes_read: int
    bytes_written: int


def materialize(
    *,
    base: Path,
    updates: Path,
    version: int,
    out: Path,
    env: Env,
    base_version: int = 0,
    run_id: str | None = None,
    threads: int = 2,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> MaterializeReport:
    """Write version `version` to `out`, complete and durable, or nothing at all.

    Args: base: the checkpoint that counts as `base_version`. updates: holds `weight_vNNNNNN`
        directories. run_id: the run that Stitch's own publications must be of. on_progress:
        called with bytes done and in total.
    Raises: CorruptData, Unsupported: a publication is at fault. NotVisibleYet: one is missing
        and may still appear. InvalidInput: a bad base, or `out` exists. Unavailable: the disk or
        memory is full, or a file cannot be read or written; everything else is as before.
    """
    if not base_version <= version <= VERSION_MAX:
        raise InvalidInput(
            f"version {version} is below the base, which counts as {base_version}", param="version"
        )
    try:
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(open_base(base))
            chain = open_chain(updates, version, base_version, run_id, stack)
            directory = stack.enter_context(atomic_directory(out, env))
            return _write(held, chain, directory, version, base_version, env, threads, on_progress)
    except OSError as error:
        what = error.filename if error.filename else f"cannot write {out}"
        raise Unavailable(f"{what}: {error.strerror or error}", errno=error.errno) from error
    except MemoryError as error:
        raise Unavailable(f"cannot rebuild in the memory there is: {error}") from error
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise Unavailable(f"{error}: use fewer threads or allow more processes") from error


def open_base(base: Path) -> Checkpoint:
    """Open the base. Raises: InvalidInput for whatever is wrong with it."""
    try:
        return Checkpoint.open(base)
    except (CorruptData, Unsupported, InvalidInput) as error:
        said = error.message.removeprefix(f"{base} ").removeprefix("is ")
        raise InvalidInput(f"the base {base}: {said}", **error.fields) from error


def open_chain(
    updates: Path,
    version: int,
    base_version: int,
    run_id: str | None,
    stack: contextlib.ExitStack,
) -> list[PublicationReader]:
    """Open the publications from the newest full version above the base, or from the base, up
    to `version`, oldest first; `stack` closes them. One that is missing on the way is an error.
    """
    if updates.exists() and not updates.is_dir():
        raise InvalidInput(f"{updates} is not a directory", file=str(updates))
    chain: list[PublicationReader] = []
    for number in range(version, base_version, -1):
        expect = Ref(run_id, number) if run_id is not None else number
        reader = PublicationReader.open(updates / version_name(number), expect=expect)
        chain.insert(0, stack.enter_context(reader))
        if reader.kind == Kind.ANCHOR:
            break
        if reader.base_version != number - 1:
            reason = f"it applies to version {reader.base_version}, not to the one before it"
            raise CorruptData(
                f"{reader.directory.name}: {reason}", version=number, file=None, reason=reason
            )
    return chain


def _write(
    base: Checkpoint,
    chain: list[PublicationReader],
    directory: Path,
    version: int,
    base_version: int,
    env: Env,
    threads: int,
    on_progress: Callable[[int, int], None],
) -> MaterializeReport:
    anchor = chain[0].checkpoint if chain else None
    seed = anchor if anchor is not None else base
    if not seed.side_files:
        # A full version of weights alone: config and tokenizer are the base's.
        seed = Checkpoint(seed.directory, seed.shards, base.side_files)
    total = sum(tensor.nbytes for tensor in seed.tensors.values())
    writer = CheckpointWriter(env.files, directory, seed)

    def add(tensor: RebuiltTensor) -> None:
        writer.add(tensor)
        on_progress(min(writer.bytes_written, total), total)

    try:
        report = rebuild(
            base,
            chain,
            on_tensor=add,
            threads=threads,
            base_version=base_version,
            everything=True,
        )
        writer.finish(version)
    except CorruptData as error:
        _blame_base(base, chain, threads, error)
        raise
    finally:
        writer.close()
    return MaterializeReport(
        version=version,
        seed_version=chain[0].version if anchor is not None else None,
        applied=tuple(reader.version for reader in chain if reader.kind == Kind.DELTA),
        tensors=len(seed.tensors),
        changed=len(report.changed),
        model_digest=report.model_digest,
        bytes_read=report.bytes_read,
        bytes_written=writer.bytes_written,
    )


def _blame_base(
    base: Checkpoint, chain: list[PublicationReader], threads: int, cause: CorruptData
) -> None:
    """Tell a base of other weights from damage in the chain, where a manifest says which base.

    Raises: InvalidInput if the base is the one at fault.
    """
    first = chain[0].manifest if chain and chain[0].kind == Kind.DELTA else None
    if first is None or first.base_digest is None:
        return
    found = base.model_digest(threads=threads)
    if found != first.base_digest:
        raise InvalidInput(
            f"the base {base.directory} is not the one that {chain[0].directory.name} applies to: "
            f"its model digest is {found}, the manifest says {first.base_digest}",
            found=found,
            expected=first.base_digest,
        ) from cause
