"""What a store holds: runs, versions, sizes; and whether every byte of it is right."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, NotVisibleYet, StitchError, Unsupported
from stitch.format.checkpoint import LONE_FILE_NAME, Checkpoint
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import rebuild
from stitch.format.records import FIRST_UPDATES_DIR, version_prefix
from stitch.format.shards import INDEX_NAME
from stitch.format.wire import RunRecord
from stitch.stores import Store
from stitch.stores.versions import (
    BARE_RUN_ID,
    fetch_version,
    load_run,
    parse_stored_pointer,
    read_index,
    read_manifest,
    record_of,
    resolve_pointer,
)
from stitch.types import Kind, Ref, parse_version_name, version_name

__all__ = ["Problem", "RunSurvey", "StoreSurvey", "VersionSurvey", "survey", "verify_run"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the pointer, a run or a version. `retryable`: it may still appear."""

    where: str
    reason: str
    retryable: bool

    @classmethod
    def of(cls, where: str, error: StitchError) -> Problem:
        return cls(where, error.message, isinstance(error, NotVisibleYet))


@dataclass(frozen=True, slots=True)
class VersionSurvey:
    """One version as its index and manifest describe it.

    files: its shards. bytes: its data, the shards and an anchor's side files; index and manifest,
    which `Published.bytes` counts too, are left out.
    """

    version: int
    kind: str
    base_version: int | None
    encoding: str | None
    checksum_format: str | None
    tensors: int
    files: int
    bytes: int
    foreign: bool
    rollback_of: str | None


@dataclass(slots=True)
class RunSurvey:
    """One run: its record, and every version that can be described."""

    run_id: str
    record: RunRecord
    foreign: bool
    versions: list[VersionSurvey] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass(slots=True)
class StoreSurvey:
    """The whole store. `pointer` is None if no run is claimed or the text cannot be parsed."""

    url: str
    pointer_text: str
    pointer: Ref | None
    runs: list[RunSurvey]
    problems: list[Problem]


async def survey(store: Store, env: Env) -> StoreSurvey:
    """Describe everything in `store` from indexes and manifests; data files are not read.

    Raises: Unavailable. Whatever is wrong with single parts is in `problems`.
    """
    text = (await store.read_pointer()).text
    found = StoreSurvey(store.url, text.strip(), None, [], [])
    try:
        found.pointer = parse_stored_pointer(text)
        await resolve_pointer(store, None, env=env, deadline_s=0)
    except (CorruptData, NotVisibleYet) as error:
        found.problems.append(Problem.of("latest", error))
    for run_id in await _run_ids(store, found):
        try:
            Ref(run_id, 0)
            known = await load_run(store, run_id)
            record = known if known is not None else await record_of(store, run_id)
            versions = await _versions(store, record)
        except (CorruptData, InvalidInput, Unsupported) as error:
            found.problems.append(Problem.of(f"runs/{run_id}", error))
            continue
        run = RunSurvey(run_id, record, known is None)
        for version in versions:
            await _describe(store, run, version)
        found.runs.append(run)
    return found


async def _run_ids(store: Store, survey: StoreSurvey) -> list[str]:
    parts = [key.split("/") for key in await _listed(store, "runs", survey)]
    found = {key[1] for key in parts if len(key) == 3 and key[2] == "run.json"}
    for lone in ("/".join(key) for key in parts if len(key) == 2):
        try:
            await store.stat(lone)
        except InvalidInput as error:
            survey.problems.append(Problem.of(lone, error))
    claimed = {
        record.updates_dir
        for record in [await _record_or_none(store, run_id) for run_id in sorted(found)]
        if record is not None
    }
    if survey.pointer is not None:
        found.add(survey.pointer.run_id)
    elif FIRST_UPDATES_DIR not in claimed and await _listed(store, FIRST_UPDATES_DIR, survey):
        found.add(BARE_RUN_ID)
    return sorted(found)


async def _listed(store: Store, prefix: str, survey: StoreSurvey) -> Sequence[str]:
    try:
        return await store.list(prefix)
    except InvalidInput as error:
        survey.problems.append(Problem.of(prefix, error))
        return []


async def _record_or_none(store: Store, run_id: str) -> RunRecord | None:
    try:
        return await load_run(store, run_id)
    except (CorruptData, InvalidInput, Unsupported):
        return None


async def _versions(store: Store, record: RunRecord) -> list[int]:
    prefix = f"{record.updates_dir}/"
    found = set()
    for key in await store.list(record.updates_dir):
        name = key.removeprefix(prefix).split("/")[0]
        with contextlib.suppress(CorruptData):
            found.add(parse_version_name(name))
    return sorted(found)


async def _describe(store: Store, run: RunSurvey, version: int) -> None:
    prefix = version_prefix(run.record, version)
    try:
        lone = await store.stat(f"{prefix}/{LONE_FILE_NAME}")
        if lone is not None and await store.stat(f"{prefix}/{INDEX_NAME}") is None:
            run.versions.append(
                VersionSurvey(version, "anchor", None, None, None, 0, 1, lone.size, True, None)
            )
            return
        index, _ = await read_index(store, run.record, version)
        manifest, _ = await read_manifest(store, run.record, version)
        names = sorted(set(index.weight_map.values()))
        if manifest is not None:
            sizes = [entry.size for entry in manifest.files]
        else:
            infos = [await store.stat(f"{prefix}/{name}") for name in names]
            sizes = [info.size for info in infos if info is not None]
    except (CorruptData, InvalidInput, NotVisibleYet, Unsupported) as error:
        run.problems.append(Problem.of(version_name(version), error))
        return
    rollback = manifest.rollback_of if manifest is not None else None
    run.versions.append(
        VersionSurvey(
            version=version,
            kind=index.kind.value,
            base_version=index.base_version,
            encoding=index.encoding,
            checksum_format=index.checksum_format,
            tensors=len(index.weight_map),
            files=len(names),
            bytes=sum(sizes),
            foreign=manifest is None,
            rollback_of=str(rollback.to_ref()) if rollback is not None else None,
        )
    )


async def verify_run(
    store: Store,
    run: RunSurvey,
    env: Env,
    cache: Path,
    *,
    base: Path | None,
    deep: bool,
    threads: int,
    on_version: Callable[[int], None] = lambda version: None,
) -> list[Problem]:
    """Read every version of the run in full, and with `deep` rebuild it tensor by tensor.

    Args: cache: an empty directory for versions that are not local. base: the checkpoint that
        counts as the run's boot version; without it, deltas before the first anchor cannot be
        rebuilt, which is a problem if `deep`.
    Raises: Unavailable.
    """
    problems: list[Problem] = []
    good: list[tuple[int, Path]] = []
    for described in run.versions:
        on_version(described.version)
        try:
            path = await fetch_version(store, run.record, described.version, cache, env)
            good.append((described.version, path))
        except (CorruptData, InvalidInput, NotVisibleYet, Unsupported) as error:
            problems.append(Problem.of(version_name(described.version), error))
    problems += _gaps(run)
    if deep and not problems:
        work = functools.partial(_rebuild_all, run, good, base, threads)
        problems += await env.offload(work)
    return problems


def _gaps(run: RunSurvey) -> list[Problem]:
    there = {described.version for described in run.versions} | {run.record.boot_version}
    return [
        Problem(
            version_name(described.version),
            f"its base, version {described.base_version}, is not in the store",
            True,
        )
        for described in run.versions
        if described.base_version is not None and described.base_version not in there
    ]


def _rebuild_all(
    run: RunSurvey, versions: Sequence[tuple[int, Path]], base: Path | None, threads: int
) -> list[Problem]:
    """Rebuild segment by segment: the base or an anchor, and the deltas up to the next anchor."""
    kinds = {described.version: described.kind for described in run.versions}
    segments: list[list[tuple[int, Path]]] = []
    for version, path in versions:
        if not segments or kinds[version] == Kind.ANCHOR.value:
            segments.append([])
        segments[-1].append((version, path))
    problems = []
    for segment in segments:
        first, last = version_name(segment[0][0]), version_name(segment[-1][0])
        needs_base = kinds[segment[0][0]] != Kind.ANCHOR.value
        if needs_base and base is None:
            problems.append(Problem(f"{first}…{last}", "give --base to rebuild these", False))
            continue
        try:
            _rebuild_segment(segment, base if needs_base else None, run, threads)
        except (CorruptData, NotVisibleYet, Unsupported) as error:
            problems.append(Problem.of(f"{first}…{last}", error))
    return problems


def _rebuild_segment(
    segment: Sequence[tuple[int, Path]], base: Path | None, run: RunSurvey, threads: int
) -> None:
    with contextlib.ExitStack() as stack:
        chain = [
            stack.enter_context(
                PublicationReader.open(
                    path,
                    expect=version if run.foreign else Ref(run.run_id, version),
                    verify_files=False,
                )
            )
            for version, path in segment
        ]
        source = chain[0].checkpoint
        if base is not None:
            source = stack.enter_context(Checkpoint.open(base))
        assert source is not None
        boot = run.record.boot_version if base is not None else None
        rebuild(source, chain, on_tensor=lambda _: None, threads=threads, base_version=boot)
