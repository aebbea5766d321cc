"""The sidecar and the gate: constraints, closed gates, aborted leases, events, draining."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from stitch.admission import GateConfig
from stitch.errors import Closed
from stitch.sidecar import SidecarConfig
from stitch.testing.http_fakes import FakeReplica, fake_replica
from stitch.types import Label, Ref, exactly


def v(version: int, run: str = "run-a") -> Ref:
    return Ref(run, version)


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    gate = GateConfig(gate_wait_s=0.3, drain_deadline_s=0.05, defer_count_max=0, waiting_max=3)
    config = SidecarConfig(events_keepalive_s=0.05, partial_s=1.0, close_s=1.0)
    async with fake_replica(served=v(5), gate_config=gate, config=config) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Call:
    """Posts to one replica."""

    def __init__(self, http: aiohttp.ClientSession, replica: FakeReplica) -> None:
        self._http = http
        self._url = replica.url

    async def __call__(self, weight_version: Any = None, **body: Any) -> tuple[int, Any, Any]:
        headers = body.pop("headers", {})
        if weight_version is not None:
            body["weight_version"] = weight_version
        async with self._http.post(self._url + "/generate", json=body, headers=headers) as answer:
            return answer.status, answer.headers, json.loads(await answer.read())


@pytest.fixture
def call(http: aiohttp.ClientSession, replica: FakeReplica) -> Call:
    return Call(http, replica)


async def eventually(check: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("demand", "status", "reason"),
    [
        ({}, 200, None),
        ({"min_version": 5}, 200, None),
        ({"exact_version": "5"}, 200, None),
        ({"min_version": 9, "exact_version": 5}, 200, None),
        ({"run_id": "run-a", "min_version": 1}, 200, None),
        ({"max_lag": 0}, 200, None),
        ({"min_version": 6}, 409, "behind"),
        ({"exact_version": 6}, 409, "behind"),
        ({"exact_version": 4}, 409, "passed"),
        ({"run_id": "run-b"}, 409, "other_run"),
        ({"min_version": 6, "max_wait_ms": 0}, 409, "behind"),
        ({"min_version": 6, "max_wait_ms": 50}, 409, "behind"),
    ],
)
async def test_the_constraint_matrix(call, replica, demand, status, reason) -> None:
    found, headers, body = await call(demand)
    assert found == status
    if status == 409:
        assert (body["type"], body["applied"]) == ("WeightVersionNotReady", 5)
        assert body["target_version"] == demand.get("exact_version", demand.get("min_version"))
        assert body["error"]["reason"] == reason
        assert body["error"]["run_id"] == "run-a"
        assert headers["Retry-After"] == "1"
        assert replica.view.wakes == 1
        assert replica.server.seen == []


async def test_lag_is_checked_against_the_replicas_own_pointer(call, replica) -> None:
    replica.view.see(v(8))
    assert (await call({"max_lag": 3}))[0] == 200
    status, _, body = await call({"max_lag": 2})
    assert (status, body["error"]["reason"], body["target_version"]) == (409, "behind", 6)
    replica.view.see(v(1, "run-b"))
    status, _, body = await call({"max_lag": 3})
    assert (status, body["error"]["reason"]) == (409, "other_run")


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"weight_version": {"min_version": True}}, {}, "weight_version.min_version"),
        ({"weight_version": 5}, {}, "weight_version"),
        (
            {"weight_version": {"exact_version": 4}},
            {"x-stitch-exact-version": "5"},
            "weight_version.exact_version",
        ),
        ({}, {"x-stitch-min-version": "-1"}, "x-stitch-min-version"),
        ({"rid": 5}, {}, "rid"),
        ({"rid": []}, {}, "rid"),
        ({"rid": ["a", 1]}, {}, "rid"),
    ],
)
async def test_malformed_demands(call, replica, body, headers, param) -> None:
    status, _, found = await call(**body, headers=headers)
    assert (status, found["error"]["param"]) == (400, param)
    assert replica.server.seen == []


async def test_a_replica_that_knows_no_version_serves_nothing(call, replica) -> None:
    replica.view.serve(None)
    status, _, body = await call()
    assert (status, body["applied"], body["error"]["retryable"]) == (409, None, True)


async def test_waiting_for_a_version(call, replica) -> None:
    task = asyncio.create_task(call({"min_version": 6, "max_wait_ms": 3000}))
    await eventually(lambda: replica.view.gate.waiting == 1)
    replica.view.serve(v(6))
    status, headers, _ = await task
    assert (status, headers["x-stitch-version-admitted"]) == (200, "6")


class TestClosedGate:
    async def test_nothing_runs_until_it_opens_then_with_the_new_label(
        self, http, call, replica
    ) -> None:
        gate = replica.view.gate
        gate.config = GateConfig(gate_wait_s=5)
        await gate.close(everything=True)
        tasks = [asyncio.create_task(call()) for _ in range(2)]
        read = asyncio.create_task(http.get(replica.url + "/raw"))
        await eventually(lambda: gate.waiting == 3)
        assert replica.server.seen == []
        gate.open(Label(v(6), 2))
        admitted = {(await task)[1]["x-stitch-version-admitted"] for task in tasks}
        assert admitted == {"6"}
        answer = await read
        assert answer.headers["x-stitch-version-admitted"] == "6"
        answer.release()

    async def test_past_the_wait_it_is_a_503(self, call, replica) -> None:
        await replica.view.gate.close(everything=True)
        status, headers, body = await call()
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "Closed", "1")
        status, _, body = await call({"max_wait_ms": 0})
        assert (status, body["error"]["code"]) == (503, "Closed")

    async def test_the_queue_is_bounded(self, call, replica) -> None:
        gate = replica.view.gate
        await gate.close(everything=True)
        tasks = [asyncio.create_task(call()) for _ in range(3)]
        await eventually(lambda: gate.waiting == 3)
        status, _, body = await call()
        assert (status, body["error"]["code"]) == (429, "Overloaded")
        gate.open(Label(v(5), 2))
        assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}

    async def test_a_waiter_that_leaves_leaves_nothing_behind(self, call, replica) -> None:
        gate = replica.view.gate
        await gate.close(everything=True)
        task = asyncio.create_task(call())
        await eventually(lambda: gate.waiting == 1)
        task.cancel()
        await eventually(lambda: gate.waiting == 0)
        gate.open(Label(v(5), 2))
        assert gate.running == 0
        assert replica.server.seen == []


class TestGateAborts:
    """Pins that hold an activation back for too long are ended with what they made."""

    async def _activate(self, replica: FakeReplica) -> None:
        gate = replica.view.gate
        await gate.close(everything=False)
        assert gate.running == 0
        gate.open(Label(v(6), 2))

    async def test_a_plain_response_becomes_an_error_with_the_partial_output(
        self, call, replica
    ) -> None:
        pin = {"exact_version": 5}
        task = asyncio.create_task(call(pin, fake={"delay_s": 30}, rid="pinned"))
        await eventually(lambda: "pinned" in replica.server.running)
        await self._activate(replica)
        status, headers, body = await task
        error = body["error"]
        assert (status, error["code"], error["retryable"]) == (503, "Closed", True)
        assert headers["Retry-After"] == "1"
        assert error["partial"]["meta_info"]["finish_reason"] == {"type": "abort"}
        assert (error["weight_run_id"], error["weight_version_admitted"]) == ("run-a", 5)
        assert replica.server.aborted == ["pinned"]

    async def test_a_stream_gets_its_last_tokens_and_an_error_event(self, http, replica) -> None:
        body = {
            "weight_version": {"exact_version": 5},
            "rid": "pinned",
            "fake": {"kind": "sse", "tokens": 100, "gap_s": 0.05},
        }
        async with http.post(replica.url + "/generate", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            await self._activate(replica)
            rest = await answer.read()
        events = [json.loads(part[6:]) for part in rest.split(b"\n\n") if part]
        assert b"[DONE]" not in rest
        assert events[-1]["error"]["code"] == "Closed"
        assert events[-2]["meta_info"]["finish_reason"] == {"type": "abort"}

    async def test_an_engine_that_does_not_react_is_left_behind(self, call, replica) -> None:
        replica.server.abort = lambda rid: None  # type: ignore[method-assign]
        task = asyncio.create_task(call({"exact_version": 5}, fake={"delay_s": 30}, rid="deaf"))
        await eventually(lambda: "deaf" in replica.server.running)
        await self._activate(replica)
        status, _, body = await task
        assert (status, body["error"]["code"], body["error"]["partial"]) == (503, "Closed", None)

    async def test_unpinned_requests_ride_through(self, call, replica) -> None:
        task = asyncio.create_task(call(fake={"delay_s": 0.2}, rid="free"))
        await eventually(lambda: "free" in replica.server.running)
        await replica.view.gate.close(everything=False)
        replica.view.gate.open(Label(v(6), 2))
        status, headers, _ = await task
        assert (status, headers["x-stitch-version-admitted"]) == (200, "5")

    async def test_client_and_gate_together(self, call, replica) -> None:
        task = asyncio.create_task(call({"exact_version": 5}, fake={"delay_s": 30}, rid="both"))
        await eventually(lambda: "both" in replica.server.running)
        task.cancel()
        await self._activate(replica)
        await eventually(lambda: not replica.server.running)


async def test_random_cancels_over_activations_leak_nothing(http, replica) -> None:
    import random

    rng = random.Random(7)
    gate = replica.view.gate
    gate.config = GateConfig(gate_wait_s=5, drain_deadline_s=5)
    call = Call(http, replica)
    version = 5
    tasks: list[asyncio.Task[Any]] = []
    for _ in range(20):
        for _ in range(10):
            kind = rng.choice(["json", "sse"])
            tasks.append(
                asyncio.create_task(_quietly(call, {"kind": kind, "delay_s": 0.02, "gap_s": 0.01}))
            )
        await asyncio.sleep(rng.uniform(0, 0.02))
        await gate.close(everything=False)
        for task in rng.sample(tasks, min(len(tasks), 10)):
            task.cancel()
        await asyncio.sleep(0.002)
        version += 1
        gate.open(Label(v(version), version))
    await asyncio.wait(tasks)
    await eventually(lambda: gate.running == 0 and gate.waiting == 0)
    await eventually(lambda: not replica.server.running)
    assert (await call())[0] == 200


async def _quietly(call: Call, fake: dict[str, Any]) -> None:
    try:
        await call(fake=fake)
    except (asyncio.CancelledError, json.JSONDecodeError):
        return


class TestEvents:
    async def _open(self, http: Any, replica: FakeReplica, last_id: str | None = None) -> Any:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        answer = await http.get(replica.url + "/events", headers=headers)
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert await answer.content.readuntil(b"\n\n") == b"retry: 250\n\n"
        return answer

    async def _next(self, answer: Any) -> tuple[str, dict[str, Any]]:
        while True:
            text = (await answer.content.readuntil(b"\n\n")).decode()
            if text.startswith("id: "):
                lines = dict(line.split(": ", 1) for line in text.strip().split("\n"))
                return lines["id"], json.loads(lines["data"])

    async def test_a_snapshot_comes_first_then_changes(self, http, replica) -> None:
        answer = await self._open(http, replica)
        event_id, report = await self._next(answer)
        assert event_id == f"life-1:{report['seq']}"
        assert report["served"] == {"run_id": "run-a", "version": 5}
        assert report["protocol"] == 1
        replica.view.serve(v(6))
        later_id, later = await self._next(answer)
        assert later["served"]["version"] == 6
        assert later["seq"] > report["seq"]
        answer.close()
        resumed = await self._open(http, replica, later_id)
        assert b"keepalive" in await resumed.content.readuntil(b"\n\n")
        resumed.close()
        unknown = await self._open(http, replica, "other-life:99")
        assert (await self._next(unknown))[0] == later_id
        unknown.close()

    async def test_a_quiet_stream_is_kept_alive(self, http, replica) -> None:
        answer = await self._open(http, replica)
        await self._next(answer)
        assert await answer.content.readuntil(b"\n\n") == b": keepalive\n\n"
        answer.close()

    async def test_events_flow_while_the_gate_is_closed(self, http, replica) -> None:
        answer = await self._open(http, replica)
        await self._next(answer)
        await replica.view.gate.close(everything=True)
        _, report = await self._next(answer)
        assert (report["gate"], report["phase"]) == ("CLOSED", "ACTIVATING")
        answer.close()


async def test_draining_refuses_new_and_ends_running_requests(http, call, replica) -> None:
    task = asyncio.create_task(call(fake={"delay_s": 0.2}, rid="last"))
    await eventually(lambda: "last" in replica.server.running)
    drain = asyncio.create_task(replica.sidecar.drain(2.0))
    await eventually(lambda: replica.view.state.value == "DRAINING")
    async with http.get(replica.url + "/health") as answer:
        assert answer.status == 503
    status, _, body = await call()
    assert (status, body["error"]["retryable"]) == (503, True)
    assert (await task)[0] == 200
    await drain
    with pytest.raises(aiohttp.ClientConnectionError):
        await call()


async def test_engine_death_ends_everything_that_runs(call, replica) -> None:
    tasks = [asyncio.create_task(call(fake={"delay_s": 30}, rid=f"r{i}")) for i in range(5)]
    await eventually(lambda: len(replica.server.running) == 5)
    await replica.server.close()
    for status, _, body in await asyncio.gather(*tasks):
        assert (status, body["error"]["code"]) == (503, "EngineUnavailable")
    await eventually(lambda: replica.view.gate.running == 0)
    replica.view.gate.abort_all(Closed("gone"))


class TestUnlabelledEngine:
    """An engine whose responses the sidecar must label."""

    @pytest.fixture
    async def plain(self) -> AsyncIterator[FakeReplica]:
        async with fake_replica(served=v(5), final_responses=False) as running:
            yield running

    async def test_json_is_labelled(self, http, plain) -> None:
        call = Call(http, plain)
        status, _, body = await call(headers={"Accept-Encoding": "gzip"})
        assert (status, body["meta_info"]["weight_version_start"]) == (200, 5)
        assert "accept-encoding" not in plain.server.seen[-1].headers

    async def test_every_event_is_labelled(self, http, plain) -> None:
        body = {"fake": {"kind": "sse", "tokens": 3, "gap_s": 0.01}}
        async with http.post(plain.url + "/generate", json=body) as answer:
            data = await answer.read()
        events = [part[6:] for part in data.split(b"\n\n") if part]
        assert events.pop() == b"[DONE]"
        assert {json.loads(e)["meta_info"]["weight_version_end"] for e in events} == {5}

    async def test_a_cut_stream_still_ends_in_an_error(self, http, plain) -> None:
        body = {"fake": {"kind": "die_in_stream", "gap_s": 0.01}}
        async with http.post(plain.url + "/generate", json=body) as answer:
            data = await answer.read()
        assert (
            json.loads(data.rstrip().split(b"\n\n")[-1][6:])["error"]["code"] == "EngineUnavailable"
        )


async def test_a_pin_taken_directly_is_what_the_gate_says(replica) -> None:
    lease = replica.view.gate.try_admit(exactly(5))
    assert lease is not None
    replica.view.gate.release(lease)


async def test_slow_readers_hold_the_engine_back(replica) -> None:
    size = 40_000_000
    body = json.dumps({"fake": {"kind": "chunked", "size": size}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.sidecar.port, limit=2**16)
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    await eventually(lambda: replica.sidecar.upstream.open)
    connection = next(iter(replica.sidecar.upstream.open))
    exchange = connection._exchange
    assert exchange is not None
    await eventually(lambda: connection._paused and exchange.received > 2**24)
    stuck = exchange.received
    await asyncio.sleep(0.2)
    assert exchange.received == stuck < size
    total = 0
    while not exchange.done or total < size:
        data = await reader.read(2**20)
        if not data:
            break
        total += len(data)
    assert total > size
    writer.close()
    await eventually(lambda: replica.view.gate.running == 0)


async def test_a_generation_that_ended_before_the_gates_word_is_answered(http, replica) -> None:
    body = {
        "fake": {"kind": "sse", "tokens": 3, "gap_s": 0.05},
        "weight_version": {"exact_version": 5},
    }
    async with http.post(replica.url + "/generate", json=body) as answer:
        gate = replica.view.gate
        lease = next(iter(gate._leases.values()))
        connection = next(iter(replica.sidecar.upstream.open))
        end = connection._end

        def end_then_abort(error: Any) -> None:
            end(error)
            lease.error = Closed("too late")
            lease.on_abort(lease.error)

        connection._end = end_then_abort
        data = await answer.read()
    assert data.endswith(b"data: [DONE]\n\n")
    await eventually(lambda: gate.running == 0)
    assert replica.server.aborted == []


async def test_a_response_too_large_to_label_ends_its_generation() -> None:
    config = SidecarConfig(response_bytes_max=100_000)
    async with (
        fake_replica(served=v(5), final_responses=False, config=config) as plain,
        aiohttp.ClientSession() as session,
    ):
        call = Call(session, plain)
        status, _, body = await call(fake={"kind": "chunked", "size": 3_000_000}, rid="big")
        assert (status, body["error"]["code"]) == (501, "Unsupported")
        await eventually(lambda: plain.view.gate.running == 0)
        assert plain.server.aborted == ["big"]
