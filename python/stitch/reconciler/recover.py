"""From an engine whose weights are not known to one whose weights are proven, or ReplicaLost.

Used at boot, when a sidecar attaches to a running engine, after an activation that neither
verified nor was undone, and when the engine was lost or came back as another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from stitch.destinations.base import StageRequest
from stitch.engines.base import Engine, Health
from stitch.env import Env
from stitch.errors import (
    ActivationFailed,
    CorruptData,
    EngineUnavailable,
    InvalidInput,
    ReplicaLost,
    StitchError,
    Unavailable,
    Unsupported,
)
from stitch.reconciler.config import DestinationFactory, ReplicaConfig
from stitch.reconciler.control import EngineControl
from stitch.reconciler.life import UNNAMED, Life
from stitch.reconciler.status import ReplicaStatus
from stitch.types import ActivationMode

__all__ = ["Recovery"]

log = logging.getLogger(__name__)


class Recovery:
    """Makes lives, and makes their weights known."""

    def __init__(
        self,
        engine: Engine,
        factory: DestinationFactory,
        status: ReplicaStatus,
        config: ReplicaConfig,
        env: Env,
    ) -> None:
        self._engine = engine
        self._factory = factory
        self._status = status
        self._config = config
        self._env = env

    async def restore(self, life: Life | None) -> Life:
        """Return a life whose weights are known: the given one, or that of a restarted engine.

        Raises: ReplicaLost when the engine stays away too long, cannot be described, or its
            weights cannot be brought to a verified state.
        """
        limit_s = self._config.boot_s_max if life is None else self._config.engine_return_s
        end = self._env.clock.monotonic() + limit_s
        failures = 0
        while True:
            try:
                life = await self._same_or_next(life)
                await self._make_known(life)
                return life
            except (Unsupported, InvalidInput) as error:
                self._status.destination_error = error.message
                raise ReplicaLost(
                    f"the engine's weights cannot be proven: {error.message}"
                ) from error
            except Unavailable as error:
                self._note(error)
                if self._env.clock.monotonic() >= end:
                    raise ReplicaLost(
                        f"the engine's weights are unknown and it did not come back within "
                        f"{limit_s:g} s: {error.message}"
                    ) from error
            except (ActivationFailed, CorruptData) as error:
                self._note(error)
                failures += 1
                if failures >= self._config.recover_tries:
                    raise ReplicaLost(
                        f"neither undo nor re-activation verifies after {failures} tries: "
                        f"{error.message}"
                    ) from error
            await self._env.clock.sleep(min(1.0, limit_s / 20))

    async def _same_or_next(self, life: Life | None) -> Life:
        control = self._control(self._status.incarnation)
        if await control.healthy() is not Health.HEALTHY:
            raise EngineUnavailable("the engine does not answer its health probe")
        description = await control.describe()
        if life is not None and description.boot_id == life.boot_id:
            return life
        if life is not None:
            log.warning("engine restarted", extra={"boot_id": description.boot_id})
            await life.destination.close()
            self._status.begin_incarnation(self._env.random.nonce())
        self._status.gate.forget()
        incarnation = self._status.incarnation
        destination = self._factory(self._engine, incarnation)
        self._status.destination = destination.name
        offered = self._engine.capabilities.destinations
        if destination.name not in offered:
            raise Unsupported(
                f"the engine takes no weights by {destination.name!r}, only by "
                f"{', '.join(sorted(offered))}"
            )
        return Life(incarnation, description.boot_id, destination, self._control(incarnation))

    async def _make_known(self, life: Life) -> None:
        """Prove the live weights, or rewrite them; then label, resume, open."""
        if not life.proven:
            right = await self._prove(life)
        else:
            await life.control.pause(self._mode())
            life.staged = None
            await life.destination.fence(life.next_attempt())
            right = (await life.destination.scrub()).ok
        if not right:
            await life.control.pause(self._mode())
            await self._repair(life)
        if not self._engine.capabilities.keyed_cache:
            await life.control.flush()
        label = None if life.held is None else life.next_label(life.held)
        await life.control.label(life.label_attempt(), label)
        await life.control.resume(recompute=True)
        life.known = True
        self._status.known = True
        self._status.destination_ready = True
        self._status.destination_error = None
        self._status.booted = True
        self._status.gate.open(label)
        self._status.changed()

    async def _prove(self, life: Life) -> bool:
        try:
            proof = await life.destination.prove()
        except CorruptData as error:
            # An engine that served before this sidecar attached: its bytes are rewritten.
            log.warning("engine not at its checkpoint", extra={"error": error.message})
            life.proven = True
            return False
        life.proven = True
        for name, reason in proof.missing.items():
            log.warning("tensor not in the engine", extra={"tensor": name, "reason": reason})
        return True

    async def _repair(self, life: Life) -> None:
        """Write every wrong tensor anew from the canonical state and verify all of them."""
        ref = life.held or UNNAMED
        request = StageRequest(base=ref, target=ref, chain=(), attempt=life.next_attempt())
        staged = await life.destination.stage(request)
        try:
            await life.destination.preflight(staged)
            await life.destination.commit(staged)
            verified = await life.destination.scrub()
            if not verified.ok:
                raise ActivationFailed(
                    f"{len(verified.mismatched)} of {verified.checked} tensors stay wrong, first "
                    f"{verified.mismatched[0]!r}",
                    tensor=verified.mismatched[0],
                )
        except (StitchError, asyncio.CancelledError):
            with contextlib.suppress(StitchError):
                await life.destination.discard(staged)
            raise
        await life.destination.adopt(staged)
        log.info("weights repaired", extra={"tensors": len(staged.changed)})

    def _mode(self) -> ActivationMode:
        """A pause for an engine on which nothing of ours runs any more."""
        modes = self._engine.capabilities.modes
        if ActivationMode.RECOMPUTE in modes:
            return ActivationMode.RECOMPUTE
        return self._config.mode

    def _control(self, incarnation: str) -> EngineControl:
        return EngineControl(self._engine, incarnation, self._config, self._env)

    def _note(self, error: StitchError) -> None:
        log.warning("recovery failed", extra={"code": error.code, "error": error.message})
        self._status.fail(error)
