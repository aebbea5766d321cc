"""A simulated engine: real weight bytes on simulated ranks, generations, and scripted faults.

Every token carries a fingerprint of the bytes it was sampled from and of the bytes its
key/value state was built under, so that a wrong label is a failing test, not a matter of trust.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from stitch.engines.base import (
    EngineCapabilities,
    EngineDescription,
    Health,
    LiveTensor,
    RankOrder,
    RankReply,
    RouteKind,
)
from stitch.env import Env
from stitch.errors import ActivationFailed, EngineUnavailable
from stitch.testing.engine_ranks import SimulatedRank
from stitch.types import ActivationMode, Label, Prefix, Span

__all__ = ["Fault", "Faults", "Generation", "SimulatedEngine", "Token"]

T = TypeVar("T")

_ROUTES: Final = {
    ("POST", "/generate"): RouteKind.SAMPLING,
    ("GET", "/model_info"): RouteKind.READ_ONLY,
}


# A control call carries no attempt, so one that acts late could undo a later one; engines answer
# them in order (see `freeze` for a process that stops and goes on).
_CONTROL: Final = frozenset({"pause", "resume", "flush", "describe", "health"})


@dataclass(slots=True)
class Fault:
    """One scripted fault.

    op: a rank order's op, or pause, resume, flush, describe, health.
    action: `lose_reply` act, then fail the call; `drop` fail it without acting; `late` fail it
        at once and act after `delay_s`; `slow` act after `delay_s`; `die` the engine dies
        before acting; `die_after` it dies after acting; `restart_after` and is at once a new
        process; `fail_at` rank `rank` fails at tensor `at`; `refuse` answer no (flush).
    """

    op: str
    action: str
    times: int = 1
    skip: int = 0
    rank: int = 0
    at: int = 0
    delay_s: float = 0.0


class Faults:
    """Scripted faults first, then seeded random ones while `chance` is above 0."""

    RANDOM_ACTIONS: Final = ("lose_reply", "drop", "late", "fail_at", "die_after")

    def __init__(self, env: Env) -> None:
        self._env = env
        self.script: list[Fault] = []
        self.chance = 0.0
        self.actions: Sequence[str] = self.RANDOM_ACTIONS
        self.taken: list[tuple[str, str]] = []

    def add(self, op: str, action: str, **options: Any) -> Faults:
        """Script one fault; returns self."""
        self.script.append(Fault(op, action, **options))
        return self

    def take(self, op: str) -> Fault | None:
        """The fault that strikes this call, if any."""
        for fault in self.script:
            if fault.op != op or fault.times <= 0:
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            fault.times -= 1
            self.taken.append((op, fault.action))
            return fault
        if self.chance and self._env.random.random() < self.chance:
            index = int(self._env.random.uniform(0, len(self.actions)))
            action = self.actions[min(index, len(self.actions) - 1)]
            if op in _CONTROL and action not in {"drop", "die_after"}:
                action = "lose_reply"
            self.taken.append((op, action))
            return Fault(op, action, delay_s=self._env.random.uniform(0, 60))
        return None


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token: what it was labelled, and what it really came from."""

    label: Label | None
    prefix: Prefix
    fingerprint: str
    state_fingerprint: str


@dataclass(slots=True)
class Generation:
    """One request inside the engine. `cached`: its prompt's state came from the shared cache."""

    rid: str
    prompt: str
    key: str | None
    tokens: list[Token] = field(default_factory=list)
    cached: bool = False
    aborted: bool = False
    state_fingerprint: str = ""
    state_epoch: int = -1

    def spans(self) -> list[Span]:
        """The labelled spans, as the engine reports them; unlabelled tokens are left out."""
        spans: list[Span] = []
        for index, token in enumerate(self.tokens):
            if token.label is None:
                continue
            last = spans[-1] if spans else None
            same = last is not None and (last.ref, last.prefix, last.end) == (
                token.label.ref,
                token.prefix,
                index,
            )
            if last is not None and same:
                spans[-1] = Span(last.ref, last.start, index + 1, last.prefix)
            else:
                spans.append(Span(token.label.ref, index, index + 1, token.prefix))
        return spans


class SimulatedEngine:
    """Implements `Engine` and `RankChannel` in memory. Deterministic under virtual time.

    Args:
        model_dir: the checkpoint all ranks load, again at every restart.
        rank_count: ranks, each with a full copy.
        keyed_cache: the prefix cache is keyed by the activation epoch; else it needs a flush.
        token_s: virtual seconds per token.
    """

    rank_type: type[SimulatedRank] = SimulatedRank

    def __init__(
        self,
        model_dir: Path,
        env: Env,
        *,
        rank_count: int = 2,
        keyed_cache: bool = True,
        modes: frozenset[ActivationMode] = frozenset(ActivationMode),
        token_s: float = 0.01,
    ) -> None:
        self.model_dir = model_dir
        self.env = env
        self.rank_count = rank_count
        self.token_s = token_s
        self.faults = Faults(env)
        self.calls: list[str] = []
        self._capabilities = EngineCapabilities(
            modes=modes,
            destinations=frozenset({"cpu", "disk"}),
            spans=True,
            final_responses=True,
            keyed_cache=keyed_cache,
        )
        self.members: list[SimulatedRank] = []
        self.boot_id = ""
        self.alive = False
        self.paused = False
        self.running: dict[str, Generation] = {}
        self.cache: dict[tuple[int, str | None, str], str] = {}
        self._going = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._turn = asyncio.Lock()
        self._late: set[asyncio.Task[Any]] = set()
        self.restart()

    # Life and death, for tests.

    def restart(self) -> None:
        """Start as a new process: boot weights, no label, not paused."""
        self.members = [self.rank_type(i, self.model_dir) for i in range(self.rank_count)]
        self.boot_id = self.env.random.nonce()
        self.alive, self.paused = True, False
        self.cache.clear()
        self._turn = asyncio.Lock()
        self._going.set()
        self._thawed.set()

    def die(self) -> None:
        """The process is gone: what ran ends, every call is refused."""
        self.alive = False
        for task in list(self._late):
            task.cancel()
        for generation in self.running.values():
            generation.aborted = True
        self.running.clear()
        self._going.set()
        self._thawed.set()

    def freeze(self) -> None:
        """SIGSTOP: calls hang until `thaw`; what was sent meanwhile is carried out then."""
        self._thawed.clear()

    def thaw(self) -> None:
        """SIGCONT."""
        self._thawed.set()

    @property
    def frozen(self) -> bool:
        return not self._thawed.is_set()

    async def close(self) -> None:
        """End tasks of late orders."""
        for task in list(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    # Engine.

    @property
    def base_url(self) -> str:
        return "http://simulated.invalid"

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def ranks(self) -> SimulatedEngine:
        return self

    def route(self, method: str, path: str) -> RouteKind:
        return _ROUTES.get((method, path), RouteKind.BLOCKED)

    async def describe(self) -> EngineDescription:
        return await self._call("describe", self._describe)

    async def health(self) -> Health:
        fault = self.faults.take("health")
        if not self.alive:
            return Health.UNREACHABLE
        if self.frozen or fault is not None:
            await self.env.clock.sleep(2.0)
            return Health.UNRESPONSIVE
        return Health.HEALTHY

    async def pause(self, mode: ActivationMode) -> None:
        async def act() -> None:
            if mode is ActivationMode.QUIESCE and self.running:
                raise ActivationFailed(f"{len(self.running)} requests still run")
            self.paused = True
            self._going.clear()

        await self._call("pause", act)

    async def resume(self, *, recompute: bool) -> float:
        async def act() -> float:
            if not self.paused:
                return 0.0
            if recompute:
                for generation in self.running.values():
                    self.build_state(generation)
            self.paused = False
            self._going.set()
            return 0.001 * len(self.running) if recompute else 0.0

        return await self._call("resume", act)

    async def flush(self) -> bool:
        async def act() -> bool:
            if fault is not None and fault.action == "refuse":
                return False
            self.cache.clear()
            return True

        fault = self.faults.take("flush")
        return await self._struck("flush", fault, act)

    async def abort(self, rid: str) -> None:
        generation = self.running.pop(rid, None)
        if generation is not None:
            generation.aborted = True

    def stamp_request(self, path: str, body: dict[str, Any], *, rid: str, label: Label) -> None:
        body["rid"] = rid
        old = body.get("cache_key")
        prefix = f"{label.ref.run_id}:{label.epoch}:"
        body["cache_key"] = (
            [prefix + str(k) for k in old]
            if isinstance(old, list)
            else prefix + ("" if old is None else str(old))
        )

    def stamp_response(self, path: str, body: dict[str, Any], *, admitted: Label) -> None:
        raise AssertionError("final_responses engines stamp their own responses")

    # RankChannel.

    async def order(self, order: RankOrder, *, deadline_s: float) -> Sequence[RankReply]:
        fault = self.faults.take(order.op)

        async def act() -> Sequence[RankReply]:
            async with self._turn:
                return [
                    await rank.apply(order, self._before_tensor(rank.index, fault))
                    for rank in self.members
                ]

        return await self._struck(order.op, fault, act, deadline_s=deadline_s)

    # Generation.

    async def generate(
        self, rid: str, prompt: str, token_count: int, *, cache_key: str | None = None
    ) -> Generation:
        """Sample `token_count` tokens; ends early when aborted.

        Raises: EngineUnavailable if the engine is not there.
        """
        if not self.alive:
            raise EngineUnavailable("connection refused")
        generation = Generation(rid, prompt, cache_key)
        self.running[rid] = generation
        while len(generation.tokens) < token_count and not generation.aborted:
            await self._going.wait()
            await self._thawed.wait()
            await self.env.clock.sleep(self.token_s)
            if generation.aborted or self.paused or self.frozen or not self.alive:
                continue
            self.sample(generation)
        self.running.pop(rid, None)
        return generation

    def sample(self, generation: Generation) -> None:
        """One forward pass for one request."""
        if not generation.tokens:
            self.prefill(generation)
        label = self.members[0].label
        epoch = -1 if label is None else label.epoch
        exact = generation.state_epoch == epoch
        generation.tokens.append(
            Token(
                label,
                Prefix.EXACT if exact else Prefix.CARRIED,
                self.fingerprint(),
                generation.state_fingerprint,
            )
        )

    def prefill(self, generation: Generation) -> None:
        """Take the prompt's state from the shared cache, or build and share it."""
        key = self.cache_key(generation)
        found = self.cache.get(key)
        self.build_state(generation)
        if found is not None:
            generation.cached = True
            generation.state_fingerprint = found
        self.cache[key] = generation.state_fingerprint

    def build_state(self, generation: Generation) -> None:
        """Compute key/value state under the weights in place."""
        label = self.members[0].label
        generation.state_fingerprint = self.fingerprint()
        generation.state_epoch = -1 if label is None else label.epoch

    def cache_key(self, generation: Generation) -> tuple[int, str | None, str]:
        """What the shared prefix cache is keyed by."""
        label = self.members[0].label
        epoch = -1 if label is None or not self._capabilities.keyed_cache else label.epoch
        return (epoch, generation.key, generation.prompt)

    def fingerprint(self) -> str:
        """The model digest that all ranks agree on, or a text that matches none."""
        found = sorted({rank.fingerprint() for rank in self.members})
        return found[0] if len(found) == 1 else "mixed:" + ",".join(found)

    # Inside.

    async def _describe(self) -> EngineDescription:
        tensors = tuple(
            LiveTensor(name, dtype, shape, nbytes)
            for name, (dtype, shape, nbytes) in self.members[0].info.items()
        )
        return EngineDescription(
            name="simulated",
            version="1",
            boot_id=self.boot_id,
            model_path=str(self.model_dir),
            architecture="Simulated",
            rank_count=self.rank_count,
            tensors=tensors,
        )

    def _before_tensor(
        self, index: int, fault: Fault | None
    ) -> Callable[[int], Coroutine[Any, Any, None]]:
        async def before(count: int) -> None:
            strikes = fault is not None and fault.action == "fail_at" and fault.rank == index
            if strikes and fault is not None and count >= fault.at:
                raise RuntimeError(f"simulated failure at tensor {count}")
            await self.env.clock.sleep(0)

        return before

    async def _call(self, op: str, act: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._struck(op, self.faults.take(op), act)

    async def _struck(
        self,
        op: str,
        fault: Fault | None,
        act: Callable[[], Coroutine[Any, Any, T]],
        *,
        deadline_s: float = 3600.0,
    ) -> T:
        """Perform one call under its fault. A caller that gives up does not stop the engine."""
        self.calls.append(op)
        action = "" if fault is None else fault.action
        if not self.alive or action == "drop":
            raise EngineUnavailable(f"connection refused at {op}")
        if action == "die":
            self.die()
            raise EngineUnavailable(f"connection reset at {op}")
        delay_s = fault.delay_s if fault is not None and action in {"late", "slow"} else 0.0
        task = asyncio.create_task(self._later(act, delay_s), name=f"engine-{op}")
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        try:
            async with self.env.clock.timeout(0 if action == "late" else deadline_s):
                result = await asyncio.shield(task)
        except TimeoutError as error:
            task.add_done_callback(_retrieve)
            raise EngineUnavailable(f"no answer to {op} in time") from error
        except asyncio.CancelledError:
            task.add_done_callback(_retrieve)
            if task.cancelled():
                raise EngineUnavailable(f"connection reset at {op}") from None
            raise
        if action in {"die_after", "restart_after"}:
            self.die()
        if action == "restart_after":
            self.restart()
        if action in {"lose_reply", "die_after", "restart_after"}:
            raise EngineUnavailable(f"connection reset after {op}")
        return result

    async def _later(self, act: Callable[[], Coroutine[Any, Any, T]], delay_s: float) -> T:
        if delay_s:
            await self.env.clock.sleep(delay_s)
        await self._thawed.wait()
        if not self.alive:
            raise EngineUnavailable("the engine died")
        return await act()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
