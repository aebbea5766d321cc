"""The Store protocol: one mutable pointer, create-only objects, sealed versions, leases.

Keys are relative POSIX paths under the store's root (`docs/publication-format.md` has the
layout). Every method is safe to repeat unless it says otherwise. A store never interprets
what it holds; it promises durability, create-only names, and an atomic pointer swap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = [
    "INDEX_NAME",
    "Lost",
    "ObjectInfo",
    "PointerRead",
    "Sealed",
    "Staging",
    "Store",
    "StoreCapabilities",
    "SwapResult",
    "Unknown",
    "Won",
]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a store can promise. Callers adapt or refuse clearly; they never test the class."""

    atomic_swap: bool
    create_only: bool
    ranges: bool
    server_checksums: bool
    local_files: bool


@dataclass(frozen=True, slots=True)
class PointerRead:
    """The pointer as read. `token` is opaque and None when there is no pointer object."""

    text: str
    token: str | None


@dataclass(frozen=True, slots=True)
class Won:
    """The swap took effect; `token` names the new state and is durable."""

    token: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Another writer was first; this is what stands there now."""

    text: str
    token: str | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The outcome could not be learnt (say, a lost reply). Read the pointer and compare."""

    reason: str


SwapResult = Won | Lost | Unknown


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size in bytes and the opaque token of one object."""

    size: int
    token: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """Result of a seal: `created` is False if the name was sealed before, by anybody."""

    prefix: str
    created: bool


class Staging(Protocol):
    """One attempt at writing one version directory. Nothing is visible to readers before `seal`."""

    async def put(self, name: str, chunks: Iterable[bytes | bytearray | memoryview]) -> int:
        """Write one file, durable on return. Returns its size in bytes. Names are bare.

        Raises: Conflict if this attempt already wrote `name`; Unavailable if the store is full
            or gone, with nothing visible.
        """
        ...

    async def seal(self, index: bytes) -> Sealed:
        """Make the directory and its index durable and visible, create-only.

        The index (`INDEX_NAME`) is the commit: readers see the complete directory or nothing.
        Orphans of other attempts are gone from the directory before it becomes visible.
        If the name is already sealed nothing changes and `created` is False; so a seal whose
        outcome is unknown (Unavailable) may be repeated.
        """
        ...

    async def abandon(self) -> None:
        """Remove what this attempt wrote. Safe at any time; does nothing after a seal."""
        ...

    async def leave(self) -> None:
        """End this process's part of an attempt that another process seals or abandons; what it
        wrote stays. Does nothing after a seal."""
        ...


class Store(Protocol):
    """A root with one pointer, many runs, and leases. All methods raise Unavailable when the
    store cannot be reached, and CorruptData never: bytes are the caller's to judge."""

    @property
    def url(self) -> str:
        """The URL that `open_store` takes to open this store again."""
        ...

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store promises."""
        ...

    async def read_pointer(self) -> PointerRead:
        """Read the pointer. An absent pointer reads as empty text and token None."""
        ...

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        """Replace the pointer if its token still is `expect` (None: only if absent).

        Durable before it returns `Won`. Atomic against any number of other processes.
        """
        ...

    async def create(self, key: str, data: bytes) -> bool:
        """Create one small object, durable on return. False if the key exists (unchanged)."""
        ...

    async def read(self, key: str, *, size_max: int) -> bytes | None:
        """The whole object, or None if absent.

        Raises: Unavailable; InvalidInput if the object is larger than `size_max`.
        """
        ...

    async def stat(self, key: str) -> ObjectInfo | None:
        """Size and token, or None if absent."""
        ...

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, *, expect_token: str | None = None
    ) -> int:
        """Read bytes at `offset` into `buffer`; returns the count, short only at the end.

        Raises: NotVisibleYet if absent; Conflict if the token differs from `expect_token`.
        """
        ...

    async def list(self, prefix: str) -> Sequence[str]:
        """Keys under `prefix`, sorted. Sealed directories and plain objects only. Never hot.

        A link that leads out of the store is one key, whatever is behind it, and reading it is
        InvalidInput; so is a `prefix` that leads out.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove one object. Absent is fine. Never used on a sealed index."""
        ...

    async def begin(self, prefix: str, *, attempt: str) -> Staging:
        """Start an attempt at the version directory `prefix`; `attempt` is a fresh nonce.

        Processes that begin the same attempt write into one staging; one of them seals it.
        Leftovers of attempts whose processes died are removed here.
        """
        ...

    async def confirm(self, prefix: str) -> bool:
        """Whether `prefix` is sealed. If it is, it is durable on return, whoever sealed it: the
        writer may have died between making it visible and making it durable."""
        ...

    def local_path(self, key: str) -> Path | None:
        """A path through which the immutable object can be mapped, or None if not local."""
        ...

    async def write_lease(self, name: str, data: bytes) -> None:
        """Create or replace one lease (`[A-Za-z0-9._-]{1,128}`), atomically and durably."""
        ...

    async def read_leases(self) -> dict[str, bytes]:
        """All leases by name. One that cannot be read, or is larger than a lease may be, is there
        with no bytes: somebody holds it, and what it names is not known."""
        ...

    async def drop_lease(self, name: str) -> None:
        """Remove one lease. Absent is fine."""
        ...

    async def close(self) -> None:
        """Release what the store holds. Further calls raise Unavailable."""
        ...
