"""Invariants 1, 3, 5 and 7: labels are true and an activation is all or nothing, under faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stitch.admission import GateConfig
from stitch.errors import NotReady, ReplicaLost, StitchError, Unsupported
from stitch.testing.clock import run_virtual
from stitch.testing.replica_world import World, make_replica, world
from stitch.types import ActivationMode, Constraint, GateState, Prefix, Ref, ReplicaState, exactly

Scenario = Callable[[World], Awaitable[None]]

PHASES = ("stage", "state", "pause", "commit", "verify", "label", "resume")


def simulate(root: Path, scenario: Scenario, **options: Any) -> None:
    async def run() -> None:
        async with world(root, **options) as made:
            made.start()
            await scenario(made)

    run_virtual(run)


async def serving(made: World) -> Any:
    """A run at version 1, clients of every kind asking all the time."""
    run = await made.claim()
    await made.settle(await made.publish(run))
    for constraint in (Constraint(), Constraint(min_version=1), exactly(2)):
        made.client(constraint)
    return run


@pytest.mark.parametrize("mode", list(ActivationMode), ids=lambda mode: mode.value)
def test_truth_of_labels_over_activations(tmp_path: Path, mode: ActivationMode) -> None:
    """Invariant 1, in every mode: requests cross activations, and every token's label is true."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        for _ in range(8):
            await made.publish(run)
            await made.env.clock.sleep(made.env.random.uniform(0.1, 1.0))
        await made.settle(run.ref)
        prefixes = {t.prefix for done in made.finished for t in done.generation.tokens}
        crossed = [d for d in made.finished if len({t.label for t in d.generation.tokens}) > 1]
        if mode is ActivationMode.QUIESCE:
            assert not crossed
        else:
            assert crossed, "no request crossed an activation"
        assert (Prefix.CARRIED in prefixes) == (mode is ActivationMode.IN_PLACE)
        assert len(made.finished) > 20

    simulate(tmp_path, scenario, mode=mode)


def test_the_cache_never_crosses_weights(tmp_path: Path) -> None:
    """B07, B08: the same prompt after each activation; with and without an epoch-keyed cache."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        for _ in range(4):
            await made.settle(await made.publish(run))
            assert not (await made.request()).cached
            assert (await made.request()).cached

    simulate(tmp_path / "keyed", scenario)
    simulate(tmp_path / "flushed", scenario, engine={"keyed_cache": False})


@pytest.mark.parametrize("action", ["lose_reply", "drop", "die", "die_after"])
@pytest.mark.parametrize("op", PHASES)
def test_a_fault_in_every_phase(tmp_path: Path, op: str, action: str) -> None:
    """Invariant 7: lost calls are repeated; a dead engine is out of rotation until proven anew."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.add(op, action)
        await made.publish(run)
        if action.startswith("die"):
            await made.until(lambda: not made.engine.alive)
            await made.until(lambda: made.replica.gate.served is None, 60)
            assert made.replica.report().served is None
            made.engine.restart()
        await made.settle(run.ref, seconds=120)
        await made.settle(await made.publish(run), seconds=60)

    simulate(tmp_path, scenario, rank_s=5.0)


@pytest.mark.parametrize("op", PHASES)
def test_an_engine_that_restarts_in_a_phase_never_meets_an_open_gate(
    tmp_path: Path, op: str
) -> None:
    """A restarted engine holds boot weights: the gate stays shut until it was proven again."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        gate, seen = made.replica.gate, []

        def watch() -> None:
            if gate.state is GateState.OPEN and gate.label is not None:
                seen.append((gate.label, made.engine.members[0].label))

        made.engine.faults.add(op, "restart_after")
        told, gate.on_change = gate.on_change, lambda: (watch(), told and told())
        await made.publish(run)
        await made.settle(run.ref, seconds=120)
        await made.settle(await made.publish(run), seconds=60)
        assert (op, "restart_after") in made.engine.faults.taken
        # Staging goes on beside an open gate; there the health probe is who notices.
        assert seen
        if op != "stage":
            assert all(label == stamped for label, stamped in seen), seen

    simulate(tmp_path, scenario, rank_s=5.0)


@pytest.mark.parametrize("seconds", [2.0, 25.0])
@pytest.mark.parametrize("op", PHASES)
def test_a_stopped_engine_that_goes_on(tmp_path: Path, op: str, seconds: float) -> None:
    """SIGSTOP in each phase, SIGCONT later: a verified version or an undo, never a mix."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        stop_at = made.engine.calls.count(op)
        made.engine.faults.add(op, "slow", delay_s=1.0)
        publish = asyncio.create_task(made.publish(run))
        await made.until(lambda: made.engine.calls.count(op) > stop_at)
        made.engine.freeze()
        await publish
        await made.env.clock.sleep(seconds)
        made.engine.thaw()
        await made.settle(run.ref, seconds=120)
        await made.settle(await made.publish(run), seconds=60)

    simulate(tmp_path, scenario, rank_s=5.0, control_s=5.0)


def test_a_rank_that_fails_half_way_is_undone(tmp_path: Path) -> None:
    """B106: at no time is a response produced from mixed weights; the old version goes on."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.add("commit", "fail_at", rank=1, at=0)
        await made.publish(run)
        await made.until(lambda: made.info()["passes"]["undone"] == 1)
        assert made.info()["last_error"]["code"] == "ActivationFailed"
        assert made.replica.gate.served == Ref("run-a", 1)
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario)


def test_an_activation_has_a_time_limit_of_its_own(tmp_path: Path) -> None:
    """A53: past it the weights in use are unknown; they are proven before anything goes on."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.add("verify", "slow", delay_s=4.0)
        await made.publish(run)
        await made.until(lambda: ReplicaState.UNKNOWN in made.states)
        await made.until(lambda: made.info()["last_error"] is not None)
        assert "longer than 2 s" in made.info()["last_error"]["message"]
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario, activate_s_max=2.0)


def test_what_the_engine_does_not_offer_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        only = frozenset({ActivationMode.IN_PLACE})
        async with world(tmp_path, engine={"modes": only}, mode=ActivationMode.IN_PLACE) as made:
            with pytest.raises(Unsupported):
                made.config = dataclasses.replace(made.config, mode=ActivationMode.RECOMPUTE)
                make_replica(made)

    run_virtual(run)


def test_an_undo_that_fails_is_repaired(tmp_path: Path) -> None:
    """B10, B26, B106: UNKNOWN, out of rotation, nothing reported; then rewritten and verified."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.add("commit", "fail_at", rank=0, at=0)
        made.engine.faults.add("undo", "fail_at", rank=1, at=0)
        await made.publish(run)
        await made.until(lambda: ReplicaState.UNKNOWN in made.states)
        await made.settle(run.ref, seconds=120)

    simulate(tmp_path, scenario)


def test_a_replica_that_cannot_be_repaired_is_lost(tmp_path: Path) -> None:
    """ReplicaLost: never ready again, and it says why."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        rank = made.engine.members[1]
        right = rank.write
        rank.write = lambda name, data: right(name, bytes(len(data)))  # type: ignore[method-assign]
        await made.publish(run)
        await made.until(lambda: made.lost is not None, 300)
        ready, reason = made.replica.health()
        assert not ready
        assert reason is not None
        assert reason.startswith("broken")
        info = made.info()
        assert info["state"] == "FAILED"
        assert info["terminal_error"]
        assert info["served"] is None
        with pytest.raises(NotReady):
            await made.request(wait_s=None)

    simulate(tmp_path, scenario)


def test_an_engine_that_stays_dead_fails_the_replica(tmp_path: Path) -> None:
    """A48: three probes, then out of rotation; not back in time: FAILED."""

    async def scenario(made: World) -> None:
        await serving(made)
        at = made.env.clock.monotonic()
        made.engine.die()
        await made.until(lambda: made.replica.gate.served is None, 30)
        assert 9 < made.env.clock.monotonic() - at < 22
        assert not made.replica.health()[0]
        await made.until(lambda: made.lost is not None, 120)

    simulate(tmp_path, scenario)


def test_an_engine_that_restarts_unseen_is_proven_anew(tmp_path: Path) -> None:
    """A new boot id: new incarnation, boot weights proven, then caught up again."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        before = made.replica.report().incarnation
        made.engine.die()
        made.engine.restart()
        await made.until(lambda: made.replica.report().incarnation != before, 30)
        await made.settle(run.ref, seconds=30)

    simulate(tmp_path, scenario)


def test_a_sidecar_that_attaches_starts_unknown(tmp_path: Path) -> None:
    """The engine serves version 2 under a sidecar that died; the next one proves or rewrites."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run, 2))
        before = made.replica.report().incarnation
        await made.stop_replica()
        made.replica = make_replica(made)
        assert made.replica.report().state is ReplicaState.BOOTING
        assert made.replica.report().served is None
        made.start()
        await made.settle(run.ref, seconds=30)
        assert made.replica.report().incarnation != before

    simulate(tmp_path, scenario)


def test_a_sidecar_killed_in_mid_activation_leaves_a_paused_engine(tmp_path: Path) -> None:
    """The next sidecar finds mixed, paused ranks and ends at a verified version, serving."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        calls = made.engine.calls.count("verify")
        made.engine.faults.add("verify", "slow", delay_s=1.0)
        await made.publish(run)
        await made.until(lambda: made.engine.calls.count("verify") > calls)
        assert made.engine.paused
        await made.stop_replica()
        made.engine.members[1].write(
            sorted(run.tensors)[0], bytes(run.tensors[sorted(run.tensors)[0]].nbytes)
        )
        made.replica = make_replica(made)
        made.start()
        await made.settle(run.ref, seconds=30)

    simulate(tmp_path, scenario)


def test_a_pause_whose_reply_is_lost_never_leaves_a_paused_engine(tmp_path: Path) -> None:
    """B37: both pauses look lost, the first resume too; the engine goes on in the end."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.add("pause", "lose_reply", times=2)
        made.engine.faults.add("resume", "drop", times=2)
        await made.publish(run)
        await made.until(lambda: made.info()["passes"]["failed"] > 0)
        await made.settle(run.ref, seconds=60)
        assert not made.engine.paused

    simulate(tmp_path, scenario)


def test_a_resume_that_is_never_confirmed_takes_the_replica_out(tmp_path: Path) -> None:
    """B37, B86: bounded retries, then UNKNOWN, not ready; back once the engine answers."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.add("resume", "drop", times=8)
        await made.publish(run)
        await made.until(lambda: made.replica.report().state is ReplicaState.UNKNOWN, 30)
        await made.until(lambda: made.replica.gate.state is GateState.OPEN, 60)
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario)


def test_a_flush_that_is_refused_is_retried_then_undone(tmp_path: Path) -> None:
    """B05: a delay between tries, a deadline, and the old version serving after it."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        before = made.engine.calls.count("flush")
        made.engine.faults.add("flush", "refuse", times=10_000)
        await made.publish(run)
        await made.until(lambda: made.info()["passes"]["undone"] == 1, 60)
        assert 10 < made.engine.calls.count("flush") - before < 80
        assert made.replica.gate.served == Ref("run-a", 1)
        made.engine.faults.script.clear()
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario, engine={"keyed_cache": False})


def test_a_cache_without_epochs_is_flushed_after_the_last_crossing(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(run.ref)
        crossing = asyncio.create_task(made.request(token_count=300))
        await made.env.clock.sleep(0.1)
        await made.settle(await made.publish(run))
        flushes = made.engine.calls.count("flush")
        await made.env.clock.sleep(1.0)
        assert made.engine.calls.count("flush") == flushes, "flushed while the crossing runs"
        await crossing
        await made.env.clock.sleep(0.2)
        assert made.engine.calls.count("flush") == flushes + 1

    simulate(tmp_path, scenario, engine={"keyed_cache": False}, mode=ActivationMode.IN_PLACE)


def test_pins_hold_an_activation_back_then_are_ended(tmp_path: Path) -> None:
    """Invariant 5 and the bounded drain: defer three times, then abort with a retryable error."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        pin = asyncio.create_task(made.request(exactly(1), token_count=100_000))
        await made.env.clock.sleep(1)
        await made.publish(run)
        await made.env.clock.sleep(2)
        assert made.replica.gate.served == Ref("run-a", 1)
        with pytest.raises(StitchError) as caught:
            await asyncio.wait_for(pin, 600)
        assert caught.value.retryable
        await made.settle(run.ref)

    simulate(tmp_path, scenario, gate=GateConfig(drain_deadline_s=5.0))


def test_a_switch_of_runs_drains_everything(tmp_path: Path) -> None:
    """B103, A36: no token of run B from run A's weights or the reverse; A is fenced."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        await made.settle(await made.publish(run, 3))
        other = await made.claim("run-b", first=False)
        await other.publish(made.change(other, 0, 5))
        made.replica.wake()
        await made.settle(other.ref)
        for done in made.finished:
            runs = {t.label.ref.run_id for t in done.generation.tokens if t.label}
            assert len(runs) <= 1, "a request straddled two runs"
        await run.publish(made.change(run, 1, 6), point=False)
        await made.env.clock.sleep(10)
        assert made.serves(other.ref)
        with pytest.raises(StitchError) as caught:
            await made.request(Constraint(run_id="run-a"), wait_s=None)
        assert not caught.value.retryable
        await made.settle(await made.publish(other))

    simulate(tmp_path, scenario)


def test_a_fork_from_what_is_served_only_changes_the_name(tmp_path: Path) -> None:
    """Relabel: equal by digest, so nothing is staged, paused or written."""

    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run, 2))
        commits = made.engine.calls.count("commit")
        fork = await made.claim(
            "run-b",
            first=False,
            tensors=run.tensors,
            boot_version=2,
            forked_from=run.fork_point(),
        )
        made.replica.wake()
        await made.settle(fork.ref)
        assert made.engine.calls.count("commit") == commits
        await made.settle(await made.publish(fork))

    simulate(tmp_path, scenario)


def test_a_fork_from_an_older_version_goes_back_to_it(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run, 2))
        point, tensors = run.fork_point(), dict(run.tensors)
        await made.settle(await made.publish(run, 2))
        fork = await made.claim(
            "run-b", first=False, tensors=tensors, boot_version=2, forked_from=point
        )
        await made.settle(await made.publish(fork))

    simulate(tmp_path, scenario)


def test_a_checkpoint_that_is_not_the_runs_base_is_never_labelled(tmp_path: Path) -> None:
    """The store disproves version 0; only an anchor makes the replica useful."""

    async def scenario(made: World) -> None:
        tensors = dict(made_tensors(5))
        run = await made.claim(tensors=tensors)
        made.replica.wake()
        await made.env.clock.sleep(30)
        assert made.replica.gate.served is None
        assert made.info()["base"] == "differs"
        from stitch.types import Kind

        await run.publish(made.change(run, 0, 1), kind=Kind.ANCHOR)
        made.replica.wake()
        await made.settle(run.ref, seconds=60)

    simulate(tmp_path, scenario)


def made_tensors(seed: int) -> Any:
    from stitch.testing.publications import small_model

    return small_model(seed=seed)


def test_a_full_pass_on_schedule_finds_a_flipped_byte(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        rank = made.engine.members[1]
        name = sorted(rank.live)[2]
        rank.write(name, bytes(len(rank.live[name])))
        await made.until(lambda: made.info()["last_error"] is not None, 60)
        await made.settle(run.ref, seconds=30)

    simulate(tmp_path, scenario, scrub_s=30.0)


def test_draining_refuses_new_requests_and_lets_running_ones_end(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        run = await made.claim()
        await made.settle(await made.publish(run))
        running = asyncio.create_task(made.request(token_count=50))
        await made.env.clock.sleep(0.1)
        drain = asyncio.create_task(made.replica.drain(30.0))
        await made.env.clock.sleep(0.01)
        assert made.replica.report().state is ReplicaState.DRAINING
        assert not made.replica.health()[0]
        with pytest.raises(StitchError) as caught:
            await made.request(wait_s=None)
        assert caught.value.retryable
        await drain
        assert len((await running).tokens) == 50
        assert made.replica.gate.running == 0

    simulate(tmp_path, scenario)


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_end_in_convergence(tmp_path: Path, seed: int) -> None:
    """All invariants at once: seeded faults in every call, engine deaths, a racing publisher."""

    async def scenario(made: World) -> None:
        run = await serving(made)
        made.engine.faults.chance = 0.06
        made.offload.seconds_max = 0.05
        for _ in range(12):
            await made.publish(run, wake=made.env.random.random() < 0.7)
            await made.env.clock.sleep(made.env.random.uniform(0.2, 6.0))
            if not made.engine.alive:
                await made.env.clock.sleep(made.env.random.uniform(0, 20))
                made.engine.restart()
        made.engine.faults.chance = 0.0
        if not made.engine.alive:
            made.engine.restart()
        made.engine.thaw()
        await made.settle(run.ref, seconds=200)
        with contextlib.suppress(StitchError):
            await made.request()
        assert made.finished

    mode = list(ActivationMode)[seed % 3]
    keyed = seed % 2 == 0
    options = {"rank_s": 5.0, "recover_tries": 50, "engine_return_s": 300.0}
    simulate(tmp_path, scenario, seed=seed, mode=mode, engine={"keyed_cache": keyed}, **options)


def test_lost_is_what_run_raises(tmp_path: Path) -> None:
    """The process that hosts a replica learns that it must be replaced."""

    async def scenario(made: World) -> None:
        made.engine.die()
        await made.until(lambda: made.lost is not None, 1000)
        assert isinstance(made.lost, ReplicaLost)

    simulate(tmp_path, scenario)
