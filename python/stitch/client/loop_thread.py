"""One private event loop in a thread of its own, under the sync faces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from any thread. Starts at first use; `close` ends it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the loop runs."""
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and return its result. An interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, stream: AsyncIterator[T]) -> Iterator[T]:
        """An async iterator as a plain one; closing it closes the inner one."""
        try:
            while True:
                try:
                    item = self.run(_next(stream))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                self.run(close())

    def close(self) -> None:
        """Stop the loop and join the thread. Safe to repeat."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)
