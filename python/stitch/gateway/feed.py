"""Follows discovery, and each member's event stream, for as long as they live."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence

from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, StitchError, Unsupported
from stitch.gateway.config import GatewayConfig
from stitch.gateway.members import Roster, Seat
from stitch.gateway.wire import parse_report
from stitch.http.exchange import Exchange
from stitch.http.sse import EventReader
from stitch.http.upstream import Upstream, UpstreamLost, origin_of
from stitch.pools.base import Member, Pool

__all__ = ["Feeds"]

log = logging.getLogger(__name__)


class Feeds:
    """Keeps the roster's knowledge fresh. Owns one task for discovery and one per member."""

    def __init__(self, pool: Pool, roster: Roster, *, config: GatewayConfig, env: Env) -> None:
        self._pool = pool
        self._roster = roster
        self._config = config
        self._env = env
        self._tasks: list[asyncio.Task[None]] = []
        self._followers: dict[Seat, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to watch."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._watch(), name="discovery"),
            loop.create_task(self._forget(), name="discovery-age"),
        ]

    async def close(self) -> None:
        """Stop all tasks."""
        tasks = [*self._followers.values(), *self._tasks]
        self._followers.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # Discovery.

    async def _watch(self) -> None:
        failures = 0
        while True:
            try:
                async for members in self._pool.watch():
                    failures = 0
                    self._take(members)
                self._roster.discovery_error = "discovery ended its answers"
            except (StitchError, OSError) as error:
                self._roster.discovery_error = f"discovery failed: {error}"
                log.warning("discovery failed", extra={"why": str(error)})
            failures += 1
            await self._back_off(failures)

    def _take(self, members: Sequence[Member]) -> None:
        usable = []
        for member in members:
            try:
                origin_of(member.url)
                usable.append(member)
            except InvalidInput as error:
                log.warning("member left out", extra={"member": member.id, "why": str(error)})
        if not usable:
            # Replicas that exist are known to vanish from discovery: an error, not an empty pool.
            self._roster.discovery_error = "discovery knows no members"
            return
        self._roster.discovery_error = None
        self._roster.discovered_at = self._env.clock.monotonic()
        self._apply(usable)

    async def _forget(self) -> None:
        """Drop the last known members once discovery gave none for too long."""
        while True:
            await self._env.clock.sleep(min(1.0, self._config.stale_s_max / 4))
            roster = self._roster
            if roster.discovery_error is None:
                roster.discovered_at = self._env.clock.monotonic()
            elif self._env.clock.monotonic() - roster.discovered_at > self._config.stale_s_max:
                self._apply([])

    def _apply(self, members: Sequence[Member]) -> None:
        joined, left = self._roster.apply(members)
        for seat in left:
            log.info("member left", extra={"member": seat.member.id})
            self._followers.pop(seat).cancel()
        for seat in joined:
            log.info("member joined", extra={"member": seat.member.id, "url": seat.member.url})
            self._followers[seat] = asyncio.get_running_loop().create_task(
                self._follow(seat), name=f"events-{seat.member.id}"
            )

    # One member.

    async def _follow(self, seat: Seat) -> None:
        limits = dataclasses.replace(self._config.replica, silence_s=self._config.feed_silence_s)
        upstream = Upstream(seat.member.url, limits=limits, env=self._env)
        last_id = ""
        failures = 0
        try:
            while True:
                reader = _Reader(self._roster, seat)
                try:
                    await self._read(upstream, seat, reader, last_id)
                except (StitchError, OSError) as error:
                    self._roster.failed(seat)
                    log.info(
                        "event stream lost", extra={"member": seat.member.id, "why": str(error)}
                    )
                last_id = reader.last_id or last_id
                failures = 0 if reader.last_id else failures + 1
                await self._back_off(failures)
        finally:
            await upstream.close()

    async def _read(self, upstream: Upstream, seat: Seat, reader: _Reader, last_id: str) -> None:
        known = f"Last-Event-ID: {last_id}\r\n" if last_id else ""
        head = b"GET /events HTTP/1.1\r\nHost: %b\r\nAccept: text/event-stream\r\n%b\r\n" % (
            upstream.authority,
            known.encode("latin-1"),
        )
        exchange = await upstream.send(head)
        try:
            if exchange.status != 200 or not exchange.event_stream:
                raise UpstreamLost(f"/events answered {exchange.status}", sent=True)
            self._roster.succeeded(seat)
            reader.exchange = exchange
            seat.ask_again = reader.cut
            await exchange.pipe(reader.feed)
        except UpstreamLost as error:
            raise reader.error or error from error
        finally:
            seat.ask_again = None
            exchange.cancel()
        if reader.error is not None:
            raise reader.error

    async def _back_off(self, failures: int) -> None:
        config = self._config
        pause_s = min(config.feed_backoff_s * 2 ** min(failures, 16), config.feed_backoff_s_max)
        await self._env.clock.sleep(self._env.random.uniform(pause_s / 2, pause_s))


class _Reader:
    """Turns one event stream into reports."""

    def __init__(self, roster: Roster, seat: Seat) -> None:
        self.last_id = ""
        self.error: StitchError | None = None
        self.exchange: Exchange | None = None
        self._roster = roster
        self._seat = seat
        self._events = EventReader()

    def feed(self, chunk: bytes) -> None:
        """Take in bytes; never raises, for it runs inside the connection."""
        if self.error is not None:
            return
        try:
            for event in self._events.feed(chunk):
                report = parse_report(event.data)
                self._seat.problem = None
                self.last_id = event.id
                self._roster.take_report(self._seat, report)
        except Unsupported as error:
            self._seat.problem = error.message
            self._end(error)
        except CorruptData as error:
            self._end(error)

    def _end(self, error: StitchError) -> None:
        """Begin a new stream, else the member would be known by its last good report for good."""
        self.error = error
        self.cut()

    def cut(self) -> None:
        """End the stream, outside of the caller's own work."""
        if self.exchange is not None:
            asyncio.get_running_loop().call_soon(self.exchange.cancel)
