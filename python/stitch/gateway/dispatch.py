"""One request's way to a replica: choose and reserve, send, and retry before the first byte.

A slot is reserved in the same step in which its member is chosen, so any number of requests
that arrive at once spread evenly. A member that refused or failed is left out of this
request's choice until it reports again or its retry hint passes. A 409 never counts against
a member's health.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from stitch.env import Env
from stitch.errors import Overloaded, StitchError, Unavailable
from stitch.gateway.config import GatewayConfig
from stitch.gateway.members import Roster, Seat
from stitch.gateway.routing.affinity import Affinity
from stitch.gateway.routing.eligible import eligible, refusal
from stitch.gateway.routing.least_loaded import least_loaded
from stitch.gateway.wire import Demand, admitted_ref, affinity_key
from stitch.http.exchange import Exchange
from stitch.http.message import Request, Response
from stitch.http.relay import deliver, error_event, held, request_head
from stitch.http.upstream import UpstreamLost
from stitch.types import Constraint

__all__ = ["Dispatcher"]

log = logging.getLogger(__name__)

_BACK_PRESSURE: Final = frozenset({409, 429, 503})
_REFUSAL_BYTES_MAX: Final = 4 * 1024 * 1024
_WAIT_STEP_S_MIN: Final = 0.005


@dataclass(frozen=True, slots=True)
class _Refused:
    """A member's own answer that another member may better."""

    head: bytes
    body: bytes
    retry_s: float


class Dispatcher:
    """Sends requests to members of a roster."""

    def __init__(
        self,
        roster: Roster,
        *,
        config: GatewayConfig,
        env: Env,
        count: Callable[[str, str], None],
    ) -> None:
        self.waiting = 0
        self.affinity = Affinity(config=config, clock=env.clock, random=env.random)
        self._roster = roster
        self._config = config
        self._clock = env.clock
        self._count = count

    async def run(self, request: Request, response: Response) -> None:
        """Answer one request from some member. Raises: the error to answer with."""
        await _Journey(self, request, response).run()

    def reserve(
        self,
        constraint: Constraint,
        key: str | None,
        left_out: Callable[[Seat], bool],
        *,
        pressing: bool = False,
    ) -> Seat | None:
        """Choose a member and take one of its slots, in one step.

        pressing: the request can't wait, so members under back-pressure are taken too.
        """
        roster = self._roster
        found = eligible(
            list(roster.seats.values()),
            constraint,
            roster.latest,
            in_flight_max=self._config.in_flight_max,
        )
        now = self._clock.monotonic()
        found = [
            seat for seat in found if (pressing or now >= seat.avoid_until) and not left_out(seat)
        ]
        if not found:
            return None
        seat = least_loaded(found) if key is None else self.affinity.choose(key, found)
        seat.in_flight += 1
        seat.picks += 1
        return seat


class _Journey:
    """The tries of one request."""

    def __init__(self, dispatcher: Dispatcher, request: Request, response: Response) -> None:
        self._of = dispatcher
        self._roster = dispatcher._roster
        self._config = dispatcher._config
        self._clock = dispatcher._clock
        self._request = request
        self._response = response
        self._demand = Demand(request)
        self._key = affinity_key(request)
        self._start = self._clock.monotonic()
        self._left_out: dict[Seat, tuple[float, int]] = {}
        self._last: _Refused | None = None
        self._lost: StitchError | None = None

    async def run(self) -> None:
        for attempt in range(self._config.retries_max + 1):
            try:
                seat, bounded = await self._acquire()
            except StitchError as error:
                if self._last is not None:
                    break
                self._of._count("stitch_gateway_refused_total", f'code="{error.code}"')
                raise
            if attempt:
                self._of._count("stitch_gateway_retries_total", "")
            try:
                if await self._attempt(seat, bounded):
                    return
            finally:
                self._roster.released(seat)
        if self._last is not None:
            self._response.send_raw(self._last.head, self._last.body)
            return
        self._of._count("stitch_gateway_refused_total", 'code="Unavailable"')
        raise Unavailable(
            f"{self._config.retries_max + 1} tries failed; the last: {self._lost}"
        ) from self._lost

    # Choosing.

    async def _acquire(self) -> tuple[Seat, Constraint]:
        """A member with a slot of it reserved, waiting within bounds for one to come."""
        while True:
            bounded = self._demand.bound_lag(self._roster.latest)
            seat = self._of.reserve(bounded, self._key, self._is_left_out)
            if seat is not None:
                return seat, bounded
            refused = refusal(
                list(self._roster.seats.values()),
                bounded,
                self._roster.latest,
                in_flight_max=self._config.in_flight_max,
            )
            left_s = self._limit_s(refused.coming or bool(self._left_out)) - (
                self._clock.monotonic() - self._start
            )
            if left_s <= 0 or not refused.error.retryable:
                seat = self._of.reserve(bounded, self._key, self._is_left_out, pressing=True)
                if seat is not None:
                    return seat, bounded
                raise refused.error
            if self._of.waiting >= self._config.waiting_max:
                self._of._count("stitch_gateway_shed_total", "")
                raise Overloaded(f"{self._of.waiting} requests already wait here; try later")
            self._of.waiting += 1
            try:
                await self._roster.change(
                    min(left_s, self._next_look_s()),
                    for_slot=isinstance(refused.error, Overloaded),
                )
            finally:
                self._of.waiting -= 1

    def _limit_s(self, coming: bool) -> float:
        """How long this request may wait in all."""
        stated_ms = self._demand.constraint.max_wait_ms
        if stated_ms is not None:
            return min(stated_ms / 1000, self._config.wait_s_max)
        return self._config.wait_s_max if coming else 0.0

    def _next_look_s(self) -> float:
        """When a member that is left out, here or for all, comes back by time alone."""
        now = self._clock.monotonic()
        ends = [until for until, _ in self._left_out.values()]
        ends += [seat.avoid_until for seat in self._roster.seats.values()]
        following = min((end for end in ends if end > now), default=now + 1.0)
        return max(following - now, _WAIT_STEP_S_MIN)

    def _is_left_out(self, seat: Seat) -> bool:
        found = self._left_out.get(seat)
        if found is None:
            return False
        until, stamp = found
        return seat.stamp == stamp and self._clock.monotonic() < until

    def _leave_out(self, seat: Seat, seconds: float) -> None:
        self._left_out[seat] = (self._clock.monotonic() + seconds, seat.stamp)

    # Sending.

    async def _attempt(self, seat: Seat, bounded: Constraint) -> bool:
        """One try. True if the client has its answer; False to try again."""
        request = self._request
        remaining_s = self._limit_s(True) - (self._clock.monotonic() - self._start)
        headers, body = self._demand.message(bounded, max(0.0, remaining_s))
        head = request_head(request, seat.upstream.authority, request.lines, len(body), headers)
        sent: list[Exchange] = []
        try:
            exchange = await seat.upstream.send(
                head, body, bare=request.method == "HEAD", on_sent=sent.append
            )
            if exchange.status in _BACK_PRESSURE:
                refused = await self._refused(exchange)
                if refused is not None:
                    self._last, self._lost = refused, None
                    self._hold_back(seat, exchange.status, refused.retry_s)
                    return False
            else:
                await held(exchange, self._config.response_bytes_max)
            self._roster.succeeded(seat)
            await self._answer(seat, exchange)
        except UpstreamLost as error:
            self._last, self._lost = None, error
            self._roster.failed(seat)
            self._leave_out(seat, self._config.retry_s)
            log.info("try failed", extra={"member": seat.member.id, "why": error.message})
            return False
        finally:
            for exchange in sent:
                exchange.cancel()
        return True

    async def _refused(self, exchange: Exchange) -> _Refused | None:
        """The member's refusal if another try may better it; else the answer is left to pass."""
        if not await exchange.gather(_REFUSAL_BYTES_MAX):
            return None
        body = exchange.peek()
        try:
            found = orjson.loads(body)["error"]
            # Partial output is the client's to keep: doing it again elsewhere would lose it.
            retryable = bool(found["retryable"]) and found.get("partial") is None
            retry_ms = found.get("retry_after_ms")
        except (orjson.JSONDecodeError, KeyError, TypeError):
            retryable, retry_ms = exchange.status == 503, None
        if not retryable:
            return None
        retry_s = retry_ms / 1000 if isinstance(retry_ms, int | float) else self._config.retry_s
        return _Refused(exchange.head, body, retry_s)

    def _hold_back(self, seat: Seat, status: int, retry_s: float) -> None:
        """Leave the member out: for this request, and on a 503 for all, until it reports."""
        self._leave_out(seat, retry_s)
        self._of._count("stitch_gateway_refusals_total", f'status="{status}"')
        if status == 503:
            now = self._clock.monotonic()
            seat.avoid_until = max(seat.avoid_until, now + min(retry_s, self._config.retry_s))

    async def _answer(self, seat: Seat, exchange: Exchange) -> None:
        ref = admitted_ref(exchange.head)
        if ref is not None:
            self._roster.learn(seat, ref)
        cut = await deliver(
            exchange,
            self._request,
            self._response,
            extra=b"",
            cut_event=lambda error: self._cut_event(exchange, error),
        )
        if cut is not None:
            self._roster.failed(seat)
            self._of._count("stitch_gateway_cut_total", "")
        elif self._key is not None and exchange.status < 400:
            self._of.affinity.bind(self._key, seat.member.id)

    def _cut_event(self, exchange: Exchange, error: StitchError) -> bytes:
        versions: dict[str, Any] = {}
        ref = admitted_ref(exchange.head)
        if ref is not None:
            versions = {"weight_run_id": ref.run_id, "weight_version_admitted": ref.version}
        gone = Unavailable("the replica broke off in the middle of the answer; try again")
        return error_event(gone, **versions)
