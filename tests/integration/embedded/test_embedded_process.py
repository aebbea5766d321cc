"""Starting and ending the engine process: clear refusals, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch.engines.base import Health, RankOrder
from stitch.engines.embedded import EmbeddedEngine, EngineProcess
from stitch.env import Env
from stitch.errors import EngineUnavailable, InvalidInput
from stitch.types import Label, Ref

pytestmark = pytest.mark.engine


async def test_a_directory_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(InvalidInput) as caught:
        await EngineProcess.spawn(tmp_path / "absent", work_dir=work, env=Env())
    assert "config.json" in caught.value.message
    assert "\n" not in caught.value.message
    assert [path.suffix for path in work.iterdir()] == [".log"], "no ready file stays"


async def test_a_taken_port_and_wrong_flags_are_refused(
    models: dict[int, Path], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput) as caught:
            await EngineProcess.spawn(models[1], work_dir=tmp_path, env=Env(), port=port)
        assert f"127.0.0.1:{port}" in caught.value.message
    with pytest.raises(EngineUnavailable) as died:
        await EngineProcess.spawn(
            models[1], work_dir=tmp_path, env=Env(), arguments=["--no-such-flag"]
        )
    assert "--no-such-flag" in died.value.message


async def test_a_passed_deadline_leaves_no_process(models: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable):
        await EngineProcess.spawn(models[1], work_dir=tmp_path, env=Env(), deadline_s=0.1)
    listing = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert str(tmp_path) not in listing


async def test_an_end_in_mid_stream_is_said_in_the_stream(
    models: dict[int, Path], tmp_path: Path
) -> None:
    started = await EngineProcess.spawn(models[1], work_dir=tmp_path, env=Env())
    params = {"max_new_tokens": 1900, "ignore_eos": True}
    body = {"text": "to be cut", "sampling_params": params}
    events: list[str] = []
    async with aiohttp.ClientSession(started.base_url) as http:

        async def plain() -> int:
            async with http.post("/generate", json=body) as response:
                return response.status

        whole = asyncio.create_task(plain())
        async with http.post("/generate", json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    events.append(line[6:].decode().strip())
                    if len(events) == 1:
                        started.signal(signal.SIGTERM)
        assert await whole == 503
    assert json.loads(events[-1])["error"]["type"] == "EngineUnavailable"
    assert "[DONE]" not in events
    assert await started.terminate() == 0


async def test_the_engine_dies_with_its_parent(models: dict[int, Path], tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from stitch.engines.embedded import EngineProcess\n"
        "from stitch.env import Env\n"
        "p = asyncio.run(EngineProcess.spawn(sys.argv[1], work_dir=Path(sys.argv[2]), env=Env()))\n"
        "print(p.pid, p.base_url, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(models[1]), str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, url = (await asyncio.wait_for(parent.stdout.readline(), 60)).decode().split()
    engine = EmbeddedEngine(url, Env())
    try:
        assert await engine.health() is Health.HEALTHY
        os.kill(int(pid), signal.SIGSTOP)
        assert await engine.health() is Health.UNRESPONSIVE
        # A stopped engine dies with its parent too.
        parent.kill()
        await parent.wait()
        async with asyncio.timeout(10):
            while await engine.health() is not Health.UNREACHABLE:
                await asyncio.sleep(0.01)
    finally:
        await engine.close()


async def test_a_process_that_was_never_labelled_answers_nobody(
    models: dict[int, Path], tmp_path: Path
) -> None:
    """A restarted engine must not answer, on the same port, for the one that had a version."""
    started = await EngineProcess.spawn(
        models[1], work_dir=tmp_path, env=Env(), arguments=("--labelled-only",)
    )
    engine = EmbeddedEngine(started.base_url, Env())
    body = {"text": "who is it", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    async with aiohttp.ClientSession(started.base_url) as http:

        async def ask() -> tuple[int, Any]:
            async with http.post("/generate", json=body) as response:
                return response.status, await response.json()

        await engine.resume(recompute=False)  # whoever resumes it proves nothing
        status, answer = await ask()
        assert (status, answer["error"]["code"]) == (503, "EngineUnavailable")
        label = Label(Ref("run-a", 3), 1)
        for order in (RankOrder("i", 1, "discard"), RankOrder("i", 1, "label", label=label)):
            assert all(reply.ok for reply in await engine.ranks.order(order, deadline_s=10))
        status, answer = await ask()
        assert (status, answer["meta_info"]["weight_version"]) == (200, "3")
    await engine.close()
    assert await started.terminate() == 0
