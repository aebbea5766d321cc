"""Invariant 8: every path to the pointer, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stitch.errors import CorruptData, NotReady
from stitch.testing.clock import run_virtual
from stitch.testing.replica_world import World, served_versions, world
from stitch.types import Constraint, Kind, Phase, Ref, ReplicaState, at_least, exactly

Scenario = Callable[[World], Awaitable[None]]


def simulate(root: Path, scenario: Scenario, **options: Any) -> None:
    async def run() -> None:
        async with world(root, **options) as made:
            made.start()
            await scenario(made)

    run_virtual(run)


def test_no_pointer_is_a_normal_state(tmp_path: Path) -> None:
    """B34, B92, A22: a scoped replica serves its boot weights as version 0 before any publish."""

    async def scenario(made: World) -> None:
        await made.until(lambda: made.replica.health()[0])
        for constraint in (Constraint(), at_least(0), exactly(0)):
            generation = await made.request(constraint)
            assert {t.label.ref.version for t in generation.tokens if t.label} == {0}
        with pytest.raises(NotReady):
            await made.request(at_least(1), wait_s=None)
        run = await made.claim()
        await made.settle(await made.publish(run))
        assert made.info()["base"] == "proven"

    simulate(tmp_path, scenario)


def test_an_unscoped_replica_refuses_until_a_run_claims_it(tmp_path: Path) -> None:
    """B92: without a known version everything is refused, and nothing crashes."""

    async def scenario(made: World) -> None:
        await made.env.clock.sleep(20)
        assert made.replica.report().state is ReplicaState.CATCHING_UP
        with pytest.raises(NotReady, match=r"no run is claimed: .* publish a version"):
            await made.request(wait_s=None)
        assert "no run is claimed" in str(made.replica.health()[1])
        run = await made.claim(boot_version=4)
        await made.settle(Ref("run-a", 4))
        await made.settle(await made.publish(run))

    simulate(tmp_path, scenario, run_id=None)


def test_a_new_pointer_is_reported_before_anything_is_fetched(tmp_path: Path) -> None:
    """What `lag(k)` is judged by at the gateway."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        made.store.latency_s = 0.1
        seen: list[tuple[Phase, Ref | None]] = []

        async def follow() -> None:
            async for report in made.replica.reports():
                if report.latest == Ref("run-a", 2):
                    seen.append((report.phase, report.served))

        following = asyncio.create_task(follow())
        await made.settle(await made.publish(run))
        following.cancel()
        phase, served = seen[0]
        assert phase in {Phase.IDLE, Phase.FETCHING}
        assert served == Ref("run-a", 1)

    simulate(tmp_path, scenario)


def test_many_versions_are_one_stage_and_one_activation(tmp_path: Path) -> None:
    """A26: a joiner walks a chain once."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.publish(run, 6)
        made.start()
        await made.settle(run.ref)
        assert made.engine.calls.count("commit") == 1

    async def run() -> None:
        async with world(tmp_path) as made:
            await scenario(made)

    run_virtual(run)


def test_an_anchor_shortens_the_way(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.publish(run, 3)
        await made.settle(run.ref)
        await run.publish(made.change(run, 1, 77), kind=Kind.ANCHOR)
        await made.publish(run, 1)
        await made.settle(run.ref)

    simulate(tmp_path, scenario)


def test_lost_wakes_are_healed_by_polling(tmp_path: Path) -> None:
    """A29."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        await made.publish(run, 3, wake=False)
        await made.settle(run.ref, seconds=7.0)

    simulate(tmp_path, scenario)


def test_without_polling_a_wake_is_enough(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        made.start()
        await made.settle(run.ref)
        await made.publish(run, 1, wake=False)
        await made.env.clock.sleep(600)
        assert made.replica.gate.served == Ref("run-a", 0)
        made.replica.wake()
        await made.settle(run.ref, seconds=2.0)

    async def run() -> None:
        async with world(tmp_path, poll_s=0.0) as made:
            await scenario(made)

    run_virtual(run)


def test_a_refused_request_wakes_the_replica(tmp_path: Path) -> None:
    """A30: a 409 for a later version starts a reconcile, even without polling."""

    async def run() -> None:
        async with world(tmp_path, poll_s=0.0) as made:
            run = await made.claim()
            made.start()
            await made.settle(run.ref)
            await made.publish(run, 1, wake=False)
            generation = await made.request(at_least(1))
            assert generation.tokens
            await made.settle(run.ref, seconds=2.0)

    run_virtual(run)


def test_wakes_coalesce(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        before = made.info()["passes"]["total"]
        for _ in range(500):
            made.replica.wake()
        await made.env.clock.sleep(0.5)
        assert made.info()["passes"]["total"] - before <= 3

    simulate(tmp_path, scenario)


def test_an_empty_range_moves_the_label_alone(tmp_path: Path) -> None:
    """A28, B02a: no stage, no pause, no rank writes; exact pins on the old name end first."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        calls = len(made.engine.calls)
        await run.publish({})
        await run.publish({})
        made.replica.wake()
        await made.settle(run.ref)
        touched = set(made.engine.calls[calls:]) - {"describe", "health"}
        assert touched == {"label"}
        assert made.info()["metrics"]["skipped_weight_update"] is True
        await made.settle(await made.publish(run))

    simulate(tmp_path, scenario)


def test_one_change_in_the_range_is_an_update(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        await run.publish({}, point=False)
        await run.publish(made.change(run, 0, 9), point=False)
        await run.publish({})
        made.replica.wake()
        await made.settle(run.ref)
        assert made.engine.calls.count("commit") == 1

    simulate(tmp_path, scenario)


def test_a_stage_is_superseded_a_bounded_number_of_times(tmp_path: Path) -> None:
    """A27: a publisher that never stops cannot starve activation."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        made.offload.seconds_max = 0.1
        for _ in range(40):
            await made.publish(run)
            await made.env.clock.sleep(0.5)
        stages, commits = (made.engine.calls.count(op) for op in ("stage", "commit"))
        assert commits >= 3, f"{commits} activations while 40 versions were published"
        assert commits < stages <= 3 * (commits + 1), f"{stages} stages, {commits} activations"
        await made.settle(run.ref)

    simulate(tmp_path, scenario)


def test_a_failed_second_look_activates_what_was_staged(tmp_path: Path) -> None:
    """A27: the newer version is corrupt; the one prepared before it is activated."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        made.offload.seconds_max = 3.0
        good = await made.publish(run)
        await made.until(lambda: made.engine.calls.count("stage") == 1)
        await run.publish(made.change(run, 2, 5), damage=True)
        await made.until(lambda: made.replica.gate.served == good, 60)
        assert made.replica.health()[0]

    simulate(tmp_path, scenario)


def test_a_corrupt_publication_is_reported_and_healed_by_the_next_anchor(tmp_path: Path) -> None:
    """B101, A32: old weights keep serving, the reason shows, a good version recovers."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        good = run.ref
        await run.publish(made.change(run, 0, 200), damage=True)
        made.replica.wake()
        await made.until(lambda: made.info()["last_error"] is not None)
        info = made.info()
        assert info["last_error"]["code"] == CorruptData.code
        assert info["sync_state"] == "ERROR"
        assert info["ready"] is True
        assert made.serves(good)
        await made.request(exactly(good.version))
        await run.publish(made.change(run, 1, 201), kind=Kind.ANCHOR)
        made.replica.wake()
        await made.settle(run.ref)
        info = made.info()
        assert info["sync_state"] == "IDLE"
        assert info["last_error"]["code"] == CorruptData.code, "the last error is kept"

    simulate(tmp_path, scenario)


def test_a_delta_after_a_failed_one_waits_for_its_base(tmp_path: Path) -> None:
    """B01: a version is never reported over a base that was not applied."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        made.engine.faults.add("commit", "fail_at", at=0)
        await made.publish(run)
        await made.until(lambda: made.info()["passes"]["undone"] == 1)
        await run.publish(made.change(run, 3, 40))
        await made.settle(run.ref)

    simulate(tmp_path, scenario)


@pytest.mark.parametrize("text", ["", "\0" * 24, "run-a/weight_v0000", "run-a/weight_v", "0"])
def test_a_pointer_that_does_not_qualify_is_read_again(tmp_path: Path, text: str) -> None:
    """B104: never version 0, never "no version"; an error after the deadline; then it heals."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        made.store.pointer = text
        await made.env.clock.sleep(60)
        assert made.serves(run.ref)
        assert made.info()["last_error"] is not None
        made.store.pointer = None
        await made.settle(await made.publish(run), seconds=60)

    simulate(tmp_path, scenario, visible_deadline_s=5.0)


def test_a_pointer_rewind_is_refused_and_reported(tmp_path: Path) -> None:
    """Invariant 4: the served version never goes back within a run."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run, 3))
        made.store.pointer = "run-a/weight_v000001"
        await made.env.clock.sleep(60)
        assert made.serves(run.ref)
        assert made.info()["last_error"] is not None
        made.store.pointer = None
        await made.settle(await made.publish(run), seconds=60)
        versions = served_versions(made.history)
        assert versions == sorted(versions)

    simulate(tmp_path, scenario, visible_deadline_s=5.0)


def test_files_that_appear_later_are_waited_for(tmp_path: Path) -> None:
    """B77, B101: the pointer names a version before its files are visible."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        made.store.pointer = "run-a/weight_v000001"
        made.replica.wake()
        await made.env.clock.sleep(30)
        assert made.serves(Ref("run-a", 0))
        assert made.info()["lag"] == 0
        await run.publish(made.change(run, 0, 3))
        await made.settle(run.ref, seconds=40)

    simulate(tmp_path, scenario, visible_deadline_s=5.0)


def test_a_store_that_is_away_costs_only_time(tmp_path: Path) -> None:
    """B101: served meanwhile; lag and age show; convergence once it is back."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        made.store.failing = True
        await made.publish(run)
        await made.env.clock.sleep(120)
        assert made.serves(Ref("run-a", 0))
        info = made.info()
        assert info["last_success_age_s"] > 60
        assert info["last_error"]["code"] == "Unavailable"
        made.store.failing = False
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario)


def test_readiness_can_depend_on_age_and_lag(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        made.store.failing = True
        await made.env.clock.sleep(60)
        ready, reason = made.replica.health()
        assert not ready
        assert reason is not None
        assert reason.startswith("stale")
        made.store.failing = False
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario, ready_stale_s_max=30.0)


def test_a_full_disk_keeps_the_old_version(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        good = run.ref
        made.files.full = True
        await made.publish(run)
        await made.env.clock.sleep(30)
        assert made.serves(good)
        assert "space" in made.info()["last_error"]["message"].lower()
        made.files.full = False
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario)


def test_a_store_with_faults_and_a_racing_publisher(tmp_path: Path) -> None:
    """Invariant 8 under latency, read failures, lost wakes, and a publisher that never waits."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        made.store.chance, made.store.latency_s = 0.15, 0.3
        made.offload.seconds_max = 0.2
        for constraint in (Constraint(), at_least(2), exactly(3), Constraint(max_lag=2)):
            made.client(constraint)
        for index in range(25):
            await made.publish(run, wake=bool(index % 3))
            await made.env.clock.sleep(made.env.random.uniform(0, 4))
        made.store.chance = made.store.latency_s = 0.0
        await made.settle(run.ref, seconds=60)
        assert len(made.finished) > 50

    for seed in range(3):
        simulate(tmp_path / str(seed), scenario, seed=seed)


def test_the_store_lease_is_held_while_fetching_only(tmp_path: Path) -> None:
    """Invariant 9, the reader's half: refs and a counter that moves."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        assert await made.plain.read_leases() == {}
        made.offload.seconds_max = 60.0
        await made.publish(run)
        seen: list[bytes] = []
        for _ in range(40):
            await made.env.clock.sleep(1)
            seen += list((await made.plain.read_leases()).values())
        counters = {lease.split(b'"counter": ')[1] for lease in seen}
        assert len(counters) > 1, "the lease's counter stood still"
        assert b"run-a/weight_v000001" in seen[0]
        made.offload.seconds_max = 0.0
        await made.settle(run.ref)
        assert await made.plain.read_leases() == {}

    simulate(tmp_path, scenario, lease_beat_s=2.0)
