"""Claiming a run: a new one, one of ours after a restart, or a fork of another. Rank 0 only."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from stitch.env import Env
from stitch.errors import Conflict, CorruptData, InvalidInput, NotVisibleYet, StitchError
from stitch.format.records import (
    FIRST_RUN_KEY,
    FIRST_UPDATES_DIR,
    RUN_RECORD_SIZE_MAX,
    encode_run_record,
    new_run_record,
    run_record_key,
)
from stitch.format.wire import ForkPoint, RunRecord
from stitch.publisher.lineage import Loader
from stitch.publisher.session import Session, fenced
from stitch.publisher.state import SealedState
from stitch.stores.base import PointerRead, Store
from stitch.stores.versions import load_run, parse_stored_pointer, read_manifest, record_of
from stitch.types import Ref

__all__ = ["ClaimRequest", "claim"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What to claim. boot_version: None means 0 for a new run, and as it is for another.
    fork_from: a ref, or "pointer", for a run that starts from another's version."""

    run_id: str
    boot_version: int | None = None
    fork_from: Ref | str | None = None


async def claim(store: Store, request: ClaimRequest, loader: Loader, env: Env) -> Session:
    """Claim the run and point to it, or find our place in it again.

    Safe to repeat: an existing claim of the same run is resumed at the pointer, whose durability
    is repeated. Raises: Conflict if the pointer belongs to another run meanwhile; CorruptData if
    the pointer was lost; InvalidInput if the request does not fit the run that is there.
    """
    pointer = await store.read_pointer()
    record = await load_run(store, request.run_id)
    if record is not None:
        return await _resume(store, request, record, pointer, loader)
    boot_version, point, state = request.boot_version or 0, None, None
    if request.fork_from is not None:
        state, point = await _fork_point(store, request.fork_from, pointer, loader)
        boot_version = point.version
    boot = Ref(request.run_id, boot_version)
    if state is None and loader.base is not None:
        state = await loader.base_state(boot)
    record = new_run_record(
        request.run_id,
        first=await _takes_first(store, pointer, request.run_id),
        boot_version=boot_version,
        base_digest=state.model_digest if state is not None else None,
        writer=env.random.nonce(),
        forked_from=point,
    )
    if not await store.create(run_record_key(record.run_id), encode_run_record(record)):
        raise Conflict(f"run {record.run_id} was just claimed by another writer; pick another id")
    log.info("claimed", extra={"run_id": record.run_id, "boot_version": boot_version})
    return await _point_to_boot(store, record, pointer, _at(boot, state))


async def _takes_first(store: Store, pointer: PointerRead, run_id: str) -> bool:
    """Take `updates/` for this run if it is free: no pointer, no other run, no foreign versions,
    and no other run that is being claimed at this moment."""
    others = [key for key in await store.list("runs") if key != FIRST_RUN_KEY]
    if pointer.text.strip() or others or await store.list(FIRST_UPDATES_DIR):
        return False
    if await store.create(FIRST_RUN_KEY, run_id.encode()):
        return True
    return await store.read(FIRST_RUN_KEY, size_max=RUN_RECORD_SIZE_MAX) == run_id.encode()


def _at(boot: Ref, state: SealedState | None) -> SealedState:
    """The state as the boot version; unknown when there is neither base nor fork point."""
    if state is None:
        return SealedState(boot, None, None, None, None)
    return SealedState(
        boot,
        state.held,
        state.catalog,
        state.model_digest,
        None,
        state.deltas_since_anchor,
        state.side_files,
    )


async def _point_to_boot(
    store: Store, record: RunRecord, pointer: PointerRead, state: SealedState
) -> Session:
    boot = Ref(record.run_id, record.boot_version)
    # `pointer` in the session is where readers go back to if the swap is lost: the boot itself.
    session = Session(store, record, state, boot, pointer.token, ours={pointer.text})
    await session.move_pointer(boot)
    return session


async def _resume(
    store: Store,
    request: ClaimRequest,
    record: RunRecord,
    pointer: PointerRead,
    loader: Loader,
) -> Session:
    if request.boot_version not in (None, record.boot_version):
        raise InvalidInput(
            f"run {record.run_id} boots from version {record.boot_version}, not "
            f"{request.boot_version}",
            param="boot_version",
        )
    # It is there; this makes it durable, which its writer may not have lived to do.
    await store.create(run_record_key(record.run_id), encode_run_record(record))
    ref = parse_stored_pointer(pointer.text)
    if ref is None or ref.run_id != record.run_id:
        published = await store.list(record.updates_dir)
        if published and ref is not None:
            raise fenced(f"run {record.run_id} was superseded: the pointer names {ref}")
        if published:
            raise CorruptData(
                f"the store's pointer is empty or gone, but run {record.run_id} has versions: put "
                "back what it named, or the newest version that a replica serves",
                run_id=record.run_id,
            )
        # Claimed, but the writer died before it could point to the run.
        state = await _state_or_none(loader, record, record.boot_version)
        boot = Ref(record.run_id, record.boot_version)
        return await _point_to_boot(store, record, pointer, _at(boot, state))
    state = await _state_or_none(loader, record, ref.version)
    if state is None:
        digest = None
        if ref.version > record.boot_version:
            _, digest = await read_manifest(store, record, ref.version)
        state = SealedState(ref, None, None, None, digest)
    session = Session(store, record, state, ref, pointer.token)
    if not state.known and loader.base is not None:
        session.names_wanted = frozenset((await loader.base_state(ref)).tensors)
    await session.move_pointer(ref)
    log.info("resumed", extra={"run_id": record.run_id, "version": ref.version})
    return session


async def _state_or_none(loader: Loader, record: RunRecord, version: int) -> SealedState | None:
    """The state, or None if no unbroken chain leads to it: then an anchor must follow."""
    try:
        return await loader.load(record, version)
    except InvalidInput:
        raise
    except (NotVisibleYet, CorruptData) as error:
        log.warning(
            "state not rebuilt; the next version will be an anchor",
            extra={"run_id": record.run_id, "version": version, "reason": error.message},
        )
        return None


async def _fork_point(
    store: Store, fork_from: Ref | str, pointer: PointerRead, loader: Loader
) -> tuple[SealedState, ForkPoint]:
    if isinstance(fork_from, Ref):
        ref: Ref | None = fork_from
    else:
        ref = parse_stored_pointer(pointer.text if fork_from == "pointer" else fork_from)
    if ref is None:
        raise InvalidInput("there is no pointer to fork from: no run is claimed", param="fork_from")
    parent = await record_of(store, ref.run_id)
    try:
        state = await loader.load(parent, ref.version)
    except StitchError as error:
        raise type(error)(f"cannot fork from {ref}: {error.message}", **error.fields) from error
    return state, ForkPoint(
        run_id=ref.run_id, version=ref.version, manifest_digest=state.manifest_digest
    )
