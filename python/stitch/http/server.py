"""The HTTP server: listens, limits, and closes gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from stitch.env import Env
from stitch.errors import InvalidInput
from stitch.http.connection import Connection, Handler
from stitch.http.limits import ServerLimits

__all__ = ["HttpServer"]

log = logging.getLogger(__name__)


class HttpServer:
    """Serves one handler on one port. `start` binds; `close` drains.

    The handler answers through its Response; StitchErrors that it raises become error
    responses, anything else a logged 500. It is cancelled when its client goes.
    """

    def __init__(self, handler: Handler, *, limits: ServerLimits, env: Env) -> None:
        self.handler = handler
        self.limits = limits
        self.now = env.clock.monotonic()
        self._clock = env.clock
        self.closing = False
        self.bodies_bytes = 0
        self.connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Bind and listen. Returns the port. Raises: InvalidInput if it can't be bound."""
        loop = asyncio.get_running_loop()
        self.now = self._clock.monotonic()
        try:
            self._listener = await loop.create_server(
                lambda: Connection(self), host, port, backlog=2048
            )
        except OSError as error:
            raise InvalidInput(
                f"can't listen on {host}:{port}: {error.strerror or error}; choose a free port",
                param="port",
            ) from error
        self._sweeper = loop.create_task(self._sweep(), name="http-sweep")
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self, grace_s: float) -> None:
        """Stop accepting, let running requests end for up to `grace_s`, then cut them."""
        if self.closing:
            return
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_idle()
        end = self._clock.monotonic() + grace_s
        while self.connections and self._clock.monotonic() < end:
            await self._clock.sleep(0.01)
        tasks = [task for c in list(self.connections) if (task := c.kill()) is not None]
        if tasks:
            log.warning("requests cut at shutdown", extra={"count": len(tasks)})
            await asyncio.wait(tasks, timeout=grace_s + 5.0)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self.limits.sweep_s)
            self.now = self._clock.monotonic()
            for connection in list(self.connections):
                connection.check(self.now)
