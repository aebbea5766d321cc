"""The scheduler thread: owns the model, the pages and every running request.

One iteration takes commands, then runs one forward pass in which prefill chunks of new
requests and one decode token of every running request share the batch. Everything else that
touches weights or key/value state (pause, commit, abort, labels) is a command executed
between two passes, so none needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stitch.engines.embedded.config import EngineConfig
from stitch.engines.embedded.generation import Ask, Generation, Progress
from stitch.engines.embedded.model import LoadedModel
from stitch.engines.embedded.outcome import Outcome
from stitch.engines.embedded.ragged import Stretch
from stitch.engines.embedded.residency import Residency
from stitch.engines.embedded.runner import Runner
from stitch.engines.embedded.text import TextCodec
from stitch.env import Clock
from stitch.errors import ActivationFailed, Closed, EngineUnavailable, Overloaded
from stitch.types import ActivationMode, Label

__all__ = ["Scheduler", "SchedulerStats"]

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start. Written by the scheduler thread, read by anyone."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: int = 0
    weight_writes: int = 0


class Scheduler(threading.Thread):
    """Continuous batching over one model.

    Methods marked "any thread" hand work over; all others run on the scheduler thread.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        codec: TextCodec,
        config: EngineConfig,
        *,
        clock: Clock,
        context_tokens_max: int,
    ) -> None:
        super().__init__(name="stitch-scheduler", daemon=True)
        self.stats = SchedulerStats()
        self.label: Label | None = None
        self.labelled_once = False
        self._paused = False
        self.context_tokens_max = context_tokens_max
        self._runner = runner
        self._residency = Residency(runner.pool, prefix_cache=config.prefix_cache)
        self._outcome = Outcome(
            codec, eos=model.eos_token_ids, context_tokens_max=context_tokens_max
        )
        self._config = config
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._news: list[tuple[Generation, Progress]] = []
        self._recompute: tuple[float, list[Future[float]]] | None = None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admitted = 0  # loop side: samples handed over and not yet finished

    # Any thread.

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop on which sinks are called. Once, before `start`."""
        self._loop = loop

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` between two forward passes."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(command)
        return future

    def submit(
        self, asks: Sequence[Ask], sinks: Sequence[Callable[[Progress], None]]
    ) -> list[Generation]:
        """Queue samples; sinks are called on the loop. Loop thread only.

        Raises: Overloaded if the queue has no room for all of them.
        """
        limit = self._config.running_max + self._config.queued_max
        if self._admitted + len(asks) > limit:
            raise Overloaded(
                f"{self._admitted} samples are running or queued of at most {limit}; retry later"
            )
        self._admitted += len(asks)
        made = [Generation(ask, sink) for ask, sink in zip(asks, sinks, strict=True)]
        self._inbox.put(lambda: self._waiting.extend(made))
        return made

    def abort(self, chosen: Callable[[Ask], bool], reason: str) -> Future[int]:
        """End all samples that `chosen` names; also while paused. Returns how many."""
        return self.call(lambda: self._abort(chosen, reason))

    def resume(self, *, recompute: bool) -> Future[float]:
        """Go on sampling; the result is the seconds spent on recomputing."""
        future: Future[float] = Future()
        self._inbox.put(lambda: self._begin_resume(future, recompute))
        return future

    def stop(self) -> None:
        """End the thread after the present pass."""
        self._inbox.put(self._stop)

    @property
    def paused(self) -> bool:
        """Whether no pass runs and none starts; not yet while a resume recomputes."""
        return self._paused and self._recompute is None

    @property
    def running_count(self) -> int:
        """Samples in the batch."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Samples that wait for their first pass."""
        return len(self._waiting)

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return self._residency.pool.free_count

    @property
    def cached_pages(self) -> int:
        """Pages of the prefix cache, shared with samples or not."""
        return len(self._residency.cache)

    @property
    def weights_generation(self) -> int:
        """How often live weights were written."""
        return self._residency.generation

    # The thread.

    def run(self) -> None:
        """Loop until `stop`."""
        while not self._stopping:
            idle = self._recompute is None and (
                self._paused or not (self._running or self._waiting)
            )
            self._take_commands(block=idle)
            try:
                if self._recompute is not None:
                    self._recompute_step()
                elif not self._paused and (self._running or self._waiting):
                    self._step()
            except Exception:
                log.exception("forward_failed", extra={"running": len(self._running)})
                self._fail_all("the engine failed in a forward pass; see its log")
            self._deliver()

    def _take_commands(self, *, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            self._inbox.get(block)()
            while True:
                self._inbox.get_nowait()()

    def _stop(self) -> None:
        self._stopping = True
        self._fail_all("the engine is shutting down")

    # Control, between passes.

    def pause(self, mode: ActivationMode) -> int:
        """No pass starts until `resume`. Returns the number of samples in flight. Idempotent."""
        arrived = self._waiting and not self._paused  # what arrives during a pause is held
        if mode is ActivationMode.QUIESCE and (self._running or arrived):
            raise ActivationFailed(
                f"{len(self._running) + len(self._waiting)} requests are in flight; "
                "drain before a quiesce pause"
            )
        if self._recompute is not None:
            _, futures = self._recompute
            self._recompute = None
            for future in futures:
                future.set_exception(Closed("paused again while recomputing"))
        if not self._paused:
            self._paused = True
            self.stats.pauses += 1
        return len(self._running) + len(self._waiting)

    def weights_changing(self) -> None:
        """Call before the first live byte changes: the label becomes unknown, prefixes end.

        Samples without output start over; the others' key/value state is stale from now on.
        """
        assert self.paused, "weights change only while paused"
        self.label = None
        self.stats.weight_writes += 1
        self._residency.weights_changing()
        for sample in self._running:
            if sample.output:
                sample.stale = sample.stale or sample.computed > 0
            else:
                self._residency.drop(sample)
        for sample in (*self._running, *self._waiting):
            if not sample.output:
                sample.input_logprobs.clear()
                sample.input_tops.clear()

    def set_label(self, label: Label | None) -> None:
        """What tokens are stamped with from the next pass on. A new epoch ends old prefixes."""
        self.label = label
        self.labelled_once = self.labelled_once or label is not None
        self._residency.set_epoch(None if label is None else label.epoch)

    def flush(self) -> None:
        """Forget all cached prefixes."""
        self._residency.cache.clear()

    def _abort(self, chosen: Callable[[Ask], bool], reason: str, *, failed: bool = False) -> int:
        gone = [g for g in (*self._running, *self._waiting) if chosen(g.ask)]
        finish = {"type": "abort", "message": reason, **({"failed": True} if failed else {})}
        for generation in gone:
            self._finish(generation, dict(finish))
        self._sweep()
        return len(gone)

    def _begin_resume(self, future: Future[float], recompute: bool) -> None:
        # Marked as running, the future cannot be cancelled under our hands; a caller that left
        # does not undo the resume.
        future.set_running_or_notify_cancel()
        if future.cancelled():
            future = Future()
        if self._recompute is not None:
            self._recompute[1].append(future)
        elif not self._paused:
            future.set_result(0.0)
        elif recompute and any(g.output and (g.stale or g.pending > 1) for g in self._running):
            for sample in self._running:
                if sample.stale:
                    self._residency.drop(sample)
            self._recompute = (self._clock.monotonic(), [future])
        else:
            self._paused = False
            future.set_result(0.0)

    def _recompute_step(self) -> None:
        """Rebuild the state of running samples, up to the token that is decoded next."""
        assert self._recompute is not None, "called only while recomputing"
        behind = [g for g in self._running if g.output and g.pending > 1]
        if behind:
            work = self._plan(behind, spare=1)
            if not work:
                return
            self._runner.forward([_stretch(g, n) for g, n in work], [[]] * len(work))
            for sample, count in work:
                sample.computed += count
                self.stats.recomputed_tokens += count
                self._residency.keep(sample)
            return
        started, futures = self._recompute
        self._recompute = None
        self._paused = False
        for future in futures:
            future.set_result(self._clock.monotonic() - started)

    # One pass.

    def _step(self) -> None:
        self._admit()
        work = self._plan(self._running, spare=0)
        if not work:
            return
        wanted = [self._outcome.wanted(g, n) for g, n in work]
        logits = self._runner.forward([_stretch(g, n) for g, n in work], wanted)
        self.stats.steps += 1
        row = 0
        for (sample, count), offsets in zip(work, wanted, strict=True):
            rows = logits[row : row + len(offsets)]
            row += len(offsets)
            self._advance(sample, count, rows)
        self._sweep()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.running_max:
            # A sample that cannot hold its tokens would only be retracted again.
            tokens = len(self._waiting[0].tokens) + 1
            if self._running and not self._residency.make_room(tokens):
                return
            self._running.append(self._waiting.popleft())

    def _plan(self, chosen: Sequence[Generation], *, spare: int) -> list[tuple[Generation, int]]:
        """How many tokens of each sample the next pass computes: decodes first, then prefill.

        spare: tokens at the end to leave for later. Pages are reserved; when they run out the
        youngest sample gives up its state and waits.
        """
        budget = self._config.prefill_tokens_max
        work: list[tuple[Generation, int]] = []
        for sample in sorted(chosen, key=lambda g: g.computed == 0 or g.pending > 1):
            if sample not in self._running:
                continue  # retracted for an earlier one in this very plan
            if sample.computed == 0 and not sample.pages and self._residency.load(sample):
                self.stats.cached_tokens += sample.computed
                self.stats.prompt_tokens += sample.prompt_length
            count = sample.pending - spare
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count >= 1 and self._reserve(sample, sample.computed + count):
                work.append((sample, count))
        return [(g, n) for g, n in work if g in self._running]

    def _reserve(self, sample: Generation, tokens: int) -> bool:
        while not self._residency.extend(sample, tokens):
            youngest = self._running[-1]
            assert len(self._running) > 1, "the pool holds one full context"
            self._residency.drop(youngest)
            self._running.remove(youngest)
            self._waiting.appendleft(youngest)
            self.stats.preemptions += 1
            if youngest is sample:
                return False
        return True

    def _advance(self, sample: Generation, count: int, rows: Any) -> None:
        completes = sample.pending == count
        sample.computed += count
        self._residency.keep(sample)
        if sample.ask.logprob_start is not None and not sample.output:
            self._outcome.note_prompt(sample, rows[:-1] if completes else rows)
        if not completes:
            return
        produced = len(sample.output)
        finish = self._outcome.next_token(sample, rows[-1], self.label)
        self.stats.output_tokens += len(sample.output) - produced
        if finish is not None:
            self._finish(sample, finish)
        elif sample.ask.stream and sample.stream is not None:
            shown = sample.stream.text[: sample.stream.settled_length]
            self._news.append((sample, Progress(len(sample.output), shown, None)))

    # Ends.

    def _finish(self, sample: Generation, finish: dict[str, Any]) -> None:
        """Settle the text and tell the HTTP side. `_sweep` then drops it from the batch."""
        if sample.finish is not None:
            return
        sample.finish = finish
        self.stats.finished[finish["type"]] += 1
        text = self._outcome.final_text(sample, finish)
        self._news.append((sample, Progress(len(sample.output), text, finish)))

    def _sweep(self) -> None:
        for sample in self._running:
            if sample.finish is not None:
                self._residency.drop(sample)
        self._running = [g for g in self._running if g.finish is None]
        if any(g.finish is not None for g in self._waiting):
            self._waiting = deque(g for g in self._waiting if g.finish is None)

    def _fail_all(self, reason: str) -> None:
        if self._recompute is not None:
            _, futures = self._recompute
            self._recompute = None
            for future in futures:
                future.set_exception(EngineUnavailable(reason))
        self._abort(lambda _: True, reason, failed=True)
        self._deliver()

    def _deliver(self) -> None:
        if not self._news:
            return
        news, self._news = self._news, []
        assert self._loop is not None, "attach before start"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._hand_out, news)

    def _hand_out(self, news: list[tuple[Generation, Progress]]) -> None:
        for generation, progress in news:
            if progress.finish is not None:
                self._admitted -= 1
            generation.sink(progress)


def _stretch(sample: Generation, count: int) -> Stretch:
    start = sample.computed
    return Stretch(sample.tokens[start : start + count], start, sample.pages)
