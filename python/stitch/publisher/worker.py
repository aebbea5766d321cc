"""The background half of a publisher: one task that runs jobs in order, and one that wakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from stitch.env import Env
from stitch.errors import StitchError, Unavailable
from stitch.pools.base import Pool
from stitch.publisher.job import Job
from stitch.publisher.pipeline import Pipeline

__all__ = ["Worker"]

log = logging.getLogger(__name__)

_WAKE_S_MAX: Final = 10.0


class Worker:
    """Runs jobs first in, first out. All methods belong to the loop thread."""

    def __init__(
        self, pipeline: Pipeline, pool: Pool | None, env: Env, on_end: Callable[[], None]
    ) -> None:
        self._pipeline = pipeline
        self._pool = pool
        self._env = env
        self._on_end = on_end
        self._queue: asyncio.Queue[Job | None] = asyncio.Queue()
        self._moved = asyncio.Event()
        self._waking = False
        self._jobs = asyncio.create_task(self._run(), name="stitch-publish")
        self._wakes = asyncio.create_task(self._wake(), name="stitch-wake") if pool else None

    async def enqueue(self, job: Job) -> None:
        """Add a job. The caller bounds how many are under way."""
        self._queue.put_nowait(job)

    async def drain(self) -> None:
        """Run what is queued, then end."""
        self._queue.put_nowait(None)
        await self._jobs
        try:
            await self._pipeline.settle()
        except StitchError as error:
            log.warning("the pointer stays behind", extra={"reason": error.message[:500]})
        if self._wakes is not None:
            while self._moved.is_set() or self._waking:
                await self._env.clock.sleep(0.005)
            self._wakes.cancel()
            await asyncio.gather(self._wakes, return_exceptions=True)

    async def _run(self) -> None:
        while (job := await self._queue.get()) is not None:
            try:
                await self._end(job)
            finally:
                self._on_end()

    async def _end(self, job: Job) -> None:
        ref = job.publication.ref
        try:
            published = await self._pipeline.run(job)
        except asyncio.CancelledError:
            job.publication.resolve(Unavailable(f"the publisher was closed before {ref} was out"))
            raise
        except Exception as error:
            # Task boundary: the failure belongs to this publication and its waiter.
            # The reason is in the message: where logging was not set up, nothing else is shown.
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            log.warning("publishing %s failed: %s", ref, reason)
            job.publication.resolve(error)
            return
        log.info(
            "published",
            extra={"ref": str(ref), "kind": published.kind.value, "delta_bytes": published.bytes},
        )
        self._moved.set()
        job.publication.resolve(published)

    async def _wake(self) -> None:
        """Nudge the pool after publications, coalesced. A wake is a hint: failures are logged."""
        assert self._pool is not None
        while True:
            await self._moved.wait()
            self._moved.clear()
            self._waking = True
            try:
                async with self._env.clock.timeout(_WAKE_S_MAX):
                    await self._pool.wake()
            except Exception as error:
                # Task boundary: replicas poll anyway.
                log.warning("wake failed", extra={"reason": str(error)[:500]})
            finally:
                self._waking = False
