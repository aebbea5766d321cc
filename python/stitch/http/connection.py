"""One client connection: reads whole requests within limits and answers them in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, cast

import httptools

from stitch.errors import InvalidInput, Overloaded, StitchError
from stitch.http.errors import (
    BodyTooLarge,
    ExpectationFailed,
    HeadTooLarge,
    MethodNotAllowed,
    RequestTimeout,
    TargetTooLong,
    internal_error_body,
)
from stitch.http.limits import ServerLimits
from stitch.http.message import (
    DROPPED_PREFIX,
    NOTED,
    Request,
    Response,
    origin_form,
    without_named,
)

__all__ = ["Connection", "Handler", "Host"]

log = logging.getLogger(__name__)

Handler = Callable[[Request, Response], Awaitable[None]]
_NEVER: Final = float("inf")
_LINGER_S: Final = 2.0
_LINGER_BYTES_MAX: Final = 4 * 1024 * 1024
_IDLE, _HEAD, _BODY = range(3)


class Host(Protocol):
    """What a connection needs of its server."""

    limits: ServerLimits
    now: float  # monotonic seconds, as of the last sweep
    handler: Handler
    closing: bool
    bodies_bytes: int
    connections: set[Connection]


class Connection(asyncio.Protocol):
    """Parses, queues pipelined requests, runs one handler at a time, keeps time limits.

    A client that disconnects, or ends its sending side, cancels the running handler.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._response: Response | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: StitchError | None = None
        self._phase = _IDLE
        self._deadline = _NEVER
        self._stalled_at = _NEVER
        self._stalled_bytes = 0
        self._running_bytes = 0
        self._head_read = 0
        self._body_end = _NEVER
        self._lingering = 0
        self._paused = False
        self._reset()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._deadline = self._host.now + self._limits.head_timeout_s
        self._host.connections.add(self)
        if len(self._host.connections) > self._limits.connections_max:
            self._fail(Overloaded("this server holds as many connections as it may; try later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._host.connections.discard(self)
        self._forget_bodies()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._stalled_at = self._host.now
        if self._transport is not None:
            self._stalled_bytes = self._transport.get_write_buffer_size()
        if self._response is not None:
            self._response.hold()

    def resume_writing(self) -> None:
        self._stalled_at = _NEVER
        if self._response is not None:
            self._response.unhold()
        elif self._queue:
            self._start_queued()

    def data_received(self, data: bytes) -> None:
        if self._failure is not None:
            self._linger(len(data))
            return
        size, before = len(data), self._body_bytes
        in_head = self._phase == _HEAD
        while data:
            try:
                self._parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                # No protocol is offered to switch to: the request stands as plain HTTP/1.1.
                data = data[upgrade.args[0] :]
                if self._phase == _HEAD:
                    # The parser took its body for the other protocol: read it again without.
                    data = self._plain_head() + data
                self._parser = httptools.HttpRequestParser(self)
                self._reset()
            except httptools.HttpParserError as error:
                self._fail(InvalidInput(f"malformed HTTP request: {error}"))
                return
            if self._failure is not None:
                return
        if self._phase == _HEAD:
            # A head line still incomplete is not seen by `on_header`: count the raw reads too.
            self._head_read += size if in_head else 0
            if self._head_read > self._limits.head_bytes_max:
                self._fail(self._head_too_large())
        elif self._phase == _BODY:
            # Trailers and chunk extensions: what is read without bringing any of the body.
            self._head_read = self._head_read + size if self._body_bytes == before else 0
            if self._head_read > self._limits.head_bytes_max:
                self._fail(self._head_too_large())
                return
            idle_end = self._host.now + self._limits.body_idle_timeout_s
            self._deadline = min(idle_end, self._body_end)

    # The parser's side.

    def on_message_begin(self) -> None:
        self._reset()
        self._phase = _HEAD
        if self._response is None:
            self._deadline = self._host.now + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.target_bytes_max:
            self._fail(
                TargetTooLong(f"the request target passes {self._limits.target_bytes_max} bytes")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase != _HEAD or self._failure is not None:
            return  # trailers carry nothing that is acted on
        self._head_bytes += len(name) + len(value)
        self._head_count += 1
        if (
            self._head_bytes > self._limits.head_bytes_max
            or self._head_count > self._limits.head_count_max
        ):
            self._fail(self._head_too_large())
            return
        lower = name.lower()
        forwarded = NOTED.get(lower)
        if forwarded is None:
            if not lower.startswith(DROPPED_PREFIX):
                self._lines.append(b"%b: %b\r\n" % (name, value))
            return
        if forwarded:
            self._lines.append(b"%b: %b\r\n" % (name, value))
        known = self._headers.get(lower)
        self._headers[lower] = value if known in (None, value) else b"%b, %b" % (known, value)

    def on_headers_complete(self) -> None:
        if self._failure is not None or self._body_hidden():
            return
        self._phase = _BODY
        now = self._host.now
        self._body_end = now + self._limits.body_timeout_s
        self._deadline = now + self._limits.body_idle_timeout_s
        length = self._headers.get(b"content-length")
        if length is not None and int(length) > self._limits.body_bytes_max:
            self._fail(self._body_too_large())
            return
        expect = self._headers.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                self._fail(ExpectationFailed(f"unknown expectation {expect[:40]!r}"))
            else:
                self._expecting = True
                self._answer_expectation()

    def on_body(self, body: bytes) -> None:
        if self._failure is not None:
            return
        self._body_bytes += len(body)
        self._host.bodies_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes_max:
            self._fail(self._body_too_large())
        elif self._host.bodies_bytes > self._limits.bodies_bytes_max:
            self._fail(Overloaded("request bodies in memory pass this server's limit; try later"))
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._failure is not None or self._body_hidden():
            return
        self._phase = _IDLE
        self._deadline = _NEVER
        request = self._take_request()
        if request is None:
            return
        if self._response is None and self._stalled_at == _NEVER:
            self._start(request)
            return
        self._queue.append(request)
        if len(self._queue) >= self._limits.pipeline_max:
            self._pause_reading()

    # Requests.

    def _reset(self) -> None:
        self._target = b""
        self._lines: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._head_count = 0
        self._expecting = False
        self._head_read = 0

    def _body_hidden(self) -> bool:
        """Whether the parser skips this request's body because it asks for an upgrade."""
        return (
            self._parser.should_upgrade()
            and self._parser.get_method() != b"CONNECT"
            and (
                self._headers.get(b"content-length", b"0") != b"0"
                or b"transfer-encoding" in self._headers
            )
        )

    def _plain_head(self) -> bytes:
        """This request's head once more, without its Upgrade header."""
        noted = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self._headers.items()
            if not NOTED[name] and name != b"upgrade"
        ]
        return b"%b %b HTTP/%b\r\n%b%b\r\n" % (
            self._parser.get_method(),
            self._target,
            self._parser.get_http_version().encode("latin-1"),
            b"".join(noted),
            b"".join(self._lines),
        )

    def _take_request(self) -> Request | None:
        method = self._parser.get_method().decode("latin-1")
        if method == "CONNECT":
            self._fail(MethodNotAllowed("this is no tunnel; CONNECT is not offered"))
            return None
        target = self._target
        if not target.startswith(b"/"):
            target = origin_form(target)
            if not target:
                self._fail(InvalidInput(f"malformed request target {self._target[:80]!r}"))
                return None
        connection = self._headers.get(b"connection")
        lines = self._lines if connection is None else without_named(self._lines, connection)
        http10 = self._parser.get_http_version() == "1.0"
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body_bytes = 0  # from here on the request owns them
        return Request(
            method,
            target,
            lines,
            self._headers,
            body,
            http10=http10,
            keep_alive=not http10 and (connection is None or b"close" not in connection.lower()),
        )

    def _start(self, request: Request) -> None:
        assert self._transport is not None
        assert self._response is None
        close = not request.keep_alive or self._host.closing
        self._response = response = Response(self._transport, request, close=close)
        if self._stalled_at != _NEVER:
            response.hold()
        self._running_bytes = len(request.body)
        self._task = self._loop.create_task(self._run(request, response), name="http-request")

    def _start_queued(self) -> None:
        self._start(self._queue.popleft())
        if len(self._queue) < self._limits.pipeline_max:
            self._resume_reading()

    async def _run(self, request: Request, response: Response) -> None:
        try:
            await self._host.handler(request, response)
            assert response.complete, f"{request.method} {request.path} was left unanswered"
        except StitchError as error:
            if response.started:
                log.warning("answer cut", extra={"path": request.path, "code": error.code})
                response.abort()
            else:
                response.send_error(error)
        except Exception:
            log.exception("handler failed", extra={"path": request.path})
            if response.started:
                response.abort()
            else:
                response.send(500, internal_error_body())
        finally:
            self._free_running()
            self._finish(response)

    def _finish(self, response: Response) -> None:
        self._response = self._task = None
        transport = self._transport
        if transport is None:
            return
        if not response.complete:  # cancelled while the client is still there
            transport.abort()
        elif response.close or (self._host.closing and not self._queue):
            transport.close()
        elif self._queue:
            # A client that takes no answers is given no more of them.
            if self._stalled_at == _NEVER:
                self._start_queued()
        elif self._failure is not None:
            self._send_failure(self._failure)
        else:
            self._answer_expectation()
            wait_s = (
                self._limits.keepalive_s if self._phase == _IDLE else (self._limits.head_timeout_s)
            )
            self._deadline = self._host.now + wait_s

    def _pause_reading(self) -> None:
        transport = self._transport
        if not self._paused and transport is not None and not transport.is_closing():
            self._paused = True
            transport.pause_reading()

    def _resume_reading(self) -> None:
        transport = self._transport
        if self._paused and transport is not None and not transport.is_closing():
            self._paused = False
            transport.resume_reading()

    def _answer_expectation(self) -> None:
        if self._expecting and self._response is None and self._transport is not None:
            self._expecting = False
            if not self._body_bytes:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Limits.

    def check(self, now: float) -> None:
        """End what passed its time. Called by the server's sweep."""
        transport = self._transport
        if transport is None:
            return
        if self._stalled_at != _NEVER:
            unsent = transport.get_write_buffer_size()
            if unsent < self._stalled_bytes:
                self._stalled_at = now
            self._stalled_bytes = unsent
        if now - self._stalled_at > self._limits.write_stall_s:
            transport.abort()
        elif self._response is None and now >= self._deadline:
            if self._failure is not None or self._phase == _IDLE:
                transport.abort() if self._failure is not None else transport.close()
            else:
                part = "headers" if self._phase == _HEAD else "body"
                self._fail(RequestTimeout(f"the request's {part} did not arrive in time"))

    def close_idle(self) -> None:
        """The server stops: close now unless a request is being answered or read."""
        idle = self._response is None and not self._queue and self._phase == _IDLE
        if idle and self._transport is not None:
            self._transport.close()

    def kill(self) -> asyncio.Task[None] | None:
        """Cut the connection, which cancels its handler; returns the handler's task."""
        if self._transport is not None:
            self._transport.abort()
        return self._task

    def _fail(self, error: StitchError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._host.bodies_bytes -= self._body_bytes
        self._body, self._body_bytes = [], 0
        if self._response is None:
            self._send_failure(error)

    def _send_failure(self, error: StitchError) -> None:
        """Answer, stop sending, and read a little longer: a reset would destroy the answer."""
        if self._transport is None:
            return
        request = Request("GET", b"/", [], {}, b"", keep_alive=False)
        Response(self._transport, request, close=True).send_error(error)
        self._deadline = self._host.now + _LINGER_S
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _linger(self, nbytes: int) -> None:
        self._lingering += nbytes
        if self._lingering > _LINGER_BYTES_MAX and self._transport is not None:
            self._transport.abort()

    def _free_running(self) -> None:
        self._host.bodies_bytes -= self._running_bytes
        self._running_bytes = 0

    def _forget_bodies(self) -> None:
        self._free_running()  # a handler that is cancelled before it began frees nothing
        self._host.bodies_bytes -= self._body_bytes
        self._body_bytes = 0
        for request in self._queue:
            self._host.bodies_bytes -= len(request.body)
        self._queue.clear()

    def _head_too_large(self) -> StitchError:
        return HeadTooLarge(
            f"the header block passes {self._limits.head_bytes_max} bytes or "
            f"{self._limits.head_count_max} lines"
        )

    def _body_too_large(self) -> StitchError:
        return BodyTooLarge(f"the request body passes {self._limits.body_bytes_max} bytes")
