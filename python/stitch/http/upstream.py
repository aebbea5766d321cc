"""Keep-alive connections to one upstream, and one exchange over them.

Response heads are cut out of the byte stream and filtered of hop headers; bodies pass
through as bytes, counted (Content-Length), unchunked, or read until close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from stitch.env import Env
from stitch.errors import InvalidInput, Overloaded, StitchError, Unavailable
from stitch.http.exchange import Exchange
from stitch.http.limits import UpstreamLimits
from stitch.http.upstream_connection import UpstreamConnection

__all__ = ["Upstream", "UpstreamLost", "origin_of"]

log = logging.getLogger(__name__)


class UpstreamLost(Unavailable):
    """The upstream can't be reached, or broke off before its answer was whole.

    Field `sent`: whether any byte of the request may have reached it.
    """

    code = "UpstreamLost"


def origin_of(url: str) -> tuple[str, int, bool]:
    """Host, port, and whether TLS is spoken, of a base URL. Raises: InvalidInput."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if tls else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise InvalidInput(f"{url!r} is not an http://HOST:PORT address", param="url")
    if parts.path not in ("", "/") or parts.query:
        raise InvalidInput(f"{url!r} has a path; give the replica's bare address", param="url")
    return parts.hostname, port, tls


class Upstream:
    """A pool of connections to one origin. Owned by one event loop."""

    def __init__(self, url: str, *, limits: UpstreamLimits, env: Env) -> None:
        self.host, self.port, self._tls = origin_of(url)
        self.limits = limits
        self.now = env.clock.monotonic()
        self._clock = env.clock
        self.authority = urlsplit(url).netloc.rpartition("@")[2].encode()
        self.idle: list[UpstreamConnection] = []
        self.open: set[UpstreamConnection] = set()
        self.closed = False
        self._opening = 0
        self._sweeper: asyncio.Task[None] | None = None

    async def send(
        self,
        request: bytes,
        body: bytes = b"",
        *,
        bare: bool = False,
        on_sent: Callable[[Exchange], None] | None = None,
    ) -> Exchange:
        """Send one request and wait for the head of its response.

        Args:
            request: complete head, with Content-Length. bare: the response has no body (HEAD).
            on_sent: told of the exchange before its head is there; told again on a retry.
        Raises: UpstreamLost. A reused connection that the upstream closed without sending a
            byte is retried once on a fresh one; nothing else is.
        """
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                exchange = connection.start(request, body, bare=bare)
                if on_sent is not None:
                    on_sent(exchange)
                try:
                    await exchange.head_arrived()
                    return exchange
                except StitchError:
                    if not exchange.stale:
                        raise
                    log.debug("stale connection", extra={"upstream": self.authority.decode()})
                    break
        exchange = (await self._connect()).start(request, body, bare=bare)
        if on_sent is not None:
            on_sent(exchange)
        await exchange.head_arrived()
        return exchange

    async def close(self) -> None:
        """Close all connections; exchanges under way are cut."""
        self.closed = True
        for connection in list(self.open):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    async def _connect(self) -> UpstreamConnection:
        if self.closed:
            raise UpstreamLost(f"upstream {self.host}:{self.port} was taken out", sent=False)
        if len(self.open) + self._opening >= self.limits.connections_max:
            raise Overloaded(
                f"{self.limits.connections_max} connections to {self.host}:{self.port} are in use"
            )
        loop = asyncio.get_running_loop()
        if self._sweeper is None:
            self.now = self._clock.monotonic()
            self._sweeper = loop.create_task(self._sweep(), name="upstream-sweep")
        self._opening += 1
        try:
            async with self._clock.timeout(self.limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self, UpstreamLost),
                    self.host,
                    self.port,
                    ssl=True if self._tls else None,
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamLost(
                f"can't connect to {self.host}:{self.port}: {error or 'timed out'}", sent=False
            ) from error
        finally:
            self._opening -= 1
        return connection

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self.limits.sweep_s)
            self.now = self._clock.monotonic()
            for connection in list(self.open):
                connection.check(self.now)
