"""What every engine promises, as named cases over the public protocol.

An engine's own tests build an `EngineHarness` and run every case of `CASES` against it:

    @pytest.mark.parametrize("name", CASES)
    async def test_engine(name): await CASES[name](await make_harness())

A case raises AssertionError naming the broken promise. Each case needs a fresh engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from stitch.checksum import (
    Checksum,
    additive_lanes,
    lane_bytes_for,
    model_digest,
    tensor_term,
)
from stitch.destinations.canonical import MappedState, open_boot
from stitch.engines.base import Engine, Health, RankOrder, RankReply, RouteKind, TensorSlice
from stitch.env import Env
from stitch.errors import StitchError
from stitch.format.dtypes import bits_of
from stitch.types import ActivationMode, Label, Prefix, Ref, Span

__all__ = ["CASES", "Driven", "EngineHarness", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request. `cached`: prompt state came from the shared prefix cache."""

    spans: Sequence[Span]
    token_count: int
    cached: bool
    content: str = ""


class EngineHarness(Protocol):
    """One fresh engine with a checkpoint loaded, and a client for it."""

    env: Env
    model_dir: Path
    work_dir: Path

    @property
    def engine(self) -> Engine: ...

    async def generate(self, rid: str, prompt: str, token_count: int, label: Label) -> Outcome:
        """Run one greedy request to its end or abort, stamped for `label` by the engine."""
        ...

    def progress(self, rid: str) -> int:
        """Tokens that a running request has so far; 0 if unknown."""
        ...

    def tell_truth(self, outcome: Outcome, digests: dict[Ref, str]) -> None:
        """Raise AssertionError if a token's label is not the weights it came from (if knowable)."""
        ...


V0, V1 = Ref("suite", 0), Ref("suite", 1)


@dataclass
class Driven:
    """Drives one engine the way a destination does, and keeps what the suite compares."""

    harness: EngineHarness
    incarnation: str = "suite-incarnation-1"
    attempt: int = 0
    base: dict[str, TensorSlice] = field(default_factory=dict)
    new: dict[str, TensorSlice] = field(default_factory=dict)
    label: Label = field(default_factory=lambda: Label(V0, 1))

    @classmethod
    async def start(cls, harness: EngineHarness) -> Driven:
        """Bind the ranks, label version 0, and prepare other bytes for some tensors."""
        driven = cls(harness)
        await driven.send("discard")
        state = open_boot(harness.model_dir, threads=1)
        held = set.intersection(*[set(sums) for sums in await driven.sums("full")])
        driven.base = {name: part for name, part in state.slices.items() if name in held}
        source = MappedState(state)
        names = [n for n in sorted(driven.base) if driven.base[n].nbytes > 0]
        for index, name in enumerate(names):
            driven.new[name] = _changed(driven.base[name], source.view(name), harness, index)
        source.close()
        await driven.send("label", label=driven.label)
        return driven

    @property
    def engine(self) -> Engine:
        return self.harness.engine

    async def order(self, op: Any, **fields: Any) -> list[RankReply]:
        fields.setdefault("incarnation", self.incarnation)
        fields.setdefault("attempt", self.attempt)
        order = RankOrder(op=op, **fields)
        return list(await self.engine.ranks.order(order, deadline_s=60.0))

    async def send(self, op: Any, **fields: Any) -> list[RankReply]:
        """An order that all ranks must take."""
        replies = await self.order(op, **fields)
        assert replies, "no rank answered"
        for reply in replies:
            assert reply.ok, f"rank {reply.rank}: {op} gave {reply.code}: {reply.message}"
        return replies

    async def sums(self, scope: str) -> list[dict[str, str]]:
        return [dict(r.data["checksums"]) for r in await self.send("verify", scope=scope)]

    async def stage(self) -> None:
        self.attempt += 1
        await self.send(
            "stage",
            tensors=tuple(self.new.values()),
            undo_tensors=tuple(self.base[n] for n in self.new),
        )

    async def paused_commit(self, mode: ActivationMode = ActivationMode.RECOMPUTE) -> None:
        await self.stage()
        await self.engine.pause(mode)
        await self.send("commit")

    async def activate(self, mode: ActivationMode, ref: Ref) -> None:
        """A whole activation of the other bytes, labelled `ref`."""
        await self.paused_commit(mode)
        await self._go_on(ref, mode)

    async def undo(self, mode: ActivationMode, ref: Ref) -> None:
        await self.engine.pause(mode)
        await self.send("undo")
        await self._go_on(ref, mode)

    async def _go_on(self, ref: Ref, mode: ActivationMode) -> None:
        if not self.engine.capabilities.keyed_cache:
            assert await self.engine.flush(), "flush was not confirmed"
        self.label = Label(ref, self.label.epoch + 1)
        await self.send("label", label=self.label)
        await self.engine.resume(recompute=mode is not ActivationMode.IN_PLACE)

    async def live_is(self, expected: dict[str, TensorSlice], why: str) -> None:
        """Every rank's live bytes, of every canonical tensor, are the expected ones."""
        wanted = {name: expected.get(name, part).checksum for name, part in self.base.items()}
        for index, sums in enumerate(await self.sums("full")):
            wrong = sorted(n for n, text in wanted.items() if sums.get(n) != text)
            assert not wrong, f"rank {index}: {wrong[:3]} have other bytes: {why}"

    async def state(self) -> list[dict[str, Any]]:
        return [dict(r.data) for r in await self.send("state")]

    async def run(self, rid: str, prompt: str, count: int) -> Outcome:
        return await self.harness.generate(rid, prompt, count, self.label)

    async def until_progress(self, rid: str, count: int) -> None:
        for _ in range(2000):
            if self.harness.progress(rid) >= count:
                return
            await self.harness.env.clock.sleep(0.005)
        raise AssertionError(f"{rid} made no progress")


def _changed(
    part: TensorSlice, data: memoryview, harness: EngineHarness, index: int
) -> TensorSlice:
    """The same tensor with its elements in reverse: valid numbers, other bytes."""
    size = max(1, bits_of(part.dtype) // 8)
    raw = bytes(data)
    elements = [raw[at : at + size] for at in range(0, len(raw), size)]
    other = b"".join(reversed(elements))
    path = harness.work_dir / f"suite-{index:05d}.bin"
    handle = harness.env.files.create(path)
    handle.write(other)
    handle.close()
    lane = lane_bytes_for(part.shape, bits_of(part.dtype))
    checksum: Checksum = additive_lanes(other, lane_bytes=lane)
    return replace(part, path=str(path), offset=0, checksum=checksum.to_text())


async def describe_is_stable(harness: EngineHarness) -> None:
    """One boot id per life, and every live storage by name."""
    first, second = await harness.engine.describe(), await harness.engine.describe()
    assert first.boot_id == second.boot_id, "boot_id changed without a restart"
    assert first.rank_count >= 1, "no ranks"
    assert first.tensors, "no live storages described"
    assert await harness.engine.health() is Health.HEALTHY


async def unknown_routes_are_blocked(harness: EngineHarness) -> None:
    """Default deny."""
    assert harness.engine.route("POST", "/no/such/route") is RouteKind.BLOCKED
    assert harness.engine.route("POST", "/generate") is RouteKind.SAMPLING


async def stage_touches_no_live_byte(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.stage()
    await driven.live_is({}, "staging must not write")


async def commit_makes_every_rank_live(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.paused_commit()
    await driven.live_is(driven.new, "commit must write every staged tensor on every rank")


async def verify_reads_live_bytes(harness: EngineHarness) -> None:
    """Before a commit the staged tensors' live checksums are still the old ones."""
    driven = await Driven.start(harness)
    await driven.stage()
    for sums in await driven.sums("changed"):
        for name in driven.new:
            assert sums.get(name) == driven.base[name].checksum, (
                f"verify says {name} is what was staged, but nothing was committed"
            )


async def a_repeated_commit_acts_once(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.paused_commit()
    await driven.send("commit")
    await driven.live_is(driven.new, "a repeated commit must not act again")


async def a_repeated_stage_is_answered(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.stage()
    driven.attempt -= 1
    await driven.stage()
    await driven.live_is({}, "a repeated stage must not write")


async def undo_restores_every_tensor(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.paused_commit()
    await driven.send("undo")
    await driven.live_is({}, "undo must put back every tensor")
    await driven.send("undo")
    await driven.live_is({}, "a repeated undo must not act again")


async def undo_before_commit_is_harmless(harness: EngineHarness) -> None:
    """A rank that missed the commit gets the undo of the others."""
    driven = await Driven.start(harness)
    await driven.stage()
    await driven.engine.pause(ActivationMode.RECOMPUTE)
    await driven.send("undo")
    await driven.live_is({}, "undo without a commit must leave the old bytes")


async def stale_attempts_are_ignored(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.stage()
    await driven.stage()
    await driven.engine.pause(ActivationMode.RECOMPUTE)
    for reply in await driven.order("commit", attempt=driven.attempt - 1):
        assert reply.code == "stale", f"an old attempt got {reply.code}"
    await driven.live_is({}, "an old attempt must not write")


async def commit_needs_its_own_stage(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.stage()
    driven.attempt += 1
    for reply in await driven.order("commit"):
        assert not reply.ok, "a commit without a stage of its attempt was taken"
    await driven.live_is({}, "a commit without a stage must not write")


async def a_late_commit_after_undo_is_refused(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.paused_commit()
    await driven.send("undo")
    for reply in await driven.order("commit"):
        assert not reply.ok, "a commit after the undo of its attempt was taken"
    await driven.live_is({}, "a late commit must not write")


async def a_fence_voids_older_stages(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.stage()
    await driven.send("discard", attempt=driven.attempt + 1)
    for reply in await driven.order("commit"):
        assert reply.code == "stale", f"a fenced attempt got {reply.code}"
    driven.attempt += 1
    await driven.live_is({}, "a fenced attempt must not write")


async def other_incarnations_are_refused(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.stage()
    for reply in await driven.order("commit", incarnation="suite-incarnation-0"):
        assert reply.code == "refused", f"another incarnation got {reply.code}"
    await driven.send("discard", incarnation="suite-incarnation-2", attempt=1)
    for op in ("commit", "label", "discard"):
        for reply in await driven.order(op, attempt=99):
            assert reply.code == "refused", f"a replaced incarnation's {op} got {reply.code}"
    driven.incarnation, driven.attempt = "suite-incarnation-2", 1
    await driven.live_is({}, "taking over must not write")
    for state in await driven.state():
        assert state["label"] is None, "a new incarnation starts without a label"


async def an_unbound_rank_takes_only_a_discard(harness: EngineHarness) -> None:
    """Orders meant for the process before a restart do nothing to the new one."""
    driven = Driven(harness)
    for reply in await driven.order("label", attempt=3, label=Label(V1, 9)):
        assert reply.code == "refused", f"a label before any discard got {reply.code}"
    for state in await driven.state():
        assert state["label"] is None, "a refused label was kept"


async def discard_keeps_what_is_live(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    await driven.paused_commit()
    driven.attempt += 1
    await driven.send("discard")
    await driven.live_is(driven.new, "discard must not take back what was committed")


async def the_label_is_unknown_from_commit_on(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    assert all(s["label"] is not None for s in await driven.state()), "the label was not kept"
    await driven.stage()
    assert all(s["label"] is not None for s in await driven.state()), "a stage took the label"
    await driven.engine.pause(ActivationMode.RECOMPUTE)
    await driven.send("commit")
    for state in await driven.state():
        assert state["label"] is None, "a label survived the first live byte"
        assert (state["attempt"], state["step"]) == (driven.attempt, "committed"), state


async def misfits_are_refused_before_a_byte_moves(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    name = next(iter(driven.new))
    part = driven.new[name]
    bad = replace(part, shape=(*part.shape, 1, 2), nbytes=part.nbytes)
    driven.attempt += 1
    for reply in await driven.order("stage", tensors=(bad,), undo_tensors=(driven.base[name],)):
        assert reply.code == "mismatch", f"another shape got {reply.code}"
    for reply in await driven.order("commit"):
        assert not reply.ok, "a refused stage could be committed"
    await driven.live_is({}, "a misfit must not write")


async def a_pause_stops_every_forward(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    run = asyncio.create_task(driven.run("pause-1", "hello", 60))
    await driven.until_progress("pause-1", 2)
    await driven.engine.pause(ActivationMode.RECOMPUTE)
    before = harness.progress("pause-1")
    await harness.env.clock.sleep(0.3)
    assert harness.progress("pause-1") == before, "tokens were sampled after pause returned"
    await driven.engine.pause(ActivationMode.RECOMPUTE)
    await driven.engine.resume(recompute=True)
    await driven.engine.resume(recompute=True)
    outcome = await run
    assert outcome.token_count == 60, f"{outcome.token_count} of 60 tokens after a pause"


async def health_answers_while_paused(harness: EngineHarness) -> None:
    await harness.engine.pause(ActivationMode.RECOMPUTE)
    async with harness.env.clock.timeout(5.0):
        assert await harness.engine.health() is Health.HEALTHY, "paused is not unhealthy"
    await harness.engine.resume(recompute=True)


async def quiesce_refuses_while_requests_run(harness: EngineHarness) -> None:
    if ActivationMode.QUIESCE not in harness.engine.capabilities.modes:
        return
    driven = await Driven.start(harness)
    run = asyncio.create_task(driven.run("quiesce-1", "hello", 60))
    await driven.until_progress("quiesce-1", 1)
    try:
        await driven.engine.pause(ActivationMode.QUIESCE)
    except StitchError:
        await driven.engine.resume(recompute=True)
        await run
        return
    raise AssertionError("quiesce paused over a running request")


async def aborts_end_requests_also_while_paused(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    runs = [asyncio.create_task(driven.run(f"abort-{i}", "hello", 200)) for i in range(2)]
    await driven.until_progress("abort-0", 1)
    await driven.engine.abort("abort-0")
    await driven.engine.pause(ActivationMode.RECOMPUTE)
    await driven.engine.abort("abort-1")
    await driven.engine.abort("never-seen")
    await driven.engine.resume(recompute=True)
    async with harness.env.clock.timeout(30.0):
        counts = [(await run).token_count for run in runs]
    assert max(counts) < 200, "an aborted request ran to its end"


async def _crossing(harness: EngineHarness, mode: ActivationMode) -> Outcome:
    driven = await Driven.start(harness)
    run = asyncio.create_task(driven.run("cross-1", "hello world", 40))
    await driven.until_progress("cross-1", 3)
    await driven.activate(mode, V1)
    outcome = await run
    digests = {V0: _digest(driven.base), V1: _digest({**driven.base, **driven.new})}
    harness.tell_truth(outcome, digests)
    assert outcome.token_count == 40, f"{outcome.token_count} of 40 tokens"
    refs = [span.ref for span in outcome.spans]
    assert refs == [V0, V1], f"a request that crossed once reports {refs}"
    return outcome


async def recomputed_tokens_are_exactly_their_versions(harness: EngineHarness) -> None:
    if ActivationMode.RECOMPUTE in harness.engine.capabilities.modes:
        outcome = await _crossing(harness, ActivationMode.RECOMPUTE)
        assert all(span.prefix is Prefix.EXACT for span in outcome.spans), "recomputed is exact"


async def carried_state_is_said_to_be_carried(harness: EngineHarness) -> None:
    if ActivationMode.IN_PLACE in harness.engine.capabilities.modes:
        outcome = await _crossing(harness, ActivationMode.IN_PLACE)
        assert outcome.spans[0].prefix is Prefix.EXACT
        assert outcome.spans[1].prefix is Prefix.CARRIED, "carried state was called exact"


async def the_prefix_cache_never_crosses_weights(harness: EngineHarness) -> None:
    """v0 → v1 → undone: the same prompt never meets state of other weights."""
    driven = await Driven.start(harness)
    prompt = "the same long prompt every time"
    first = await driven.run("cache-1", prompt, 6)
    await driven.activate(ActivationMode.RECOMPUTE, V1)
    second = await driven.run("cache-2", prompt, 6)
    assert not second.cached, "prompt state of v0 was used under v1"
    await driven.undo(ActivationMode.RECOMPUTE, V0)
    third = await driven.run("cache-3", prompt, 6)
    assert not third.cached, "prompt state from before the undo's epoch was used"
    assert third.content == first.content, "the undone weights answer differently"
    digests = {V0: _digest(driven.base), V1: _digest({**driven.base, **driven.new})}
    for outcome in (first, second, third):
        harness.tell_truth(outcome, digests)


async def a_confirmed_flush_is_done(harness: EngineHarness) -> None:
    driven = await Driven.start(harness)
    prompt = "a prompt that is asked twice"
    await driven.run("flush-1", prompt, 4)
    assert await driven.engine.flush(), "an idle engine refused to flush"
    again = await driven.run("flush-2", prompt, 4)
    assert not again.cached, "the cache was still there after a confirmed flush"


def _digest(slices: dict[str, TensorSlice]) -> str:
    return model_digest(
        tensor_term(n, part.dtype, part.shape, Checksum.from_text(part.checksum))
        for n, part in slices.items()
    )


CASES: Final[dict[str, Callable[[EngineHarness], Awaitable[None]]]] = {
    case.__name__: case
    for case in (
        describe_is_stable,
        unknown_routes_are_blocked,
        stage_touches_no_live_byte,
        commit_makes_every_rank_live,
        verify_reads_live_bytes,
        a_repeated_commit_acts_once,
        a_repeated_stage_is_answered,
        undo_restores_every_tensor,
        undo_before_commit_is_harmless,
        stale_attempts_are_ignored,
        commit_needs_its_own_stage,
        a_late_commit_after_undo_is_refused,
        a_fence_voids_older_stages,
        other_incarnations_are_refused,
        an_unbound_rank_takes_only_a_discard,
        discard_keeps_what_is_live,
        the_label_is_unknown_from_commit_on,
        misfits_are_refused_before_a_byte_moves,
        a_pause_stops_every_forward,
        health_answers_while_paused,
        quiesce_refuses_while_requests_run,
        aborts_end_requests_also_while_paused,
        recomputed_tokens_are_exactly_their_versions,
        carried_state_is_said_to_be_carried,
        the_prefix_cache_never_crosses_weights,
        a_confirmed_flush_is_done,
    )
}
