"""Watches the pool from outside: every replica's `/events`, and the gateway's counters."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Final

import aiohttp
import orjson

from stitch.demo.record import RunRecord
from stitch.errors import CorruptData, Unavailable
from stitch.http.sse import EventReader
from stitch.pools.base import Member, Pool
from stitch.publisher.loop import LoopThread

__all__ = ["Monitor"]

_AGAIN_S: Final = 0.2
_STATUS_S: Final = 0.5


class Monitor:
    """Follows members as they come and go, and writes what they report into the record."""

    def __init__(self, pool: Pool, url: str, record: RunRecord, *, loop: LoopThread) -> None:
        self._pool = pool
        self._url = url
        self._record = record
        self._loop = loop
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Begin watching."""
        self._running = self._loop.submit(self._run())

    def stop(self) -> None:
        """Stop watching. Safe to repeat."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_gateway(session), name="gateway-status")
            try:
                async for members in self._pool.watch():
                    self._update(members, session, tasks)
            except Unavailable as error:
                self._record.note(f"discovery failed: {error.message}")

    def _update(
        self, members: Sequence[Member], session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        known = {member.id for member in members}
        for member in members:
            if member.id not in self._tasks:
                self._tasks[member.id] = tasks.create_task(
                    self._follow(member, session), name=f"events-{member.id}"
                )
        for gone in self._tasks.keys() - known:
            self._tasks.pop(gone).cancel()
            self._record.ended(gone, killed=False)

    async def _follow(self, member: Member, session: aiohttp.ClientSession) -> None:
        while True:
            reader = EventReader()
            try:
                async with session.get(f"{member.url}/events") as answer:
                    while data := await answer.content.readany():
                        for event in reader.feed(data):
                            self._record.observe(orjson.loads(event.data))
            except (aiohttp.ClientError, OSError, CorruptData, orjson.JSONDecodeError):
                pass  # gone or going: discovery will say
            await asyncio.sleep(_AGAIN_S)

    async def _follow_gateway(self, session: aiohttp.ClientSession) -> None:
        while True:
            try:
                async with session.get(f"{self._url}/status") as answer:
                    body = orjson.loads(await answer.read())
                counters = body.get("counters")
                if isinstance(counters, dict):
                    with self._record.lock:
                        self._record.counters = {k: int(v) for k, v in counters.items()}
            except (aiohttp.ClientError, OSError, orjson.JSONDecodeError):
                pass
            await asyncio.sleep(_STATUS_S)
