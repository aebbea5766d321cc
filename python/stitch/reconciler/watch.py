"""What runs beside the reconciler's passes: the engine's health, and the flush after crossings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from stitch.engines.base import Health
from stitch.env import Env
from stitch.errors import EngineUnavailable, StitchError
from stitch.reconciler.life import Life, lose
from stitch.reconciler.status import ReplicaStatus
from stitch.types import GateState, Phase

__all__ = ["EngineWatch"]

log = logging.getLogger(__name__)

_CROSSING_LOOK_S = 0.05


class EngineWatch:
    """Marks a life as unknown when its engine is gone; never while an activation runs.

    Args:
        life: the present life, or None.
        wake: starts a pass, which recovers.
    """

    def __init__(
        self,
        status: ReplicaStatus,
        env: Env,
        *,
        life: Callable[[], Life | None],
        wake: Callable[[], None],
    ) -> None:
        self._status = status
        self._config = status.config
        self._gate = status.gate
        self._env = env
        self._life = life
        self._wake = wake

    async def health(self) -> None:
        """Probe until cancelled. `probe_failures_max` failures in a row, or another process
        behind the same address, and the weights in use are not known any more."""
        failures = 0
        while True:
            await self._env.clock.sleep(self._config.probe_s)
            life = self._life()
            if life is None or not self._may_judge(life):
                failures = 0
                continue
            found = await life.control.healthy()
            restarted = False
            if found is Health.HEALTHY:
                failures = 0
                with contextlib.suppress(EngineUnavailable):
                    restarted = (await life.control.describe()).boot_id != life.boot_id
            else:
                failures += 1
            if not self._may_judge(life):
                failures = 0
            elif restarted or failures >= self._config.probe_failures_max:
                failures = 0
                why = "came back as another process" if restarted else f"is {found.value}"
                self._status.fail(EngineUnavailable(f"the engine {why}"))
                lose(life, self._status)
                self._wake()

    async def crossings(self) -> None:
        """Until cancelled: where the prefix cache is not keyed by the epoch, flush it once more
        when the last request that crossed an activation has ended, as its state may be shared."""
        while True:
            await self._env.clock.sleep(_CROSSING_LOOK_S)
            life = self._life()
            if life is None or life.crossed_epoch is None or not self._may_judge(life):
                continue
            epoch = life.crossed_epoch
            oldest = self._gate.oldest_epoch()
            if oldest is not None and oldest < epoch:
                continue
            try:
                await life.control.flush()
            except StitchError as error:
                log.warning("flush after crossing not confirmed", extra={"error": error.message})
                continue
            if life.crossed_epoch == epoch:
                life.crossed_epoch = None

    def _may_judge(self, life: Life) -> bool:
        """The engine should make progress now: known, and no activation is under way."""
        return (
            life is self._life()
            and life.known
            and self._status.phase is not Phase.ACTIVATING
            and self._gate.state is GateState.OPEN
        )
