"""The Engine protocol: one inference server and its ranks, as the replica's sidecar drives it.

Two faces. `Engine` is control and labelling; `RankChannel` (its `ranks`) carries weight
orders to the processes that hold weights. Route names of a particular engine stop at its
adapter. Every call has a deadline and raises EngineUnavailable when it passes; after an
error in the middle of an activation the caller must treat the engine's state as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from stitch.types import ActivationMode, Label, Span

__all__ = [
    "RANK_PROTOCOL",
    "Engine",
    "EngineCapabilities",
    "EngineDescription",
    "Health",
    "LiveTensor",
    "Mixed",
    "RankChannel",
    "RankOrder",
    "RankReply",
    "RouteKind",
    "TensorSlice",
]

RANK_PROTOCOL = 1


class Health(StrEnum):
    """What a probe found."""

    HEALTHY = "healthy"
    UNRESPONSIVE = "unresponsive"
    UNREACHABLE = "unreachable"


class RouteKind(StrEnum):
    """How the sidecar treats a route of the engine. Anything unlisted is blocked."""

    SAMPLING = "sampling"
    READ_ONLY = "read_only"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What the engine can promise.

    modes: the activation modes it supports. destinations: names it can receive weights by.
    spans: it reports per-token version spans itself. final_responses: its response bodies
    already have every label key of the HTTP contract, so bytes may pass through unparsed.
    keyed_cache: its prefix cache is keyed by the activation epoch (else flush).
    """

    modes: frozenset[ActivationMode]
    destinations: frozenset[str]
    spans: bool
    final_responses: bool
    keyed_cache: bool


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One live storage of one rank, as the engine names it. `shape` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What runs: the engine's life (`boot_id`, fresh at every engine start), model and ranks."""

    name: str
    version: str
    boot_id: str
    model_path: str
    architecture: str
    rank_count: int
    tensors: tuple[LiveTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where the bytes of one canonical tensor lie: `nbytes` at `offset` of an immutable file.

    `checksum` is the additive checksum's text form (`stitch.checksum.Checksum.to_text`).
    """

    name: str
    path: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True, slots=True)
class RankOrder:
    """One order to all ranks.

    A rank keeps `(incarnation, attempt, step)` beside the weights, refuses another
    incarnation, ignores attempts older than the newest it saw (reply code `stale`), and
    answers a repeat of the step it is at without acting again.

    Rules: any order of a higher attempt forgets an older attempt's stage. Within an attempt
    the way is stage → commit → undo: commit needs that attempt's stage, and once undone or
    discarded an attempt cannot be committed (`refused`), so a late order does no harm.
    verify with scope="full", label, state and discard need no stage. Only a
    `discard` of an incarnation never seen binds a rank to it: stage forgotten, label unknown, a
    former incarnation refused for ever. A rank that was never bound takes nothing else but
    `state`, so an engine that restarted in mid-activation is not mistaken for the old one.
    `code` is `refused` for a wrong incarnation or step, `stale` for an old attempt, `mismatch`
    for tensors that do not fit the live storages, `failed` for all else.

    op:
        stage    map and check `tensors` (names, dtypes, shapes against live storages), and
                 keep `undo_tensors` (the same names with the bytes now served). Live weights
                 are not touched. Data: none.
        commit   copy the staged bytes into the live storages. The rank's label becomes unknown.
        verify   `scope="changed"`: checksums of the live bytes of the staged tensors;
                 `scope="full"`: of every canonical tensor. Data: {"checksums": {name: text}}.
        undo     copy `undo_tensors` back. Allowed after commit, also after a failed one.
        discard  forget the stage; live weights stay as they are.
        label    set the label stamped on tokens (`run_id`, `version`, `epoch`), or unknown.
        state    report {"attempt", "step", "label"} and change nothing. `label` is
                 `Label.to_wire`'s form or None; `step` is the last step taken in this attempt:
                 none, staged, committed, failed, undone or discarded.
    """

    incarnation: str
    attempt: int
    op: Literal["stage", "commit", "verify", "undo", "discard", "label", "state"]
    tensors: tuple[TensorSlice, ...] = ()
    undo_tensors: tuple[TensorSlice, ...] = ()
    scope: Literal["changed", "full"] = "changed"
    label: Label | None = None
    via: Literal["disk", "cpu"] = "cpu"


@dataclass(frozen=True, slots=True)
class RankReply:
    """One rank's answer. `code` is stable: ok, stale, refused, mismatch, failed, unknown_order."""

    rank: int
    code: str
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the order (or its repeat) stands."""
        return self.code == "ok"


class RankChannel(Protocol):
    """Orders to every rank of the engine; versioned by RANK_PROTOCOL."""

    async def order(self, order: RankOrder, *, deadline_s: float) -> Sequence[RankReply]:
        """Send to all ranks and gather all replies.

        Raises: EngineUnavailable on a lost connection or a passed deadline; then each rank may
            or may not have acted, and only `state` or a restart can tell.
        """
        ...


@dataclass(frozen=True, slots=True)
class Mixed:
    """Labels taken from one response: spans per choice, in order."""

    spans: tuple[tuple[Span, ...], ...]


class Engine(Protocol):
    """One engine under one sidecar."""

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT` for the proxied data path."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def ranks(self) -> RankChannel: ...

    def route(self, method: str, path: str) -> RouteKind:
        """Classify one route. Unknown routes are BLOCKED."""
        ...

    async def describe(self) -> EngineDescription:
        """Model identity, ranks, and every live storage."""
        ...

    async def health(self) -> Health:
        """Probe liveness with a short deadline. Answers while paused. Never raises."""
        ...

    async def pause(self, mode: ActivationMode) -> None:
        """Stop sampling; on return no forward pass runs and none starts. Idempotent.

        RECOMPUTE and IN_PLACE keep requests in flight; QUIESCE expects none and refuses
        (ActivationFailed) if any runs. If the outcome is lost, treat the engine as paused.
        """
        ...

    async def resume(self, *, recompute: bool) -> float:
        """Go on sampling. With `recompute` the key/value state of every running request is
        built again under the present weights first (`prefix: exact`), else carried over.

        Returns: seconds spent on recomputing. Idempotent; retried until confirmed.
        """
        ...

    async def flush(self) -> bool:
        """Drop the shared prefix cache; True only if the engine's body confirmed it."""
        ...

    async def abort(self, rid: str) -> None:
        """End one request by its id, running or queued, also while paused. Absent is fine."""
        ...

    def stamp_request(self, path: str, body: dict[str, Any], *, rid: str, label: Label) -> None:
        """Add `rid` and the cache key for `label` to a sampling request, in place.

        A client's own cache key is kept inside the new one; a list is treated item by item.
        """
        ...

    def stamp_response(self, path: str, body: dict[str, Any], *, admitted: Label) -> None:
        """Add the label keys of the HTTP contract to a JSON response, in place.

        Called only when `capabilities.final_responses` is False.
        """
        ...
