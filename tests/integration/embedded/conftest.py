"""A live embedded engine per test module, three versions of its weights, and a driver."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch.engines.base import RankOrder, RankReply, TensorSlice
from stitch.engines.embedded import EmbeddedEngine, EngineProcess
from stitch.engines.embedded.tiny import write_tiny_model
from stitch.env import Env
from stitch.format.checkpoint import Checkpoint
from stitch.types import ActivationMode, Label, Ref

RUN = "run-a"
KV_TOKENS = 8192


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoint directories of versions 1 to 3: one architecture, other values."""
    root = tmp_path_factory.mktemp("models")
    for version in (1, 2, 3):
        write_tiny_model(
            root / f"v{version}",
            seed=version,
            hidden_size=64,
            layers=2,
            init_std=0.2,
            max_position=2048,
        )
    return {version: root / f"v{version}" for version in (1, 2, 3)}


@pytest.fixture(scope="module")
def process(
    models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """One engine process on version 1."""
    work = tmp_path_factory.mktemp("engine")
    arguments = ["--max-running", "16", "--max-queued", "48", "--kv-tokens", str(KV_TOKENS)]
    started = asyncio.run(
        EngineProcess.spawn(models[1], work_dir=work, env=Env(), arguments=arguments)
    )
    yield started
    started.kill()


class Driver:
    """Talks to one engine as a client and as its sidecar."""

    _incarnations = itertools.count(1)

    def __init__(self, process: EngineProcess, models: dict[int, Path]) -> None:
        self.process = process
        self.models = models
        self.engine = EmbeddedEngine(process.base_url, Env())
        self.http = aiohttp.ClientSession(process.base_url)
        self.incarnation = f"incarnation-{next(self._incarnations)}"
        self.attempt = 0
        self.epoch = 0

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """POST JSON (or raw bytes); the status and the JSON answer."""
        kind = {"data": body} if isinstance(body, bytes | io.BytesIO) else {"json": body}
        async with self.http.post(path, **kind) as response:  # type: ignore[arg-type]
            return response.status, json.loads(await response.read())

    async def generate(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """`/generate` with log-probabilities; keyword arguments are sampling parameters."""
        extra = options.pop("extra", {})
        name = "text" if isinstance(prompt, str) else "input_ids"
        body = {name: prompt, "sampling_params": options, "return_logprob": True, **extra}
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return dict(answer) if isinstance(answer, dict) else {"items": answer}

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Events of a stream; the last one of a whole stream is the text `[DONE]`."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    text = line[6:].strip().decode()
                    yield text if text == "[DONE]" else json.loads(text)

    async def info(self) -> dict[str, Any]:
        """`/server_info`."""
        async with self.http.get("/server_info") as response:
            return dict(await response.json())

    def slices(self, version: int, names: Sequence[str] | None = None) -> tuple[TensorSlice, ...]:
        """Where the tensors of a version lie."""
        with Checkpoint.open(self.models[version]) as checkpoint:
            sums = checkpoint.checksums()
            return tuple(
                TensorSlice(
                    name,
                    str(t.path),
                    t.offset,
                    t.nbytes,
                    t.dtype,
                    tuple(t.shape),
                    sums[name].to_text(),
                )
                for name, t in checkpoint.tensors.items()
                if names is None or name in names
            )

    async def order(self, op: str, **fields: Any) -> RankReply:
        """One order of the present attempt."""
        fields = {"incarnation": self.incarnation, "attempt": self.attempt, **fields}
        replies = await self.engine.ranks.order(RankOrder(op=op, **fields), deadline_s=30)  # type: ignore[arg-type]
        return replies[0]

    async def must(self, op: str, **fields: Any) -> RankReply:
        """An order that has to stand."""
        reply = await self.order(op, **fields)
        assert reply.ok, reply
        return reply

    async def take_over(self) -> None:
        """Own the rank, whoever had it."""
        await self.must("discard")

    async def label(self, version: int | None, run_id: str = RUN) -> None:
        """Set the label, with a new epoch."""
        self.epoch += 1
        label = None if version is None else Label(Ref(run_id, version), self.epoch)
        await self.must("label", label=label)

    async def stage(self, version: int, *, undo: int, **fields: Any) -> RankReply:
        """Stage a version under a new attempt."""
        self.attempt += 1
        return await self.order(
            "stage", tensors=self.slices(version), undo_tensors=self.slices(undo), **fields
        )

    async def activate(
        self, version: int, *, undo: int, mode: ActivationMode = ActivationMode.RECOMPUTE
    ) -> float:
        """Stage, pause, commit, verify, label, resume."""
        assert (await self.stage(version, undo=undo)).ok
        await self.engine.pause(mode)
        await self.must("commit")
        sums = (await self.must("verify")).data["checksums"]
        assert sums == {t.name: t.checksum for t in self.slices(version)}
        await self.label(version)
        return await self.engine.resume(recompute=mode is ActivationMode.RECOMPUTE)

    async def reset(self) -> None:
        """Own the rank; version 1 live and labelled; nothing paused."""
        await self.take_over()
        await self.engine.resume(recompute=False)
        sums = (await self.must("verify", scope="full")).data["checksums"]
        if sums != {t.name: t.checksum for t in self.slices(1)}:
            await self.activate(1, undo=2)
        await self.label(1)

    async def settle(self) -> None:
        """Resume, end what runs, and check that nothing leaked."""
        await self.engine.resume(recompute=False)
        await self.post("/abort_request", {"abort_all": True})
        await self.until(lambda i: i["running"] == i["waiting"] == 0, "nothing is left running")
        info = await self.info()
        assert info["free_pages"] + info["cached_pages"] == KV_TOKENS // 16

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.close()
        await self.http.close()

    async def until(self, condition: Any, what: str) -> None:
        """Poll the engine's state until it is as wanted."""
        try:
            async with asyncio.timeout(20):
                while not condition(await self.info()):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"waited 20 s until {what}") from None


@pytest.fixture
async def live(process: EngineProcess, models: dict[int, Path]) -> AsyncIterator[Driver]:
    """A driver that owns the rank, with version 1 live and labelled, and nothing running."""
    driver = Driver(process, models)
    try:
        await driver.reset()
        yield driver
        await driver.settle()
    finally:
        await driver.close()
