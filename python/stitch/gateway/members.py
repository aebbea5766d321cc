"""The gateway's knowledge of one pool: members, their reports, the freshest pointer.

Everything lives on one event loop. Reports are hints: a replica decides again at admission.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from stitch.env import Clock, Env
from stitch.gateway.config import GatewayConfig
from stitch.http.upstream import Upstream
from stitch.pools.base import Member
from stitch.reconciler.base import ReplicaReport
from stitch.types import Ref, ReplicaState

__all__ = ["Roster", "Seat"]

_RETIRED_MAX = 16
_LEAVER_LOOK_S = 0.05


class Seat:
    """One member as the gateway sees it.

    in_flight: requests reserved or running through this gateway. failures: consecutive ones.
    avoid_until: back-pressure, on the monotonic clock; a new report ends it. ask_again: ends the
    present event stream, so that a new one tells whether the member can be reached.
    """

    def __init__(self, member: Member, upstream: Upstream) -> None:
        self.member = member
        self.upstream = upstream
        self.report: ReplicaReport | None = None
        self.reported_at = 0.0
        self.in_flight = 0
        self.picks = 0
        self.failures = 0
        self.reachable = True
        self.avoid_until = 0.0
        self.problem: str | None = None
        self.stamp = 0
        self.ask_again: Callable[[], None] | None = None
        self._retired: deque[str] = deque(maxlen=_RETIRED_MAX)

    @property
    def ready(self) -> bool:
        """Whether it can be routed to: reachable, and ready by its own word."""
        report = self.report
        return (
            self.reachable
            and self.problem is None
            and report is not None
            and report.state is ReplicaState.READY
        )

    @property
    def joining(self) -> bool:
        """Whether it may still become ready."""
        if self.ready or self.problem is not None:
            return False
        report = self.report
        return report is None or report.state not in (ReplicaState.FAILED, ReplicaState.DRAINING)

    @property
    def load(self) -> int:
        """Running plus queued, by our count or by its own, whichever is more."""
        report = self.report
        return (
            self.in_flight
            if report is None
            else max(self.in_flight, report.running + report.waiting)
        )

    def accept(self, report: ReplicaReport, now: float) -> bool:
        """Take in a report unless it is older than what is known. True if it has news.

        Load alone is no news: it ends no back-pressure, and nobody waits for it.
        """
        known = self.report
        if known is not None and known.incarnation == report.incarnation:
            if report.seq < known.seq:
                return False
        elif report.incarnation in self._retired:
            return False
        elif known is not None:
            self._retired.append(known.incarnation)
        self.report = report
        self.reported_at = now
        if known is not None and _load_only(known, report):
            return False
        self.avoid_until = 0.0
        self.stamp += 1
        return True


class Roster:
    """All members of the pool, and who waits for news of them."""

    def __init__(self, *, config: GatewayConfig, env: Env) -> None:
        self.config = config
        self.clock: Clock = env.clock
        self.seats: dict[str, Seat] = {}
        self.latest: Ref | None = None
        self.discovery_error: str | None = "not asked yet"
        self.discovered_at = env.clock.monotonic()
        self.version = 0
        self._env = env
        self._runs: dict[str, None] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._slot_waiters: deque[asyncio.Future[None]] = deque()
        self._leavers: set[asyncio.Task[None]] = set()
        self._closed = False

    def apply(self, members: Iterable[Member]) -> tuple[list[Seat], list[Seat]]:
        """Take in a member list. Returns: seats that joined and seats that left."""
        wanted = {member.id: member for member in members}
        left = [seat for key, seat in self.seats.items() if wanted.get(key) != seat.member]
        for seat in left:
            del self.seats[seat.member.id]
            self._close_later(seat.upstream)
        joined = []
        for key, member in wanted.items():
            if key not in self.seats:
                upstream = Upstream(member.url, limits=self.config.replica, env=self._env)
                self.seats[key] = seat = Seat(member, upstream)
                joined.append(seat)
        if joined or left:
            self.notify()
        return joined, left

    def take_report(self, seat: Seat, report: ReplicaReport) -> None:
        """A report came in on the member's own stream."""
        before = None if seat.report is None else seat.report.latest
        news = seat.accept(report, self.clock.monotonic())
        if seat.report is not report:
            return
        self.succeeded(seat)
        self.version += 1
        if not news:
            return
        if report.latest is not None:
            self._see_latest(report.latest, before)
        self.notify()

    def learn(self, seat: Seat, served: Ref) -> None:
        """A response told what the member serves, ahead of its next report."""
        report = seat.report
        known = None if report is None else report.served
        if known is None or known.run_id != served.run_id or known.version >= served.version:
            return
        assert report is not None
        seat.report = dataclasses.replace(report, served=served)
        self.notify()

    def failed(self, seat: Seat) -> None:
        """A connection or stream failed. The member is left out only after several in a row."""
        seat.failures += 1
        if seat.reachable and seat.failures >= self.config.failures_max:
            seat.reachable = False
            if seat.ask_again is not None:
                seat.ask_again()
            self.notify()

    def succeeded(self, seat: Seat) -> None:
        """The member answered."""
        seat.failures = 0
        if not seat.reachable:
            seat.reachable = True
            self.notify()

    def released(self, seat: Seat) -> None:
        """A request of the member ended."""
        seat.in_flight -= 1
        assert seat.in_flight >= 0, seat.member.id
        _wake_one(self._slot_waiters)

    @property
    def ready(self) -> Sequence[Seat]:
        """Members that can be routed to."""
        return [seat for seat in self.seats.values() if seat.ready]

    @property
    def waiting(self) -> int:
        """Requests waiting for news."""
        return len(self._waiters) + len(self._slot_waiters)

    def notify(self) -> None:
        """Something changed: let waiting requests look again, oldest first."""
        self.version += 1
        for waiters in (self._waiters, self._slot_waiters):
            while waiters:
                _wake_one(waiters)

    async def change(self, limit_s: float, *, for_slot: bool) -> None:
        """Wait for the next change, or for a slot to be free, at most `limit_s`.

        A freed slot wakes one of those that wait for one: all of them, each time, would make
        a full pool spend its time on looking.
        """
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._slot_waiters if for_slot else self._waiters
        waiters.append(waiter)
        try:
            async with self.clock.timeout(limit_s):
                await waiter
        except TimeoutError:
            return
        finally:
            with contextlib.suppress(ValueError):
                waiters.remove(waiter)

    async def close(self) -> None:
        """Drop all members and cut what still runs on them."""
        self._closed = True
        self.apply([])
        if self._leavers:
            await asyncio.wait(set(self._leavers))

    def _see_latest(self, latest: Ref, before: Ref | None) -> None:
        """Keep the freshest pointer: the higher number within a run; of two runs, the one not
        seen before, or the one that a replica moved to from ours."""
        known = self.latest
        if known is None or known.run_id == latest.run_id:
            if known is None or latest.version > known.version:
                self.latest = latest
        elif latest.run_id not in self._runs or (
            before is not None and before.run_id == known.run_id
        ):
            self.latest = latest
        self._runs[latest.run_id] = None

    def _close_later(self, upstream: Upstream) -> None:
        """Let requests that still run on a member that left end by themselves."""

        async def close() -> None:
            while len(upstream.open) > len(upstream.idle) and not self._closed:
                await self.clock.sleep(_LEAVER_LOOK_S)
            await upstream.close()

        task = asyncio.get_running_loop().create_task(close(), name="member-close")
        self._leavers.add(task)
        task.add_done_callback(self._leavers.discard)


def _load_only(known: ReplicaReport, report: ReplicaReport) -> bool:
    """Whether a report differs from the one before in `running` and `waiting`, and in no more."""
    loads = (known.running, known.waiting), (report.running, report.waiting)
    return loads[0] != loads[1] and known == dataclasses.replace(
        report, seq=known.seq, running=known.running, waiting=known.waiting
    )


def _wake_one(waiters: deque[asyncio.Future[None]]) -> None:
    """Wake the oldest that still waits."""
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return
