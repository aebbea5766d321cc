"""The gateway over real replicas' HTTP: routing, waiting, retrying, members that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from stitch.admission import GateConfig
from stitch.commands.status import _member_row
from stitch.env import Env
from stitch.errors import EngineUnavailable, Unavailable, Unsupported
from stitch.gateway import GatewayConfig, GatewayServer, serve_gateway
from stitch.pools.base import Member
from stitch.testing.http_fakes import FakeReplica, fake_replica
from stitch.types import Ref, ReplicaState

FAST = GatewayConfig(feed_backoff_s=0.02, feed_backoff_s_max=0.1, retry_s=0.1)


class ListPool:
    """A pool whose member list the test replaces; None makes discovery fail."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members: Sequence[Member] | None = list(members)
        self._changed = asyncio.Event()

    def set(self, members: Sequence[Member] | None) -> None:
        self._members = members
        self._changed.set()

    async def members(self) -> Sequence[Member]:
        if self._members is None:
            raise Unavailable("discovery is down")
        return self._members

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        while True:
            self._changed.clear()
            yield await self.members()
            await self._changed.wait()

    async def wake(self) -> int:
        return 0

    async def scale(self, replicas: int) -> None:
        raise Unsupported("fixed")

    async def close(self) -> None: ...


class Rig:
    """A gateway over some fake replicas."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.replicas: list[FakeReplica] = []
        self.pool = ListPool([])
        self.gateway: GatewayServer
        self.http: aiohttp.ClientSession
        self.url = ""

    async def start(
        self,
        served: Sequence[Ref | None],
        *,
        config: GatewayConfig = FAST,
        latest: Ref | None = None,
    ) -> Rig:
        for ref in served:
            await self.add(ref, latest=latest)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.gateway = await serve_gateway(self.pool, config=config, env=Env())
        self._stack.push_async_callback(self.gateway.close)
        self.url = f"http://127.0.0.1:{self.gateway.port}"
        await eventually(
            lambda: (
                len(self.seats()) == len(served)
                and all(seat.report is not None for seat in self.seats())
            )
        )
        return self

    async def add(self, served: Ref | None, *, latest: Ref | None = None) -> FakeReplica:
        replica = await self._stack.enter_async_context(
            fake_replica(served=served, replica_id=f"replica-{len(self.replicas)}")
        )
        if latest is not None:
            replica.view.see(latest)
        self.replicas.append(replica)
        self.announce()
        return replica

    def announce(self, without: int | None = None) -> None:
        self.pool.set(
            [
                Member(f"m{index}", replica.url)
                for index, replica in enumerate(self.replicas)
                if index != without
            ]
        )

    def seats(self) -> list[Any]:
        return list(self.gateway.roster.seats.values())

    async def post(self, path: str = "/generate", **body: Any) -> tuple[int, Any, Any]:
        headers = body.pop("headers", {})
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, answer.headers, json.loads(await answer.read())

    async def knows(self, index: int, version: int) -> None:
        await eventually(
            lambda: self.gateway.roster.seats[f"m{index}"].report.served.version == version
        )


async def eventually(check: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        yield Rig(stack)


def v(version: int, run: str = "run-a") -> Ref:
    return Ref(run, version)


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        ({}, {"replica-0", "replica-1", "replica-2"}),
        ({"min_version": 2}, {"replica-1", "replica-2"}),
        ({"min_version": "3"}, {"replica-2"}),
        ({"exact_version": 1}, {"replica-0"}),
        ({"exact_version": 2, "min_version": 3}, {"replica-1"}),
        ({"max_lag": 0}, {"replica-2"}),
        ({"max_lag": 1}, {"replica-1", "replica-2"}),
        ({"run_id": "run-a", "min_version": 3}, {"replica-2"}),
    ],
)
async def test_constraints_choose_replicas(rig, demand, expected) -> None:
    await rig.start([v(1), v(2), v(3)], latest=v(3))
    used = set()
    for _ in range(6):
        status, headers, _ = await rig.post(weight_version=demand)
        assert status == 200
        used.add(headers["x-stitch-replica"])
    assert used == expected


async def test_headers_constrain_too(rig) -> None:
    await rig.start([v(1), v(2)])
    for _ in range(4):
        status, headers, _ = await rig.post(headers={"x-stitch-exact-version": "1"})
        assert (status, headers["x-stitch-version-admitted"]) == (200, "1")


@pytest.mark.parametrize(
    ("demand", "status", "code", "reason", "retryable"),
    [
        ({"min_version": 9}, 409, "WeightVersionNotReady", "behind", True),
        ({"exact_version": 9}, 409, "WeightVersionNotReady", "behind", True),
        ({"exact_version": 1}, 409, "NeverSatisfiable", "passed", False),
        ({"run_id": "run-b"}, 409, "WeightVersionNotReady", "other_run", True),
        ({"min_version": -1}, 400, "InvalidInput", None, False),
        ({"nonsense": 1}, 400, "InvalidInput", None, False),
    ],
)
async def test_what_nobody_serves(rig, demand, status, code, reason, retryable) -> None:
    await rig.start([v(3), v(3)])
    found, headers, body = await rig.post(weight_version=demand)
    error = body["error"]
    assert (found, error["code"], error["retryable"]) == (status, code, retryable)
    assert error.get("reason") == reason
    if status == 409:
        assert body["type"] == "WeightVersionNotReady"
        assert body["applied"] == 3
        assert ("Retry-After" in headers) is retryable
    assert all(replica.server.seen == [] for replica in rig.replicas)


async def test_a_pin_between_replicas_is_not_hopeless(rig) -> None:
    await rig.start([v(3), v(5)])
    _, _, body = await rig.post(weight_version={"exact_version": 4})
    assert body["error"]["retryable"] is True


async def test_a_joining_member_keeps_hope(rig) -> None:
    await rig.start([v(3), None])
    _, _, body = await rig.post(weight_version={"exact_version": 1, "max_wait_ms": 0})
    assert body["error"]["code"] == "WeightVersionNotReady"


async def test_waiting_for_a_version_to_arrive(rig) -> None:
    await rig.start([v(1)])
    call = asyncio.create_task(rig.post(weight_version={"min_version": 2, "max_wait_ms": 5000}))
    await eventually(lambda: rig.gateway.status()["waiting"] == 1)
    rig.replicas[0].view.serve(v(2))
    status, headers, _ = await call
    assert (status, headers["x-stitch-version-admitted"]) == (200, "2")


async def test_waiting_ends_at_its_bound(rig) -> None:
    await rig.start([v(1)])
    clock = asyncio.get_running_loop().time
    start = clock()
    status, _, body = await rig.post(weight_version={"min_version": 2, "max_wait_ms": 150})
    assert 0.14 < clock() - start < 2
    assert (status, body["error"]["reason"]) == (409, "behind")


async def test_without_a_stated_wait_only_a_coming_version_is_waited_for(rig) -> None:
    await rig.start([v(1)], latest=v(2))
    call = asyncio.create_task(rig.post(weight_version={"min_version": 2}))
    await eventually(lambda: rig.gateway.status()["waiting"] == 1)
    rig.replicas[0].view.serve(v(2))
    assert (await call)[0] == 200
    assert (await rig.post(weight_version={"min_version": 3}))[0] == 409


async def test_max_lag_is_bound_and_checked_again(rig) -> None:
    await rig.start([v(4)], latest=v(5))
    status, _, _ = await rig.post(weight_version={"max_lag": 1})
    assert status == 200
    # The replica learns of a newer pointer that the gateway has not seen.
    rig.replicas[0].view.latest = v(9)
    status, _, body = await rig.post(weight_version={"max_lag": 1, "max_wait_ms": 0})
    assert (status, body["error"]["reason"]) == (409, "behind")


async def test_the_remaining_wait_is_forwarded(rig) -> None:
    await rig.start([v(1)])
    view = rig.replicas[0].view
    seen: list[float | None] = []
    admit = view.gate.admit

    async def spy(constraint: Any, **options: Any) -> Any:
        seen.append(options["wait_s"])
        return await admit(constraint, **options)

    view.gate.admit = spy
    call = asyncio.create_task(rig.post(weight_version={"min_version": 2, "max_wait_ms": 4000}))
    await eventually(lambda: rig.gateway.status()["waiting"] == 1)
    await asyncio.sleep(0.1)
    view.serve(v(2))
    assert (await call)[0] == 200
    assert seen[-1] is not None
    assert 3.0 < seen[-1] <= 3.91


async def test_a_hundred_at_once_spread_evenly(rig) -> None:
    await rig.start([v(1)] * 4)
    calls = [
        asyncio.create_task(rig.post(fake={"delay_s": 0.5}, rid=f"r{index}"))
        for index in range(100)
    ]
    await eventually(lambda: sum(len(r.server.running) for r in rig.replicas) == 100)
    loads = [len(replica.server.running) for replica in rig.replicas]
    assert max(loads) - min(loads) <= 1
    assert {status for status, _, _ in await asyncio.gather(*calls)} == {200}
    assert rig.gateway.status()["in_flight"] == 0


class TestRetries:
    async def test_a_refused_connection_goes_elsewhere(self, rig) -> None:
        await rig.start([v(1), v(1)])
        await rig.replicas[0].sidecar.close()
        for _ in range(4):
            status, headers, _ = await rig.post()
            assert (status, headers["x-stitch-replica"]) == (200, "replica-1")
        await eventually(lambda: not rig.gateway.roster.seats["m0"].reachable)
        dead = rig.gateway.status()["members"][0]
        assert (dead["state"], dead["ready"], dead["reachable"]) == ("UNREACHABLE", False, False)
        assert dead["report"]["state"] == "READY", "what it said last is kept apart"
        row = _member_row(dead)
        assert row[1] == "UNREACHABLE"
        assert row[-1].startswith("does not answer; last report")

    @pytest.mark.parametrize("kind", ["die_before", "die_in_body", "die_in_head"])
    async def test_an_engine_that_breaks_off_goes_elsewhere(self, rig, kind) -> None:
        await rig.start([v(1), v(1)])
        broken = rig.replicas[0].server
        answer = broken._generate

        async def die(path: str, rid: str, script: Any, writer: Any) -> bool:
            return await answer(path, rid, {"kind": kind}, writer)

        broken._generate = die  # type: ignore[method-assign]
        for _ in range(6):
            status, headers, _ = await rig.post()
            assert (status, headers["x-stitch-replica"]) == (200, "replica-1")
        assert len(broken.seen) >= 1

    async def test_a_409_goes_elsewhere_and_counts_against_nobody(self, rig) -> None:
        await rig.start([v(2), v(2)])
        # The first replica drains its pins, which the gateway does not know.
        gate = rig.replicas[0].view.gate
        gate.on_change = None
        held = await gate.admit(_pin(2))
        drain = asyncio.create_task(gate.drain_pins())
        await asyncio.sleep(0)
        for _ in range(6):
            status, headers, _ = await rig.post(weight_version={"exact_version": 2})
            assert (status, headers["x-stitch-replica"]) == (200, "replica-1")
        assert rig.gateway.roster.seats["m0"].failures == 0
        gate.release(held)
        await drain

    async def test_a_single_replica_that_comes_back_is_used_at_once(self, rig) -> None:
        await rig.start([v(1)])
        view = rig.replicas[0].view
        view.gate.on_change = None
        refusing = EngineUnavailable("restarting")
        view.gate._refusal = refusing
        call = asyncio.create_task(rig.post())
        await eventually(lambda: rig.gateway.status()["waiting"] == 1)
        view.gate._refusal = None
        view.changed()
        status, _, _ = await asyncio.wait_for(call, 1.0)
        assert status == 200

    async def test_retries_end(self, rig) -> None:
        await rig.start([v(1)])
        status, headers, body = await rig.post(fake={"kind": "die_before"})
        assert (status, body["error"]["code"]) == (503, "EngineUnavailable")
        assert headers["Retry-After"] == "1"
        assert len(rig.replicas[0].server.seen) == 4

    async def test_partial_output_is_the_clients(self, rig) -> None:
        await rig.start([v(1), v(1)])
        call = asyncio.create_task(
            rig.post(fake={"delay_s": 30}, rid="r", weight_version={"exact_version": 1})
        )
        await eventually(lambda: any("r" in r.server.running for r in rig.replicas))
        busy = next(r for r in rig.replicas if r.server.running)
        busy.view.gate.config = GateConfig(drain_deadline_s=0.01, defer_count_max=0)
        await busy.view.gate.close(everything=False)
        status, _, body = await call
        assert (status, body["error"]["code"]) == (503, "Closed")
        assert body["error"]["partial"]["meta_info"]["finish_reason"] == {"type": "abort"}
        assert sum(len(replica.server.seen) for replica in rig.replicas) == 1

    async def test_a_blocked_route_is_not_retried(self, rig) -> None:
        await rig.start([v(1), v(1)])
        status, _, body = await rig.post("/flush_cache")
        assert (status, body["error"]["type"]) == (403, "RouteBlocked")

    async def test_nothing_is_retried_after_the_first_byte(self, rig) -> None:
        await rig.start([v(1), v(1)])
        async with rig.http.post(
            rig.url + "/generate", json={"fake": {"kind": "die_in_stream", "gap_s": 0.02}}
        ) as answer:
            body = await answer.read()
        assert b"[DONE]" not in body
        assert body.count(b'"error"') == 1
        assert sum(len(replica.server.seen) for replica in rig.replicas) == 1


async def _stream(rig: Rig, url: str, fake: dict[str, Any]) -> bytes:
    async with rig.http.post(url + "/generate", json={"fake": fake}) as answer:
        assert answer.status == 200
        return await answer.read()


def _pin(version: int) -> Any:
    from stitch.types import exactly

    return exactly(version)


async def test_overload_is_shed(rig) -> None:
    await rig.start([v(1)], config=GatewayConfig(waiting_max=2))
    calls = [
        asyncio.create_task(rig.post(weight_version={"min_version": 2, "max_wait_ms": 5000}))
        for _ in range(2)
    ]
    await eventually(lambda: rig.gateway.status()["waiting"] == 2)
    status, headers, body = await rig.post(weight_version={"min_version": 2, "max_wait_ms": 500})
    assert (status, body["error"]["code"]) == (429, "Overloaded")
    assert headers["Retry-After"] == "1"
    rig.replicas[0].view.serve(v(2))
    assert {status for status, _, _ in await asyncio.gather(*calls)} == {200}


class TestAffinity:
    @pytest.mark.parametrize("header", ["x-stitch-affinity", "Modal-Session-ID"])
    async def test_a_key_stays(self, rig, header) -> None:
        await rig.start([v(1)] * 4)
        for key in ("group-0", "group-1", "group-7"):
            used = {
                (await rig.post(headers={header: key}))[1]["x-stitch-replica"] for _ in range(5)
            }
            assert len(used) == 1
        seen = [request for replica in rig.replicas for request in replica.server.seen]
        assert not any(header.lower() in request.headers for request in seen)

    async def test_keys_spread(self, rig) -> None:
        await rig.start([v(1)] * 4)
        used = Counter()
        for key in range(40):
            _, headers, _ = await rig.post(headers={"x-stitch-affinity": f"k{key}"})
            used[headers["x-stitch-replica"]] += 1
        assert len(used) == 4

    async def test_a_constraint_beats_affinity_and_rebinds(self, rig) -> None:
        await rig.start([v(1)] * 3)
        mine = {"x-stitch-affinity": "s"}
        first = (await rig.post(headers=mine))[1]["x-stitch-replica"]
        other = next(i for i, r in enumerate(rig.replicas) if r.view.replica_id != first)
        rig.replicas[other].view.serve(v(2))
        await rig.knows(other, 2)
        moved = await rig.post(headers=mine, weight_version={"min_version": 2})
        assert moved[1]["x-stitch-replica"] == f"replica-{other}"
        assert (await rig.post(headers=mine))[1]["x-stitch-replica"] == f"replica-{other}"

    async def test_load_moves_a_key_and_a_leaver_moves_only_its_own(self, rig) -> None:
        await rig.start([v(1)] * 3, config=GatewayConfig(affinity_load_max=2))
        mine = {"x-stitch-affinity": "hot"}
        home = (await rig.post(headers=mine))[1]["x-stitch-replica"]
        calls = [
            asyncio.create_task(rig.post(headers=mine, fake={"delay_s": 0.3})) for _ in range(4)
        ]
        used = Counter(
            [headers["x-stitch-replica"] for _, headers, _ in await asyncio.gather(*calls)]
        )
        assert used[home] == 2
        assert len(used) > 1

    async def test_a_leaver_moves_only_its_own_keys(self, rig) -> None:
        await rig.start([v(1)] * 4)

        async def homes() -> dict[str, str]:
            found = {}
            for key in (f"k{index}" for index in range(20)):
                headers = (await rig.post(headers={"x-stitch-affinity": key}))[1]
                found[key] = headers["x-stitch-replica"]
            return found

        before = await homes()
        rig.announce(without=2)
        await eventually(lambda: len(rig.seats()) == 3)
        after = await homes()
        for key, home in before.items():
            assert (after[key] == home) is (home != "replica-2")


class TestMembers:
    async def test_join_and_leave(self, rig) -> None:
        await rig.start([v(1)])
        await rig.add(v(2))
        await eventually(lambda: len(rig.gateway.roster.ready) == 2)
        assert (await rig.post(weight_version={"min_version": 2}))[0] == 200
        rig.announce(without=1)
        await eventually(lambda: len(rig.seats()) == 1)
        demand = {"min_version": 2, "max_wait_ms": 0}
        assert (await rig.post(weight_version=demand))[0] == 409

    async def test_a_request_on_a_leaver_ends_in_peace(self, rig) -> None:
        await rig.start([v(1)])
        call = asyncio.create_task(rig.post(fake={"delay_s": 0.3}, rid="r"))
        await eventually(lambda: "r" in rig.replicas[0].server.running)
        await rig.add(v(1))
        rig.announce(without=0)
        assert (await call)[0] == 200

    async def test_an_empty_or_failed_discovery_keeps_the_known_set(self, rig) -> None:
        config = GatewayConfig(stale_s_max=0.6, feed_backoff_s=0.02, feed_backoff_s_max=0.05)
        await rig.start([v(1)], config=config)
        assert rig.gateway.status()["discovery"]["ok"] is True
        for broken in ([], None):
            rig.pool.set(broken)
            await eventually(lambda: not rig.gateway.status()["discovery"]["ok"])
            assert (await rig.post())[0] == 200
            rig.announce()
            await eventually(lambda: rig.gateway.status()["discovery"]["ok"])
        rig.pool.set([])
        await eventually(lambda: rig.seats() == [])
        status, _, body = await rig.post()
        assert (status, body["error"]["code"]) == (503, "Unavailable")

    async def test_a_draining_replica_gets_nothing_new(self, rig) -> None:
        await rig.start([v(1), v(1)])
        call = asyncio.create_task(
            rig.http.post(rig.url + "/generate", json={"fake": {"kind": "sse", "gap_s": 0.1}})
        )
        await eventually(lambda: any(r.server.running for r in rig.replicas))
        busy = next(r for r in rig.replicas if r.server.running)
        drain = asyncio.create_task(busy.sidecar.drain(5.0))
        await eventually(lambda: any(s.report.state is ReplicaState.DRAINING for s in rig.seats()))
        for _ in range(4):
            status, headers, _ = await rig.post()
            assert status == 200
            assert headers["x-stitch-replica"] != busy.view.replica_id
        answer = await call
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await drain

    async def test_scale_in_loses_nothing_silently(self, rig) -> None:
        await rig.start([v(1)] * 3)
        leaver = rig.replicas[0]
        # Ten long streams and five requests queued at its gate, placed there directly.
        streams = [
            asyncio.create_task(
                _stream(rig, leaver.url, {"kind": "sse", "tokens": 1000, "gap_s": 0.05})
            )
            for _ in range(5)
        ] + [
            asyncio.create_task(
                _stream(rig, leaver.url, {"kind": "sse", "tokens": 3, "gap_s": 0.05})
            )
            for _ in range(5)
        ]
        await eventually(lambda: len(leaver.server.running) == 10)
        drain = asyncio.create_task(leaver.sidecar.drain(0.5))
        queued = [asyncio.create_task(rig.post()) for _ in range(5)]
        for status, headers, _ in await asyncio.gather(*queued):
            assert (status, headers["x-stitch-replica"] != "replica-0") == (200, True)
        for index, data in enumerate(await asyncio.gather(*streams)):
            if index < 5:
                last = json.loads(data.rstrip().split(b"\n\n")[-1].removeprefix(b"data: "))
                assert (last["error"]["code"], last["error"]["retryable"]) == ("Closed", True)
                assert b"[DONE]" not in data
            else:
                assert data.endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(drain, 5)
        assert leaver.view.gate.running == 0

    async def test_a_flapping_event_stream_removes_nobody(self, rig) -> None:
        await rig.start([v(1)], config=GatewayConfig(feed_backoff_s=0.01, feed_backoff_s_max=0.02))
        streams = rig.replicas[0].sidecar._streams
        serve = streams.serve
        served = 0

        async def flaky(request: Any, response: Any, events: Any) -> None:
            nonlocal served
            served += 1
            if served % 5 == 1:
                response.abort()
                await events.aclose()
                return
            task = asyncio.ensure_future(serve(request, response, events))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task})
            response.abort()

        streams.serve = flaky
        for connection in list(rig.replicas[0].sidecar._http.connections):
            connection.kill()
        while served < 30:
            assert rig.gateway.roster.ready
            await asyncio.sleep(0.005)

    async def test_hysteresis(self, rig) -> None:
        await rig.start([v(1)], config=GatewayConfig(failures_max=3))
        seat = rig.gateway.roster.seats["m0"]
        for _ in range(20):
            rig.gateway.roster.failed(seat)
            rig.gateway.roster.failed(seat)
            assert seat.ready
            rig.gateway.roster.succeeded(seat)
        for _ in range(3):
            rig.gateway.roster.failed(seat)
        assert not seat.ready

    async def test_old_reports_are_dropped(self, rig) -> None:
        import dataclasses

        await rig.start([v(1)])
        seat = rig.gateway.roster.seats["m0"]
        report = seat.report
        newer = dataclasses.replace(report, seq=report.seq + 10, served=v(7))
        rig.gateway.roster.take_report(seat, newer)
        rig.gateway.roster.take_report(seat, dataclasses.replace(report, seq=report.seq + 9))
        assert seat.report.served == v(7)
        reborn = dataclasses.replace(report, incarnation="life-2", seq=1, served=v(3))
        rig.gateway.roster.take_report(seat, reborn)
        rig.gateway.roster.take_report(seat, dataclasses.replace(newer, seq=99))
        assert seat.report.served == v(3)


async def test_a_client_that_leaves_reaches_the_engine(rig) -> None:
    await rig.start([v(1)])
    call = asyncio.create_task(rig.post(fake={"delay_s": 30}, rid="left"))
    server = rig.replicas[0].server
    await eventually(lambda: "left" in server.running)
    call.cancel()
    await eventually(lambda: server.aborted == ["left"])
    await eventually(lambda: rig.replicas[0].view.gate.running == 0)
    await eventually(lambda: rig.gateway.status()["in_flight"] == 0)


async def test_control_routes(rig) -> None:
    await rig.start([v(1), v(3)], latest=v(3))
    async with rig.http.get(rig.url + "/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"ready": True})
    async with rig.http.get(rig.url + "/status") as answer:
        status = await answer.json()
    assert status["latest"] == {"run_id": "run-a", "version": 3}
    assert [member["lag"] for member in status["members"]] == [2, 0]
    async with rig.http.get(rig.url + "/server_info") as answer:
        assert (await answer.json())["replicas_ready"] == 2
    async with rig.http.get(rig.url + "/metrics") as answer:
        text = await answer.text()
    assert 'stitch_gateway_member_lag{member="m0"} 2' in text
    async with rig.http.get(rig.url + "/events") as answer:
        line = await answer.content.readuntil(b"data: ")
        assert line.startswith(b"retry")
        assert json.loads(await answer.content.readline())["ready"] is True
    rig.replicas[0].view.serve(None)
    rig.replicas[1].view.serve(None)
    await eventually(lambda: not rig.gateway.roster.ready)
    async with rig.http.get(rig.url + "/health") as answer:
        assert answer.status == 503
        assert "0 of 1" in (await answer.json())["reason"]


async def test_an_unconstrained_body_passes_as_it_is(rig) -> None:
    await rig.start([v(1)])
    odd = b'{ "text" : "a",  "n":1.0 ,"weight\\u005fversion":{"min_version":1}}'
    async with rig.http.post(rig.url + "/generate", data=odd) as answer:
        assert answer.status == 200
    odd = b'{"weight\\u005fversion":{"min_version":-1}}'
    async with rig.http.post(rig.url + "/generate", data=odd) as answer:
        assert answer.status == 400


async def test_a_full_pool_queues_in_order_and_serves_all(rig) -> None:
    await rig.start([v(1), v(1)], config=GatewayConfig(in_flight_max=2))
    calls = [
        asyncio.create_task(rig.post(fake={"delay_s": 0.05}, weight_version={"max_wait_ms": 5000}))
        for _ in range(20)
    ]
    peak = 0
    while not all(call.done() for call in calls):
        peak = max(peak, rig.gateway.status()["in_flight"])
        await asyncio.sleep(0.005)
    assert {status for status, _, _ in await asyncio.gather(*calls)} == {200}
    assert peak == 4
    held = [asyncio.create_task(rig.post(fake={"delay_s": 0.3})) for _ in range(4)]
    await eventually(lambda: rig.gateway.status()["in_flight"] == 4)
    status, _, body = await rig.post(weight_version={"max_wait_ms": 0})
    assert (status, body["error"]["code"]) == (429, "Overloaded")
    await asyncio.gather(*held)


async def test_back_pressure_does_not_refuse_who_can_not_wait(rig) -> None:
    await rig.start([v(1)])
    seat = rig.seats()[0]
    seat.avoid_until = asyncio.get_running_loop().time() + 1e9
    status, _, _ = await rig.post(weight_version={"max_wait_ms": 0})
    assert status == 200


async def test_a_replica_that_moves_is_found_again(rig) -> None:
    await rig.start([v(1)])
    assert (await rig.post())[0] == 200
    await rig.add(v(1))
    moved = Member("m0", rig.replicas[1].url)
    rig.pool.set([moved])
    await eventually(lambda: [seat.member for seat in rig.gateway.roster.ready] == [moved])
    await rig.replicas[0].sidecar.close()
    assert (await rig.post())[1]["x-stitch-replica"] == "replica-1"


async def test_no_path_around_a_closed_gate(rig) -> None:
    """Two gateways and direct clients: nothing begins while the replica activates."""
    await rig.start([v(1)])
    replica = rig.replicas[0]
    other = await serve_gateway(rig.pool, config=FAST, env=Env())
    try:
        await eventually(lambda: other.roster.ready)
        urls = [rig.url, f"http://127.0.0.1:{other.port}", replica.url]
        stop = asyncio.Event()
        admitted: list[str] = []

        async def client(url: str) -> None:
            while not stop.is_set():
                async with rig.http.post(url + "/generate", json={"fake": {"delay_s": 0.002}}) as a:
                    await a.read()
                    assert a.status == 200
                    admitted.append(a.headers["x-stitch-version-admitted"])

        clients = [asyncio.create_task(client(url)) for url in urls for _ in range(4)]
        gate = replica.view.gate
        for version in range(2, 12):
            await asyncio.sleep(0.03)
            await gate.close(everything=True)
            begun = len(replica.server.seen)
            assert not replica.server.running
            await asyncio.sleep(0.02)
            assert len(replica.server.seen) == begun
            replica.view.serve(v(version))
        await asyncio.sleep(0.03)
        stop.set()
        await asyncio.gather(*clients)
        assert set(map(str, range(1, 12))) == set(admitted)
    finally:
        await other.close()


async def test_a_report_that_nobody_understands_does_not_make_the_gateway_deaf(rig) -> None:
    """It was left with its last good report, on a stream that it no longer read."""
    await rig.start([v(1)])
    view, seat = rig.replicas[0].view, rig.seats()[0]
    view.state = SimpleNamespace(value="A_STATE_OF_LATER")
    view.changed()
    await eventually(lambda: seat.failures > 0)
    view.serve(v(2))
    await eventually(lambda: seat.ready and seat.report.served == v(2))


async def test_a_quiet_member_left_out_for_failed_requests_comes_back(rig) -> None:
    """Its event stream lives and has nothing new to say: only a new one shows that it is back."""
    await rig.start([v(1)])
    seat = rig.seats()[0]
    for _ in range(FAST.failures_max):
        rig.gateway.roster.failed(seat)
    assert not seat.ready
    await eventually(lambda: seat.ready)
    async with rig.http.post(rig.url + "/generate", json={"text": "a"}) as answer:
        assert answer.status == 200
