"""The documents of the HTTP contract as models: what the published schemas are made from.

Nothing on the hot path uses them; tests hold live answers against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stitch.types import VERSION_MAX, GateState, Phase, Prefix, ReplicaState

__all__ = [
    "AbortedBody",
    "ErrorBody",
    "ErrorEvent",
    "ErrorObject",
    "GatewayInfo",
    "GatewayStatus",
    "Health",
    "LabelFields",
    "NotReadyBody",
    "ReplicaEvent",
    "ServerInfo",
    "SpanDocument",
    "WeightVersion",
    "Woken",
]

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Version = Annotated[int, Field(ge=0, le=VERSION_MAX)]
Decimal = Annotated[str, Field(pattern=r"^[0-9]{1,16}$")]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class _Closed(BaseModel):
    """A document of ours: strict, without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_enum_values=True)


class _Open(BaseModel):
    """A document that carries further facts."""

    model_config = ConfigDict(extra="allow", strict=True)


class RefDocument(_Closed):
    """One policy version."""

    run_id: RunId
    version: Version


class SpanDocument(_Closed):
    """Completion tokens `[start, end)` sampled from exactly the weights of one version."""

    run_id: RunId
    version: Version
    start: Count
    end: Count
    prefix: Annotated[Literal["exact", "carried"], Field(description=Prefix.__doc__)]


class WeightVersion(_Closed):
    """The request field `weight_version`. Null means absent; the exact version decides."""

    min_version: Version | Decimal | None = None
    exact_version: Version | Decimal | None = None
    run_id: RunId | None = None
    max_lag: Version | Decimal | None = None
    max_wait_ms: Version | Decimal | None = None


class LabelFields(_Open):
    """Label keys of a response; what the engine can't tell is absent, never null."""

    weight_versions: list[SpanDocument] = Field(default_factory=list)
    weight_version_start: Version = 0
    weight_version_end: Version = 0
    weight_run_id: RunId = "run"


class ErrorObject(_Open):
    """A failure. Retry logic reads `code` and `retryable`, never `message`."""

    type: str
    code: str
    message: str
    param: str | None
    retryable: bool
    retry_after_ms: Count | None


class ErrorBody(_Closed):
    """The body of every error response but 409."""

    error: ErrorObject


class NotReadyError(ErrorObject):
    """The error object of a 409."""

    run_id: str | None
    target_version: Version | None
    applied: Version | None
    reason: Literal["behind", "passed", "other_run", "closing"] | None


class NotReadyBody(_Closed):
    """The body of a 409; four keys are repeated at the top level for existing clients."""

    type: Literal["WeightVersionNotReady"]
    target_version: Version | None
    applied: Version | None
    message: str
    error: NotReadyError


class AbortedError(ErrorObject):
    """The error object of a generation that was ended for a weight update."""

    partial: Any
    weight_run_id: RunId
    weight_version_admitted: Version


class AbortedBody(_Closed):
    """The body of a generation that was ended for a weight update."""

    error: AbortedError


class CutError(ErrorObject):
    """The error object of a cut stream."""

    status: int
    weight_run_id: RunId | None = None
    weight_version_admitted: Version | None = None


class ErrorEvent(_Closed):
    """The last event of a stream that broke off; no `[DONE]` follows."""

    error: CutError


class ReplicaReportDocument(_Closed):
    """What a replica says of itself. Drop any with a lower `seq` of the same incarnation."""

    replica_id: str
    incarnation: str
    seq: Count
    state: Literal[tuple(state.value for state in ReplicaState)]  # type: ignore[valid-type]
    phase: Literal[tuple(phase.value for phase in Phase)]  # type: ignore[valid-type]
    gate: Literal[tuple(gate.value for gate in GateState)]  # type: ignore[valid-type]
    served: RefDocument | None
    latest: RefDocument | None
    lag: int | None
    running: Count
    waiting: Count
    reason: str | None
    gate_closed_s: Seconds | None
    swap_s: Seconds | None
    recompute_s: Seconds | None


class ReplicaEvent(ReplicaReportDocument):
    """The data of one `/events` event of a sidecar: always a full report."""

    protocol: Count


class Health(_Closed):
    """`/health`."""

    ready: bool
    reason: str | None = None


class ServerInfo(_Open):
    """`/server_info` of a sidecar. These keys are kept for existing pollers."""

    ready: bool
    applied: str | None
    sync_state: Literal["IDLE", "FETCHING", "STAGING", "COMMITTING", "ERROR"]
    reason: str | None
    run_id: str | None
    commit_mode: str
    active_requests: Count
    update_destination_ready: bool
    update_destination_error: str | None
    terminal_error: str | None
    metrics: dict[str, Any] | None
    protocol: Count


class GatewayInfo(_Closed):
    """`/server_info` of a gateway."""

    protocol: Count
    role: Literal["gateway"]
    ready: bool
    reason: str | None
    run_id: str | None
    latest: str | None
    replicas: Count
    replicas_ready: Count


class MemberStatus(_Closed):
    """One member as the gateway sees it.

    `state` is UNREACHABLE while the member does not answer; `phase`, `gate`, `served`, `lag` and
    `report` are then of its last report.
    """

    id: str
    url: str
    ready: bool
    reachable: bool
    failures: Count
    problem: str | None
    in_flight: Count
    load: Count
    state: (
        Literal[(*(state.value for state in ReplicaState), "UNREACHABLE")]  # type: ignore[valid-type]
        | None
    )
    phase: str | None
    gate: str | None
    served: RefDocument | None
    lag: Count | None
    report_age_s: Seconds | None
    report: ReplicaReportDocument | None


class Discovery(_Closed):
    """Whether the member list is fresh. An empty answer is an error, not an empty pool."""

    ok: bool
    error: str | None
    age_s: Seconds


class GatewayStatus(_Closed):
    """`/status` of a gateway, and the data of its `/events`."""

    protocol: Count
    ready: bool
    reason: str | None
    latest: RefDocument | None
    waiting: Count
    in_flight: Count
    discovery: Discovery
    members: list[MemberStatus]
    counters: dict[str, float]


class Woken(_Closed):
    """`/wake` of a gateway: how many members answered."""

    woken: Count
