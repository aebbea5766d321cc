"""Members that join, leave, drain, move and fall silent under a gateway."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from gateway_rig import FAST, Rig, eventually, v

from stitch.gateway import GatewayConfig
from stitch.pools.base import Member
from stitch.types import ReplicaState


async def _stream(rig: Rig, url: str, fake: dict[str, Any]) -> bytes:
    async with rig.http.post(url + "/generate", json={"fake": fake}) as answer:
        assert answer.status == 200
        return await answer.read()


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


async def test_a_replica_that_moves_is_found_again(rig) -> None:
    await rig.start([v(1)])
    assert (await rig.post())[0] == 200
    await rig.add(v(1))
    moved = Member("m0", rig.replicas[1].url)
    rig.pool.set([moved])
    await eventually(lambda: [seat.member for seat in rig.gateway.roster.ready] == [moved])
    await rig.replicas[0].sidecar.close()
    assert (await rig.post())[1]["x-stitch-replica"] == "replica-1"


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
