"""Every failure Stitch raises: one class, one stable code, one party that repairs it.

Retry logic reads `retryable` and `code`, never message text. Bugs are assertions,
never a `StitchError`. The tree and its HTTP mapping are documented in
`docs/http-contract.md`.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ActivationFailed",
    "Closed",
    "Conflict",
    "CorruptData",
    "EngineUnavailable",
    "Forbidden",
    "InvalidInput",
    "NeverSatisfiable",
    "NotReady",
    "NotVisibleYet",
    "Overloaded",
    "ReplicaLost",
    "StitchError",
    "Unavailable",
    "Unsupported",
]


class StitchError(Exception):
    """Base of all Stitch failures.

    Args:
        message: one sentence: what, where, and what to do.
        fields: named facts (`file=`, `tensor=`, `found=`, `expected=` …), kept in `fields`.
    """

    code: ClassVar[str] = "StitchError"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def to_wire(self) -> dict[str, Any]:
        """The `error` object of the HTTP contract, without transport-specific keys."""
        return {
            "type": self.code,
            "code": self.code,
            "message": self.message,
            "param": self.fields.get("param"),
            "retryable": self.retryable,
        }


class InvalidInput(StitchError):
    """The caller's input is malformed; the caller repairs it."""

    code = "InvalidInput"
    http_status = 400


class Forbidden(StitchError):
    """The route or scope is closed to this caller; the operator decides."""

    code = "Forbidden"
    http_status = 403


class Unsupported(StitchError):
    """Unknown dtype, layout, codec, or format major; the operator upgrades or reconfigures."""

    code = "Unsupported"
    http_status = 501


class NotReady(StitchError):
    """The served version misses the constraint; another replica or a later try may meet it."""

    code = "WeightVersionNotReady"
    retryable = True
    http_status = 409


class NeverSatisfiable(StitchError):
    """No replica can ever meet the constraint: proven deleted, or run superseded."""

    code = "NeverSatisfiable"
    http_status = 409


class Overloaded(StitchError):
    """A queue or rate limit is full; the client tries later."""

    code = "Overloaded"
    retryable = True
    http_status = 429


class Conflict(StitchError):
    """The pointer moved, a name is taken, or a rewind was asked for; re-read, then decide."""

    code = "Conflict"
    retryable = False
    http_status = 409


class Unavailable(StitchError):
    """Store or engine unreachable, or a deadline passed; the next pass tries again."""

    code = "Unavailable"
    retryable = True
    http_status = 503


class NotVisibleYet(Unavailable):
    """Named by the pointer or a chain but not readable yet; may still become visible."""

    code = "NotVisibleYet"


class Closed(Unavailable):
    """The admission gate stayed closed past the caller's wait."""

    code = "Closed"


class EngineUnavailable(Unavailable):
    """The engine is gone, hung, or refused the connection."""

    code = "EngineUnavailable"


class CorruptData(StitchError):
    """Bad checksum, broken lineage, truncation; old weights serve on, a new publication heals."""

    code = "CorruptData"


class ActivationFailed(StitchError):
    """Activation was undone and the old weights verified; the reconciler tries again."""

    code = "ActivationFailed"
    retryable = True
    http_status = 503


class ReplicaLost(StitchError):
    """Neither undo nor re-activation verifies; the replica must be replaced."""

    code = "ReplicaLost"
    http_status = 503
