"""The simulated engine keeps every engine promise, and every broken engine is caught by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch.engines.base import Health, RankOrder, RankReply
from stitch.env import Env
from stitch.testing.clock import run_virtual, virtual_env
from stitch.testing.engine import Generation, SimulatedEngine
from stitch.testing.engine_ranks import SimulatedRank
from stitch.testing.engine_suite import CASES, Outcome
from stitch.testing.publications import small_model, write_checkpoint
from stitch.types import ActivationMode, Label, Prefix, Ref

MakeEngine = Callable[[Path, Env], SimulatedEngine]


class Harness:
    def __init__(self, env: Env, root: Path, make: MakeEngine) -> None:
        self.env = env
        self.model_dir = write_checkpoint(root / "model", small_model())
        self.work_dir = root / "work"
        self.work_dir.mkdir()
        self._engine = make(self.model_dir, env)

    @property
    def engine(self) -> SimulatedEngine:
        return self._engine

    async def generate(self, rid: str, prompt: str, token_count: int, label: Label) -> Outcome:
        body: dict[str, Any] = {}
        self.engine.stamp_request("/generate", body, rid=rid, label=label)
        done = await self.engine.generate(rid, prompt, token_count, cache_key=body["cache_key"])
        self._last = done
        return Outcome(done.spans(), len(done.tokens), done.cached, _content(done))

    def progress(self, rid: str) -> int:
        found = self.engine.running.get(rid)
        return 0 if found is None else len(found.tokens)

    def tell_truth(self, outcome: Outcome, digests: dict[Ref, str]) -> None:
        for token in self._last.tokens:
            assert token.label is not None, "a token without a label"
            assert token.fingerprint == digests[token.label.ref], "a label that is not true"
            if token.prefix is Prefix.EXACT:
                assert token.state_fingerprint == token.fingerprint, "state that is not exact"


def _content(done: Generation) -> str:
    return ",".join(f"{t.fingerprint[:8]}{t.state_fingerprint[:8]}" for t in done.tokens)


def check(name: str, root: Path, make: MakeEngine) -> None:
    async def run() -> None:
        harness = Harness(virtual_env(7), root, make)
        try:
            await CASES[name](harness)
        finally:
            harness.engine.die()
            await harness.engine.close()
            await asyncio.sleep(0)

    run_virtual(run)


def keyed(model_dir: Path, env: Env) -> SimulatedEngine:
    return SimulatedEngine(model_dir, env)


def flushed(model_dir: Path, env: Env) -> SimulatedEngine:
    return SimulatedEngine(model_dir, env, keyed_cache=False, rank_count=1)


@pytest.mark.parametrize("make", [keyed, flushed], ids=["keyed-cache", "flushed-cache"])
@pytest.mark.parametrize("name", CASES)
def test_simulated_engine(name: str, make: MakeEngine, tmp_path: Path) -> None:
    check(name, tmp_path, make)


# Broken engines. Each overrides one thing, and the case that must notice is named.


class LabelSurvivesCommit(SimulatedRank):
    async def on_commit(self, before_tensor: Any) -> RankReply:
        label = self.label
        reply = await super().on_commit(before_tensor)
        self.label = label
        return reply


class StageTouchesLive(SimulatedRank):
    def on_stage(self, order: RankOrder) -> RankReply:
        reply = super().on_stage(order)
        for name, data in self.staged.items():
            self.write(name, data)
        return reply


class CommitActsTwice(SimulatedRank):
    async def on_commit(self, before_tensor: Any) -> RankReply:
        again = self.step == "committed"
        reply = await super().on_commit(before_tensor)
        if again:
            for name, data in self.staged.items():
                self.write(name, bytes(a ^ b for a, b in zip(self.live[name], data, strict=True)))
        return reply


class AcceptsStaleAttempts(SimulatedRank):
    def _enter(self, order: RankOrder) -> RankReply | None:
        if order.attempt < self.attempt:
            return None
        return super()._enter(order)


class UndoLeavesOneTensor(SimulatedRank):
    async def on_undo(self, before_tensor: Any) -> RankReply:
        self.undo.pop(min(self.undo), None)
        return await super().on_undo(before_tensor)


class VerifyLies(SimulatedRank):
    def on_stage(self, order: RankOrder) -> RankReply:
        self.claimed = {part.name: part.checksum for part in order.tensors}
        return super().on_stage(order)

    def on_verify(self, order: RankOrder) -> RankReply:
        if order.scope == "changed":
            return self._ok(checksums=self.claimed)
        return super().on_verify(order)


class DiscardTakesBack(SimulatedRank):
    def forget(self) -> None:
        if self.step == "committed":
            for name in self.staged:
                self.write(name, bytes(len(self.live[name])))
        super().forget()


class CommitsAfterUndo(SimulatedRank):
    async def on_commit(self, before_tensor: Any) -> RankReply:
        if self.step == "undone":
            self.step = "staged"
        return await super().on_commit(before_tensor)


class KeepsStageOfOlderAttempt(SimulatedRank):
    def _enter(self, order: RankOrder) -> RankReply | None:
        if order.attempt > self.attempt and self.step == "staged" and order.op == "commit":
            self.attempt = order.attempt
        return super()._enter(order)


class ObeysAnyIncarnation(SimulatedRank):
    def _enter(self, order: RankOrder) -> RankReply | None:
        self.incarnation = order.incarnation
        return super()._enter(order)


class BindsToAnyOrder(SimulatedRank):
    def _enter(self, order: RankOrder) -> RankReply | None:
        self.incarnation = self.incarnation or order.incarnation
        return super()._enter(order)


class TakesAnyShape(SimulatedRank):
    def on_stage(self, order: RankOrder) -> RankReply:
        self.info = {p.name: (p.dtype, p.shape, p.nbytes) for p in order.tensors} | {
            n: i for n, i in self.info.items() if n not in {p.name for p in order.tensors}
        }
        undo = tuple(p for p in order.tensors)
        return super().on_stage(RankOrder("", 0, "stage", tensors=order.tensors, undo_tensors=undo))


class OneRankCommits(SimulatedEngine):
    async def order(self, order: RankOrder, *, deadline_s: float) -> Any:
        if order.op == "commit":
            rank = self.members[0]
            reply = await rank.apply(order, self._before_tensor(0, None))
            return [RankReply(m.index, reply.code, reply.message) for m in self.members]
        return await super().order(order, deadline_s=deadline_s)


class PauseReturnsEarly(SimulatedEngine):
    async def pause(self, mode: ActivationMode) -> None:
        async def later() -> None:
            await self.env.clock.sleep(0.1)
            await super(PauseReturnsEarly, self).pause(mode)

        self._late.add(asyncio.create_task(later()))


class HealthBlocksWhilePaused(SimulatedEngine):
    async def health(self) -> Health:
        await self._going.wait()
        return await super().health()


class CacheKeyedByVersion(SimulatedEngine):
    def cache_key(self, generation: Generation) -> tuple[int, str | None, str]:
        label = self.members[0].label
        return (-1 if label is None else label.ref.version, None, generation.prompt)


class CallsCarriedExact(SimulatedEngine):
    def sample(self, generation: Generation) -> None:
        label = self.members[0].label
        if label is not None:
            generation.state_epoch = label.epoch
        super().sample(generation)


class ConfirmsAFlushItSkips(SimulatedEngine):
    async def flush(self) -> bool:
        return True


class ResumesWithoutRecompute(SimulatedEngine):
    async def resume(self, *, recompute: bool) -> float:
        return await super().resume(recompute=False)


class QuiescesOverRequests(SimulatedEngine):
    async def pause(self, mode: ActivationMode) -> None:
        await super().pause(ActivationMode.RECOMPUTE)


class AbortForgets(SimulatedEngine):
    async def abort(self, rid: str) -> None:
        if not self.paused:
            await super().abort(rid)


RANKS = {
    LabelSurvivesCommit: "the_label_is_unknown_from_commit_on",
    StageTouchesLive: "stage_touches_no_live_byte",
    CommitActsTwice: "a_repeated_commit_acts_once",
    AcceptsStaleAttempts: "stale_attempts_are_ignored",
    UndoLeavesOneTensor: "undo_restores_every_tensor",
    VerifyLies: "verify_reads_live_bytes",
    DiscardTakesBack: "discard_keeps_what_is_live",
    CommitsAfterUndo: "a_late_commit_after_undo_is_refused",
    KeepsStageOfOlderAttempt: "commit_needs_its_own_stage",
    ObeysAnyIncarnation: "other_incarnations_are_refused",
    BindsToAnyOrder: "an_unbound_rank_takes_only_a_discard",
    TakesAnyShape: "misfits_are_refused_before_a_byte_moves",
}
ENGINES = {
    OneRankCommits: "commit_makes_every_rank_live",
    PauseReturnsEarly: "a_pause_stops_every_forward",
    HealthBlocksWhilePaused: "health_answers_while_paused",
    CacheKeyedByVersion: "the_prefix_cache_never_crosses_weights",
    CallsCarriedExact: "carried_state_is_said_to_be_carried",
    ConfirmsAFlushItSkips: "a_confirmed_flush_is_done",
    ResumesWithoutRecompute: "recomputed_tokens_are_exactly_their_versions",
    QuiescesOverRequests: "quiesce_refuses_while_requests_run",
    AbortForgets: "aborts_end_requests_also_while_paused",
}


@pytest.mark.parametrize("rank", RANKS, ids=lambda kind: kind.__name__)
def test_a_broken_rank_is_caught(rank: type[SimulatedRank], tmp_path: Path) -> None:
    def make(model_dir: Path, env: Env) -> SimulatedEngine:
        engine = type("Broken", (SimulatedEngine,), {"rank_type": rank})
        made: SimulatedEngine = engine(model_dir, env)
        return made

    with pytest.raises((AssertionError, TimeoutError)):
        check(RANKS[rank], tmp_path, make)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda kind: kind.__name__)
def test_a_broken_engine_is_caught(engine: type[SimulatedEngine], tmp_path: Path) -> None:
    with pytest.raises((AssertionError, TimeoutError)):
        check(ENGINES[engine], tmp_path, lambda model_dir, env: engine(model_dir, env))
