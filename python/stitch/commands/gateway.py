"""`stitch gateway`: run the pool's front door until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from stitch.commands.logs import configure_logging
from stitch.env import Env
from stitch.errors import InvalidInput
from stitch.gateway import GatewayConfig, serve_gateway
from stitch.http.upstream import origin_of
from stitch.pools import FilePool, Pool, StaticPool

__all__ = ["configure", "run"]

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--member", action="append", metavar="URL", help="a replica's base URL; repeat for more"
    )
    source.add_argument(
        "--pool-file", type=Path, metavar="PATH", help="a members file, read again when it changes"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to bind (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="the port to bind; 0 picks one (0)")
    parser.add_argument(
        "--replicas-floor", type=int, default=1, help="/health wants three quarters of these (1)"
    )
    parser.add_argument(
        "--wait-s-max", type=float, default=30.0, help="cap on a request's wait for a version (30)"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop. Returns the exit code."""
    import uvloop

    configure_logging("WARNING")
    if not 0 <= options.port <= 65535:
        raise InvalidInput(f"port {options.port} is not between 0 and 65535", param="port")
    return int(uvloop.run(_serve(options)))


async def _serve(options: argparse.Namespace) -> int:
    env = Env()
    pool: Pool
    if options.member:
        for url in options.member:
            origin_of(url)
        pool = StaticPool(options.member, env=env)
    else:
        if not options.pool_file.exists():  # whoever writes it may start later
            log.warning("no members file yet", extra={"path": str(options.pool_file)})
        pool = FilePool(options.pool_file, env=env)
    config = GatewayConfig(replicas_floor=options.replicas_floor, wait_s_max=options.wait_s_max)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    server = await serve_gateway(pool, host=options.host, port=options.port, config=config, env=env)
    print(f"listening http://{options.host}:{server.port}", flush=True)
    await stop.wait()
    await server.close()
    await pool.close()
    return 0
