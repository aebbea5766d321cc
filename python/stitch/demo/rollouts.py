"""The rollout side: groups of completions, sampled through the gateway while the trainer trains."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from dataclasses import dataclass

from stitch.client import AsyncClient, ClientConfig, Interrupted
from stitch.demo import task
from stitch.demo.record import RunRecord
from stitch.demo.settings import DemoSettings
from stitch.env import Env
from stitch.errors import Unavailable
from stitch.publisher.loop import LoopThread
from stitch.rl.trajectory import Trajectory
from stitch.types import lag

__all__ = ["RolloutFeed"]


@dataclass(slots=True)
class _Failed:
    error: Exception


class RolloutFeed:
    """Keeps `in_flight` groups going and hands finished ones to the trainer, oldest first.

    Bounded: at most `finished_max` finished ones wait, so tokens do not age in a queue.
    """

    def __init__(
        self, url: str, settings: DemoSettings, record: RunRecord, *, loop: LoopThread, env: Env
    ) -> None:
        self._settings = settings
        self._record = record
        self._loop = loop
        self._client = AsyncClient(url, config=ClientConfig(deadline_s=60.0), env=env)
        self._rng = random.Random(settings.seed + 1)
        self._made = 0
        # Bound to the loop that first waits on it, which is the loop thread's.
        self._queue: asyncio.Queue[list[Trajectory] | _Failed] = asyncio.Queue(
            settings.finished_max
        )
        self._task: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Begin sampling."""
        self._task = self._loop.submit(self._run())

    def take(self, count: int) -> list[Trajectory]:
        """The trajectories of `count` groups. Blocks the trainer until they are there.

        Raises: what ended the sampling; Unavailable if groups stay away for `step_s_max`.
        """
        return self._loop.run(self._take(count))

    def stop(self) -> None:
        """End sampling; requests in flight are dropped. Safe to repeat."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._loop.run(self._client.close())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for number in range(self._settings.in_flight):
                workers.create_task(self._work(), name=f"rollout-{number}")

    async def _work(self) -> None:
        while True:
            try:
                group = await self._sample()
            except Exception as error:  # the trainer raises it: its `take` waits on this
                await self._queue.put(_Failed(error))
                return
            if group:
                await self._queue.put(group)

    async def _sample(self) -> list[Trajectory]:
        """One group; empty if the request was lost for a reason that chaos explains."""
        settings = self._settings
        number = self._made
        self._made += 1
        prompt = task.make_prompt(self._rng)
        try:
            found = await self._client.generate(
                input_ids=prompt,
                constraint=lag(settings.lag_max),
                sampling={
                    "max_new_tokens": task.ANSWER_TOKENS,
                    "temperature": 1.0,
                    "ignore_eos": True,
                    "seed": settings.seed * 1_000_003 + number,
                },
                n=settings.samples,
                return_logprob=True,
            )
        except (Interrupted, Unavailable) as error:
            with self._record.lock:
                self._record.lost_requests += 1
            self._record.note(f"a request was lost: {error.code}")
            return []
        finally:
            with self._record.lock:
                self._record.requests += 1
                self._record.client_retries = dict(self._client.stats.retries)
        return [
            Trajectory(
                prompt_ids=tuple(prompt),
                output_ids=one.output_ids,
                logprobs=one.logprobs,
                spans=one.spans,
                rewards=tuple(task.token_rewards(prompt, one.output_ids)),
                group=number,
            )
            for one in found
        ]

    async def _take(self, count: int) -> list[Trajectory]:
        batch: list[Trajectory] = []
        try:
            async with asyncio.timeout(self._settings.step_s_max):
                for _ in range(count):
                    group = await self._queue.get()
                    if isinstance(group, _Failed):
                        raise group.error
                    batch += group
        except TimeoutError as error:
            raise Unavailable(
                f"no rollouts for {self._settings.step_s_max:g} s; see the replicas' logs"
            ) from error
        return batch
