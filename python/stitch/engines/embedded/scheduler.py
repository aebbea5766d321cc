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
from stitch.engines.embedded.kv import PAGE_TOKENS, PagePool, PrefixCache, chain_keys
from stitch.engines.embedded.model import LoadedModel
from stitch.engines.embedded.ragged import Stretch
from stitch.engines.embedded.runner import Runner
from stitch.engines.embedded.sampling import choose, log_softmax, top_tokens, uniform_at
from stitch.engines.embedded.text import TextCodec, TextStream
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
        self.model = model
        self.stats = SchedulerStats()
        self.label: Label | None = None
        self.generation = 0
        self.paused = False
        self.prefix_cache = PrefixCache(runner.pool, enabled=config.prefix_cache)
        self.context_tokens_max = context_tokens_max
        self._runner = runner
        self._pool: PagePool = runner.pool
        self._codec = codec
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
        return self._pool.free_count

    # The thread.

    def run(self) -> None:
        """Loop until `stop`."""
        while not self._stopping:
            idle = self._recompute is None and (self.paused or not (self._running or self._waiting))
            self._take_commands(block=idle)
            try:
                if self._recompute is not None:
                    self._recompute_step()
                elif not self.paused and (self._running or self._waiting):
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
        if mode is ActivationMode.QUIESCE and (self._running or self._waiting):
            raise ActivationFailed(
                f"{len(self._running) + len(self._waiting)} requests are in flight; "
                "drain before a quiesce pause"
            )
        if self._recompute is not None:
            _, futures = self._recompute
            self._recompute = None
            for future in futures:
                future.set_exception(Closed("paused again while recomputing"))
        if not self.paused:
            self.paused = True
            self.stats.pauses += 1
        return len(self._running) + len(self._waiting)

    def weights_changing(self) -> None:
        """Call before the first live byte changes: the label becomes unknown, caches end.

        Samples without output start over; the others' key/value state is stale from now on.
        """
        assert self.paused, "weights change only while paused"
        self.label = None
        self.generation += 1
        self.stats.weight_writes += 1
        self.prefix_cache.clear()
        for generation in self._running:
            if generation.output:
                generation.stale = generation.stale or generation.computed > 0
            else:
                self._pool.release(generation.drop_state())
        for generation in (*self._running, *self._waiting):
            if not generation.output:
                generation.input_logprobs.clear()
                generation.input_tops.clear()

    def set_label(self, label: Label | None) -> None:
        """What tokens are stamped with from the next pass on. A new epoch ends old prefixes."""
        self.label = label
        self.prefix_cache.clear()

    def flush(self) -> None:
        """Forget all cached prefixes."""
        self.prefix_cache.clear()

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
        elif not self.paused:
            future.set_result(0.0)
        elif recompute and any(g.stale for g in self._running):
            for generation in self._running:
                if generation.stale:
                    self._pool.release(generation.drop_state())
            self._recompute = (self._clock.monotonic(), [future])
        else:
            self.paused = False
            future.set_result(0.0)

    def _recompute_step(self) -> None:
        """Rebuild the state of running samples, up to the token that is decoded next."""
        assert self._recompute is not None
        behind = [g for g in self._running if g.output and g.pending > 1]
        if behind:
            work = self._plan(behind, spare=1)
            if not work:
                return
            self._runner.forward([self._stretch(g, n) for g, n in work], [[]] * len(work))
            for generation, count in work:
                generation.computed += count
                self.stats.recomputed_tokens += count
                self._keep_pages(generation)
            return
        started, futures = self._recompute
        self._recompute = None
        self.paused = False
        for future in futures:
            future.set_result(self._clock.monotonic() - started)

    # One pass.

    def _step(self) -> None:
        self._admit()
        work = self._plan(self._running, spare=0)
        if not work:
            return
        wanted = [self._wanted(g, n) for g, n in work]
        logits = self._runner.forward([self._stretch(g, n) for g, n in work], wanted)
        self.stats.steps += 1
        row = 0
        for (generation, count), offsets in zip(work, wanted, strict=True):
            rows = logits[row : row + len(offsets)]
            row += len(offsets)
            self._advance(generation, count, rows)
        self._sweep()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.running_max:
            generation = self._waiting[0]
            needed = -(-(len(generation.tokens) + 1) // PAGE_TOKENS)
            # A sample that cannot hold its tokens would only be retracted again.
            while self._running and self._pool.free_count < needed:
                if not self._evict():
                    return
            self._running.append(self._waiting.popleft())

    def _match_prefix(self, generation: Generation) -> None:
        limit = len(generation.tokens) - 1
        if generation.ask.logprob_start is not None:
            known = len(generation.input_logprobs)
            limit = min(limit, generation.ask.logprob_start + max(0, known - 1))
        root = self._root(generation)
        generation.pages = self.prefix_cache.match(root, generation.tokens, limit)
        generation.computed = len(generation.pages) * PAGE_TOKENS
        if generation.cached_tokens is None:
            generation.cached_tokens = generation.computed
            self.stats.cached_tokens += generation.computed
            self.stats.prompt_tokens += generation.prompt_length

    def _root(self, generation: Generation) -> bytes:
        epoch = None if self.label is None else self.label.epoch
        return PrefixCache.root(self.generation, epoch, generation.ask.extra_key)

    def _plan(self, chosen: Sequence[Generation], *, spare: int) -> list[tuple[Generation, int]]:
        """How many tokens of each sample the next pass computes: decodes first, then prefill.

        spare: tokens at the end to leave for later. Pages are reserved; when they run out the
        youngest sample gives up its state and waits.
        """
        budget = self._config.prefill_tokens_max
        work: list[tuple[Generation, int]] = []
        for generation in sorted(chosen, key=lambda g: g.computed == 0 or g.pending > 1):
            if generation not in self._running:
                continue  # preempted by an earlier one in this very plan
            if generation.computed == 0 and not generation.pages:
                self._match_prefix(generation)
            count = generation.pending - spare
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count < 1 or not self._reserve(generation, generation.computed + count):
                continue
            work.append((generation, count))
        return [(g, n) for g, n in work if g in self._running]

    def _reserve(self, generation: Generation, tokens: int) -> bool:
        while len(generation.pages) * PAGE_TOKENS < tokens:
            page = self._pool.take()
            if page is not None:
                generation.pages.append(page)
            elif not self._evict() and not self._preempt(generation):
                return False
        return True

    def _evict(self) -> bool:
        return self.prefix_cache.evict()

    def _preempt(self, wanting: Generation) -> bool:
        """Take the pages of the youngest running sample; False if that is `wanting` itself."""
        youngest = self._running[-1]
        if youngest is wanting:
            if len(self._running) == 1:
                return False
            self._retract(wanting)
            return False
        self._retract(youngest)
        return True

    def _retract(self, generation: Generation) -> None:
        self._pool.release(generation.drop_state())
        self._running.remove(generation)
        self._waiting.appendleft(generation)
        self.stats.preemptions += 1

    @staticmethod
    def _stretch(generation: Generation, count: int) -> Stretch:
        start = generation.computed
        return Stretch(generation.tokens[start : start + count], start, generation.pages)

    @staticmethod
    def _wanted(generation: Generation, count: int) -> Sequence[int]:
        """Offsets whose logits are needed: the last if it completes, and wanted prompt ones."""
        completes = generation.pending == count
        start = generation.ask.logprob_start
        if start is None:
            return [count - 1] if completes else []
        # Logits at position p are about token p + 1; those of `known` ones exist already.
        known = max(0, len(generation.input_logprobs) - 1)
        first = max(0, start + known - generation.computed)
        last = min(count, generation.prompt_length - 1 - generation.computed)
        return [*range(first, last), *([count - 1] if completes else [])]

    def _advance(self, generation: Generation, count: int, rows: Any) -> None:
        completes = generation.pending == count
        generation.computed += count
        self._keep_pages(generation)
        if generation.ask.logprob_start is not None:
            self._keep_input_logprobs(generation, rows[:-1] if completes else rows)
        if completes:
            self._sample(generation, rows[-1])

    def _keep_pages(self, generation: Generation) -> None:
        """Share pages that just became full, unless their state is not the present weights'."""
        full = generation.computed // PAGE_TOKENS
        if generation.stale or not self._config.prefix_cache:
            return
        root = self._root(generation)
        if root != generation.chain_root or len(generation.chain) > full:
            generation.chain, generation.chain_root = [], root
        done = len(generation.chain)
        if full == done:
            return
        parent = generation.chain[-1] if generation.chain else root
        tail = generation.tokens[done * PAGE_TOKENS : full * PAGE_TOKENS]
        for index, key in enumerate(chain_keys(parent, tail), start=done):
            generation.chain.append(key)
            self.prefix_cache.insert(key, generation.pages[index])

    def _keep_input_logprobs(self, generation: Generation, rows: Any) -> None:
        ask = generation.ask
        if not generation.input_logprobs:
            generation.input_logprobs.append(None)
            generation.input_tops.append(None)
        assert ask.logprob_start is not None
        for row in rows:
            at = ask.logprob_start + len(generation.input_logprobs)
            logprobs = log_softmax(row)
            generation.input_logprobs.append(float(logprobs[ask.prompt[at]]))
            generation.input_tops.append(top_tokens(logprobs, ask.top_logprobs))

    def _sample(self, generation: Generation, logits: Any) -> None:
        ask, params = generation.ask, generation.ask.params
        generation.prompt_label = self.label if not generation.output else generation.prompt_label
        if params.max_new_tokens == 0:
            self._finish(generation, {"type": "length", "length": 0})
            return
        at = len(generation.output)
        ends = self._end_tokens(generation)
        choice = choose(
            logits,
            params,
            uniform=uniform_at(ask.seed, at),
            output_counts=generation.counts,
            prompt_tokens=frozenset(ask.prompt) if params.penalized else frozenset(),
            barred=ends if at < params.min_new_tokens else frozenset(),
        )
        if choice is None:
            reason = "the logits are not finite; the weights are damaged"
            self._finish(generation, {"type": "abort", "message": reason, "failed": True})
            return
        if ask.return_logprob:
            generation.logprobs.append(choice.logprob)
            generation.tops.append(top_tokens(choice.logprobs, ask.top_logprobs))
        generation.accept(choice.token, label=self.label)
        self.stats.output_tokens += 1
        self._after_token(generation, choice.token, ends)

    def _end_tokens(self, generation: Generation) -> frozenset[int]:
        params = generation.ask.params
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self.eos

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a sample unless it ignores them."""
        return self.model.eos_token_ids

    def _after_token(self, generation: Generation, token: int, ends: frozenset[int]) -> None:
        params = generation.ask.params
        stream = generation.stream
        if stream is None and (generation.ask.stream or params.stop):
            stream = generation.stream = TextStream(
                self._codec, skip_special_tokens=params.skip_special_tokens, stops=params.stop
            )
        if token in ends:
            if stream is not None and params.no_stop_trim:
                stream.push(token)
            self._finish(generation, {"type": "stop", "matched": token})
            return
        if stream is not None:
            before = len(stream.text)
            stream.push(token)
            stop = stream.find_stop(params.stop, before) if params.stop else None
            if stop is not None and len(generation.output) >= params.min_new_tokens:
                at, matched = stop
                stream.finish(cut_at=at + len(matched) if params.no_stop_trim else at)
                self._finish(generation, {"type": "stop", "matched": matched})
                return
        room = self.context_tokens_max - generation.prompt_length
        if len(generation.output) >= min(params.max_new_tokens, room):
            self._finish(generation, {"type": "length", "length": len(generation.output)})
        elif generation.ask.stream and stream is not None:
            shown = stream.text[: stream.settled_length]
            self._news.append((generation, Progress(len(generation.output), shown, None)))

    # Ends.

    def _finish(self, generation: Generation, finish: dict[str, Any]) -> None:
        """Settle the text and tell the HTTP side. `_sweep` then drops it from the batch."""
        if generation.finish is not None:
            return
        generation.finish = finish
        self.stats.finished[finish["type"]] += 1
        stream = generation.stream
        if stream is None:
            ids = generation.output
            if finish["type"] == "stop" and not generation.ask.params.no_stop_trim:
                ids = ids[:-1]
            skip = generation.ask.params.skip_special_tokens
            text = self._codec.decode(ids, skip_special_tokens=skip)
        else:
            if not isinstance(finish.get("matched"), str):
                stream.finish()
            text = stream.text
        self._news.append((generation, Progress(len(generation.output), text, finish)))

    def _sweep(self) -> None:
        for generation in self._running:
            if generation.finish is not None:
                self._pool.release(generation.drop_state())
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
