"""What the gateway reads of replicas' events, and of requests' constraints."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from stitch.errors import CorruptData, InvalidInput, Unsupported
from stitch.http import HTTP_PROTOCOL
from stitch.http.message import Request
from stitch.http.wire import (
    FIELD,
    HEADER_EXACT,
    HEADER_MIN,
    constraint_to_wire,
    encode_json_object,
    parse_constraint,
    parse_json_object,
)
from stitch.reconciler.base import ReplicaReport
from stitch.types import Constraint, GateState, Phase, Ref, ReplicaState

__all__ = ["AFFINITY_HEADERS", "Demand", "admitted_ref", "affinity_key", "parse_report"]

AFFINITY_HEADERS: Final = (b"x-stitch-affinity", b"modal-session-id")
_AFFINITY_BYTES_MAX: Final = 512
_ADMITTED: Final = re.compile(
    rb"\r\nx-stitch-version-admitted: ([0-9]{1,16})\r\nx-stitch-run-id: ([^\r\n]{1,64})\r\n"
)
_MARK: Final = b'"weight_version"'


def parse_report(data: bytes) -> ReplicaReport:
    """One `/events` record. Unknown fields are ignored.

    Raises: Unsupported for a newer protocol; CorruptData for anything malformed.
    """
    try:
        wire = orjson.loads(data)
        protocol = wire.get("protocol", HTTP_PROTOCOL)
        if protocol > HTTP_PROTOCOL:
            raise Unsupported(
                f"the replica speaks protocol {protocol}, this gateway up to {HTTP_PROTOCOL}"
            )
        return ReplicaReport(
            replica_id=str(wire["replica_id"]),
            incarnation=str(wire["incarnation"]),
            seq=int(wire["seq"]),
            state=ReplicaState(wire["state"]),
            phase=Phase(wire["phase"]),
            gate=GateState(wire["gate"]),
            served=_ref(wire["served"]),
            latest=_ref(wire["latest"]),
            lag=wire["lag"],
            running=int(wire["running"]),
            waiting=int(wire["waiting"]),
            reason=wire.get("reason"),
            gate_closed_s=wire.get("gate_closed_s"),
            swap_s=wire.get("swap_s"),
            recompute_s=wire.get("recompute_s"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, InvalidInput) as error:
        raise CorruptData(f"malformed replica report: {error}") from error


def _ref(wire: Any) -> Ref | None:
    return None if wire is None else Ref(wire["run_id"], wire["version"])


def admitted_ref(head: bytes) -> Ref | None:
    """What a response's head says was served when its request was admitted."""
    found = _ADMITTED.search(head)
    try:
        return None if found is None else Ref(found[2].decode("latin-1"), int(found[1]))
    except InvalidInput:
        return None


def affinity_key(request: Request) -> str | None:
    """The request's affinity key, cut to a bounded length."""
    for name in AFFINITY_HEADERS:
        value = request.headers.get(name)
        if value:
            return value[:_AFFINITY_BYTES_MAX].decode("latin-1")
    return None


class Demand:
    """What one request demands, and the body that says so to the replica.

    Raises: InvalidInput naming the field, when made from a malformed one.
    """

    __slots__ = ("_body", "_parsed", "constraint", "headers")

    def __init__(self, request: Request) -> None:
        self._body = request.body
        self._parsed: dict[str, Any] | None = None
        value = None
        # A key may be spelled with escapes; only then is a body without the mark parsed.
        if request.method == "POST" and (_MARK in self._body or b"\\u00" in self._body):
            self._parsed = parse_json_object(self._body)
            value = self._parsed.get(FIELD)
        self.constraint: Constraint = parse_constraint(value, request.headers)
        self.headers = b"".join(
            b"%b: %b\r\n" % (name, request.headers[name])
            for name in (HEADER_MIN, HEADER_EXACT)
            if name in request.headers
        )

    def bound_lag(self, latest: Ref | None) -> Constraint:
        """The constraint, `max_lag` turned into a minimum of the freshest pointer's run."""
        found = self.constraint
        if found.max_lag is None or latest is None or found.exact_version is not None:
            return found
        if found.run_id not in (None, latest.run_id):
            return found
        return Constraint(
            min_version=max(found.min_version or 0, latest.version - found.max_lag),
            run_id=latest.run_id,
            max_lag=found.max_lag,
            max_wait_ms=found.max_wait_ms,
        )

    def message(self, bounded: Constraint, remaining_s: float) -> tuple[bytes, bytes]:
        """Header lines and body for the replica, with the wait that remains.

        A request whose constraint does not change passes with the bytes it came with.
        """
        found = self.constraint
        if found.max_wait_ms is None and bounded is found:
            return self.headers, self._body
        wait_ms = None if found.max_wait_ms is None else max(0, int(remaining_s * 1000))
        sent = Constraint(
            min_version=bounded.min_version,
            exact_version=bounded.exact_version,
            run_id=bounded.run_id,
            max_lag=bounded.max_lag,
            max_wait_ms=wait_ms,
        )
        # The headers are folded into the field, which may now demand more than they did.
        parsed = self._parsed if self._parsed is not None else parse_json_object(self._body)
        return b"", encode_json_object({**parsed, FIELD: constraint_to_wire(sent)})
