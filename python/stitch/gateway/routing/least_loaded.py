"""The member with the fewest requests of this gateway. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.gateway.members import Seat

__all__ = ["least_loaded"]


def least_loaded(seats: Sequence[Seat]) -> Seat:
    """The least loaded of a non-empty list.

    Our own count decides, for it is exact at this moment; what members report, which may be
    old and counts other gateways' requests too, breaks ties, then turn-taking.
    """
    return min(seats, key=lambda seat: (seat.in_flight, seat.load, seat.picks))
