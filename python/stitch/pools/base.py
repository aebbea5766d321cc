"""The Pool protocol: who the replicas are, and how to nudge them. Discovery may be stale."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Member", "Pool"]


@dataclass(frozen=True, slots=True)
class Member:
    """One replica's address as discovery knows it. `id` is stable while the replica lives."""

    id: str
    url: str


class Pool(Protocol):
    """A set of replicas of one policy. A vanished member is not an error; an unanswered
    discovery is (Unavailable), and never the same as an empty pool."""

    async def members(self) -> Sequence[Member]:
        """The members now, sorted by id.

        Raises: Unavailable when discovery itself does not answer.
        """
        ...

    def watch(self) -> AsyncIterator[Sequence[Member]]:
        """Yield the full member list at once and then after every change, until closed."""
        ...

    async def wake(self) -> int:
        """Nudge every member to reconcile; a lossy hint. Returns how many answered.

        Never raises.
        """
        ...

    async def scale(self, replicas: int) -> None:
        """Ask for a replica count. Raises Unsupported where the pool cannot scale."""
        ...

    async def close(self) -> None:
        """Stop watching and release what the pool holds."""
        ...
