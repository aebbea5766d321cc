"""The ranks that publish together. Collectives run on one task, in one order, on all ranks."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

from stitch.env import Env
from stitch.errors import InvalidInput, Unavailable

__all__ = ["Ranks", "SoloRanks", "TorchRanks", "open_ranks"]


class Ranks(Protocol):
    """A fixed set of processes. Every method is collective: all ranks call it, in the same order.

    Raises: Unavailable when a rank is gone or late; the publication fails on every rank left.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    async def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        ...

    async def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        ...


class SoloRanks:
    """One process."""

    rank = 0
    size = 1

    async def all_gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    async def broadcast(self, value: Any) -> Any:
        """The value itself."""
        return value


class TorchRanks:
    """All ranks of a torch.distributed group, over a gloo group of their own.

    Making it is collective. The trainer's own group is never used afterwards, so publications in
    the background cannot interleave with the trainer's collectives.
    """

    def __init__(self, group: Any, env: Env, *, timeout_s: float) -> None:
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise InvalidInput(
                "a process group needs torch: install stitch-rl[torch]", param="group"
            ) from error
        if not dist.is_initialized():
            raise InvalidInput("torch.distributed is not initialized", param="group")
        self._dist: Any = dist
        self._env = env
        members = dist.get_process_group_ranks(group)
        self._first = members[0]
        self._group = dist.new_group(
            members,
            backend="gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
            use_local_synchronization=True,
        )
        self.rank = dist.get_rank(self._group)
        self.size = len(members)

    async def all_gather(self, value: Any) -> list[Any]:
        """Pickled objects over gloo."""

        def work() -> list[Any]:
            gathered: list[Any] = [None] * self.size
            self._dist.all_gather_object(gathered, value, group=self._group)
            return gathered

        gathered: list[Any] = await self._run(work)
        return gathered

    async def broadcast(self, value: Any) -> Any:
        """A pickled object over gloo."""

        def work() -> Any:
            box = [value if self.rank == 0 else None]
            self._dist.broadcast_object_list(box, src=self._first, group=self._group)
            return box[0]

        return await self._run(work)

    async def _run(self, work: Any) -> Any:
        try:
            return await self._env.offload(work)
        except RuntimeError as error:
            raise Unavailable(
                f"a rank of the publishing job is gone or late: {str(error)[:200]}"
            ) from error


def open_ranks(group: Any, env: Env, *, timeout_s: float) -> Ranks:
    """The ranks of `group`; None means this process alone."""
    return SoloRanks() if group is None else TorchRanks(group, env, timeout_s=timeout_s)
