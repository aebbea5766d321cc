"""What the gateway tells of itself and its members: `/status`, `/metrics`."""

from __future__ import annotations

from typing import Any, Final

from stitch.gateway.members import Roster, Seat
from stitch.http import HTTP_PROTOCOL
from stitch.http.metrics import Counters, gauge
from stitch.types import Ref

__all__ = ["COUNTERS", "metrics_text", "readiness", "status_body"]

_UNREACHABLE: Final = "UNREACHABLE"

COUNTERS: Final = {
    "stitch_gateway_requests_total": "Requests that were answered by a member.",
    "stitch_gateway_refused_total": "Requests that no member took, by error code.",
    "stitch_gateway_refusals_total": "Members' 409, 429 and 503 answers that were tried again.",
    "stitch_gateway_retries_total": "Tries after the first.",
    "stitch_gateway_shed_total": "Requests refused because too many wait.",
    "stitch_gateway_cut_total": "Responses that broke off after their first byte.",
    "stitch_gateway_client_gone_total": "Requests whose client left.",
}


def readiness(roster: Roster) -> tuple[bool, str | None]:
    """Whether enough members are ready: three quarters of the floor, rounded up."""
    needed = -(-roster.config.replicas_floor * 3 // 4)
    count = len(roster.ready)
    if count >= needed:
        return True, None
    known = len(roster.seats)
    error = f"; {roster.discovery_error}" if roster.discovery_error else ""
    return False, f"{count} of {needed} replicas ready, {known} known{error}"


def status_body(roster: Roster, counters: Counters, waiting: int) -> dict[str, Any]:
    """The `/status` document."""
    ready, reason = readiness(roster)
    now = roster.clock.monotonic()
    return {
        "protocol": HTTP_PROTOCOL,
        "ready": ready,
        "reason": reason,
        "latest": _ref(roster.latest),
        "waiting": waiting,
        "in_flight": sum(seat.in_flight for seat in roster.seats.values()),
        "discovery": {
            "ok": roster.discovery_error is None,
            "error": roster.discovery_error,
            "age_s": round(now - roster.discovered_at, 3),
        },
        "members": [
            _member(seat, roster.latest, now)
            for _, seat in sorted(roster.seats.items(), key=lambda item: item[0])
        ],
        "counters": {name: counters.value(name) for name in COUNTERS},
    }


def metrics_text(roster: Roster, counters: Counters, waiting: int) -> str:
    """The `/metrics` page."""
    seats = [(f'member="{_escape(key)}"', seat) for key, seat in sorted(roster.seats.items())]
    return counters.render() + "".join(
        (
            gauge("stitch_gateway_members", "Members known.", [("", len(seats))]),
            gauge("stitch_gateway_members_ready", "Members ready.", [("", len(roster.ready))]),
            gauge("stitch_gateway_waiting", "Requests that wait for a member.", [("", waiting)]),
            gauge(
                "stitch_gateway_in_flight",
                "Requests running on a member through this gateway.",
                [(labels, seat.in_flight) for labels, seat in seats],
            ),
            gauge(
                "stitch_gateway_member_version",
                "Version that a member serves.",
                [
                    (labels, seat.report.served.version)
                    for labels, seat in seats
                    if seat.report is not None and seat.report.served is not None
                ],
            ),
            gauge(
                "stitch_gateway_member_lag",
                "Latest minus served version of a member.",
                [
                    (labels, lag)
                    for labels, seat in seats
                    if (lag := _lag(seat, roster.latest)) is not None
                ],
            ),
        )
    )


def _member(seat: Seat, latest: Ref | None, now: float) -> dict[str, Any]:
    report = seat.report
    return {
        "id": seat.member.id,
        "url": seat.member.url,
        "ready": seat.ready,
        "reachable": seat.reachable,
        "failures": seat.failures,
        "problem": seat.problem,
        "in_flight": seat.in_flight,
        "load": seat.load,
        "state": _state(seat),
        "phase": None if report is None else report.phase.value,
        "gate": None if report is None else report.gate.value,
        "served": None if report is None else _ref(report.served),
        "lag": _lag(seat, latest),
        "report_age_s": None if report is None else round(now - seat.reported_at, 3),
        "report": None if report is None else report.to_wire(),
    }


def _state(seat: Seat) -> str | None:
    """UNREACHABLE while it does not answer, whatever it reported last."""
    if not seat.reachable:
        return _UNREACHABLE
    return None if seat.report is None else seat.report.state.value


def _lag(seat: Seat, latest: Ref | None) -> int | None:
    served = None if seat.report is None else seat.report.served
    if served is None or latest is None or served.run_id != latest.run_id:
        return None
    return max(0, latest.version - served.version)


def _ref(ref: Ref | None) -> dict[str, Any] | None:
    return None if ref is None else ref.to_wire()


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
