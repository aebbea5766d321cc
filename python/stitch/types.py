"""Vocabulary and pure rules: refs, pointers, constraints, spans. No I/O, no clock, no logging."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stitch.errors import Conflict, CorruptData, InvalidInput

__all__ = [
    "UNCONSTRAINED",
    "VERSION_MAX",
    "ActivationMode",
    "Constraint",
    "GateState",
    "Kind",
    "Label",
    "Phase",
    "Prefix",
    "Ref",
    "ReplicaState",
    "Span",
    "Unmet",
    "at_least",
    "check_constraint",
    "decide_pointer_move",
    "exactly",
    "lag",
    "parse_pointer",
    "parse_version_name",
    "validate_spans",
    "version_name",
]

VERSION_MAX: Final = 2**53 - 1
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION_NAME = re.compile(r"weight_v([0-9]{6,16})")


class Kind(StrEnum):
    """What a publication stores."""

    ANCHOR = "anchor"
    DELTA = "delta"


class ActivationMode(StrEnum):
    """How an activation treats requests in flight (docs/architecture.md, Activation)."""

    RECOMPUTE = "recompute"
    IN_PLACE = "in_place"
    QUIESCE = "quiesce"


class ReplicaState(StrEnum):
    """The one state of a replica."""

    BOOTING = "BOOTING"
    CATCHING_UP = "CATCHING_UP"
    READY = "READY"
    UNKNOWN = "UNKNOWN"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


class Phase(StrEnum):
    """What the reconciler is doing now."""

    IDLE = "IDLE"
    FETCHING = "FETCHING"
    STAGING = "STAGING"
    ACTIVATING = "ACTIVATING"


class GateState(StrEnum):
    """The admission gate's state."""

    OPEN = "OPEN"
    DRAINING_PINS = "DRAINING_PINS"
    CLOSED = "CLOSED"


class Prefix(StrEnum):
    """Which weights made the key/value state that a span's tokens attended to."""

    EXACT = "exact"
    CARRIED = "carried"


@dataclass(frozen=True, slots=True)
class Ref:
    """One policy version: a run and a number. Numbers compare only within a run."""

    run_id: str
    version: int

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise InvalidInput(
                f"run id {self.run_id!r} must match [A-Za-z0-9][A-Za-z0-9._-]{{0,63}}",
                param="run_id",
            )
        if isinstance(self.version, bool) or not 0 <= self.version <= VERSION_MAX:
            raise InvalidInput(
                f"version {self.version!r} must be an integer from 0 to 2**53 - 1", param="version"
            )

    def __str__(self) -> str:
        return f"{self.run_id}/{version_name(self.version)}"

    def to_wire(self) -> dict[str, str | int]:
        """The ref as every JSON document of ours spells it."""
        return {"run_id": self.run_id, "version": self.version}


def version_name(version: int) -> str:
    """`weight_v` and the number, zero-padded to at least six digits. Never sort these by name."""
    return f"weight_v{version:06d}"


def parse_version_name(name: str) -> int:
    """The number in a `weight_vNNNNNN` directory name.

    Raises: CorruptData unless `name` is exactly what `version_name` writes.
    """
    match = _VERSION_NAME.fullmatch(name)
    if match is None or version_name(int(match[1])) != name or int(match[1]) > VERSION_MAX:
        raise CorruptData(f"{name!r} is not a version directory name", found=name)
    return int(match[1])


def parse_pointer(text: str | bytes) -> Ref | None:
    """Parse the pointer's text. Surrounding white space is dropped.

    Returns: the ref, or None for an empty pointer (no run claimed).
    Raises: CorruptData for anything else, NUL bytes and half-written text included. A bare
        number or bare `weight_vNNNNNN` has no run and is refused here; readers that must
        serve the old form call `parse_version_name` themselves.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptData("the pointer is not UTF-8 text", found=text[:80]) from error
    stripped = text.strip(" \t\r\n")
    if not stripped:
        return None
    run_id, slash, name = stripped.rpartition("/")
    if not slash or not _RUN_ID.fullmatch(run_id):
        raise CorruptData(f"pointer text {stripped[:100]!r} is not RUN/weight_vNNNNNN")
    return Ref(run_id, parse_version_name(name))


def decide_pointer_move(current: Ref | None, proposed: Ref) -> None:
    """Permit or refuse a pointer move. Within a run the pointer only grows.

    Raises: Conflict on a rewind (equal or lower version of the same run).
    """
    if current is None or current.run_id != proposed.run_id:
        return
    if proposed.version <= current.version:
        raise Conflict(
            f"the pointer is at {current}; moving it to {proposed} would be a rewind",
            found=str(current),
            proposed=str(proposed),
        )


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request demands of the served version. None means absent.

    With both `exact_version` and `min_version`, the exact one decides. `max_lag` is turned
    into a minimum by whoever knows the pointer and is checked again at the replica.
    """

    min_version: int | None = None
    exact_version: int | None = None
    run_id: str | None = None
    max_lag: int | None = None
    max_wait_ms: int | None = None

    @property
    def target_version(self) -> int | None:
        """The exact version if pinned, else the minimum, else None."""
        return self.exact_version if self.exact_version is not None else self.min_version

    @property
    def is_pin(self) -> bool:
        """Whether this is an exact pin, which holds activation back while it runs."""
        return self.exact_version is not None


UNCONSTRAINED: Final = Constraint()


def at_least(version: int, *, run_id: str | None = None) -> Constraint:
    """A constraint met by `version` or any later version of the run. Raises: InvalidInput."""
    return Constraint(min_version=_count(version, "min_version"), run_id=run_id)


def exactly(version: int, *, run_id: str | None = None) -> Constraint:
    """A constraint met by `version` alone. Raises: InvalidInput."""
    return Constraint(exact_version=_count(version, "exact_version"), run_id=run_id)


def lag(versions: int, *, run_id: str | None = None) -> Constraint:
    """A constraint met by the newest version or one at most `versions` behind it.

    Raises: InvalidInput.
    """
    return Constraint(max_lag=_count(versions, "max_lag"), run_id=run_id)


def _count(value: int, param: str) -> int:
    """`value`, if it is one that a server would take. `Constraint` itself stays cheap to make."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= VERSION_MAX:
        raise InvalidInput(f"{param} {value!r} must be an integer from 0 to 2**53 - 1", param=param)
    return value


class Unmet(StrEnum):
    """Why a constraint is not met here: the `reason` of a 409."""

    BEHIND = "behind"
    PASSED = "passed"
    OTHER_RUN = "other_run"
    CLOSING = "closing"


def check_constraint(
    constraint: Constraint, served: Ref | None, *, latest: Ref | None = None
) -> Unmet | None:
    """Whether `served` meets `constraint`. None means met.

    A replica that knows no version (`served` is None) meets nothing, not even no constraint.
    `latest` is the freshest pointer known, used only for `max_lag`.
    """
    if served is None:
        return Unmet.BEHIND
    if constraint.run_id is not None and constraint.run_id != served.run_id:
        return Unmet.OTHER_RUN
    if constraint.exact_version is not None:
        if served.version == constraint.exact_version:
            return None
        return Unmet.BEHIND if served.version < constraint.exact_version else Unmet.PASSED
    if constraint.min_version is not None and served.version < constraint.min_version:
        return Unmet.BEHIND
    if constraint.max_lag is None or latest is None or latest.run_id != served.run_id:
        return None
    return Unmet.BEHIND if served.version < latest.version - constraint.max_lag else None


@dataclass(frozen=True, slots=True)
class Label:
    """What an engine stamps on tokens: the ref, and the activation epoch that keys its caches."""

    ref: Ref
    epoch: int

    def to_wire(self) -> dict[str, str | int]:
        """The label as ranks receive and report it."""
        return {**self.ref.to_wire(), "epoch": self.epoch}


@dataclass(frozen=True, slots=True)
class Span:
    """Completion tokens `[start, end)` sampled from exactly the weights of `ref`."""

    ref: Ref
    start: int
    end: int
    prefix: Prefix = Prefix.EXACT

    def to_wire(self) -> dict[str, str | int]:
        """The span as the HTTP contract spells it."""
        return {
            **self.ref.to_wire(),
            "start": self.start,
            "end": self.end,
            "prefix": self.prefix.value,
        }


def validate_spans(spans: Sequence[Span], token_count: int) -> None:
    """Check that spans tile `[0, token_count)` in order.

    Raises: CorruptData naming the first gap or overlap.
    """
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            raise CorruptData(f"span {span.to_wire()} does not continue at token {at}")
        at = span.end
    if at != token_count:
        raise CorruptData(f"spans cover {at} of {token_count} completion tokens")
