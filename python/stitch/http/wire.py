"""The request's version constraint, from the body field and the headers.

`weight_version: {min_version, exact_version, run_id, max_lag, max_wait_ms}` or the headers
`x-stitch-min-version` and `x-stitch-exact-version`. Numbers are integers or decimal strings;
null means absent; anything else is InvalidInput whose `param` names the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from stitch.errors import InvalidInput
from stitch.types import UNCONSTRAINED, VERSION_MAX, Constraint

__all__ = [
    "FIELD",
    "HEADER_EXACT",
    "HEADER_MIN",
    "constraint_to_wire",
    "encode_json_object",
    "parse_constraint",
    "parse_json_object",
]

FIELD: Final = "weight_version"
HEADER_MIN: Final = b"x-stitch-min-version"
HEADER_EXACT: Final = b"x-stitch-exact-version"

_NUMBERS: Final = ("min_version", "exact_version", "max_lag", "max_wait_ms")
_KEYS: Final = frozenset({*_NUMBERS, "run_id"})
_HEADERS: Final = ((HEADER_MIN, "min_version"), (HEADER_EXACT, "exact_version"))
_DECIMAL: Final = re.compile(r"[0-9]{1,16}")
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """A request body as a JSON object. Raises: InvalidInput."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request body is not valid JSON: {error}", param="body") from None
    if not isinstance(parsed, dict):
        raise InvalidInput("the request body must be a JSON object", param="body")
    return parsed


def encode_json_object(body: dict[str, Any]) -> bytes:
    """The body as sent on. Raises: InvalidInput if it is nested deeper than can be written."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise InvalidInput("the request body is nested too deeply", param="body") from None


def parse_constraint(value: object, headers: Mapping[bytes, bytes]) -> Constraint:
    """The constraint of one request.

    Args:
        value: the body's `weight_version`, None where absent or null.
        headers: lower-case name to value; only the two version headers are read.
    Raises: InvalidInput naming the field, also where header and body differ.
    """
    if value is None and HEADER_MIN not in headers and HEADER_EXACT not in headers:
        return UNCONSTRAINED
    fields: dict[str, Any] = {}
    if value is not None:
        fields = _body_fields(value)
    for header, name in _HEADERS:
        raw = headers.get(header)
        if raw is None:
            continue
        number = _number(raw.decode("latin-1"), header.decode())
        stated = fields.get(name)
        if stated is not None and stated != number:
            raise InvalidInput(
                f"header {header.decode()} says {number} and body field {FIELD}.{name} says "
                f"{stated}; send one of them",
                param=f"{FIELD}.{name}",
            )
        fields[name] = number
    return Constraint(**fields) if fields else UNCONSTRAINED


def constraint_to_wire(constraint: Constraint) -> dict[str, int | str]:
    """The body field for `constraint`; absent parts are left out."""
    found: dict[str, int | str] = {}
    for name in (*_NUMBERS, "run_id"):
        value = getattr(constraint, name)
        if value is not None:
            found[name] = value
    return found


def _body_fields(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(
            f"{FIELD} must be an object with any of {', '.join(sorted(_KEYS))}", param=FIELD
        )
    fields: dict[str, Any] = {}
    for name, item in value.items():
        if name not in _KEYS:
            raise InvalidInput(
                f"{FIELD}.{name} is not a known field; known: {', '.join(sorted(_KEYS))}",
                param=f"{FIELD}.{name}",
            )
        if item is None:
            continue
        fields[name] = _run_id(item) if name == "run_id" else _number(item, f"{FIELD}.{name}")
    return fields


def _number(item: object, param: str) -> int:
    number: int | None = None
    if isinstance(item, int) and not isinstance(item, bool):
        number = item
    elif isinstance(item, str) and _DECIMAL.fullmatch(item):
        number = int(item)
    if number is None or not 0 <= number <= VERSION_MAX:
        raise InvalidInput(
            f"{param} must be an integer or decimal string from 0 to 2**53 - 1, found "
            f"{repr(item)[:60]}",
            param=param,
        )
    return number


def _run_id(item: object) -> str:
    if not isinstance(item, str) or not _RUN_ID.fullmatch(item):
        raise InvalidInput(
            f"{FIELD}.run_id must match {_RUN_ID.pattern}, found {repr(item)[:60]}",
            param=f"{FIELD}.run_id",
        )
    return item
