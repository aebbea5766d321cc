"""What the `cpu` and `disk` destinations share: stage canonical bytes in files, let ranks copy.

The canonical state is the boot checkpoint plus overlay files of changed tensors. Ranks get
`TensorSlice`s: where the new bytes lie, and where the old ones do, which is the undo.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from stitch.destinations.base import Proof, Staged, StageRequest, Verified
from stitch.destinations.canonical import CanonicalState, compacted, open_boot, rebuilt
from stitch.destinations.overlays import OverlayRoot, no_space
from stitch.destinations.ranks import Ranks
from stitch.engines.base import Engine, RankOrder
from stitch.env import Env
from stitch.errors import (
    ActivationFailed,
    CorruptData,
    EngineUnavailable,
    StitchError,
    Unsupported,
)

__all__ = ["CopyingConfig", "CopyingDestination"]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyingConfig:
    """Limits. rank_s: deadline of one order; full_s: of a full verification, which reads every
    live byte; order_tries: sends before its outcome is unknown;
    threads: of decoding; overlays_max: overlay directories kept before they are compacted."""

    rank_s: float = 30.0
    full_s: float = 120.0
    order_tries: int = 2
    threads: int = 2
    overlays_max: int = 8


@dataclass(frozen=True, slots=True)
class _Pending:
    attempt: int
    state: CanonicalState
    changed: frozenset[str]


class CopyingDestination:
    """See `Destination`. Subclasses say where overlays lie and how ranks read them."""

    name: str
    via: Literal["disk", "cpu"]

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        *,
        base_dir: Path,
        overlays: OverlayRoot,
        config: CopyingConfig,
        env: Env,
    ) -> None:
        self._base_dir = base_dir
        self._overlays = overlays
        self._config = config
        self._env = env
        self._ranks = Ranks(
            engine, incarnation, env, config.rank_s, config.full_s, config.order_tries
        )
        self._boot: CanonicalState | None = None
        self._held: CanonicalState | None = None
        self._pending: _Pending | None = None
        self._dirty: frozenset[str] = frozenset()
        self._compactions = 0

    @property
    def digest(self) -> str:
        return self._state.digest

    @property
    def boot_digest(self) -> str:
        assert self._boot is not None, "prove first"
        return self._boot.digest

    @property
    def _state(self) -> CanonicalState:
        assert self._held is not None, "prove first"
        return self._held

    async def prove(self) -> Proof:
        if self._boot is None:
            threads = self._config.threads
            self._boot = await self._offload(lambda: open_boot(self._base_dir, threads=threads))
            self._held = self._boot
            await self._offload(self._overlays.open)
        self._ranks.attempt = max(1, self._ranks.attempt)
        await self._ranks.send(RankOrder("", 0, "discard"))
        found = await self._ranks.live("full")
        self._ranks.learn_coverage(found)
        held = self._ranks.held_anywhere()
        strange = sorted(held - self._state.slices.keys())
        if strange:
            raise Unsupported(
                f"the engine has a storage {strange[0]!r} ({len(strange)} in all) that its "
                "checkpoint lacks; it cannot be proven",
                tensor=strange[0],
            )
        if not held:
            raise Unsupported("the engine reports no storage of its checkpoint")
        expected = {name: part.checksum for name, part in self._state.slices.items()}
        wrong = self._ranks.mismatched(found, expected, held)
        self._dirty = frozenset(wrong)
        if wrong:
            raise CorruptData(
                f"{len(wrong)} of {len(held)} live tensors differ from the checkpoint in "
                f"{self._base_dir}, first {wrong[0]!r}",
                tensor=wrong[0],
            )
        missing = dict.fromkeys(self._state.slices.keys() - held, "no rank holds it")
        return Proof(covered=len(held), missing=missing)

    def advance(self, attempt: int) -> None:
        self._ranks.attempt = max(attempt, self._ranks.attempt)

    async def fence(self, attempt: int) -> None:
        self._ranks.attempt = max(attempt, self._ranks.attempt)
        self._pending = None
        await self._ranks.send(RankOrder("", 0, "discard"))

    async def stage(self, request: StageRequest) -> Staged:
        assert self._pending is None, "discard or adopt the former stage first"
        assert request.attempt > self._ranks.attempt, "attempts only grow"
        started = self._env.clock.monotonic()
        self._ranks.attempt = request.attempt
        try:
            state, bytes_read = await self._rebuild(request)
            changed = self._changed(state)
            await self._ranks.send(
                RankOrder(
                    "",
                    0,
                    "stage",
                    tensors=tuple(state.slices[name] for name in sorted(changed)),
                    undo_tensors=tuple(self._state.slices[name] for name in sorted(changed)),
                    via=self.via,
                )
            )
        except BaseException:
            await asyncio.shield(self._drop_unused())
            raise
        self._pending = _Pending(request.attempt, state, changed)
        return Staged(
            base=request.base,
            target=request.target,
            attempt=request.attempt,
            changed={name: state.checksums[name] for name in changed},
            model_digest=state.digest,
            bytes_read=bytes_read,
            stage_s=self._env.clock.monotonic() - started,
        )

    async def preflight(self, staged: Staged) -> None:
        self._pending_of(staged)
        for reply in await self._ranks.send(RankOrder("", 0, "state")):
            found = (reply.data.get("attempt"), reply.data.get("step"))
            if found != (staged.attempt, "staged"):
                raise ActivationFailed(
                    f"rank {reply.rank} is not ready to commit attempt {staged.attempt}: it is "
                    f"at {found[1]} of attempt {found[0]}",
                    rank=reply.rank,
                )

    async def commit(self, staged: Staged) -> None:
        self._pending_of(staged)
        await self._ranks.send(RankOrder("", 0, "commit"))

    async def verify(self, staged: Staged) -> Verified:
        pending = self._pending_of(staged)
        found = await self._ranks.live("changed")
        expected = {name: pending.state.slices[name].checksum for name in pending.changed}
        wrong = self._ranks.mismatched(found, expected, pending.changed)
        return Verified(len(pending.changed), wrong)

    async def undo(self, staged: Staged) -> Verified:
        self._pending_of(staged)
        await self._ranks.send(RankOrder("", 0, "undo"))
        verified = await self.scrub()
        if verified.ok:
            self._pending = None
            await self._drop_unused()
        return verified

    async def adopt(self, staged: Staged) -> None:
        self._held = self._pending_of(staged).state
        self._pending = None
        self._dirty = frozenset()
        await self._drop_unused()
        if len(self._state.directories()) > self._config.overlays_max:
            await self._compact()

    async def discard(self, staged: Staged) -> None:
        if self._pending is None or self._pending.attempt != staged.attempt:
            return
        self._pending = None
        try:
            await self._ranks.send(RankOrder("", 0, "discard"))
        except (EngineUnavailable, ActivationFailed) as error:
            # The next stage has a higher attempt, which makes the ranks forget this one.
            log.warning("discard not confirmed", extra={"error": error.message})
        await self._drop_unused()

    async def scrub(self) -> Verified:
        found = await self._ranks.live("full")
        expected = {name: part.checksum for name, part in self._state.slices.items()}
        names = self._ranks.held_anywhere()
        wrong = self._ranks.mismatched(found, expected, names)
        self._dirty = frozenset(wrong)
        return Verified(len(names), wrong)

    async def close(self) -> None:
        self._pending = None
        await self._offload(self._overlays.close)

    def _changed(self, state: CanonicalState) -> frozenset[str]:
        """What must be written: tensors that differ from those held, or that are known wrong."""
        held, covered = self._state.slices, self._ranks.held_anywhere()
        names = {n for n, part in state.slices.items() if part.checksum != held[n].checksum}
        return frozenset(names | self._dirty) & covered

    async def _rebuild(self, request: StageRequest) -> tuple[CanonicalState, int]:
        if not request.chain:
            return (self._boot if request.from_boot and self._boot else self._state), 0
        start = self._state
        base_version: int | None = request.base.version
        if request.from_boot:
            assert self._boot is not None
            start = self._boot
        if request.from_boot or request.base.run_id != request.target.run_id:
            base_version = None
        stop = threading.Event()
        try:
            return await self._offload(
                lambda: rebuilt(
                    start,
                    request.chain,
                    self._overlays,
                    f"stage-{request.attempt:08d}",
                    threads=self._config.threads,
                    cancelled=stop.is_set,
                    base_version=base_version,
                )
            )
        finally:
            stop.set()

    async def _compact(self) -> None:
        self._compactions += 1
        name = f"compact-{self._compactions:08d}"
        try:
            self._held = await self._offload(lambda: compacted(self._state, self._overlays, name))
        except StitchError as error:
            # Only space is lost: the state stays spread over its overlays until the next time.
            log.warning("overlays not compacted", extra={"error": error.message})
        await self._drop_unused()

    async def _drop_unused(self) -> None:
        used = set() if self._held is None else self._held.directories()
        if self._pending is not None:
            used |= self._pending.state.directories()
        try:
            await self._offload(lambda: self._overlays.keep_only(used))
        except StitchError as error:
            log.warning("overlay not removed", extra={"error": error.message})

    def _pending_of(self, staged: Staged) -> _Pending:
        pending = self._pending
        assert pending is not None, "nothing is staged"
        assert pending.attempt == staged.attempt, "another attempt is staged"
        return pending

    async def _offload(self, work: Callable[[], T]) -> T:
        try:
            return await self._env.offload(work)
        except OSError as error:
            raise no_space(error) from error
