"""Wakes: `POST /wake` to every member at once. Lossy by design; correctness never depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stitch.env import Env
from stitch.pools.base import Member

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Nudger"]


class Nudger:
    """Sends wakes over kept-alive connections. One owner; `close` when done."""

    def __init__(self, env: Env, *, deadline_s: float = 2.0) -> None:
        self._env = env
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def wake(self, members: Iterable[Member]) -> int:
        """Nudge all members concurrently; returns how many answered with a 2xx in time."""
        answers = await asyncio.gather(*(self._wake_one(member) for member in members))
        return sum(answers)

    async def _wake_one(self, member: Member) -> bool:
        import aiohttp  # here, so that `stitch.pools` loads without an HTTP client

        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with (
                self._env.clock.timeout(self._deadline_s),
                self._session.post(f"{member.url}/wake") as answer,
            ):
                return 200 <= answer.status < 300
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    async def close(self) -> None:
        """Close the connections. Safe to repeat."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
