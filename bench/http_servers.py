"""Servers that `test_http.py` measures: `python bench/http_servers.py KIND [UPSTREAM]`.

upstream: a fixed 2 KB JSON answer. aiohttp: a plain streaming reverse proxy on aiohttp's server
and client. sidecar, ungated, gateway: ours; `ungated` differs from `sidecar` in its gate alone,
which admits without looking. Each prints the port that it listens on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp
import httptools
import uvloop
from aiohttp import web

from stitch.admission import AdmissionGate, Lease
from stitch.env import Env
from stitch.gateway import GatewayConfig, serve_gateway
from stitch.http.limits import UpstreamLimits
from stitch.pools import StaticPool
from stitch.sidecar import SidecarConfig, serve_sidecar
from stitch.testing.http_fakes import FakeEngine, FakeEngineServer, FakeView
from stitch.types import Label, Ref

BODY = json.dumps({"text": "y" * 1970, "meta_info": {"weight_version": "7"}}).encode()
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
) + BODY
HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class Upstream(asyncio.Protocol):
    """Answers every request at once."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.transport.write(ANSWER)


async def run_upstream() -> int:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=1024)
    return int(server.sockets[0].getsockname()[1])


async def run_aiohttp(upstream: str) -> int:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def proxy(request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        async with session.request(
            request.method, upstream + request.path_qs, headers=headers, data=await request.read()
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            if answer.content_length is not None:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", proxy)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    return int(runner.addresses[0][1])


class OpenGate(AdmissionGate):
    """Admits without looking at anything."""

    async def admit(self, constraint: Any, **options: Any) -> Lease:
        return Lease(0, Label(Ref("run-a", 7), 1), constraint, "request", None)

    def release(self, lease: Lease) -> None:
        return


async def run_sidecar(upstream: str, *, gated: bool) -> int:
    engine = FakeEngine(FakeEngineServer())
    engine.base_url = upstream
    view = FakeView(engine, env=Env())
    view.serve(Ref("run-a", 7))
    if not gated:
        view.gate = OpenGate(Env())
    # An upstream of ours keeps its connections; engines close idle ones after seconds.
    config = SidecarConfig(engine=UpstreamLimits(idle_s=60))
    return (await serve_sidecar(view, config=config, env=Env())).port


async def run_gateway(upstream: str) -> int:
    pool = StaticPool([upstream], env=Env())
    return (await serve_gateway(pool, config=GatewayConfig(), env=Env())).port


async def main(kind: str, upstream: str) -> None:
    runs = {
        "upstream": run_upstream,
        "aiohttp": lambda: run_aiohttp(upstream),
        "sidecar": lambda: run_sidecar(upstream, gated=True),
        "ungated": lambda: run_sidecar(upstream, gated=False),
        "gateway": lambda: run_gateway(upstream),
    }
    print(await runs[kind](), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
