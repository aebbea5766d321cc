"""The gateway's routing policies, its roster's rules, and what it reads off the wire."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import orjson
import pytest

from stitch.env import Env
from stitch.errors import (
    CorruptData,
    NeverSatisfiable,
    NotReady,
    Overloaded,
    Unavailable,
    Unsupported,
)
from stitch.gateway.config import GatewayConfig
from stitch.gateway.members import Roster, Seat
from stitch.gateway.routing.affinity import Affinity
from stitch.gateway.routing.eligible import eligible, refusal
from stitch.gateway.routing.least_loaded import least_loaded
from stitch.gateway.wire import Demand, admitted_ref, parse_report
from stitch.http.message import Request
from stitch.pools.base import Member
from stitch.reconciler.base import ReplicaReport
from stitch.types import UNCONSTRAINED, Constraint, GateState, Phase, Ref, ReplicaState, exactly

CONFIG = GatewayConfig()


def report(served: Ref | None, **changes: Any) -> ReplicaReport:
    found = ReplicaReport(
        replica_id="r",
        incarnation="life",
        seq=1,
        state=ReplicaState.READY,
        phase=Phase.IDLE,
        gate=GateState.OPEN,
        served=served,
        latest=served,
        lag=0,
        running=0,
        waiting=0,
        reason=None,
        gate_closed_s=None,
        swap_s=None,
        recompute_s=None,
    )
    return dataclasses.replace(found, **changes)


def seat(name: str, version: int | None = 1, *, run: str = "run-a", **changes: Any) -> Seat:
    found = Seat(Member(name, f"http://{name}:1"), None)  # type: ignore[arg-type]
    found.in_flight = changes.pop("in_flight", 0)
    found.reachable = changes.pop("reachable", True)
    served = None if version is None else Ref(run, version)
    found.report = report(served, **changes)
    return found


def names(seats: list[Seat]) -> set[str]:
    return {one.member.id for one in seats}


def pick(seats: list[Seat], constraint: Constraint = UNCONSTRAINED, **options: Any) -> set[str]:
    options.setdefault("in_flight_max", 10)
    return names(eligible(seats, constraint, options.pop("latest", None), **options))


class TestEligible:
    def test_only_ready_reachable_ones_with_room(self) -> None:
        silent = seat("silent")
        silent.report = None
        odd = seat("odd")
        odd.problem = "speaks protocol 9"
        seats = [
            seat("good"),
            silent,
            odd,
            seat("gone", reachable=False),
            seat("full", in_flight=10),
            seat("unknown", None),
            *(seat(s.value, state=s) for s in ReplicaState if s is not ReplicaState.READY),
        ]
        assert pick(seats) == {"good"}

    def test_closed_gates_are_a_last_resort(self) -> None:
        closed, open_ = seat("closed", gate=GateState.CLOSED), seat("open")
        assert pick([closed, open_]) == {"open"}
        assert pick([closed]) == {"closed"}
        assert pick([closed], exactly(1)) == set()

    def test_draining_pins_lets_others_in(self) -> None:
        draining = seat("draining", gate=GateState.DRAINING_PINS)
        assert pick([draining]) == {"draining"}
        assert pick([draining], exactly(1)) == set()

    def test_lag_is_of_the_freshest_pointer(self) -> None:
        seats = [seat("a", 1), seat("b", 3)]
        assert pick(seats, Constraint(max_lag=1), latest=Ref("run-a", 4)) == {"b"}


def test_load_alone_is_no_news() -> None:
    roster = Roster(config=CONFIG, env=Env())
    one = seat("a")
    one.avoid_until = 5.0
    assert one.report is not None
    before = one.stamp, roster.version
    roster.take_report(one, dataclasses.replace(one.report, seq=2, running=7, waiting=2))
    assert one.load == 9
    assert (one.stamp, one.avoid_until) == (before[0], 5.0), "it ends no back-pressure"
    assert roster.version == before[1] + 1, "readers of /events see it"
    roster.take_report(one, dataclasses.replace(one.report, seq=3, latest=Ref("run-a", 2)))
    assert (one.stamp, one.avoid_until) == (before[0] + 1, 0.0)
    assert roster.latest == Ref("run-a", 2)


class TestRefusal:
    def test_a_reason_that_all_members_share_is_told(self) -> None:
        seats = [seat(n, None, state=ReplicaState.CATCHING_UP, reason="no run") for n in "ab"]
        found = refusal(seats, UNCONSTRAINED, None, in_flight_max=10)
        assert found.error.message == "none of 2 known replicas is ready (no run); try again"
        seats[0].report = report(None, state=ReplicaState.BOOTING)
        found = refusal(seats, UNCONSTRAINED, None, in_flight_max=10)
        assert found.error.message == "none of 2 known replicas is ready; try again"

    @pytest.mark.parametrize(
        ("seats", "constraint", "kind", "coming"),
        [
            ([], UNCONSTRAINED, Unavailable, False),
            ([seat("a", None, state=ReplicaState.BOOTING)], UNCONSTRAINED, Unavailable, True),
            ([seat("a", state=ReplicaState.FAILED)], UNCONSTRAINED, Unavailable, False),
            ([seat("a", in_flight=10)], UNCONSTRAINED, Overloaded, True),
            ([seat("a", gate=GateState.CLOSED)], exactly(1), NotReady, True),
            ([seat("a", 1)], Constraint(min_version=2), NotReady, True),
            ([seat("a", 1)], Constraint(min_version=3), NotReady, False),
            ([seat("a", 5)], exactly(1), NeverSatisfiable, False),
            ([seat("a", 5), seat("b", None)], exactly(1), NotReady, False),
            ([seat("a", 5), seat("b", 1)], exactly(1, run_id="run-b"), NotReady, False),
            ([seat("a", 5)], exactly(4), NotReady, False),  # the pointer is yet to pass it
            ([seat("a", 5, run="other")], exactly(4), NotReady, False),
            ([seat("a", 5, run="other")], exactly(4, run_id="run-a"), NotReady, False),
        ],
    )
    def test_kinds(
        self, seats: list[Seat], constraint: Constraint, kind: type[Exception], coming: bool
    ) -> None:
        found = refusal(seats, constraint, Ref("run-a", 2), in_flight_max=10)
        assert type(found.error) is kind
        assert found.coming is coming

    def test_the_best_reason_is_told(self) -> None:
        seats = [seat("a", 1), seat("b", 9), seat("c", 4, run="other")]
        error = refusal(seats, exactly(5, run_id="run-a"), None, in_flight_max=10).error
        assert error.fields["reason"] == "behind"
        assert (error.fields["run_id"], error.fields["applied"]) == ("run-a", 9)


def test_least_loaded_goes_by_own_count_then_report_then_turns() -> None:
    a, b, c = seat("a", in_flight=2), seat("b", running=5), seat("c", running=1)
    assert least_loaded([a, b, c]) is c
    c.in_flight = 1
    assert least_loaded([a, b, c]) is b
    even = [seat(str(index)) for index in range(4)]
    turns = Counter()
    for _ in range(8):
        chosen = least_loaded(even)
        chosen.picks += 1
        turns[chosen.member.id] += 1
    assert set(turns.values()) == {2}


class TestAffinity:
    def make(self, **changes: Any) -> Affinity:
        env = Env()
        config = dataclasses.replace(CONFIG, affinity_load_max=4, **changes)
        return Affinity(config=config, clock=env.clock, random=env.random)

    def test_gateways_agree_on_new_keys_and_few_move(self) -> None:
        seats = [seat(f"m{index}") for index in range(5)]
        one, two = self.make(), self.make()
        keys = [f"key-{index}" for index in range(200)]
        homes = {key: one.choose(key, seats) for key in keys}
        assert {key: two.choose(key, list(reversed(seats))) for key in keys} == homes
        fewer = {key: one.choose(key, seats[:-1]) for key in keys}
        moved = [key for key in keys if fewer[key] is not homes[key]]
        assert {homes[key] for key in moved} == {seats[-1]}
        assert len({home.member.id for home in homes.values()}) == 5

    def test_a_bound_key_stays_until_its_home_is_busy(self) -> None:
        seats = [seat("a"), seat("b"), seat("c")]
        table = self.make()
        table.bind("key", "b")
        seats[1].in_flight = 3
        assert table.choose("key", seats) is seats[1]
        seats[1].in_flight = 4
        assert table.choose("key", seats) in (seats[0], seats[2])
        seats[0].in_flight = seats[2].in_flight = 5
        assert table.choose("key", seats) is seats[1]

    def test_the_table_is_bounded(self) -> None:
        table = self.make(affinity_keys_max=3, affinity_replicas_max=2)
        for index in range(10):
            table.bind(f"key-{index}", "a")
        assert len(table) == 3
        for name in ("a", "b", "c"):
            table.bind("key-9", name)
        assert table._replicas("key-9") == ["c", "b"]
        table.forget("c")
        assert table._replicas("key-9") == ["b"]
        table.forget("b")
        assert len(table) == 2

    def test_bindings_age(self) -> None:
        table = self.make(affinity_ttl_s=0.0)
        table.bind("key", "a")
        assert table._replicas("key") == []


class TestFreshestPointer:
    def roster(self) -> Roster:
        return Roster(config=CONFIG, env=Env())

    def see(self, roster: Roster, member: Seat, latest: Ref, seq: int) -> None:
        roster.take_report(member, report(Ref("run-a", 1), latest=latest, seq=seq))

    def test_it_grows_within_a_run_and_follows_a_new_run(self) -> None:
        roster, a, b = self.roster(), seat("a"), seat("b")
        self.see(roster, a, Ref("run-a", 5), 2)
        self.see(roster, b, Ref("run-a", 3), 2)
        assert roster.latest == Ref("run-a", 5)
        self.see(roster, a, Ref("run-b", 1), 3)
        assert roster.latest == Ref("run-b", 1)
        # A replica that is still behind does not take the pool back to the old run.
        self.see(roster, b, Ref("run-a", 6), 3)
        assert roster.latest == Ref("run-b", 1)
        # One that moved from the new run to a third does.
        self.see(roster, a, Ref("run-a", 9), 4)
        assert roster.latest == Ref("run-a", 9)


class TestWire:
    def test_a_report_survives_and_unknown_fields_are_ignored(self) -> None:
        sent = report(Ref("run-a", 3), lag=2, gate_closed_s=0.5)
        wire = sent.to_wire() | {"protocol": 1, "later": {"a": 1}}
        assert parse_report(orjson.dumps(wire)) == sent

    @pytest.mark.parametrize(
        "change",
        [
            {"state": "HAPPY"},
            {"seq": "x"},
            {"served": {"run_id": "../x", "version": 1}},
            {"served": {"run_id": "a", "version": -1}},
            {"served": 5},
            {"protocol": None},
        ],
    )
    def test_malformed_reports_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(CorruptData):
            parse_report(orjson.dumps(report(None).to_wire() | change))
        for data in (b"", b"[]", b"{}", b"null"):
            with pytest.raises(CorruptData):
                parse_report(data)

    def test_a_newer_protocol_is_told_apart(self) -> None:
        with pytest.raises(Unsupported):
            parse_report(orjson.dumps(report(None).to_wire() | {"protocol": 2}))

    def request(self, body: Any, **headers: str) -> Request:
        noted = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        return Request("POST", b"/generate", [], noted, orjson.dumps(body))

    def test_a_demand_passes_untouched_unless_it_must_change(self) -> None:
        request = self.request({"weight_version": {"min_version": "3"}, "text": "a"})
        demand = Demand(request)
        bounded = demand.bound_lag(Ref("run-a", 9))
        assert demand.message(bounded, 1.0) == (b"", request.body)
        headers, body = Demand(self.request({}, x_stitch_min_version="4")).message(
            Constraint(min_version=4), 1.0
        )
        assert headers == b"" or body == b"{}"

    def test_lag_and_wait_are_written_into_the_field(self) -> None:
        request = self.request(
            {"weight_version": {"max_lag": 2, "max_wait_ms": 5000}, "n": 2},
            x_stitch_min_version="4",
        )
        demand = Demand(request)
        bounded = demand.bound_lag(Ref("run-a", 9))
        assert bounded == Constraint(min_version=7, run_id="run-a", max_lag=2, max_wait_ms=5000)
        headers, body = demand.message(bounded, 1.25)
        assert headers == b""
        assert orjson.loads(body) == {
            "weight_version": {
                "min_version": 7, "run_id": "run-a", "max_lag": 2, "max_wait_ms": 1250,
            },
            "n": 2,
        }  # fmt: skip

    def test_a_pin_or_another_run_is_not_bound(self) -> None:
        latest = Ref("run-a", 9)
        for field in ({"max_lag": 1, "exact_version": 2}, {"max_lag": 1, "run_id": "run-b"}):
            demand = Demand(self.request({"weight_version": field}))
            assert demand.bound_lag(latest) is demand.constraint

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (b"x-stitch-version-admitted: 7\r\nx-stitch-run-id: run-a\r\n", Ref("run-a", 7)),
            (b"X: y\r\n", None),
            (b"x-stitch-version-admitted: seven\r\nx-stitch-run-id: run-a\r\n", None),
            (b"x-stitch-version-admitted: 7\r\nx-stitch-run-id: ../a\r\n", None),
            (b"x-stitch-version-admitted: 9999999999999999\r\nx-stitch-run-id: a\r\n", None),
        ],
    )
    def test_a_response_tells_what_is_served(self, lines: bytes, expected: Ref | None) -> None:
        assert admitted_ref(b"HTTP/1.1 200 OK\r\n" + lines) == expected


def test_what_a_response_tells_only_moves_forward() -> None:
    roster = Roster(config=CONFIG, env=Env())
    member = seat("a", 3)
    for told, known in ((Ref("run-a", 2), 3), (Ref("run-b", 9), 3), (Ref("run-a", 5), 5)):
        roster.learn(member, told)
        assert member.report is not None
        assert member.report.served == Ref("run-a", known)
    unknown = seat("b", None)
    roster.learn(unknown, Ref("run-a", 1))
    assert unknown.report is not None
    assert unknown.report.served is None
