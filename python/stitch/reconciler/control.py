"""Engine control with deadlines and bounded retries: no call may hang a replica."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from stitch.engines.base import Engine, EngineDescription, Health, RankOrder, RankReply
from stitch.env import Env
from stitch.errors import ActivationFailed, EngineUnavailable
from stitch.reconciler.config import ReplicaConfig
from stitch.types import ActivationMode, Label

__all__ = ["EngineControl", "with_deadline"]

log = logging.getLogger(__name__)

T = TypeVar("T")


async def with_deadline(env: Env, seconds: float, what: str, call: Awaitable[T]) -> T:
    """Await `call`; EngineUnavailable if it takes longer than `seconds`."""
    try:
        async with env.clock.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise EngineUnavailable(f"the engine did not answer {what} within {seconds:g} s") from error


class EngineControl:
    """The calls an activation makes, for one incarnation. All are idempotent and retried."""

    def __init__(self, engine: Engine, incarnation: str, config: ReplicaConfig, env: Env) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._config = config
        self._env = env

    async def pause(self, mode: ActivationMode) -> None:
        """Pause until confirmed. After an error the engine may be paused: resume it."""
        await self._retried("pause", lambda: self._engine.pause(mode), self._config.order_tries)

    async def resume(self, *, recompute: bool) -> float:
        """Resume until confirmed; seconds spent recomputing. EngineUnavailable: unhealthy."""
        return await self._retried(
            "resume",
            lambda: self._engine.resume(recompute=recompute),
            self._config.resume_tries,
            seconds=self._config.resume_s,
        )

    async def flush(self) -> None:
        """Flush until the body confirms it, with a delay between tries and a deadline.

        Raises: ActivationFailed if the engine never confirms.
        """
        clock = self._env.clock
        end = clock.monotonic() + self._config.flush_s_max
        while True:
            if await with_deadline(
                self._env, self._config.control_s, "flush", self._engine.flush()
            ):
                return
            if clock.monotonic() + self._config.flush_retry_s > end:
                raise ActivationFailed(
                    "the engine did not confirm dropping its prefix cache within "
                    f"{self._config.flush_s_max:g} s"
                )
            await clock.sleep(self._config.flush_retry_s)

    async def label(self, attempt: int, label: Label | None) -> None:
        """Set what all ranks stamp on tokens."""
        await self._order(RankOrder(self._incarnation, attempt, "label", label=label))

    async def confirm(self, attempt: int, *labels: Label | None) -> None:
        """Prove that every rank stamps one of `labels`: the same process, not a restarted one.

        Raises: EngineUnavailable if one does not.
        """
        wanted = [None if label is None else label.to_wire() for label in labels]
        order = RankOrder(self._incarnation, attempt, "state")
        for reply in await self._replies(order):
            if reply.data.get("label") not in wanted:
                raise EngineUnavailable(
                    f"rank {reply.rank} lost its label before the gate opened; it was restarted",
                    rank=reply.rank,
                )

    async def fence(self, attempt: int) -> None:
        """Make every order of an older attempt or incarnation void, late ones included."""
        await self._order(RankOrder(self._incarnation, attempt, "discard"))

    async def describe(self) -> EngineDescription:
        """Who runs there, `boot_id` above all."""
        return await with_deadline(
            self._env, self._config.control_s, "describe", self._engine.describe()
        )

    async def healthy(self) -> Health:
        """One probe, never longer than a control call."""
        try:
            return await with_deadline(
                self._env, self._config.control_s, "a health probe", self._engine.health()
            )
        except EngineUnavailable:
            return Health.UNRESPONSIVE

    async def _order(self, order: RankOrder) -> None:
        await self._replies(order)

    async def _replies(self, order: RankOrder) -> Sequence[RankReply]:
        async def send() -> Sequence[RankReply]:
            replies = await self._engine.ranks.order(order, deadline_s=self._config.rank_s)
            for reply in replies:
                if not reply.ok:
                    raise ActivationFailed(
                        f"rank {reply.rank} answered {order.op} with {reply.code}: {reply.message}",
                        rank=reply.rank,
                        reply=reply.code,
                    )
            return replies

        return await self._retried(
            order.op, send, self._config.order_tries, seconds=self._config.rank_s + 1
        )

    async def _retried(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        tries: int,
        *,
        seconds: float | None = None,
    ) -> T:
        limit_s = self._config.control_s if seconds is None else seconds
        for left in range(tries - 1, -1, -1):
            try:
                return await with_deadline(self._env, limit_s, what, call())
            except EngineUnavailable as error:
                log.warning("engine call lost", extra={"call": what, "tries_left": left})
                if left == 0:
                    raise error
                await self._env.clock.sleep(self._config.flush_retry_s)
        raise AssertionError("tries must be at least 1")
