"""From a failure to response bytes: the error object, its status, and its retry hints.

Retry hints: `retry_after_ms` in the body and, rounded up to whole seconds, `Retry-After`.
A 409 repeats four keys at the top level, where clients of the first system read them.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from stitch.errors import (
    Closed,
    EngineUnavailable,
    Forbidden,
    InvalidInput,
    NeverSatisfiable,
    NotReady,
    Overloaded,
    StitchError,
    Unavailable,
)

__all__ = [
    "BodyTooLarge",
    "ExpectationFailed",
    "HeadTooLarge",
    "MethodNotAllowed",
    "RequestTimeout",
    "RouteBlocked",
    "TargetTooLong",
    "error_body",
    "error_object",
    "internal_error_body",
    "retry_after_ms",
    "retry_headers",
]


class RouteBlocked(Forbidden):
    """The engine's adapter does not list this route for clients."""

    code = "RouteBlocked"


class BodyTooLarge(InvalidInput):
    """The request body passes the limit."""

    code = "BodyTooLarge"
    http_status = 413


class HeadTooLarge(InvalidInput):
    """The request's header block passes the limit."""

    code = "HeadTooLarge"
    http_status = 431


class TargetTooLong(InvalidInput):
    """The request target passes the limit."""

    code = "TargetTooLong"
    http_status = 414


class RequestTimeout(InvalidInput):
    """The request did not arrive in time."""

    code = "RequestTimeout"
    retryable = True
    http_status = 408


class ExpectationFailed(InvalidInput):
    """An `Expect` header other than 100-continue."""

    code = "ExpectationFailed"
    http_status = 417


class MethodNotAllowed(InvalidInput):
    """The route exists but not with this method."""

    code = "MethodNotAllowed"
    http_status = 405


# How soon a retry makes sense, by class; the first match in order decides.
_RETRY_AFTER_MS: Final[tuple[tuple[type[StitchError], int], ...]] = (
    (NotReady, 500),
    (Closed, 250),
    (EngineUnavailable, 1000),
    (Overloaded, 1000),
    (Unavailable, 1000),
)
_RESERVED: Final = frozenset({"type", "code", "message", "param", "retryable", "retry_after_ms"})


def retry_after_ms(error: StitchError) -> int | None:
    """The wait to advise, in milliseconds; None where a retry does not help."""
    if not error.retryable:
        return None
    stated = error.fields.get("retry_after_ms")
    if isinstance(stated, int):
        return stated
    for kind, wait_ms in _RETRY_AFTER_MS:
        if isinstance(error, kind):
            return wait_ms
    return 1000


def retry_headers(error: StitchError) -> bytes:
    """The `Retry-After` header line, or nothing."""
    wait_ms = retry_after_ms(error)
    return b"" if wait_ms is None else b"Retry-After: %d\r\n" % max(1, -(-wait_ms // 1000))


def error_object(error: StitchError) -> dict[str, Any]:
    """The `error` object: the fixed keys, then the named facts that JSON can carry."""
    body = error.to_wire()
    body["retry_after_ms"] = retry_after_ms(error)
    for name, value in error.fields.items():
        if name not in _RESERVED and isinstance(value, str | int | float | bool | None | dict):
            body[name] = value
    return body


def error_body(error: StitchError, **extra: Any) -> bytes:
    """The whole JSON body of an error response. `extra` joins the error object."""
    nested = error_object(error)
    nested.update(extra)
    body: dict[str, Any] = {"error": nested}
    if isinstance(error, NotReady | NeverSatisfiable):
        nested.setdefault("run_id", None)
        nested.setdefault("target_version", None)
        nested.setdefault("applied", None)
        nested.setdefault("reason", None)
        body["type"] = NotReady.code
        body["target_version"] = nested["target_version"]
        body["applied"] = nested["applied"]
        body["message"] = error.message
    return orjson.dumps(body, default=str)


def internal_error_body() -> bytes:
    """The body of a 500: a bug of ours, logged with its traceback and not described here."""
    return orjson.dumps(
        {
            "error": {
                "type": "InternalError",
                "code": "InternalError",
                "message": "internal error; the server's log has the cause",
                "param": None,
                "retryable": False,
                "retry_after_ms": None,
            }
        }
    )
