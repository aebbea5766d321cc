"""The error tree: stable codes, one HTTP status each, retry by class alone."""

from __future__ import annotations

import pytest

from stitch import errors
from stitch.errors import StitchError

# (class, code, retryable, HTTP status): frozen; clients read these.
TABLE = [
    ("InvalidInput", "InvalidInput", False, 400),
    ("Forbidden", "Forbidden", False, 403),
    ("Unsupported", "Unsupported", False, 501),
    ("NotReady", "WeightVersionNotReady", True, 409),
    ("NeverSatisfiable", "NeverSatisfiable", False, 409),
    ("Overloaded", "Overloaded", True, 429),
    ("Conflict", "Conflict", False, 409),
    ("Unavailable", "Unavailable", True, 503),
    ("NotVisibleYet", "NotVisibleYet", True, 503),
    ("Closed", "Closed", True, 503),
    ("EngineUnavailable", "EngineUnavailable", True, 503),
    ("CorruptData", "CorruptData", False, 500),
    ("ActivationFailed", "ActivationFailed", True, 503),
    ("ReplicaLost", "ReplicaLost", False, 503),
]


@pytest.mark.parametrize(("name", "code", "retryable", "status"), TABLE)
def test_the_tree_is_frozen(name: str, code: str, retryable: bool, status: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, StitchError)
    assert (kind.code, kind.retryable, kind.http_status) == (code, retryable, status)


def test_the_table_is_complete() -> None:
    assert sorted([row[0] for row in TABLE] + ["StitchError"]) == sorted(errors.__all__)


def test_fields_and_wire_form() -> None:
    error = errors.InvalidInput("min_version must be an integer", param="min_version", found="x")
    assert error.fields == {"param": "min_version", "found": "x"}
    assert error.to_wire() == {
        "type": "InvalidInput",
        "code": "InvalidInput",
        "message": "min_version must be an integer",
        "param": "min_version",
        "retryable": False,
    }
