"""`stitch replica serve`: one replica as a process, sidecar and engine together.

Prints `listening http://HOST:PORT` once it serves; it is ready (`/health` 200) a moment later,
when its weights are proven and it has caught up with the store's pointer.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from pathlib import Path
from typing import Final

from stitch.commands.logs import configure_logging
from stitch.errors import InvalidInput
from stitch.types import ActivationMode

__all__ = ["configure", "run"]

_SERVES: Final = "run a sidecar, its reconciler and an engine"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add `serve` and its arguments."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    serve = verbs.add_parser("serve", help=_SERVES, description=_SERVES)
    serve.add_argument("--model", type=Path, required=True, help="the base checkpoint's directory")
    serve.add_argument("--store", required=True, help="URL of the store, such as file:///path")
    serve.add_argument("--run-id", help="the run to serve; needed while the store names none")
    serve.add_argument("--boot-version", type=int, default=0, help="what the base counts as (0)")
    serve.add_argument("--replica-id", help="this replica's name (host and random)")
    serve.add_argument("--host", default="127.0.0.1", help="the address to bind (127.0.0.1)")
    serve.add_argument("--port", type=int, default=0, help="the port to bind; 0 picks one (0)")
    serve.add_argument(
        "--engine", choices=("embedded",), default="embedded", help="the engine to run (embedded)"
    )
    serve.add_argument("--engine-threads", type=int, default=1, help="its torch threads (1)")
    serve.add_argument(
        "--engine-argument", action="append", default=[], metavar="FLAG=VALUE",
        help="a further flag of the engine, such as --max-running=64; repeat for more",
    )  # fmt: skip
    serve.add_argument(
        "--destination", choices=("cpu", "disk"), default="cpu",
        help="where staged weights are kept: shared memory or disk (cpu)",
    )  # fmt: skip
    serve.add_argument(
        "--mode", choices=[mode.value for mode in ActivationMode], default="recompute",
        help="what an activation does with requests in flight (recompute)",
    )  # fmt: skip
    serve.add_argument(
        "--work-dir", type=Path, help="for caches and the booted checkpoint (temporary)"
    )
    serve.add_argument(
        "--ram-dir", type=Path, default=Path("/dev/shm"), help="memory-backed, for `cpu` (/dev/shm)"
    )
    serve.add_argument(
        "--poll-s",
        type=_seconds,
        default=5.0,
        help="look at the pointer this often; 0 waits for wakes (5)",
    )
    serve.add_argument(
        "--drain-s",
        type=_seconds,
        default=30.0,
        help="how long running requests may take at the end (30)",
    )
    serve.add_argument(
        "--engine-hang-s", type=_seconds, default=45.0,
        help="an engine silent this long is killed and started again (45)",
    )  # fmt: skip
    serve.add_argument("--ready-file", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    configure_logging()
    if options.port:
        _check_port(options.host, options.port)
    if not options.model.is_dir():
        raise InvalidInput(f"{options.model} is not a directory with a checkpoint")
    import uvloop

    from stitch.commands.replica_process import ReplicaProcess

    def announce(url: str) -> None:
        print(f"listening {url}", flush=True)

    try:
        return int(uvloop.run(ReplicaProcess(options, announce=announce).serve()))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"stitch replica: {where}{error.strerror or error}", file=sys.stderr)
        return 2


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


_seconds.__name__ = "seconds"  # argparse says "invalid seconds value"


def _check_port(host: str, port: int) -> None:
    """Fail in a millisecond rather than after the engine has loaded."""
    if not 0 <= port <= 65535:
        raise InvalidInput(f"port {port} is not between 0 and 65535", param="port")
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        # create_server appends the address to strerror
        reason = os.strerror(error.errno) if error.errno else error
        raise InvalidInput(
            f"port {port} on {host} cannot be used ({reason}); choose another --port",
            param="port",
        ) from error
