"""Which publications lead from the bytes held to a target, and fetching them under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, Unavailable
from stitch.format.publication import PublicationReader
from stitch.format.records import foreign_run_record
from stitch.format.wire import FORMAT_MAJOR, FORMAT_MINOR, RunRecord
from stitch.stores.base import Store
from stitch.stores.versions import chain_for, fetch_version, load_run
from stitch.types import Kind, Ref

__all__ = ["Fetched", "Held", "StoreLease", "fetch_path", "run_record"]

log = logging.getLogger(__name__)

FORK_DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class Held:
    """The canonical bytes a replica holds. `ref` is None while they have no name.

    digest: model digest of those bytes; boot_digest: of the engine's boot checkpoint.
    """

    ref: Ref | None
    digest: str
    boot_digest: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """Local directories of the publications to apply, oldest first.

    from_boot: they start at the boot checkpoint, not at the bytes held.
    empty: every one is a delta that changes nothing, so only the label moves.
    """

    target: Ref
    chain: Sequence[Path]
    from_boot: bool
    empty: bool


async def run_record(store: Store, run_id: str) -> RunRecord:
    """The run's record, or the stand-in for a foreign trainer's root without one."""
    return await load_run(store, run_id) or foreign_run_record(run_id)


class StoreLease:
    """Tells a collector what this replica reads: refs, and a counter that moves while it lives.

    A store that refuses to be written (read-only credentials) costs the protection, not the
    replica: that is logged once.
    """

    def __init__(self, store: Store, replica_id: str, env: Env, *, beat_s: float) -> None:
        self._store = store
        self._name = re.sub(r"[^A-Za-z0-9._-]", "-", f"replica-{replica_id}")[:128]
        self._replica_id = replica_id
        self._env = env
        self._beat_s = beat_s
        self._counter = 0
        self._warned = False

    @contextlib.asynccontextmanager
    async def held(self, incarnation: str, refs: Sequence[Ref | None]) -> AsyncIterator[None]:
        """Hold the lease on `refs` in the block; the counter grows every `beat_s`."""
        named = [str(ref) for ref in refs if ref is not None]
        await self._write(incarnation, named)
        beat = asyncio.create_task(self._beat(incarnation, named), name="store-lease")
        try:
            yield
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat
            with contextlib.suppress(Unavailable):
                await self._store.drop_lease(self._name)

    async def _beat(self, incarnation: str, refs: list[str]) -> None:
        while True:
            await self._env.clock.sleep(self._beat_s)
            await self._write(incarnation, refs)

    async def _write(self, incarnation: str, refs: list[str]) -> None:
        self._counter += 1
        document = {
            "format": {"major": FORMAT_MAJOR, "minor": FORMAT_MINOR},
            "replica_id": self._replica_id,
            "incarnation": incarnation,
            "refs": refs,
            "counter": self._counter,
        }
        try:
            await self._store.write_lease(self._name, json.dumps(document).encode("utf-8"))
        except Unavailable as error:
            if not self._warned:
                log.warning("lease not written", extra={"lease": self._name, "error": str(error)})
            self._warned = True


async def fetch_path(
    store: Store,
    target: Ref,
    held: Held,
    cache: Path,
    env: Env,
    *,
    trust_base: bool,
    on_version: Callable[[Ref], None] = lambda _: None,
) -> Fetched:
    """Find and fetch the shortest chain of publications from what is held to `target`.

    trust_base: a run that declares no base digest counts as starting from the boot checkpoint.
    Raises: NotVisibleYet, Unavailable; InvalidInput if no chain starts at bytes we have.
    """
    legs: list[Path] = []
    from_boot = False
    depth = 0
    at: Ref | None = target
    while at is not None:
        depth += 1
        if depth > FORK_DEPTH_MAX:
            raise CorruptData(
                f"{target} has more than {FORK_DEPTH_MAX} forks between it and a base"
            )
        record = await run_record(store, at.run_id)
        have = held.ref.version if held.ref is not None and held.ref.run_id == at.run_id else None
        if have is not None and have > at.version:
            have = None
        versions = await chain_for(store, record, at.version, have)
        paths = []
        for version in versions:
            on_version(Ref(at.run_id, version))
            paths.append(await fetch_version(store, record, version, cache, env))
        legs = [*paths, *legs]
        if have is not None or await _starts_whole(paths, env):
            break
        at, from_boot = _start_of(record, held, trust_base)
    empty = not from_boot and await env.offload(lambda: all(_is_empty(path) for path in legs))
    return Fetched(target, tuple(legs), from_boot, empty)


def _start_of(record: RunRecord, held: Held, trust_base: bool) -> tuple[Ref | None, bool]:
    """Where a run's first delta starts: (a version to walk on from or None, from the boot)."""
    base = record.base_digest
    if base is not None and base == held.digest:
        return None, False
    if base is not None and base == held.boot_digest:
        return None, True
    if record.forked_from is not None:
        return Ref(record.forked_from.run_id, record.forked_from.version), False
    if base is None and trust_base:
        return None, True
    raise InvalidInput(
        f"run {record.run_id!r} starts from a base that this replica does not hold and has no "
        "anchor to start from; start the engine from that base, or publish an anchor",
        run_id=record.run_id,
    )


async def _starts_whole(paths: Sequence[Path], env: Env) -> bool:
    return bool(paths) and await env.offload(lambda: _is_anchor(paths[0]))


def _is_anchor(path: Path) -> bool:
    with PublicationReader.open(path, verify_files=False) as reader:
        return reader.kind is Kind.ANCHOR


def _is_empty(path: Path) -> bool:
    with PublicationReader.open(path, verify_files=False) as reader:
        return reader.kind is Kind.DELTA and not reader.payloads
