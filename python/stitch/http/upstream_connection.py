"""One connection to an upstream: writes requests, cuts responses out of the byte stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from stitch.errors import StitchError
from stitch.http.exchange import Exchange
from stitch.http.limits import UpstreamLimits

__all__ = ["UpstreamConnection"]

_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?(?=\r\n)")
# What may be passed on as it is: a bare CR or LF, a folded line or a line without a name could be
# read as something else by the next hop.
_CLEAN: Final = re.compile(rb"[^\r\n\0]+\r\n(?:[!-9;-~]+:[^\r\n\0]*\r\n)*")
_LENGTH_DIGITS_MAX: Final = 18
_SPECIAL: Final = re.compile(
    rb"\r\n(connection|content-length|content-type|keep-alive|proxy-authenticate|"
    rb"proxy-connection|te|trailer|transfer-encoding|upgrade)[ \t]*:[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_CHUNKED_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_LENGTH, _CHUNKED, _CLOSE = range(3)

LostError = Callable[..., StitchError]


class _Pool(Protocol):
    host: str
    port: int
    limits: UpstreamLimits
    now: float  # monotonic seconds, as of the last sweep
    idle: list[UpstreamConnection]
    open: set[UpstreamConnection]
    closed: bool


class UpstreamConnection(asyncio.Protocol):
    """One connection; at most one exchange at a time."""

    def __init__(self, pool: _Pool, lost: LostError) -> None:
        self._pool = pool
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._decoder: httptools.HttpResponseParser | None = None
        self._buffer = b""
        self._bare = False
        self._framing = _LENGTH
        self._remaining = 0
        self._keep_alive = True
        self._paused = False
        self._deadline = float("inf")

    @property
    def usable(self) -> bool:
        """Whether a new exchange may start."""
        return (
            self._transport is not None
            and self._exchange is None
            and not self._transport.is_closing()
        )

    def start(self, request: bytes, body: bytes, *, bare: bool) -> Exchange:
        """Write one request."""
        exchange = Exchange(self)
        self._exchange = exchange
        self._bare = bare
        self._buffer = b""
        self._deadline = self._pool.now + self._pool.limits.silence_s
        transport = self._transport
        if transport is None:
            self._end(self._error("closed"))
        elif len(body) <= 65536:
            transport.write(request + body)
        else:
            transport.write(request)
            transport.write(body)
        return exchange

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()
        self._end(self._error("was cancelled"))

    def pause(self) -> None:
        transport = self._transport
        if not self._paused and transport is not None and not transport.is_closing():
            self._paused = True
            transport.pause_reading()

    def resume(self) -> None:
        transport = self._transport
        if self._paused and transport is not None and not transport.is_closing():
            self._paused = False
            transport.resume_reading()

    def check(self, now: float) -> None:
        """End what passed its time. Called by the pool's sweep."""
        if now < self._deadline or self._transport is None or self._paused:
            return
        self._transport.abort()
        if self._exchange is not None:
            self._end(self._error(f"was silent for {self._pool.limits.silence_s:g} s"))

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)
        if self._pool.closed:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.open.discard(self)
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.head and self._framing == _CLOSE:
            self._end(None)
        else:
            exchange.stale = not exchange.answered
            self._end(self._error("closed the connection before its answer was whole"))

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self._drop()  # bytes nobody asked for
            return
        exchange.answered = True
        self._deadline = self._pool.now + self._pool.limits.silence_s
        if not exchange.head:
            data = self._head(exchange, data)
            if not exchange.head or self._exchange is None:
                return
        if data:
            self._body(exchange, data)

    # The decoder's side (chunked bodies).

    def on_message_begin(self) -> None:
        if self._exchange is None:
            self._drop()  # a second response that nobody asked for

    def on_body(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._deliver(exchange, data)

    def on_message_complete(self) -> None:
        self._end(None)

    # Reading.

    def _head(self, exchange: Exchange, data: bytes) -> bytes:
        """Read the head; returns what follows it."""
        data = self._buffer + data if self._buffer else data
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                if len(data) > self._pool.limits.head_bytes_max:
                    self._break("sent a header block over the limit")
                return b""
            line = _STATUS.match(data)
            if line is None:
                self._break("sent a malformed status line")
                return b""
            status = int(line[2])
            if status >= 200:
                break
            if status == 101:
                self._break("switched protocols unasked")
                return b""
            data = data[end + 4 :]
        self._buffer = b""
        exchange.status = status
        self._keep_alive = line[1] == b"1"
        if not self._fields(exchange, data[: end + 2]):
            self._break("sent malformed or contradictory headers")
            return b""
        exchange.got_head()
        if self._framing == _LENGTH and self._remaining == 0:
            if end + 4 < len(data):
                self._keep_alive = False
            self._end(None)
            return b""
        return data[end + 4 :]

    def _fields(self, exchange: Exchange, head: bytes) -> bool:
        """Take in the headers that matter and keep the rest as they are. False: unusable."""
        if not _CLEAN.fullmatch(head):
            return False
        kept: list[bytes] = []
        at = 0
        length: int | None = None
        chunked = False
        named: bytes = b""
        for match in _SPECIAL.finditer(head):
            name, value = match[1].lower(), match[2].strip()
            if name == b"content-type":
                exchange.content_type = value.lower()
                continue
            kept.append(head[at : match.start()])
            at = match.end()
            if name == b"content-length":
                if not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
                    return False
                if length not in (None, int(value)):
                    return False
                length = int(value)
            elif name == b"transfer-encoding":
                if chunked or value.lower() != b"chunked":
                    return False
                chunked = True
            elif name == b"connection":
                named += value.lower() + b","
                if b"close" in named:
                    self._keep_alive = False
                elif b"keep-alive" in named:
                    self._keep_alive = True
        kept.append(head[at:])
        exchange.head = _without_named(b"".join(kept), named) if named else b"".join(kept)
        self._frame(exchange, length, chunked)
        return not (chunked and length is not None)

    def _frame(self, exchange: Exchange, length: int | None, chunked: bool) -> None:
        self._decoder = None
        self._remaining = 0
        exchange.length = length
        if self._bare or exchange.status in (204, 304):
            self._framing = _LENGTH
        elif chunked:
            self._framing = _CHUNKED
            self._decoder = httptools.HttpResponseParser(self)
            self._decoder.feed_data(_CHUNKED_HEAD)
        elif length is not None:
            self._framing = _LENGTH
            self._remaining = length
        else:
            self._framing = _CLOSE
            self._keep_alive = False

    def _body(self, exchange: Exchange, data: bytes) -> None:
        if self._framing == _CHUNKED:
            assert self._decoder is not None
            try:
                self._decoder.feed_data(data)
            except httptools.HttpParserError:
                if exchange.done:
                    self._drop()
                else:
                    self._break("sent malformed chunks")
        elif self._framing == _CLOSE:
            self._deliver(exchange, data)
        else:
            if len(data) > self._remaining:
                data = data[: self._remaining]
                self._keep_alive = False
            self._remaining -= len(data)
            self._deliver(exchange, data)
            if self._remaining == 0:
                self._end(None)

    def _deliver(self, exchange: Exchange, data: bytes) -> None:
        if not exchange.deliver(data) and exchange.received > self._pool.limits.buffer_bytes:
            self.pause()

    # Ending.

    def _end(self, error: StitchError | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        transport = self._transport
        if error is None and self._keep_alive and transport is not None:
            if transport.is_closing() or transport.get_write_buffer_size() or self._pool.closed:
                self._drop()
            else:
                self.resume()
                self._deadline = self._pool.now + self._pool.limits.idle_s
                self._pool.idle.append(self)
        else:
            self._drop()
        exchange.finish(error)

    def _drop(self) -> None:
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        if self._transport is not None:
            self._transport.close()

    def _break(self, what: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(self._error(what))

    def _error(self, what: str) -> StitchError:
        return self._lost(f"upstream {self._pool.host}:{self._pool.port} {what}", sent=True)


def _without_named(head: bytes, named: bytes) -> bytes:
    """Drop the headers that a Connection header names as this hop's own."""
    names = {token.strip() for token in named.split(b",")} - {b"", b"close", b"keep-alive"}
    if not names:
        return head
    lines = head.split(b"\r\n")
    return b"\r\n".join(
        line for line in lines if line.partition(b":")[0].strip().lower() not in names
    )
