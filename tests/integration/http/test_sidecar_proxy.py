"""The sidecar as a proxy: what goes through, what is answered here, how failures look."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from stitch.testing.http_fakes import FakeReplica, fake_replica
from stitch.types import Ref


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with fake_replica(served=Ref("run-a", 7)) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


async def generate(
    http: aiohttp.ClientSession, replica: FakeReplica, path: str = "/generate", **body: Any
) -> tuple[int, dict[str, Any], Any]:
    headers = body.pop("headers", {})
    async with http.post(replica.url + path, json={"text": "a", **body}, headers=headers) as answer:
        return answer.status, dict(answer.headers), await answer.json(content_type=None)


async def eventually(check: Any, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


async def test_a_request_is_admitted_stamped_and_labelled(http, replica) -> None:
    status, headers, body = await generate(
        http, replica, weight_version={"min_version": "7"}, x=[1, {"y": None}]
    )
    assert status == 200
    assert headers["x-stitch-version-admitted"] == "7"
    assert headers["x-stitch-run-id"] == "run-a"
    assert headers["x-stitch-replica"] == "replica-0"
    assert headers["X-Engine"] == "fake"
    assert body["meta_info"]["weight_version"] == "7"
    sent = replica.server.seen[-1]
    assert "weight_version" not in sent.json
    assert sent.json["x"] == [1, {"y": None}]
    assert sent.json["extra_key"] == "run-a/weight_v000007#1"
    assert len(sent.json["rid"]) > 16
    assert replica.view.gate.running == 0


@pytest.mark.parametrize("rid", ["mine", ["a", "b"], ["one"]])
async def test_a_clients_rid_is_kept(http, replica, rid) -> None:
    await generate(http, replica, rid=rid)
    assert replica.server.seen[-1].json["rid"] == rid


@pytest.mark.parametrize("kind", ["json", "chunked", "close", "gzip", "sse"])
@pytest.mark.parametrize("size", [10, 200_000])
async def test_bodies_and_headers_arrive_equal(http, replica, kind, size) -> None:
    fake = {"kind": kind, "size": size, "tokens": 5}
    for _ in range(2):
        async with http.post(
            replica.url + "/generate", json={"fake": fake, "rid": "r"}, headers={"X-Own": "1"}
        ) as answer:
            body = await answer.read()
            assert answer.status == 200
            assert "Keep-Alive" not in answer.headers
            if kind == "gzip":
                assert answer.headers["Content-Encoding"] == "gzip"
                body = gzip.decompress(body)
        if kind == "sse":
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.count(b"data: ") == 7
        else:
            assert json.loads(body)["text"] == "x" * size
    assert replica.server.seen[-1].headers["x-own"] == "1"


async def test_the_response_is_parsed_in_pieces(http, replica) -> None:
    for kind in ("json", "chunked", "gzip"):
        status, _, _ = 0, 0, 0
        async with http.post(
            replica.url + "/generate", json={"fake": {"kind": kind, "split": True}}
        ) as answer:
            status = answer.status
            await answer.read()
        assert status == 200


async def test_read_only_routes_pass_with_query_method_and_type(http, replica) -> None:
    async with http.get(replica.url + "/raw?a=1&b=%20") as answer:
        assert (answer.status, await answer.read()) == (200, b"raw:/raw?a=1&b=%20")
        assert answer.headers["Content-Type"] == "application/x-raw"
        assert answer.headers["x-stitch-version-admitted"] == "7"
    async with http.put(replica.url + "/raw", data=b"\x00binary") as answer:
        assert answer.status == 200
    assert replica.server.seen[-1].body == b"\x00binary"
    assert replica.server.seen[-1].method == "PUT"


async def test_hop_and_routing_headers_stop_here(http, replica) -> None:
    stopped = {
        "Modal-Session-ID": "s",
        "modal-key": "k",
        "X-Forwarded-For": "10.0.0.1",
        "x-stitch-affinity": "a",
        "TE": "trailers",
        "Keep-Alive": "5",
        "X-Mine": "hop",
        "Connection": "keep-alive, X-Mine",
    }
    await generate(http, replica, headers={**stopped, "Authorization": "Bearer t"})
    sent = replica.server.seen[-1].headers
    assert not {name.lower() for name in stopped} & set(sent)
    assert sent["authorization"] == "Bearer t"
    assert sent["host"] == f"127.0.0.1:{replica.server.port}"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/flush_cache"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/pause_generation"),
        ("POST", "/abort_request"),
        ("GET", "/generate"),
        ("POST", "/generate/"),
        ("POST", "/generate/../flush_cache"),
        ("POST", "/%67enerate"),
        ("POST", "//generate"),
        ("POST", "/anything"),
    ],
)
async def test_everything_unlisted_is_blocked(http, replica, method, path) -> None:
    from yarl import URL

    url = URL(replica.url + path, encoded=True)
    async with http.request(method, url, json={}) as answer:
        body = await answer.json()
    assert answer.status == 403
    assert body["error"]["type"] == "RouteBlocked"
    assert body["error"]["retryable"] is False
    assert replica.server.seen == []


async def test_control_routes(http, replica) -> None:
    async with http.get(replica.url + "/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"ready": True})
        assert answer.headers["x-stitch-protocol"] == "1"
    async with http.get(replica.url + "/server_info") as answer:
        info = await answer.json()
    assert info["applied"] == "run-a/weight_v000007"
    assert info["protocol"] == 1
    async with http.post(replica.url + "/wake") as answer:
        assert (await answer.json())["ready"] is True
    assert replica.view.wakes == 1
    async with http.get(replica.url + "/wake") as answer:
        assert answer.status == 405
    replica.view.serve(None)
    async with http.get(replica.url + "/health") as answer:
        assert answer.status == 503
        assert (await answer.json())["reason"]


async def test_metrics_answer_at_all_times(http, replica) -> None:
    async def page() -> str:
        async with http.get(replica.url + "/metrics") as answer:
            assert answer.status == 200
            return await answer.text()

    assert "fake 1" in await page()
    await replica.view.gate.close(everything=True)
    text = await page()
    assert "fake 1" in text
    assert "stitch_replica_running 0" in text
    assert "stitch_sidecar_requests_total" in text
    await replica.server.close()
    text = await page()
    assert "fake 1" not in text
    assert "stitch_replica_running 0" in text


@pytest.mark.parametrize("kind", ["die_before", "die_in_head", "die_in_body", "bad_status"])
async def test_an_engine_that_breaks_off_is_a_503(http, replica, kind) -> None:
    status, headers, body = await generate(http, replica, fake={"kind": kind}, rid="gone")
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert body["error"]["type"] == "EngineUnavailable"
    assert body["error"]["retryable"] is True
    await eventually(lambda: replica.view.gate.running == 0)
    assert replica.server.aborted == ["gone"]


async def test_an_engine_that_refuses_is_a_503(http, replica) -> None:
    await replica.server.close()
    status, _, body = await generate(http, replica)
    assert (status, body["error"]["code"]) == (503, "EngineUnavailable")
    await eventually(lambda: replica.view.gate.running == 0)


async def test_a_stale_connection_is_retried_once(http, replica) -> None:
    assert (await generate(http, replica))[0] == 200
    await replica.server.close()
    await replica.server.start(replica.server.port)
    assert (await generate(http, replica))[0] == 200


async def test_a_cut_stream_ends_with_an_error_event(http, replica) -> None:
    async with http.post(
        replica.url + "/generate", json={"fake": {"kind": "die_in_stream", "gap_s": 0.01}}
    ) as answer:
        assert answer.status == 200
        body = await answer.read()
    events = [part for part in body.split(b"\n\n") if part]
    assert b"[DONE]" not in body
    last = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert last["code"] == "EngineUnavailable"
    assert last["retryable"] is True
    assert last["weight_version_admitted"] == 7
    assert last["weight_run_id"] == "run-a"
    await eventually(lambda: replica.view.gate.running == 0)


async def test_the_first_event_is_not_delayed(http, replica) -> None:
    clock = asyncio.get_running_loop().time
    start = clock()
    async with http.post(
        replica.url + "/generate", json={"fake": {"kind": "sse", "tokens": 3, "gap_s": 0.3}}
    ) as answer:
        await answer.content.readuntil(b"\n\n")
        assert clock() - start < 0.55
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["json", "sse"])
async def test_a_client_that_leaves_aborts_its_generation(http, replica, kind) -> None:
    fake = {"kind": kind, "delay_s": 0 if kind == "sse" else 30, "tokens": 5, "gap_s": 10}
    call = asyncio.create_task(generate(http, replica, fake=fake, rid="left"))
    await eventually(lambda: "left" in replica.server.running)
    assert replica.view.gate.running == 1
    call.cancel()
    await eventually(lambda: replica.view.gate.running == 0)
    assert replica.server.aborted == ["left"]
    assert not replica.server.running


async def test_an_id_in_use_is_refused_and_its_generation_goes_on(http, replica) -> None:
    """Else a client that sends another's id and leaves would abort the other's generation."""
    call = asyncio.create_task(generate(http, replica, fake={"delay_s": 0.3}, rid="mine"))
    await eventually(lambda: "mine" in replica.server.running)
    for rid in ("mine", ["other", "mine"]):
        status, headers, body = await generate(http, replica, rid=rid)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert (body["error"]["code"], body["error"]["param"]) == ("Overloaded", "rid")
    assert (await call)[0] == 200
    assert replica.server.aborted == []
    assert (await generate(http, replica, rid=["other", "mine"]))[0] == 200


async def test_bodies_nested_too_deep_to_be_sent_on_are_refused(http, replica) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    status, _, body = await generate(http, replica, deep=deep)
    assert (status, body["error"]["code"]) == (400, "InvalidInput")
    assert replica.view.gate.running == 0
    assert replica.server.seen == []


async def test_an_engine_gives_no_labels_in_headers(http, replica) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nX-Stitch-Version-Admitted: 99\r\nx-stitch-run-id: other\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    replica.view.engine.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with http.post(replica.url + "/generate", json={"text": "a"}) as found:
        assert found.headers.getall("x-stitch-version-admitted") == ["7"]
        assert found.headers.getall("x-stitch-run-id") == ["run-a"]
    server.close()


async def test_an_engine_that_moves_is_found_at_once(http, replica) -> None:
    assert (await generate(http, replica))[0] == 200
    await replica.server.close()
    await replica.server.start()
    replica.view.engine.base_url = f"http://127.0.0.1:{replica.server.port}"
    assert (await generate(http, replica))[0] == 200
