"""A gateway over fake replicas that serve real HTTP, and a pool whose members a test replaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from stitch.env import Env
from stitch.errors import Unavailable, Unsupported
from stitch.gateway import GatewayConfig, GatewayServer, serve_gateway
from stitch.pools.base import Member
from stitch.testing.http_fakes import FakeReplica, fake_replica
from stitch.types import Ref

FAST = GatewayConfig(feed_backoff_s=0.02, feed_backoff_s_max=0.1, retry_s=0.1)


class ListPool:
    """A pool whose member list the test replaces; None makes discovery fail."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members: Sequence[Member] | None = list(members)
        self._changed = asyncio.Event()

    def set(self, members: Sequence[Member] | None) -> None:
        self._members = members
        self._changed.set()

    async def members(self) -> Sequence[Member]:
        if self._members is None:
            raise Unavailable("discovery is down")
        return self._members

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        while True:
            self._changed.clear()
            yield await self.members()
            await self._changed.wait()

    async def wake(self) -> int:
        return 0

    async def scale(self, replicas: int) -> None:
        raise Unsupported("fixed")

    async def close(self) -> None: ...


class Rig:
    """A gateway over some fake replicas."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.replicas: list[FakeReplica] = []
        self.pool = ListPool([])
        self.gateway: GatewayServer
        self.http: aiohttp.ClientSession
        self.url = ""

    async def start(
        self,
        served: Sequence[Ref | None],
        *,
        config: GatewayConfig = FAST,
        latest: Ref | None = None,
    ) -> Rig:
        for ref in served:
            await self.add(ref, latest=latest)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.gateway = await serve_gateway(self.pool, config=config, env=Env())
        self._stack.push_async_callback(self.gateway.close)
        self.url = f"http://127.0.0.1:{self.gateway.port}"
        await eventually(
            lambda: (
                len(self.seats()) == len(served)
                and all(seat.report is not None for seat in self.seats())
            )
        )
        return self

    async def add(self, served: Ref | None, *, latest: Ref | None = None) -> FakeReplica:
        replica = await self._stack.enter_async_context(
            fake_replica(served=served, replica_id=f"replica-{len(self.replicas)}")
        )
        if latest is not None:
            replica.view.see(latest)
        self.replicas.append(replica)
        self.announce()
        return replica

    def announce(self, without: int | None = None) -> None:
        self.pool.set(
            [
                Member(f"m{index}", replica.url)
                for index, replica in enumerate(self.replicas)
                if index != without
            ]
        )

    def seats(self) -> list[Any]:
        return list(self.gateway.roster.seats.values())

    async def post(self, path: str = "/generate", **body: Any) -> tuple[int, Any, Any]:
        headers = body.pop("headers", {})
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, answer.headers, json.loads(await answer.read())

    async def knows(self, index: int, version: int) -> None:
        await eventually(
            lambda: self.gateway.roster.seats[f"m{index}"].report.served.version == version
        )


async def eventually(check: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


def v(version: int, run: str = "run-a") -> Ref:
    return Ref(run, version)
