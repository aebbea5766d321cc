"""What the gateway tries again elsewhere, and what it must not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_rig import eventually, v

from stitch.admission import GateConfig
from stitch.commands.status import _member_row
from stitch.errors import EngineUnavailable


def _pin(version: int) -> Any:
    from stitch.types import exactly

    return exactly(version)


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


async def test_a_client_that_leaves_reaches_the_engine(rig) -> None:
    await rig.start([v(1)])
    call = asyncio.create_task(rig.post(fake={"delay_s": 30}, rid="left"))
    server = rig.replicas[0].server
    await eventually(lambda: "left" in server.running)
    call.cancel()
    await eventually(lambda: server.aborted == ["left"])
    await eventually(lambda: rig.replicas[0].view.gate.running == 0)
    await eventually(lambda: rig.gateway.status()["in_flight"] == 0)
