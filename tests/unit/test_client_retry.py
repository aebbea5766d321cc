"""The client against a scripted server: what is retried, what is not, what an error carries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from stitch.client import AsyncClient, Client, ClientConfig, Interrupted
from stitch.client.failure import retry_wait_s, wire_error
from stitch.errors import (
    CorruptData,
    EngineUnavailable,
    InvalidInput,
    NeverSatisfiable,
    NotReady,
    Overloaded,
    Unavailable,
)
from stitch.types import Prefix, Ref, Span, at_least, exactly, lag

RUN = "run-a"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
QUICK = ClientConfig(deadline_s=5.0, backoff_s_min=0.01, backoff_s_max=0.05)


def item(tokens: int = 4, *, finish: str | None = "length", version: int = 3) -> dict[str, Any]:
    return {
        "text": "x" * tokens,
        "output_ids": list(range(tokens)),
        "meta_info": {
            "finish_reason": None if finish is None else {"type": finish},
            "output_token_logprobs": [[-0.5, i, None] for i in range(tokens)],
            "weight_versions": [
                {"run_id": RUN, "version": version, "start": 0, "end": tokens, "prefix": "exact"}
            ],
            "weight_version_start": version,
            "weight_version_end": version,
            "weight_run_id": RUN,
        },
    }


def failure(status: int, code: str, *, retryable: bool, **facts: Any) -> web.Response:
    error = {"type": code, "code": code, "message": "no", "param": None, "retryable": retryable}
    return web.json_response({"error": {**error, **facts}}, status=status)


class Script:
    """Answers each request with the next step; the last one repeats."""

    def __init__(self, *steps: Handler | web.Response) -> None:
        self.steps = list(steps)
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, web.Response):
            return web.Response(body=step.body, status=step.status, headers=step.headers)
        return await step(request)


@asynccontextmanager
async def serving(*steps: Handler | web.Response) -> AsyncIterator[Script]:
    script = Script(*steps)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield script
    finally:
        await runner.cleanup()


def ok(body: Any = None) -> web.Response:
    return web.json_response(item() if body is None else body)


async def test_a_completion_has_its_labels() -> None:
    async with serving(ok()) as script, AsyncClient(script.url) as client:
        done = await client.generate(
            input_ids=[1, 2], constraint=lag(2), sampling={"max_new_tokens": 4},
            return_logprob=True, affinity="k",
        )  # fmt: skip
    assert done.output_ids == (0, 1, 2, 3)
    assert done.logprobs == (-0.5,) * 4
    assert done.spans == (Span(Ref(RUN, 3), 0, 4, Prefix.EXACT),)
    assert (done.run_id, done.version_start, done.version_end) == (RUN, 3, 3)
    assert done.finish_reason == "length"
    assert not done.partial
    body = script.bodies[0]
    assert body["weight_version"] == {"max_lag": 2, "max_wait_ms": 10_000}
    assert body["sampling_params"] == {"max_new_tokens": 4}
    assert script.headers[0]["x-stitch-affinity"] == "k"


async def test_no_constraint_sends_no_field() -> None:
    async with serving(ok()) as script, AsyncClient(script.url) as client:
        await client.generate("hello")
    assert "weight_version" not in script.bodies[0]
    assert script.bodies[0]["text"] == "hello"


async def test_a_callers_own_wait_is_kept() -> None:
    from dataclasses import replace

    async with serving(ok()) as script, AsyncClient(script.url) as client:
        await client.generate("x", constraint=replace(at_least(3), max_wait_ms=7))
    assert script.bodies[0]["weight_version"] == {"min_version": 3, "max_wait_ms": 7}


async def test_n_completions_come_as_a_list() -> None:
    async with serving(ok([item(), item()])) as script, AsyncClient(script.url) as client:
        assert len(await client.generate("x", n=2)) == 2
        with pytest.raises(CorruptData, match="asked for 3"):
            await client.generate("x", n=3)
        with pytest.raises(CorruptData, match="asked for 1"):
            await client.generate("x")
    assert script.bodies[0]["sampling_params"] == {"n": 2}


@pytest.mark.parametrize(
    ("status", "code"),
    [(409, "WeightVersionNotReady"), (503, "Closed"), (429, "Overloaded"), (500, "Odd")],
)
async def test_a_retryable_error_is_tried_again(status: int, code: str) -> None:
    refused = failure(status, code, retryable=True, retry_after_ms=5)
    async with serving(refused, refused, ok()) as script, AsyncClient(script.url) as client:
        await client.generate("x")
        assert sum(client.stats.retries.values()) == 2
    assert len(script.bodies) == 3


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "InvalidInput", InvalidInput),
        (409, "NeverSatisfiable", NeverSatisfiable),
        (409, "WeightVersionNotReady", NotReady),
    ],
)
async def test_a_final_error_is_raised_at_once(status: int, code: str, kind: type) -> None:
    refused = failure(status, code, retryable=False, reason="passed", applied=9)
    async with serving(refused) as script, AsyncClient(script.url) as client:
        with pytest.raises(kind) as caught:
            await client.generate("x", constraint=exactly(3))
    assert len(script.bodies) == 1
    assert caught.value.fields["applied"] == 9


async def test_a_foreign_error_body_is_judged_by_status() -> None:
    busy = web.Response(status=503, text="<html>busy</html>", headers={"Retry-After": "0"})
    async with serving(busy, ok()) as script, AsyncClient(script.url, config=QUICK) as client:
        await client.generate("x")
    assert len(script.bodies) == 2


async def test_no_try_starts_that_the_deadline_cannot_hold() -> None:
    refused = failure(409, "WeightVersionNotReady", retryable=True, retry_after_ms=60_000)
    async with serving(refused) as script, AsyncClient(script.url) as client:
        with pytest.raises(NotReady):
            await client.generate("x", deadline_s=0.5)
    assert len(script.bodies) == 1


async def test_a_silent_server_ends_at_the_deadline() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(never) as script, AsyncClient(script.url) as client:
        with pytest.raises(Unavailable, match=r"within 0\.1 s"):
            await client.generate("x", deadline_s=0.1)
    assert len(script.bodies) == 1


async def test_a_refused_connection_is_retried_then_raised() -> None:
    async with serving(ok()) as script:
        url = script.url
    async with AsyncClient(url, config=QUICK) as client:
        with pytest.raises(EngineUnavailable):
            await client.generate("x", deadline_s=0.3)
        assert client.stats.retries["EngineUnavailable"] >= 2


async def test_an_aborted_generation_keeps_what_was_made() -> None:
    async with serving(ok(item(2, finish="abort"))) as script, AsyncClient(script.url) as client:
        with pytest.raises(Interrupted) as caught:
            await client.generate("x")
    assert len(script.bodies) == 1
    assert caught.value.partial is not None
    assert caught.value.partial.output_ids == (0, 1)
    assert caught.value.partial.spans[0].end == 2


async def test_an_error_with_partial_output_is_not_retried() -> None:
    cut = failure(503, "Closed", retryable=True, retry_after_ms=1, partial=item(3, finish=None))
    async with serving(cut) as script, AsyncClient(script.url) as client:
        with pytest.raises(Interrupted) as caught:
            await client.generate("x")
    assert len(script.bodies) == 1
    assert caught.value.partial is not None
    assert len(caught.value.partial.output_ids) == 3
    assert caught.value.fields["cause_code"] == "Closed"


def streaming(*events: Any, cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            await answer.write(f"data: {data}\n\n".encode())
        if cut and request.transport is not None:
            await asyncio.sleep(0.05)
            request.transport.abort()
        return answer

    return handle


WHOLE = (item(1, finish=None), item(3, finish=None), item(4), "[DONE]")


async def test_a_stream_yields_what_is_new() -> None:
    async with serving(streaming(*WHOLE)) as script, AsyncClient(script.url) as client:
        stream = await client.generate("x", stream=True)
        chunks = [chunk async for chunk in stream]
    assert [c.output_ids for c in chunks] == [(0,), (1, 2), (3,)]
    assert "".join(c.text for c in chunks) == "xxxx"
    assert [len(c.logprobs) for c in chunks] == [1, 2, 1]
    assert [c.completion is not None for c in chunks] == [False, False, True]


async def test_a_stream_is_retried_before_its_first_event() -> None:
    refused = failure(503, "Closed", retryable=True, retry_after_ms=1)
    steps = (refused, streaming(*WHOLE))
    async with serving(*steps) as script, AsyncClient(script.url) as client:
        assert len([c async for c in await client.generate("x", stream=True)]) == 3
    assert len(script.bodies) == 2


@pytest.mark.parametrize(
    "handler",
    [
        streaming(item(1, finish=None), item(2, finish=None), cut=True),
        streaming(item(1, finish=None), item(2, finish=None)),
        streaming(item(1, finish=None), item(2, finish="abort"), "[DONE]"),
        streaming(
            item(2, finish=None),
            {"error": {"code": "Closed", "message": "gate", "retryable": True, "status": 503}},
        ),
    ],
    ids=["connection cut", "no end", "aborted", "error event"],
)
async def test_a_cut_stream_raises_with_the_partial_output(handler: Handler) -> None:
    async with serving(handler) as script, AsyncClient(script.url, config=QUICK) as client:
        stream = await client.generate("x", stream=True)
        with pytest.raises(Interrupted) as caught:
            async for _ in stream:
                pass
    assert caught.value.partial is not None
    assert caught.value.partial.output_ids == (0, 1)
    assert caught.value.partial.partial
    assert len(script.bodies) == 1


async def test_openai_routes_pass_through() -> None:
    answer = {"id": "c", "choices": [], "weight_version_start": 3}
    async with serving(web.json_response(answer)) as script, AsyncClient(script.url) as client:
        body = {"messages": [], "model": "m"}
        assert await client.chat(body, constraint=at_least(3)) == answer
        assert await client.completions(body) == answer
        with pytest.raises(InvalidInput, match="SDK"):
            await client.chat({"stream": True})
    assert script.bodies[0]["weight_version"]["min_version"] == 3
    assert script.bodies[1] == body


async def test_misuse_is_named() -> None:
    with pytest.raises(InvalidInput, match="base URL"):
        AsyncClient("localhost:1")
    async with AsyncClient("http://h") as client:
        for wrong in (
            {},
            {"prompt": "x", "input_ids": [1]},
            {"prompt": "x", "n": 0},
            {"prompt": "x", "constraint": "v3"},
        ):
            with pytest.raises(InvalidInput):
                await client.generate(**wrong)


async def test_a_body_that_is_no_generation_is_corrupt() -> None:
    async with serving(web.json_response({"odd": 1})) as script, AsyncClient(script.url) as client:
        with pytest.raises(CorruptData, match="/generate"):
            await client.generate("x")


async def test_the_sync_face() -> None:
    async with serving(ok(), streaming(*WHOLE)) as script:

        def work() -> tuple[int, int]:
            with Client(script.url) as client:
                one = client.generate("x")
                chunks = list(client.generate("x", stream=True))
                return len(one.output_ids), len(chunks)

        assert await asyncio.get_running_loop().run_in_executor(None, work) == (4, 3)


def test_a_client_that_was_never_used_closes() -> None:
    Client("http://127.0.0.1:1").close()


def test_waits_grow_and_obey_the_server() -> None:
    plain = Unavailable("x")
    waits = [retry_wait_s(plain, n, base_s=0.1, max_s=1.0, spread=0.0) for n in (1, 2, 3, 9)]
    assert waits == [0.1, 0.2, 0.4, 1.0]
    asked = wire_error(429, {"error": {"code": "Overloaded", "retry_after_ms": 300}})
    assert isinstance(asked, Overloaded)
    assert retry_wait_s(asked, 1, base_s=0.1, max_s=1.0, spread=0.0) == pytest.approx(0.3)
    assert retry_wait_s(asked, 1, base_s=0.1, max_s=1.0, spread=0.99) < 0.45
    header = wire_error(503, None, retry_after="2")
    assert retry_wait_s(header, 1, base_s=0.1, max_s=1.0, spread=0.0) == pytest.approx(2.0)
