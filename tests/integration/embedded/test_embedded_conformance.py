"""The embedded engine keeps every promise of the engine conformance suite.

Each case gets a fresh engine. To keep that cheap it runs inside this process, behind its real
HTTP server and the real adapter; the process itself is covered by the modules beside this one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stitch.engines.embedded import EmbeddedEngine
from stitch.engines.embedded.boot import build_service
from stitch.engines.embedded.config import EngineConfig
from stitch.engines.embedded.server import build_app
from stitch.engines.embedded.service import Service
from stitch.env import Env
from stitch.testing.engine_suite import CASES, Outcome
from stitch.types import Label, Prefix, Ref, Span

pytestmark = pytest.mark.engine


class Harness:
    """One engine of this process, and a client."""

    def __init__(self, service: Service, base_url: str, model_dir: Path, work_dir: Path) -> None:
        self.env = service.env
        self.model_dir = model_dir
        self.work_dir = work_dir
        self.engine = EmbeddedEngine(base_url, service.env)
        self.http = aiohttp.ClientSession(base_url)
        self._service = service

    async def generate(self, rid: str, prompt: str, token_count: int, label: Label) -> Outcome:
        """One greedy request, stamped as a sidecar stamps it."""
        params = {"temperature": 0, "max_new_tokens": token_count, "ignore_eos": True}
        body: dict[str, Any] = {
            # Long enough to fill pages, so that a stale prefix would be found.
            "text": prompt * 8,
            "sampling_params": params,
            "return_logprob": True,
        }
        self.engine.stamp_request("/generate", body, rid=rid, label=label)
        async with self.http.post("/generate", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        meta = answer["meta_info"]
        spans = [
            Span(Ref(s["run_id"], s["version"]), s["start"], s["end"], Prefix(s["prefix"]))
            for s in meta.get("weight_versions", [])
        ]
        content = repr(meta["output_token_logprobs"])
        return Outcome(spans, meta["completion_tokens"], meta["cached_tokens"] > 0, content)

    def progress(self, rid: str) -> int:
        """Read from the scheduler itself, so that nothing in flight blurs it."""
        running = list(self._service.scheduler._running)
        return next((len(g.output) for g in running if g.ask.rid == rid), 0)

    def tell_truth(self, outcome: Outcome, digests: dict[Ref, str]) -> None:
        """Proven bit for bit in test_embedded_activation.py, against runs of known weights."""


def _slow_down(service: Service) -> None:
    """At least 8 ms per pass: cases that act in the middle of a request must find one."""
    runner = service.scheduler._runner
    forward = runner.forward

    def slow(*arguments: Any) -> Any:
        time.sleep(0.008)
        return forward(*arguments)

    runner.forward = slow  # type: ignore[method-assign]


@pytest.fixture
async def harness(models: dict[int, Path], tmp_path: Path) -> AsyncIterator[Harness]:
    """A fresh engine on version 1."""
    service = build_service(EngineConfig(model=models[1]), Env())
    _slow_down(service)
    service.scheduler.attach(asyncio.get_running_loop())
    service.scheduler.start()
    runner = web.AppRunner(build_app(service), handler_cancellation=True, access_log=None)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    port = listener.getsockname()[1]
    made = Harness(service, f"http://127.0.0.1:{port}", models[1], tmp_path)
    try:
        yield made
    finally:
        await made.engine.close()
        await made.http.close()
        service.scheduler.stop()
        await runner.cleanup()
        service.scheduler.join(10)
        service.rank_thread.shutdown()


@pytest.mark.parametrize("name", CASES)
async def test_embedded_engine(name: str, harness: Harness) -> None:
    await CASES[name](harness)
