"""The gateway's choice by weight version: constraints, refusals, waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_rig import eventually, v


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


async def test_an_unconstrained_body_passes_as_it_is(rig) -> None:
    await rig.start([v(1)])
    odd = b'{ "text" : "a",  "n":1.0 ,"weight\\u005fversion":{"min_version":1}}'
    async with rig.http.post(rig.url + "/generate", data=odd) as answer:
        assert answer.status == 200
    odd = b'{"weight\\u005fversion":{"min_version":-1}}'
    async with rig.http.post(rig.url + "/generate", data=odd) as answer:
        assert answer.status == 400
