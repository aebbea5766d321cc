"""Orders to all ranks of one incarnation: sent with retries, answered by every rank, compared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stitch.engines.base import Engine, RankOrder, RankReply
from stitch.env import Env
from stitch.errors import ActivationFailed, CorruptData, EngineUnavailable, Unsupported

__all__ = ["Ranks"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ranks:
    """The engine's ranks as one destination addresses them.

    attempt: the newest one used; orders carry it. coverage: which canonical tensors each rank
    said it holds when it was proven; later answers must cover the same.
    """

    engine: Engine
    incarnation: str
    env: Env
    rank_s: float
    full_s: float
    tries: int
    attempt: int = 0
    coverage: dict[int, frozenset[str]] = field(default_factory=dict)

    async def send(self, order: RankOrder) -> Sequence[RankReply]:
        """Send `order` under the present incarnation and attempt; every rank must agree.

        A lost call is sent again: a rank answers a repeat without acting twice.
        Raises: EngineUnavailable; ActivationFailed, or CorruptData for `mismatch`, naming the
            first rank that refused.
        """
        order = replace(order, incarnation=self.incarnation, attempt=self.attempt)
        replies = await self._send(order)
        for reply in replies:
            if not reply.ok:
                kind = CorruptData if reply.code == "mismatch" else ActivationFailed
                raise kind(
                    f"rank {reply.rank} answered {order.op} with {reply.code}: {reply.message}",
                    rank=reply.rank,
                    reply=reply.code,
                )
        return replies

    async def _send(self, order: RankOrder) -> Sequence[RankReply]:
        seconds = self.full_s if order.scope == "full" else self.rank_s
        for left in range(self.tries - 1, -1, -1):
            try:
                async with self.env.clock.timeout(seconds + 1.0):
                    return await self.engine.ranks.order(order, deadline_s=seconds)
            except (EngineUnavailable, TimeoutError) as error:
                log.warning("rank order lost", extra={"op": order.op, "tries_left": left})
                if left == 0:
                    raise EngineUnavailable(
                        f"the ranks did not answer {order.op}; what they did is unknown"
                    ) from error
        raise AssertionError("tries must be at least 1")

    async def live(self, scope: str) -> list[tuple[int, dict[str, str]]]:
        """Checksums of live storages as each rank reports them: of staged tensors or of all."""
        order = RankOrder("", 0, "verify", scope="full" if scope == "full" else "changed")
        found = []
        for reply in await self.send(order):
            sums = reply.data.get("checksums")
            if not isinstance(sums, Mapping):
                raise Unsupported(f"rank {reply.rank} answered verify without checksums")
            found.append((reply.rank, {str(k): str(v) for k, v in sums.items()}))
        if not found:
            raise Unsupported("the engine has no ranks")
        return found

    def learn_coverage(self, found: Sequence[tuple[int, dict[str, str]]]) -> None:
        """Take over from a full answer what each rank holds."""
        self.coverage = {rank: frozenset(sums) for rank, sums in found}

    def held_anywhere(self) -> frozenset[str]:
        """Every canonical tensor that some rank holds."""
        return frozenset().union(*self.coverage.values())

    def mismatched(
        self,
        found: Sequence[tuple[int, dict[str, str]]],
        expected: Mapping[str, str],
        names: Iterable[str],
    ) -> tuple[str, ...]:
        """Names of which some rank's live bytes are wrong, or missing from its answer.

        Every rank's copy is compared apart. A rank that stopped answering counts as all wrong.
        """
        asked = frozenset(names)
        answers = dict(found)
        wrong: set[str] = set()
        for rank, covered in self.coverage.items():
            sums = answers.get(rank, {})
            wrong |= {name for name in covered & asked if sums.get(name) != expected.get(name)}
        wrong |= asked - self.held_anywhere()
        return tuple(sorted(wrong))
