"""`StaticPool`: a fixed list of replica addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from stitch.env import Env
from stitch.errors import InvalidInput, Unavailable, Unsupported
from stitch.pools.addresses import members_of
from stitch.pools.base import Member
from stitch.pools.nudge import wake_all

__all__ = ["StaticPool"]


class StaticPool:
    """The members given at construction, for as long as the pool is open.

    Args:
        addresses: `URL` or `ID=URL` entries; without a scheme `https://` is meant, entries
            without a host are dropped.
    Raises: InvalidInput if no entry is left.
    """

    def __init__(self, addresses: Iterable[str], *, env: Env, wake_deadline_s: float = 2.0) -> None:
        self._members = members_of(addresses)
        if not self._members:
            raise InvalidInput(
                "no replica address has a host; give at least one as http://HOST:PORT",
                param="replicas",
            )
        self._env = env
        self._wake_deadline_s = wake_deadline_s
        self._closed = asyncio.Event()

    async def members(self) -> Sequence[Member]:
        if self._closed.is_set():
            raise Unavailable("the pool is closed")
        return list(self._members)

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        if not self._closed.is_set():
            yield list(self._members)
            await self._closed.wait()

    async def wake(self) -> int:
        if self._closed.is_set():
            return 0
        return await wake_all(self._members, env=self._env, deadline_s=self._wake_deadline_s)

    async def scale(self, replicas: int) -> None:
        raise Unsupported(
            f"a static pool cannot scale to {replicas}; change its list of addresses and restart"
        )

    async def close(self) -> None:
        self._closed.set()
