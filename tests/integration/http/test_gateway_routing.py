"""The gateway over real replicas' HTTP: spreading, affinity, back-pressure, its own routes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from gateway_rig import FAST, eventually, v

from stitch.env import Env
from stitch.gateway import GatewayConfig, serve_gateway


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
