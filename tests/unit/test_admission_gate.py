"""The admission gate: check and capture, draining, deferral, waiting, and their limits."""

from __future__ import annotations

import asyncio

import pytest

from stitch.admission import AdmissionGate, Drained, GateConfig
from stitch.env import Env
from stitch.errors import (
    Closed,
    NeverSatisfiable,
    NotReady,
    Overloaded,
    StitchError,
)
from stitch.types import (
    UNCONSTRAINED,
    Constraint,
    GateState,
    Label,
    Ref,
    at_least,
    exactly,
    lag,
)


def label(version: int, run: str = "run-a", epoch: int = 1) -> Label:
    return Label(Ref(run, version), epoch)


def make_gate(version: int | None = 3, **limits: float | int) -> AdmissionGate:
    gate = AdmissionGate(Env(), GateConfig(**limits))  # type: ignore[arg-type]
    if version is not None:
        gate.open(label(version))
    return gate


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never became true")


async def test_a_gate_without_a_version_refuses_everything_retryably() -> None:
    gate = make_gate(None)
    for constraint in (UNCONSTRAINED, at_least(0), exactly(0)):
        with pytest.raises(NotReady) as caught:
            gate.try_admit(constraint)
        assert caught.value.retryable
        assert caught.value.fields["applied"] is None


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (at_least(4), "behind"),
        (exactly(4), "behind"),
        (exactly(2), "passed"),
        (at_least(1, run_id="run-b"), "other_run"),
    ],
)
async def test_an_unmet_constraint_says_why(constraint: Constraint, reason: str) -> None:
    gate = make_gate()
    with pytest.raises(NotReady) as caught:
        gate.try_admit(constraint)
    assert caught.value.fields == {
        "run_id": "run-a",
        "target_version": constraint.target_version,
        "applied": 3,
        "reason": reason,
    }
    assert gate.running == 0


async def test_lag_uses_the_callers_pointer_or_the_reconcilers() -> None:
    gate = make_gate()
    assert gate.try_admit(lag(1)) is not None
    with pytest.raises(NotReady):
        gate.try_admit(lag(1), latest=Ref("run-a", 5))
    gate.see_latest(Ref("run-a", 5))
    with pytest.raises(NotReady):
        gate.try_admit(lag(1))
    assert gate.try_admit(lag(2)) is not None


async def test_a_superseded_run_is_never_satisfiable() -> None:
    gate = make_gate()
    gate.see_latest(Ref("run-a", 3), frozenset({"old"}))
    with pytest.raises(NeverSatisfiable):
        gate.try_admit(at_least(1, run_id="old"))


async def test_unpinned_requests_ride_through_and_pins_hold_the_close_back() -> None:
    gate = make_gate()
    rider = gate.try_admit(UNCONSTRAINED)
    pin = gate.try_admit(exactly(3))
    assert rider is not None
    assert pin is not None
    closing = asyncio.create_task(gate.close(everything=False))
    await until(lambda: gate.state is GateState.DRAINING_PINS)
    with pytest.raises(NotReady) as caught:
        gate.try_admit(exactly(3))
    assert caught.value.fields["reason"] == "closing"
    assert caught.value.retryable
    assert gate.try_admit(at_least(3)) is not None
    gate.release(pin)
    gate.release(pin)
    assert await closing is Drained.CLOSED
    assert gate.state is GateState.CLOSED
    assert gate.try_admit(UNCONSTRAINED) is None
    assert gate.running == 2


async def test_everything_closes_first_and_drains_all() -> None:
    gate = make_gate()
    rider = gate.try_admit(UNCONSTRAINED)
    assert rider is not None
    closing = asyncio.create_task(gate.close(everything=True))
    await until(lambda: gate.state is GateState.CLOSED)
    assert gate.try_admit(UNCONSTRAINED) is None
    assert not closing.done()
    gate.release(rider)
    assert await closing is Drained.CLOSED


async def test_pins_defer_three_times_then_are_aborted() -> None:
    gate = make_gate(drain_deadline_s=0.01, abort_deadline_s=1.0)
    pin = gate.try_admit(exactly(3))
    assert pin is not None
    errors: list[StitchError] = []

    def let_go(error: StitchError) -> None:
        errors.append(error)
        gate.release(pin)

    pin.on_abort = let_go
    for count in (1, 2, 3):
        assert await gate.close(everything=False) is Drained.DEFERRED
        assert gate.state is GateState.OPEN
        assert gate.deferred == count
        assert not errors
    assert await gate.close(everything=False) is Drained.CLOSED
    assert len(errors) == 1
    assert errors[0].retryable
    assert pin.error is errors[0]
    assert gate.deferred == 0


async def test_an_aborted_holder_that_never_lets_go_is_dropped() -> None:
    gate = make_gate(drain_deadline_s=0.01, abort_deadline_s=0.01, defer_count_max=0)
    pin = gate.try_admit(exactly(3))
    assert pin is not None
    assert await gate.close(everything=False) is Drained.CLOSED
    assert pin.error is not None
    assert gate.running == 0


async def test_an_expired_session_holds_nothing_back() -> None:
    gate = make_gate(drain_deadline_s=5.0)
    session = gate.try_admit(exactly(3), kind="session", expiry_s=0.01)
    assert session is not None
    assert await gate.close(everything=False) is Drained.CLOSED
    assert session.error is not None


async def test_a_cancelled_close_reopens() -> None:
    gate = make_gate()
    pin = gate.try_admit(exactly(3))
    closing = asyncio.create_task(gate.close(everything=False))
    await until(lambda: gate.state is GateState.DRAINING_PINS)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert gate.state is GateState.OPEN
    assert pin is not None


async def test_callers_wait_for_a_closed_gate_in_order_and_get_the_new_label() -> None:
    gate = make_gate()
    await gate.close(everything=False)
    order: list[int] = []

    async def call(index: int) -> Label:
        lease = await gate.admit(UNCONSTRAINED)
        order.append(index)
        return lease.label

    calls = [asyncio.create_task(call(i)) for i in range(5)]
    await until(lambda: gate.waiting == 5)
    gate.relabel(label(4, epoch=2))
    gate.open(label(4, epoch=2))
    assert gate.running == 5
    assert gate.waiting == 0
    assert [(await c).ref.version for c in calls] == [4] * 5
    assert order == [0, 1, 2, 3, 4]


async def test_a_wait_for_a_version_is_granted_the_moment_it_opens() -> None:
    gate = make_gate()
    waiting = asyncio.create_task(gate.admit(exactly(4), wait_s=5))
    await until(lambda: gate.waiting == 1)
    await gate.close(everything=False)
    gate.open(label(4))
    # Captured by `open` itself: a close that follows at once already sees the pin.
    assert gate.running == 1
    closing = asyncio.create_task(gate.close(everything=False))
    gate.release(await waiting)
    assert await closing is Drained.CLOSED


async def test_a_waiter_whose_version_was_passed_fails_at_once() -> None:
    gate = make_gate()
    waiting = asyncio.create_task(gate.admit(exactly(4), wait_s=5))
    await until(lambda: gate.waiting == 1)
    await gate.close(everything=False)
    gate.open(label(5))
    with pytest.raises(NotReady) as caught:
        await waiting
    assert caught.value.fields["reason"] == "passed"


async def test_without_a_wait_a_missing_version_fails_at_once() -> None:
    gate = make_gate()
    with pytest.raises(NotReady):
        await gate.admit(at_least(9))
    with pytest.raises(NotReady):
        await gate.admit(Constraint(min_version=9, max_wait_ms=0))


async def test_waits_end_with_the_right_error() -> None:
    gate = make_gate()
    with pytest.raises(NotReady):
        await gate.admit(Constraint(min_version=9, max_wait_ms=5))
    await gate.close(everything=False)
    with pytest.raises(Closed):
        await gate.admit(UNCONSTRAINED, wait_s=0.005)
    assert gate.waiting == 0


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    gate = make_gate()
    await gate.close(everything=False)
    waiting = asyncio.create_task(gate.admit(UNCONSTRAINED))
    await until(lambda: gate.waiting == 1)
    gate.open(label(4))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.running == 0
    assert gate.waiting == 0


async def test_queue_and_running_are_bounded() -> None:
    gate = make_gate(running_max=1, waiting_max=1)
    assert gate.try_admit(UNCONSTRAINED) is not None
    with pytest.raises(Overloaded):
        gate.try_admit(UNCONSTRAINED)
    waiting = asyncio.create_task(gate.admit(at_least(9), wait_s=5))
    await until(lambda: gate.waiting == 1)
    with pytest.raises(Overloaded):
        await gate.admit(at_least(9), wait_s=5)
    waiting.cancel()


async def test_leaving_refuses_callers_and_waiters() -> None:
    gate = make_gate()
    waiting = asyncio.create_task(gate.admit(at_least(9), wait_s=5))
    await until(lambda: gate.waiting == 1)
    gate.refuse(Closed("leaving"))
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        gate.try_admit(UNCONSTRAINED)


async def test_the_served_version_never_goes_back_within_an_incarnation() -> None:
    gate = make_gate(3)
    await gate.close(everything=False)
    gate.relabel(None)
    with pytest.raises(AssertionError):
        gate.open(label(2))
    gate.forget()
    gate.open(label(0))
    assert gate.served == Ref("run-a", 0)


async def test_an_open_gate_cannot_be_relabelled() -> None:
    gate = make_gate()
    with pytest.raises(AssertionError):
        gate.relabel(label(4))


async def test_draining_pins_is_enough_to_move_a_label() -> None:
    gate = make_gate()
    rider = gate.try_admit(UNCONSTRAINED)
    assert await gate.drain_pins() is Drained.CLOSED
    assert gate.state is GateState.DRAINING_PINS
    assert gate.try_admit(UNCONSTRAINED) is not None
    gate.relabel(label(4))
    gate.open(label(4))
    assert gate.served == Ref("run-a", 4)
    assert rider is not None
    assert rider.label.ref.version == 3
