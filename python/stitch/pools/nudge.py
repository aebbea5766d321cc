"""Wakes: `POST /wake` to every member at once. Lossy by design; correctness never depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stitch.env import Env
from stitch.pools.base import Member

if TYPE_CHECKING:
    import aiohttp

__all__ = ["wake_all"]


async def wake_all(members: Iterable[Member], *, env: Env, deadline_s: float) -> int:
    """Nudge all members concurrently; returns how many answered with a 2xx in time. Never raises.

    Connections live for one call: a pool may be used from several event loops.
    """
    import aiohttp  # here, so that `stitch.pools` loads without an HTTP client

    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(_wake(session, m, env, deadline_s) for m in members))
    return sum(answers)


async def _wake(
    session: aiohttp.ClientSession, member: Member, env: Env, deadline_s: float
) -> bool:
    import aiohttp

    try:
        async with (
            env.clock.timeout(deadline_s),
            session.post(f"{member.url}/wake") as answer,
        ):
            return 200 <= answer.status < 300
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return False
