"""`AsyncClient`: generations with a version constraint, retried within a deadline."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, overload

import aiohttp
import orjson

from stitch.client.completion import Chunk, Completion, parse_completion, parse_completions
from stitch.client.failure import (
    Interrupted,
    error_of_response,
    is_retryable,
    retry_wait_s,
)
from stitch.client.request import chat_body, generate_body, request_headers
from stitch.client.stream import StreamReader
from stitch.env import Env
from stitch.errors import CorruptData, EngineUnavailable, InvalidInput, StitchError, Unavailable
from stitch.types import UNCONSTRAINED, Constraint

__all__ = ["AsyncClient", "ClientConfig", "ClientStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Limits of a client. Seconds, milliseconds, counts.

    deadline_s: the longest one call may take, all tries together.
    wait_ms: how long one try may wait at gateway or replica for its version.
    backoff_s_min, backoff_s_max: between tries where the server asks for nothing.
    connections_max: open connections; further calls queue for one.
    body_bytes_max: longest accepted response.
    """

    deadline_s: float = 120.0
    wait_ms: int | None = 10_000
    backoff_s_min: float = 0.05
    backoff_s_max: float = 5.0
    connections_max: int = 1024
    body_bytes_max: int = 256 * 1024 * 1024


@dataclass(slots=True)
class ClientStats:
    """Counts since the client was made: responses asked for again, by error code."""

    calls: int = 0
    retries: dict[str, int] = field(default_factory=dict)


class AsyncClient:
    """Talks to a gateway or a sidecar. One event loop; safe for any number of tasks.

    Args:
        url: base URL, such as `http://127.0.0.1:8000`.
    """

    def __init__(
        self, url: str, *, config: ClientConfig | None = None, env: Env | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"{url!r} is not a base URL; write http://HOST:PORT", param="url")
        self.url = url.rstrip("/")
        self.config = config or ClientConfig()
        self.stats = ClientStats()
        self._env = env or Env()
        self._session: aiohttp.ClientSession | None = None

    @overload
    async def generate(
        self, prompt: str | None = ..., *, input_ids: Sequence[int] | None = ...,
        constraint: Constraint = ..., sampling: Mapping[str, Any] | None = ..., n: None = ...,
        return_logprob: bool = ..., affinity: str | None = ..., deadline_s: float | None = ...,
        stream: Literal[False] = ...,
    ) -> Completion: ...  # fmt: skip
    @overload
    async def generate(
        self, prompt: str | None = ..., *, input_ids: Sequence[int] | None = ...,
        constraint: Constraint = ..., sampling: Mapping[str, Any] | None = ..., n: int,
        return_logprob: bool = ..., affinity: str | None = ..., deadline_s: float | None = ...,
        stream: Literal[False] = ...,
    ) -> list[Completion]: ...  # fmt: skip
    @overload
    async def generate(
        self, prompt: str | None = ..., *, input_ids: Sequence[int] | None = ...,
        constraint: Constraint = ..., sampling: Mapping[str, Any] | None = ..., n: None = ...,
        return_logprob: bool = ..., affinity: str | None = ..., deadline_s: float | None = ...,
        stream: Literal[True],
    ) -> AsyncIterator[Chunk]: ...  # fmt: skip
    async def generate(
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
    ) -> Completion | list[Completion] | AsyncIterator[Chunk]:
        """Sample one completion, `n` of them, or a stream of chunks.

        Args:
            prompt, input_ids: exactly one; ids as the model's tokenizer makes them.
            constraint: `at_least(v)`, `exactly(v)`, `lag(k)`, or nothing.
            sampling: the engine's `sampling_params` (`max_new_tokens`, `temperature`, `seed` …).
            n: with a number, a list of that many completions comes back.
            affinity: requests with the same key prefer the same replica.
            deadline_s: for all tries together; the configuration's by default.
        Raises: the server's error once it is not retryable or the deadline is near;
            Interrupted, with what arrived as `partial`, if a generation was cut short.
        """
        if stream and n is not None:
            raise InvalidInput("a stream carries one completion; leave n out", param="n")
        body = generate_body(
            prompt,
            input_ids,
            constraint=constraint,
            sampling=sampling or {},
            n=n,
            return_logprob=return_logprob,
            stream=stream,
            wait_ms=self.config.wait_ms,
        )
        headers = request_headers(affinity)
        if stream:
            return self._chunks(body, headers, deadline_s)
        found = parse_completions(await self._post("/generate", body, headers, deadline_s))
        for completion in found:
            if completion.partial:
                raise Interrupted("the generation was aborted", partial=completion)
        if len(found) != (1 if n is None else n):
            raise CorruptData(f"asked for {n or 1} completions, {len(found)} came back")
        return found[0] if n is None else found

    async def chat(
        self,
        body: Mapping[str, Any],
        *,
        constraint: Constraint = UNCONSTRAINED,
        affinity: str | None = None,
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """`POST /v1/chat/completions`, not streamed: the decoded response, labels included."""
        return await self._openai("/v1/chat/completions", body, constraint, affinity, deadline_s)

    async def completions(
        self,
        body: Mapping[str, Any],
        *,
        constraint: Constraint = UNCONSTRAINED,
        affinity: str | None = None,
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """`POST /v1/completions`, not streamed: the decoded response, labels included."""
        return await self._openai("/v1/completions", body, constraint, affinity, deadline_s)

    async def get(self, path: str, *, deadline_s: float | None = None) -> Any:
        """Decoded JSON of a read-only route, such as `/status`."""
        return await self._retried("GET", path, None, {}, deadline_s)

    async def close(self) -> None:
        """Close the connections. Safe to repeat."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _openai(
        self,
        path: str,
        body: Mapping[str, Any],
        constraint: Constraint,
        affinity: str | None,
        deadline_s: float | None,
    ) -> dict[str, Any]:
        if body.get("stream"):
            raise InvalidInput("use the official SDK against this URL to stream", param="stream")
        sent = chat_body(body, constraint=constraint, wait_ms=self.config.wait_ms)
        found = await self._post(path, sent, request_headers(affinity), deadline_s)
        if not isinstance(found, dict):
            raise CorruptData(f"{path} answered something other than an object")
        return found

    async def _post(
        self, path: str, body: Any, headers: Mapping[str, str], deadline_s: float | None
    ) -> Any:
        return await self._retried("POST", path, body, headers, deadline_s)

    async def _retried(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        deadline_s: float | None,
    ) -> Any:
        raw = b"" if body is None else orjson.dumps(body)
        patience = self._patience(deadline_s)
        while True:
            try:
                async with patience.limit():
                    return await self._once(method, path, raw, headers)
            except StitchError as error:
                await patience.wait_or_raise(error)

    async def _once(self, method: str, path: str, raw: bytes, headers: Mapping[str, str]) -> Any:
        try:
            async with self._open(method, path, raw, headers) as answer:
                data = await self._read(answer)
                if answer.status != 200:
                    raise _failure(answer.status, data, answer.headers)
                return orjson.loads(data)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{method} {self.url}{path}: {error or type(error)}") from error
        except orjson.JSONDecodeError as error:
            raise CorruptData(f"{method} {self.url}{path} answered no JSON") from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        data = await answer.content.read(self.config.body_bytes_max)
        parts = [data]
        size = len(data)
        while data:
            data = await answer.content.read(self.config.body_bytes_max)
            parts.append(data)
            size += len(data)
            if size > self.config.body_bytes_max:
                raise CorruptData(f"the response is over {self.config.body_bytes_max} bytes")
        return b"".join(parts)

    async def _chunks(
        self, body: Any, headers: Mapping[str, str], deadline_s: float | None
    ) -> AsyncIterator[Chunk]:
        raw = orjson.dumps(body)
        patience = self._patience(deadline_s)
        while True:
            reader = StreamReader()
            try:
                async with aclosing(self._stream_once(raw, headers, reader, patience)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except StitchError as error:
                await patience.wait_or_raise(error)

    async def _stream_once(
        self, raw: bytes, headers: Mapping[str, str], reader: StreamReader, patience: _Patience
    ) -> AsyncGenerator[Chunk, None]:
        """One try. Errors before the first event may be retried; later ones are Interrupted."""
        started = False
        try:
            async with self._open("POST", "/generate", raw, headers) as answer:
                if answer.status != 200:
                    raise _failure(answer.status, await self._read(answer), answer.headers)
                while data := await patience.bounded(answer.content.readany()):
                    for chunk in reader.feed(data):
                        started = True
                        yield chunk
            reader.finish()
        except (aiohttp.ClientError, OSError) as error:
            if started:
                raise reader.cut(f"the stream was cut: {error or type(error)}") from error
            raise EngineUnavailable(f"POST {self.url}/generate: {error or type(error)}") from error
        except Unavailable as error:
            if started and not isinstance(error, Interrupted):
                raise reader.cut(error.message) from error
            raise

    def _open(self, method: str, path: str, raw: bytes, headers: Mapping[str, str]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.config.connections_max),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session.request(
            method,
            f"{self.url}{path}",
            data=raw or None,
            headers={"Content-Type": "application/json", **headers},
        )

    def _patience(self, deadline_s: float | None) -> _Patience:
        self.stats.calls += 1
        return _Patience(
            self, self._env, self.config.deadline_s if deadline_s is None else deadline_s
        )


class _Patience:
    """The deadline of one call and its tries."""

    def __init__(self, client: AsyncClient, env: Env, deadline_s: float) -> None:
        self._client = client
        self._env = env
        self._deadline_s = deadline_s
        self._end = env.clock.monotonic() + deadline_s
        self._tries = 0

    @property
    def left_s(self) -> float:
        return self._end - self._env.clock.monotonic()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Bound one try by what is left. A passed deadline is final: no time for another try."""
        try:
            async with self._env.clock.timeout(max(0.0, self.left_s)):
                yield
        except TimeoutError as error:
            raise Unavailable(
                f"no answer from {self._client.url} within {self._deadline_s:g} s; is the pool "
                "serving the version asked for?",
                retryable=False,
            ) from error

    async def bounded(self, work: Any) -> bytes:
        """Await one read of a stream within what is left."""
        async with self.limit():
            found: bytes = await work
        return found

    async def wait_or_raise(self, error: StitchError) -> None:
        """Sleep before the next try, or raise `error`: final, or no time is left for another."""
        if not is_retryable(error):
            raise error
        self._tries += 1
        config = self._client.config
        wait_s = retry_wait_s(
            error,
            self._tries,
            base_s=config.backoff_s_min,
            max_s=config.backoff_s_max,
            spread=self._env.random.random(),
        )
        if wait_s >= self.left_s:
            raise error
        retries = self._client.stats.retries
        retries[error.code] = retries.get(error.code, 0) + 1
        await self._env.clock.sleep(wait_s)


def _failure(status: int, data: bytes, headers: Mapping[str, str]) -> StitchError:
    """The response's error; Interrupted where it carries partial output."""
    error = error_of_response(status, data, headers)
    partial = error.fields.get("partial")
    items = partial if isinstance(partial, list) else [partial]
    if isinstance(items[0], dict) and "meta_info" in items[0]:
        failure = Interrupted(
            f"the generation ended early: {error.message}",
            partial=parse_completion(items[0], partial=True),
            cause_code=error.fields.get("wire_code"),
        )
        failure.__cause__ = error
        return failure
    return error
