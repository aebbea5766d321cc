"""What readers do over any store: resolve the pointer, walk a chain, look at one version.

Nothing here trusts a name: a pointer counts only if it parses, resolves and is no step back,
and a version only if its index, manifest and files agree.
"""

from __future__ import annotations

from typing import Final

from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, NotVisibleYet, Unavailable
from stitch.format.checkpoint import LONE_FILE_NAME
from stitch.format.records import version_prefix
from stitch.format.wire import RunRecord
from stitch.stores.base import INDEX_NAME, Store
from stitch.stores.documents import (
    load_run,
    read_index,
    read_manifest,
    record_of,
    verify_version,
)
from stitch.stores.fetch import fetch_version
from stitch.types import Kind, Ref, parse_pointer, parse_version_name

__all__ = [
    "BARE_RUN_ID",
    "chain_for",
    "fetch_version",
    "load_run",
    "parse_stored_pointer",
    "read_index",
    "read_manifest",
    "record_of",
    "resolve_pointer",
    "verify_version",
]

# The run of a pointer in the old form, a bare number, which names none.
BARE_RUN_ID: Final = "unnamed"

_RESOLVE_DEADLINE_S: Final = 10.0
_RESOLVE_PAUSE_S: Final = (0.02, 0.5)


def parse_stored_pointer(text: str) -> Ref | None:
    """Parse a pointer, the old forms without a run included (their run is `BARE_RUN_ID`).

    Returns: None for an empty one. Raises: CorruptData for anything else.
    """
    bare = text.strip(" \t\r\n")
    if bare.isascii() and bare.isdigit() and len(bare) <= 16:
        return Ref(BARE_RUN_ID, int(bare))
    if bare.startswith("weight_v") and "/" not in bare:
        return Ref(BARE_RUN_ID, parse_version_name(bare))
    return parse_pointer(text)


async def resolve_pointer(
    store: Store,
    seen: Ref | None,
    *,
    env: Env | None = None,
    deadline_s: float = _RESOLVE_DEADLINE_S,
) -> Ref | None:
    """The pointer, once it parses fully, resolves, and is no step back from `seen`.

    Args:
        seen: the last pointer that this reader took, or None if it never took one. After one that
            names a run, a bare number is no pointer.
        deadline_s: how long a pointer that does not qualify is read again before giving up;
            0 reads once.
    Returns: None if no run is claimed, which counts only while `seen` is None.
    Raises: NotVisibleYet with what is wrong with the pointer; Unavailable.
    """
    env = env if env is not None else Env()
    deadline = env.clock.monotonic() + deadline_s
    pause, pause_max = _RESOLVE_PAUSE_S
    while True:
        try:
            return await _read_once(store, seen)
        except (CorruptData, InvalidInput) as error:
            problem: Unavailable = NotVisibleYet(f"the pointer cannot be taken: {error.message}")
        except Unavailable as error:
            problem = error
        if env.clock.monotonic() + pause > deadline:
            raise problem
        await env.clock.sleep(pause * env.random.uniform(0.5, 1.0))
        pause = min(2 * pause, pause_max)


async def _read_once(store: Store, seen: Ref | None) -> Ref | None:
    found = await store.read_pointer()
    ref = parse_stored_pointer(found.text)
    if ref is None:
        if seen is not None:
            raise NotVisibleYet(f"the pointer is empty; it named {seen} before")
        return None
    if ref == seen:
        return ref
    if seen is not None and seen.run_id != BARE_RUN_ID and "/" not in found.text:
        raise NotVisibleYet(f"the pointer is a bare number; it named {seen} before")
    if seen is not None and ref.run_id == seen.run_id and ref.version < seen.version:
        raise NotVisibleYet(f"the pointer names {ref}, a step back from {seen}")
    record = await record_of(store, ref.run_id)
    if ref.version < record.boot_version:
        raise NotVisibleYet(f"the pointer names {ref}, before the run's boot version")
    if ref.version > record.boot_version and not await _is_there(store, record, ref.version):
        raise NotVisibleYet(f"the pointer names {ref}, which is not in the store")
    return ref


async def _is_there(store: Store, record: RunRecord, version: int) -> bool:
    prefix = version_prefix(record, version)
    if await store.stat(f"{prefix}/{INDEX_NAME}") is not None:
        return True
    # A foreign full version may be one file without an index.
    return await store.stat(f"{prefix}/{LONE_FILE_NAME}") is not None


async def chain_for(
    store: Store, record: RunRecord, target: int, have: int | None = None
) -> list[int]:
    """Which versions to fetch to reach `target`, oldest first.

    Walks down from `target` to the newest anchor above `have` (the first of the answer then),
    else to `have`, or to the boot version where `have` is None.
    Raises: NotVisibleYet for a version missing on the way; InvalidInput if `target` is below
        the boot version or `have`; CorruptData for a delta on another base.
    """
    floor = record.boot_version if have is None else have
    if target < floor or floor < record.boot_version:
        raise InvalidInput(
            f"no chain of run {record.run_id} leads from {floor} to {target}", param="version"
        )
    chain: list[int] = []
    version = target
    while version > floor:
        chain.append(version)
        kind, base_version = await _kind_of(store, record, version)
        if kind is Kind.ANCHOR:
            break
        if base_version != version - 1:
            raise CorruptData(
                f"{Ref(record.run_id, version)} is a delta on {base_version}, not on {version - 1}"
            )
        version -= 1
    return chain[::-1]


async def _kind_of(store: Store, record: RunRecord, version: int) -> tuple[Kind, int | None]:
    try:
        index, _ = await read_index(store, record, version)
    except NotVisibleYet:
        if await store.stat(f"{version_prefix(record, version)}/{LONE_FILE_NAME}") is None:
            raise
        return Kind.ANCHOR, None
    return index.kind, index.base_version
