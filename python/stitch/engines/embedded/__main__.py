"""`python -m stitch.engines.embedded`: the engine process."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop

from stitch.engines.embedded.config import EngineConfig
from stitch.engines.embedded.precheck import check_model_directory
from stitch.env import Env
from stitch.errors import InvalidInput, StitchError, Unavailable

_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM. Exit codes: 0 ended on request; 2 usage or environment."""
    options = _parse(argv)
    if options.parent:
        _die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = EngineConfig(
            model=options.model,
            host=options.host,
            port=options.port,
            compute_dtype=options.compute_dtype,
            threads=options.threads,
            running_max=options.max_running,
            queued_max=options.max_queued,
            context_tokens_max=options.context_length,
            kv_tokens=options.kv_tokens,
            prefill_tokens_max=options.prefill_tokens,
            prefix_cache=not options.no_prefix_cache,
            seed=options.seed,
            labelled_only=options.labelled_only,
        )
        # First what is known in a moment: a wrong directory, a taken port.
        check_model_directory(config.model)
        listener = _bind(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, listener, options.ready_file))
    except StitchError as error:
        _announce(options.ready_file, {"error": error.message, "code": error.code})
        sys.stderr.write(f"stitch engine: {error.message}\n")
        return 2
    return 0


async def _serve(config: EngineConfig, listener: socket.socket, ready_file: Path | None) -> None:
    from aiohttp import web

    from stitch.engines.embedded.boot import build_service
    from stitch.engines.embedded.server import build_app

    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    service = await loop.run_in_executor(None, build_service, config, Env())
    service.scheduler.attach(loop)
    service.scheduler.start()
    app = build_app(service)
    # A handler is cancelled when its client leaves, which ends the generation.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=75
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        port = listener.getsockname()[1]
        _announce(ready_file, {"port": port, "pid": os.getpid(), "boot_id": service.boot_id})
        logging.getLogger("stitch.engine").info("ready", extra={"port": port})
        await ending.wait()
    finally:
        service.scheduler.stop()
        await runner.cleanup()
        await loop.run_in_executor(None, service.scheduler.join, 10.0)
        service.rank_thread.shutdown(wait=False)


def _bind(config: EngineConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
            "choose another port, or 0 for a free one"
        ) from error
    return listener


def _announce(ready_file: Path | None, document: dict[str, object]) -> None:
    """Write the ready file whole: under another name first, then renamed."""
    if ready_file is None:
        return
    draft = ready_file.with_name(ready_file.name + ".draft")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.rename(ready_file)


def _die_with_parent(parent: int) -> None:
    """SIGKILL when the spawning thread ends (Linux); at once if the parent is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise InvalidInput(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os._exit(1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stitch.engines.embedded")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--max-running", type=int, default=32, help="samples per forward pass")
    parser.add_argument("--max-queued", type=int, default=512, help="samples that may wait")
    parser.add_argument("--context-length", type=int, default=None, help="tokens, at most")
    parser.add_argument("--kv-tokens", type=int, default=None, help="size of the KV pool")
    parser.add_argument("--prefill-tokens", type=int, default=256, help="per forward pass")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--seed", type=int, default=None, help="for requests without a seed")
    parser.add_argument(
        "--labelled-only", action="store_true", help="refuse requests until a label was set once"
    )
    parser.add_argument("--ready-file", type=Path, default=None, help="JSON written when ready")
    parser.add_argument("--parent", type=int, default=None, help="process id to die with")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
