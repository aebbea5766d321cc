"""What every route shares: the engine's parts, request ids, and waiting for samples."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from stitch.engines.embedded.config import EngineConfig
from stitch.engines.embedded.generation import Ask, Generation, Progress
from stitch.engines.embedded.model import LoadedModel
from stitch.engines.embedded.rank import Rank
from stitch.engines.embedded.sampling import sample_seed
from stitch.engines.embedded.scheduler import Scheduler
from stitch.engines.embedded.text import TextCodec
from stitch.env import Env
from stitch.errors import EngineUnavailable, InvalidInput

__all__ = ["RID_CHARS_MAX", "Service", "Ticket"]

log = logging.getLogger(__name__)

RID_CHARS_MAX: Final = 256


@dataclass(slots=True)
class Ticket:
    """The samples of one HTTP request, in answer order."""

    generations: list[Generation]
    _latest: dict[int, Progress] = field(default_factory=dict)
    _changed: set[int] = field(default_factory=set)
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, index: int, progress: Progress) -> None:
        """Called on the loop; a slow reader sees only the newest progress."""
        self._latest[index] = progress
        self._changed.add(index)
        self._event.set()

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        ended = sum(p.finish is not None for p in self._latest.values())
        return ended == len(self.generations)

    async def finished(self) -> list[Progress]:
        """Wait for all. Raises: EngineUnavailable if the engine failed one of them."""
        while not self.done:
            self._event.clear()
            await self._event.wait()
        final = [self._latest[i] for i in range(len(self.generations))]
        for progress in final:
            check_finish(progress)
        return final

    async def news(self) -> AsyncIterator[tuple[int, Progress]]:
        """Progress as it comes, until all have ended."""
        while True:
            await self._event.wait()
            self._event.clear()
            done = self.done
            for index in sorted(self._changed):
                self._changed.discard(index)
                yield index, self._latest[index]
            if done:
                return


def check_finish(progress: Progress) -> None:
    """Raises: EngineUnavailable if the engine, not the client, ended the sample early."""
    finish = progress.finish
    if finish is not None and finish.get("failed"):
        raise EngineUnavailable(str(finish["message"]))


@dataclass(slots=True)
class Service:
    """One engine. All methods run on the event loop."""

    config: EngineConfig
    model: LoadedModel
    codec: TextCodec
    scheduler: Scheduler
    rank: Rank
    env: Env
    boot_id: str
    batch_invariant: bool
    started_wall_s: int
    weight_version_text: str = "default"
    pause_recomputes: bool = True
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    rank_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="stitch-rank")
    )
    requests: dict[str, int] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _made: int = 0

    @property
    def model_name(self) -> str:
        """What `/v1/models` lists: the checkpoint directory's path as given."""
        return str(self.config.model)

    def rid(self, given: Any, *, where: str = "rid") -> str:
        """The client's request id, or a fresh one. Raises: InvalidInput."""
        if given is None:
            return self.env.random.nonce() + self.env.random.nonce()
        if not isinstance(given, str) or not 0 < len(given) <= RID_CHARS_MAX:
            raise InvalidInput(
                f"{where} must be text of 1 to {RID_CHARS_MAX} characters", param=where
            )
        return given

    def seeds(self, seed: int | None, count: int) -> list[int]:
        """One seed per sample of a request; fresh ones if the request has none."""
        if seed is None:
            self._made += 1
            if self.config.seed is None:
                seed = int(self.env.random.nonce(), 16)
            else:
                text = f"{self.config.seed}/{self._made}".encode()
                seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return [sample_seed(seed, sample) for sample in range(count)]

    def check_prompt(self, ids: Sequence[int], *, where: str) -> tuple[int, ...]:
        """Raises: InvalidInput for an empty or too long prompt, or ids outside the vocabulary."""
        if not ids:
            raise InvalidInput(f"{where} has no tokens", param=where)
        room = self.scheduler.context_tokens_max - 1
        if len(ids) > room:
            raise InvalidInput(
                f"{where} has {len(ids)} tokens; the context leaves room for {room}", param=where
            )
        for token in ids:
            good = isinstance(token, int) and not isinstance(token, bool)
            if not good or not 0 <= token < self.model.vocab_size:
                raise InvalidInput(
                    f"{where} must hold token ids below {self.model.vocab_size}", param=where
                )
        return tuple(ids)

    def submit(self, asks: Sequence[Ask]) -> Ticket:
        """Queue samples. Close the ticket with `release`.

        Raises: InvalidInput for an id in use; Overloaded; EngineUnavailable before the first label
            if only labelled weights may answer.
        """
        if self.config.labelled_only and not self.scheduler.labelled_once:
            raise EngineUnavailable("this engine's weights have no version yet; try again")
        names = {name for ask in asks for name in (ask.group, ask.rid)}
        taken = sorted(names & self._names)
        if taken:
            raise InvalidInput(f"rid {taken[0]!r} is in use by a running request", param="rid")
        ticket = Ticket([])
        sinks = [lambda p, i=i: ticket.note(i, p) for i in range(len(asks))]
        ticket.generations = self.scheduler.submit(asks, sinks)
        self._names |= names
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The HTTP request is over: free its ids, end what still runs."""
        self._names -= {name for g in ticket.generations for name in (g.ask.group, g.ask.rid)}
        if not ticket.done:
            mine = {id(g.ask) for g in ticket.generations}
            self.scheduler.abort(lambda ask: id(ask) in mine, "the client is gone")

    async def on_rank_thread(self, work: Any) -> Any:
        """Run blocking rank work, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self.rank_thread, work)
