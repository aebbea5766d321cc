"""Failed responses as errors, and how long to wait before the next try. Pure.

Retry decisions read the error's class, code and `retryable` flag as sent, never its message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson

from stitch import errors
from stitch.client.completion import Completion
from stitch.errors import StitchError, Unavailable

__all__ = ["Interrupted", "error_of_response", "is_retryable", "retry_wait_s", "wire_error"]

_BY_CODE: Final = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StitchError)
}
_BY_STATUS: Final[dict[int, type[StitchError]]] = {
    400: errors.InvalidInput,
    403: errors.Forbidden,
    408: errors.Unavailable,
    409: errors.NotReady,
    422: errors.InvalidInput,
    429: errors.Overloaded,
    501: errors.Unsupported,
    502: errors.EngineUnavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}


class Interrupted(Unavailable):
    """A generation ended before it was complete. `partial` has what arrived, if anything.

    Not retried by the client: the partial output may be worth keeping, and a second try samples
    afresh. `cause_code` in `fields` names the server's reason where it gave one.
    """

    code: ClassVar[str] = "Interrupted"

    def __init__(self, message: str, /, *, partial: Completion | None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.partial = partial


def wire_error(status: int, body: Any, *, retry_after: str | None = None) -> StitchError:
    """The error that a response stands for.

    Args:
        body: decoded JSON, or None. Bodies of other servers give an error by status alone.
        retry_after: the `Retry-After` header in seconds, if any.
    """
    nested = body.get("error") if isinstance(body, dict) else None
    facts: dict[str, Any] = dict(nested) if isinstance(nested, dict) else {}
    code = facts.pop("code", None) or facts.pop("type", None)
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, StitchError)
    message = str(facts.pop("message", "") or f"the server answered {status}")
    fields: dict[str, Any] = {**facts, "status": status, "wire_code": code}
    fields.setdefault("retryable", kind.retryable)
    if fields.get("retry_after_ms") is None and retry_after is not None:
        fields["retry_after_ms"] = _retry_after_ms(retry_after)
    return kind(message, **fields)


def error_of_response(status: int, raw: bytes, headers: Mapping[str, str]) -> StitchError:
    """`wire_error` from undecoded bytes."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    return wire_error(status, body, retry_after=headers.get("Retry-After"))


def is_retryable(error: StitchError) -> bool:
    """Whether another try may succeed: the server's word, else the class's."""
    if isinstance(error, Interrupted):
        return False
    return bool(error.fields.get("retryable", error.retryable))


def retry_wait_s(
    error: StitchError, tries: int, *, base_s: float, max_s: float, spread: float
) -> float:
    """Seconds before try number `tries + 1`.

    At least what the server asked for, else exponential from `base_s` up to `max_s`; `spread`,
    drawn from [0, 1), stretches it by up to half, so that clients do not come back together.
    """
    backoff = min(max_s, base_s * 2.0 ** min(tries - 1, 16))
    asked_ms = error.fields.get("retry_after_ms")
    if isinstance(asked_ms, int | float) and not isinstance(asked_ms, bool) and asked_ms >= 0:
        return float(asked_ms) / 1000.0 * (1.0 + 0.5 * spread)
    return backoff * (1.0 + 0.5 * spread)


def _retry_after_ms(text: str) -> int | None:
    try:
        seconds = float(text)
    except ValueError:
        return None  # an HTTP date: the backoff decides
    return int(seconds * 1000) if 0 <= seconds < 86400 else None
