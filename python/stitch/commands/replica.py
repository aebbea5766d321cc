"""`stitch replica serve`: one replica as a process, sidecar and engine together.

Prints `listening http://HOST:PORT` once it serves; it is ready (`/health` 200) a moment later,
when its weights are proven and it has caught up with the store's pointer.
"""

from __future__ import annotations

import argparse
import math
import socket
import sys
from pathlib import Path

from stitch.commands.logs import configure_logging
from stitch.errors import InvalidInput
from stitch.types import ActivationMode

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add `serve` and its arguments."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    serve = verbs.add_parser("serve", help="run a sidecar, its reconciler and an engine")
    serve.add_argument("--model", type=Path, required=True, help="the base checkpoint")
    serve.add_argument("--store", required=True, help="URL of the store, such as file:///path")
    serve.add_argument("--run-id", help="the run whose boot version the base is")
    serve.add_argument("--boot-version", type=int, default=0, help="what the base counts as")
    serve.add_argument("--replica-id", help="this replica's name (default: host and random)")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="0 takes a free one")
    serve.add_argument("--engine", choices=("embedded",), default="embedded")
    serve.add_argument("--engine-threads", type=int, default=1)
    serve.add_argument(
        "--engine-argument", action="append", default=[], metavar="FLAG=VALUE",
        help="a further flag of the engine, such as --running-max=64 (may repeat)",
    )  # fmt: skip
    serve.add_argument("--destination", choices=("cpu", "disk"), default="cpu")
    serve.add_argument(
        "--mode", choices=[mode.value for mode in ActivationMode], default="recompute",
        help="what an activation does with requests in flight",
    )  # fmt: skip
    serve.add_argument(
        "--work-dir", type=Path, help="for caches and the booted checkpoint (default: temporary)"
    )
    serve.add_argument(
        "--ram-dir", type=Path, default=Path("/dev/shm"), help="memory-backed, for `cpu`"
    )
    serve.add_argument("--poll-s", type=_seconds, default=5.0, help="backstop poll; 0 turns it off")
    serve.add_argument(
        "--drain-s",
        type=_seconds,
        default=30.0,
        help="how long running requests may take at the end",
    )
    serve.add_argument(
        "--engine-hang-s", type=_seconds, default=45.0,
        help="an engine that is silent this long is killed and started again",
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
        raise InvalidInput(
            f"port {port} on {host} cannot be used ({error.strerror}); choose another --port",
            param="port",
        ) from error
