"""The gateway command and replicas as processes of their own: SIGKILL, joins, clean exits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch.env import Env
from stitch.pools.base import Member
from stitch.pools.local import write_members


class Processes:
    """Starts processes that print where they listen, and ends them all."""

    def __init__(self) -> None:
        self.running: list[asyncio.subprocess.Process] = []

    async def start(self, *arguments: str) -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
        )
        self.running.append(process)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        assert line.startswith("listening http://127.0.0.1:"), line
        return process, line.removeprefix("listening ")

    async def replica(self, name: str, version: int) -> tuple[asyncio.subprocess.Process, str]:
        return await self.start(
            "-m", "stitch.testing.http_fakes", "--replica-id", name, "--version", str(version)
        )

    async def close(self) -> None:
        for process in self.running:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    found = Processes()
    yield found
    await found.close()


async def status_until(
    http: aiohttp.ClientSession, url: str, check: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            async with http.get(url + "/status") as answer:
                status: dict[str, Any] = await answer.json()
            if check(status):
                return status
            await asyncio.sleep(0.02)


def ready(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: sum(member["ready"] for member in status["members"]) == count


async def test_a_killed_replica_mid_stream_and_one_that_joins(
    processes: Processes, tmp_path: Path
) -> None:
    first, first_url = await processes.replica("one", 1)
    _, second_url = await processes.replica("two", 1)
    members = [Member("m-one", first_url), Member("m-two", second_url)]
    pool_file = tmp_path / "members.json"
    write_members(Env(), pool_file, members)
    gateway, url = await processes.start(
        "-m", "stitch.cli", "gateway", "--pool-file", str(pool_file), "--port", "0"
    )
    async with aiohttp.ClientSession() as http:
        await status_until(http, url, ready(2))

        async def stream() -> tuple[str, bytes]:
            body = {"fake": {"kind": "sse", "tokens": 40, "gap_s": 0.05}}
            async with http.post(url + "/generate", json=body) as answer:
                return answer.headers["x-stitch-replica"], await answer.read()

        async def plain() -> tuple[int, str]:
            body = {"fake": {"delay_s": 1.0}}
            async with http.post(url + "/generate", json=body) as answer:
                await answer.read()
                return answer.status, answer.headers["x-stitch-replica"]

        streams = [asyncio.create_task(stream()) for _ in range(6)]
        plains = [asyncio.create_task(plain()) for _ in range(6)]
        await status_until(http, url, lambda status: status["in_flight"] == 12)
        await asyncio.sleep(0.2)
        first.send_signal(signal.SIGKILL)
        for name, data in await asyncio.gather(*streams):
            if name == "one":
                last = json.loads(data.rstrip().split(b"\n\n")[-1].removeprefix(b"data: "))
                assert last["error"]["retryable"] is True
                assert last["error"]["weight_version_admitted"] == 1
                assert b"[DONE]" not in data
            else:
                assert data.endswith(b"data: [DONE]\n\n")
        # What had no byte out yet was done again by the other one.
        assert set(await asyncio.gather(*plains)) == {(200, "two")}
        await status_until(http, url, ready(1))
        _, third_url = await processes.replica("three", 2)
        write_members(Env(), pool_file, [*members[1:], Member("m-three", third_url)])
        status = await status_until(http, url, ready(2))
        assert [member["id"] for member in status["members"]] == ["m-three", "m-two"]
        body = {"weight_version": {"min_version": 2}}
        async with http.post(url + "/generate", json=body) as answer:
            assert answer.headers["x-stitch-replica"] == "three"
    gateway.terminate()
    assert await asyncio.wait_for(gateway.wait(), 10) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--member", "http://127.0.0.1:1", "--port", "70000"),
        ("--member", "http://"),
        ("--member", "http://a/path"),
        (),
        ("--member", "http://a", "--pool-file", "x"),
    ],
)
async def test_bad_usage_is_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "stitch.cli", "gateway", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert out == b""
    assert err.decode().strip().splitlines()[-1].startswith("stitch gateway:")


async def test_a_taken_port_is_exit_2(processes: Processes) -> None:
    _, url = await processes.replica("one", 1)
    port = url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "stitch.cli", "gateway", "--member", url, "--port", port),
        stderr=asyncio.subprocess.PIPE,
    )
    with contextlib.suppress(ProcessLookupError):
        _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert b"choose a free port" in err
