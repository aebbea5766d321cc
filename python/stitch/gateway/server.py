"""The gateway's HTTP server: a few control routes, everything else to some member.

Stateless: what it knows it learned from discovery, event streams and responses, and learns
again after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

from stitch.env import Env
from stitch.gateway.config import GatewayConfig
from stitch.gateway.dispatch import Dispatcher
from stitch.gateway.feed import Feeds
from stitch.gateway.members import Roster
from stitch.gateway.status import COUNTERS, metrics_text, readiness, status_body
from stitch.http import HTTP_PROTOCOL
from stitch.http.control import Routes, send_json
from stitch.http.events import EventStreams
from stitch.http.message import Request, Response
from stitch.http.metrics import PROMETHEUS, Counters
from stitch.http.server import HttpServer
from stitch.pools.base import Pool

__all__ = ["GatewayServer", "serve_gateway"]

_EVENTS_KEEPALIVE_S = 5.0
_EVENTS_PAUSE_S = 0.1


async def serve_gateway(
    pool: Pool,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    config: GatewayConfig | None = None,
    env: Env,
) -> GatewayServer:
    """Serve the pool's front door. Raises: InvalidInput if the port can't be bound."""
    server = GatewayServer(pool, config=config or GatewayConfig(), env=env)
    await server.start(host, port)
    return server


class GatewayServer:
    """One gateway. `port` is bound once started. The pool stays its creator's to close."""

    def __init__(self, pool: Pool, *, config: GatewayConfig, env: Env) -> None:
        self.port = 0
        self.roster = Roster(config=config, env=env)
        self._pool = pool
        self._config = config
        self._env = env
        self._counters = Counters(COUNTERS)
        self._feeds = Feeds(pool, self.roster, config=config, env=env)
        self._dispatcher = Dispatcher(
            self.roster,
            config=config,
            env=env,
            count=lambda name, labels: self._counters.add(name, labels=labels),
        )
        self._streams = EventStreams(keepalive_s=_EVENTS_KEEPALIVE_S, env=env)
        self._life = env.random.nonce()
        self._http = HttpServer(self.handle, limits=config.server, env=env)
        self._routes = Routes(
            {
                ("GET", "/health"): self._health,
                ("GET", "/status"): self._status,
                ("GET", "/server_info"): self._server_info,
                ("GET", "/metrics"): self._metrics,
                ("GET", "/events"): self._events,
                ("POST", "/wake"): self._wake,
            }
        )

    async def start(self, host: str, port: int) -> None:
        """Bind, serve, and begin to watch the pool."""
        self.port = await self._http.start(host, port)
        self._feeds.start()

    async def close(self) -> None:
        """Stop accepting, let running requests end, then stop watching."""
        self._streams.close()
        await self._http.close(self._config.close_s)
        await self._feeds.close()
        await self.roster.close()

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request."""
        control = self._routes.find(request)
        if control is not None:
            await control(request, response)
            return
        try:
            await self._dispatcher.run(request, response)
        except asyncio.CancelledError:
            self._counters.add("stitch_gateway_client_gone_total")
            raise
        self._counters.add("stitch_gateway_requests_total")

    def status(self) -> dict[str, Any]:
        """The `/status` document."""
        return status_body(self.roster, self._counters, self._dispatcher.waiting)

    # Control routes.

    async def _health(self, request: Request, response: Response) -> None:
        ready, reason = readiness(self.roster)
        body = {"ready": True} if ready else {"ready": False, "reason": reason}
        send_json(response, 200 if ready else 503, body)

    async def _status(self, request: Request, response: Response) -> None:
        send_json(response, 200, self.status())

    async def _server_info(self, request: Request, response: Response) -> None:
        ready, reason = readiness(self.roster)
        latest = self.roster.latest
        body = {
            "protocol": HTTP_PROTOCOL,
            "role": "gateway",
            "ready": ready,
            "reason": reason,
            "run_id": None if latest is None else latest.run_id,
            "latest": None if latest is None else str(latest),
            "replicas": len(self.roster.seats),
            "replicas_ready": len(self.roster.ready),
        }
        send_json(response, 200, body)

    async def _wake(self, request: Request, response: Response) -> None:
        send_json(response, 200, {"woken": await self._pool.wake()})

    async def _metrics(self, request: Request, response: Response) -> None:
        text = metrics_text(self.roster, self._counters, self._dispatcher.waiting)
        response.send(200, text.encode(), content_type=PROMETHEUS)

    async def _events(self, request: Request, response: Response) -> None:
        await self._streams.serve(request, response, self._snapshots())

    async def _snapshots(self) -> AsyncIterator[tuple[str, bytes]]:
        """The status now and after every change, at most ten a second."""
        seen = -1
        while True:
            if self.roster.version != seen:
                seen = self.roster.version
                yield f"{self._life}:{seen}", orjson.dumps(self.status())
            await self._env.clock.sleep(_EVENTS_PAUSE_S)
