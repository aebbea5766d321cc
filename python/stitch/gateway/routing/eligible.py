"""Which members meet a constraint, and if none does, whether waiting can help. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stitch.errors import NeverSatisfiable, NotReady, Overloaded, StitchError, Unavailable
from stitch.gateway.members import Seat
from stitch.types import Constraint, GateState, Ref, Unmet, check_constraint

__all__ = ["Refusal", "eligible", "refusal"]


def eligible(
    seats: Sequence[Seat], constraint: Constraint, latest: Ref | None, *, in_flight_max: int
) -> list[Seat]:
    """Members that would admit the request now, by what they last said.

    A member whose gate is closed is named only if no open one is: it would make the request
    wait, and is about to leave the version that it reports.
    """
    found: list[Seat] = []
    closed: list[Seat] = []
    for seat in seats:
        report = seat.report
        if report is None or not seat.ready or seat.in_flight >= in_flight_max:
            continue
        if check_constraint(constraint, report.served, latest=latest) is not None:
            continue
        if report.gate is GateState.OPEN:
            found.append(seat)
        elif report.gate is GateState.DRAINING_PINS:
            if not constraint.is_pin:
                found.append(seat)
        elif not constraint.is_pin:
            closed.append(seat)
    return found or closed


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no member takes the request. coming: some member is on its way to what it demands."""

    error: StitchError
    coming: bool


def refusal(
    seats: Sequence[Seat], constraint: Constraint, latest: Ref | None, *, in_flight_max: int
) -> Refusal:
    """Explain why nobody takes the request now."""
    ready = [seat for seat in seats if seat.ready]
    if not ready:
        joining = any(seat.joining for seat in seats)
        whys = {None if seat.report is None else seat.report.reason for seat in seats}
        shared = whys.pop() if len(whys) == 1 else None
        why = f" ({shared})" if shared else ""
        return Refusal(
            Unavailable(
                f"none of {len(seats)} known replicas is ready{why}; try again",
                replicas=len(seats),
            ),
            coming=joining,
        )
    reasons = {seat: check_constraint(constraint, _served(seat), latest=latest) for seat in ready}
    if any(reason is None for reason in reasons.values()):
        if all(seat.in_flight >= in_flight_max for seat, why in reasons.items() if why is None):
            return Refusal(
                Overloaded("every replica that could serve this is full; try later"), coming=True
            )
        # Met, but the gate refuses new pins or is closed.
        return Refusal(_not_ready(constraint, ready, Unmet.CLOSING), coming=True)
    if _never(seats, constraint, latest):
        return Refusal(
            NeverSatisfiable(
                f"every replica has passed version {constraint.exact_version}",
                **_fields(constraint, ready, Unmet.PASSED),
            ),
            coming=False,
        )
    order = (Unmet.BEHIND, Unmet.CLOSING, Unmet.OTHER_RUN, Unmet.PASSED)
    why = min((reason for reason in reasons.values() if reason), key=order.index)
    return Refusal(_not_ready(constraint, ready, why), coming=_coming(constraint, latest))


def _coming(constraint: Constraint, latest: Ref | None) -> bool:
    """Whether the pointer already names a version that meets the constraint."""
    return latest is not None and check_constraint(constraint, latest, latest=latest) is None


def _never(seats: Sequence[Seat], constraint: Constraint, latest: Ref | None) -> bool:
    """Whether all members, and the pointer that all others go to, are past an exact version."""
    exact = constraint.exact_version
    if exact is None:
        return False

    def past(ref: Ref) -> bool:
        return ref.version > exact and constraint.run_id in (None, ref.run_id)

    served = [_served(seat) for seat in seats if seat.problem is None]
    return all(ref is not None and past(ref) for ref in served) and (latest is None or past(latest))


def _served(seat: Seat) -> Ref | None:
    return None if seat.report is None else seat.report.served


def _not_ready(constraint: Constraint, ready: Sequence[Seat], why: Unmet) -> StitchError:
    fields = _fields(constraint, ready, why)
    best = fields["applied"]
    return NotReady(
        f"no replica serves what is asked ({why.value}); the newest served version is {best}",
        **fields,
    )


def _fields(constraint: Constraint, ready: Sequence[Seat], why: Unmet) -> dict[str, Any]:
    served = [ref for seat in ready if (ref := _served(seat)) is not None]
    same_run = [ref for ref in served if constraint.run_id in (None, ref.run_id)]
    best = max(same_run or served, key=lambda ref: ref.version, default=None)
    return {
        "run_id": None if best is None else best.run_id,
        "target_version": constraint.target_version,
        "applied": None if best is None else best.version,
        "reason": why.value,
    }
