"""`Client`: the sync face of `AsyncClient`, over one private loop thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from stitch.client.asynchronous import AsyncClient, ClientConfig, ClientStats
from stitch.client.completion import Chunk, Completion
from stitch.env import Env
from stitch.publisher.loop import LoopThread
from stitch.types import UNCONSTRAINED, Constraint

__all__ = ["Client"]

T = TypeVar("T")


class Client:
    """Talks to a gateway or a sidecar from ordinary code. Safe to share between threads.

        with stitch.Client("http://127.0.0.1:8000") as client:
            done = client.generate("12 + 30 =", constraint=stitch.lag(1))

    Methods and errors are `AsyncClient`'s.
    """

    def __init__(
        self, url: str, *, config: ClientConfig | None = None, env: Env | None = None
    ) -> None:
        self._inner = AsyncClient(url, config=config, env=env)
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return self._inner.url

    @property
    def stats(self) -> ClientStats:
        """Calls and retries so far."""
        return self._inner.stats

    @overload
    def generate(
        self, prompt: str | None = ..., *, input_ids: Sequence[int] | None = ...,
        constraint: Constraint = ..., sampling: Mapping[str, Any] | None = ..., n: None = ...,
        return_logprob: bool = ..., affinity: str | None = ..., deadline_s: float | None = ...,
        stream: Literal[False] = ...,
    ) -> Completion: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str | None = ..., *, input_ids: Sequence[int] | None = ...,
        constraint: Constraint = ..., sampling: Mapping[str, Any] | None = ..., n: int,
        return_logprob: bool = ..., affinity: str | None = ..., deadline_s: float | None = ...,
        stream: Literal[False] = ...,
    ) -> list[Completion]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str | None = ..., *, input_ids: Sequence[int] | None = ...,
        constraint: Constraint = ..., sampling: Mapping[str, Any] | None = ..., n: None = ...,
        return_logprob: bool = ..., affinity: str | None = ..., deadline_s: float | None = ...,
        stream: Literal[True],
    ) -> Iterator[Chunk]: ...  # fmt: skip
    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        constraint: Constraint = UNCONSTRAINED,
        sampling: Mapping[str, Any] | None = None,
        n: int | None = None,
        return_logprob: bool = False,
        affinity: str | None = None,
        deadline_s: float | None = None,
        stream: bool = False,
    ) -> Completion | list[Completion] | Iterator[Chunk]:
        """Sample one completion, `n` of them, or an iterator over a stream's chunks.

        See `AsyncClient.generate`. Closing the iterator early aborts the generation.
        """
        inner: Any = self._inner  # the overloads do not take a plain bool
        found: Any = self._run(
            inner.generate(
                prompt,
                input_ids=input_ids,
                constraint=constraint,
                sampling=sampling,
                n=n,
                return_logprob=return_logprob,
                affinity=affinity,
                deadline_s=deadline_s,
                stream=stream,
            )
        )
        return self._iterate(found) if stream else found

    def chat(
        self,
        body: Mapping[str, Any],
        *,
        constraint: Constraint = UNCONSTRAINED,
        affinity: str | None = None,
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """`POST /v1/chat/completions`; see `AsyncClient.chat`."""
        return self._run(
            self._inner.chat(body, constraint=constraint, affinity=affinity, deadline_s=deadline_s)
        )

    def completions(
        self,
        body: Mapping[str, Any],
        *,
        constraint: Constraint = UNCONSTRAINED,
        affinity: str | None = None,
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """`POST /v1/completions`; see `AsyncClient.completions`."""
        return self._run(
            self._inner.completions(
                body, constraint=constraint, affinity=affinity, deadline_s=deadline_s
            )
        )

    def get(self, path: str, *, deadline_s: float | None = None) -> Any:
        """Decoded JSON of a read-only route."""
        return self._run(self._inner.get(path, deadline_s=deadline_s))

    def close(self) -> None:
        """Close connections and end the loop thread. Safe to repeat."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.run(self._inner.close())
            thread.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("stitch-client")
            thread = self._thread
        return thread.run(work)

    def _iterate(self, stream: AsyncIterator[Chunk]) -> Iterator[Chunk]:
        try:
            while True:
                try:
                    chunk = self._run(_next(stream))
                except StopAsyncIteration:
                    return
                yield chunk
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                self._run(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def _next(stream: AsyncIterator[Chunk]) -> Chunk:
    return await anext(stream)
