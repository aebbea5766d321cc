"""The constraint in body and headers, and the error object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stitch.errors import (
    Closed,
    EngineUnavailable,
    InvalidInput,
    NeverSatisfiable,
    NotReady,
    Overloaded,
)
from stitch.http.errors import RouteBlocked, error_body, retry_after_ms, retry_headers
from stitch.http.wire import constraint_to_wire, parse_constraint, parse_json_object
from stitch.types import UNCONSTRAINED, Constraint

TOP = 2**53 - 1
MIN, EXACT = b"x-stitch-min-version", b"x-stitch-exact-version"


@pytest.mark.parametrize(
    ("value", "headers", "expected"),
    [
        (None, {}, UNCONSTRAINED),
        ({}, {}, UNCONSTRAINED),
        ({"min_version": None, "exact_version": None}, {}, UNCONSTRAINED),
        ({"min_version": 0}, {}, Constraint(min_version=0)),
        ({"min_version": "7"}, {}, Constraint(min_version=7)),
        ({"min_version": "007"}, {}, Constraint(min_version=7)),
        ({"exact_version": TOP}, {}, Constraint(exact_version=TOP)),
        ({"exact_version": str(TOP)}, {}, Constraint(exact_version=TOP)),
        (
            {"min_version": 1, "exact_version": 2},
            {},
            Constraint(min_version=1, exact_version=2),
        ),
        ({"run_id": "run-a"}, {}, Constraint(run_id="run-a")),
        ({"max_lag": "0", "max_wait_ms": 10}, {}, Constraint(max_lag=0, max_wait_ms=10)),
        (None, {MIN: b"3"}, Constraint(min_version=3)),
        (None, {EXACT: b"3"}, Constraint(exact_version=3)),
        ({"min_version": None}, {MIN: b"3"}, Constraint(min_version=3)),
        ({"min_version": 3}, {MIN: b"3"}, Constraint(min_version=3)),
        ({"max_lag": 1}, {EXACT: b"3"}, Constraint(max_lag=1, exact_version=3)),
    ],
)
def test_what_is_understood(value: Any, headers: dict[bytes, bytes], expected: Constraint) -> None:
    assert parse_constraint(value, headers) == expected


WRONG = [
    True,
    False,
    -1,
    "-1",
    "+1",
    " 1",
    "1 ",
    "",
    "x",
    "1.0",
    1.0,
    2**53,
    str(2**53),
    [],
    {},
    "١",
]


@pytest.mark.parametrize("name", ["min_version", "exact_version", "max_lag", "max_wait_ms"])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_wrong_numbers_name_their_field(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_constraint({name: wrong}, {})
    assert caught.value.fields["param"] == f"weight_version.{name}"


@pytest.mark.parametrize(
    ("value", "headers", "param"),
    [
        (5, {}, "weight_version"),
        ("7", {}, "weight_version"),
        ([], {}, "weight_version"),
        (False, {}, "weight_version"),
        ({"minimum": 1}, {}, "weight_version.minimum"),
        ({"min_version": 1, "": 1}, {}, "weight_version."),
        ({"run_id": 5}, {}, "weight_version.run_id"),
        ({"run_id": "../up"}, {}, "weight_version.run_id"),
        ({"run_id": "a" * 65}, {}, "weight_version.run_id"),
        (None, {MIN: b""}, "x-stitch-min-version"),
        (None, {MIN: b"1.5"}, "x-stitch-min-version"),
        (None, {EXACT: b"1, 2"}, "x-stitch-exact-version"),
        ({"min_version": 4}, {MIN: b"3"}, "weight_version.min_version"),
        ({"exact_version": 4}, {EXACT: b"3"}, "weight_version.exact_version"),
    ],
)
def test_wrong_demands_name_their_field(value: Any, headers: Any, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_constraint(value, headers)
    assert caught.value.fields["param"] == param
    assert json.loads(error_body(caught.value))["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"{", b'{"a":1}x', b"\xff", b"null", b'"a"'])
def test_a_body_must_be_an_object(body: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_json_object(body)
    assert caught.value.fields["param"] == "body"


def test_a_constraint_survives_the_wire() -> None:
    constraint = Constraint(min_version=1, run_id="r", max_lag=2, max_wait_ms=3)
    assert parse_constraint(constraint_to_wire(constraint), {}) == constraint
    assert constraint_to_wire(UNCONSTRAINED) == {}


def test_a_409_carries_the_keys_of_both_generations() -> None:
    error = NotReady("behind", run_id="r", target_version=5, applied=None, reason="behind")
    body = json.loads(error_body(error))
    assert body == {
        "type": "WeightVersionNotReady",
        "target_version": 5,
        "applied": None,
        "message": "behind",
        "error": {
            "type": "WeightVersionNotReady",
            "code": "WeightVersionNotReady",
            "message": "behind",
            "param": None,
            "retryable": True,
            "retry_after_ms": 500,
            "run_id": "r",
            "target_version": 5,
            "applied": None,
            "reason": "behind",
        },
    }


def test_never_satisfiable_is_a_409_without_a_retry() -> None:
    error = NeverSatisfiable("superseded", target_version=1, applied=9, reason="passed")
    body = json.loads(error_body(error))
    assert body["type"] == "WeightVersionNotReady"
    assert body["error"]["code"] == "NeverSatisfiable"
    assert body["error"]["retryable"] is False
    assert retry_headers(error) == b""


@pytest.mark.parametrize(
    ("error", "wait_ms", "header"),
    [
        (Closed("x"), 250, b"Retry-After: 1\r\n"),
        (EngineUnavailable("x"), 1000, b"Retry-After: 1\r\n"),
        (Overloaded("x", retry_after_ms=2500), 2500, b"Retry-After: 3\r\n"),
        (InvalidInput("x"), None, b""),
        (RouteBlocked("x"), None, b""),
    ],
)
def test_retry_hints(error: Any, wait_ms: int | None, header: bytes) -> None:
    assert retry_after_ms(error) == wait_ms
    assert retry_headers(error) == header


def test_only_plain_facts_reach_the_body() -> None:
    body = json.loads(error_body(Closed("x", path=object(), waited_s=1.5, type="lie")))
    assert body["error"]["waited_s"] == 1.5
    assert body["error"]["type"] == "Closed"
    assert "path" not in body["error"]
