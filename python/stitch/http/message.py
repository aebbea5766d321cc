"""One request as read, and the response being written to its connection."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final, Protocol

from stitch.errors import StitchError
from stitch.http.errors import error_body, retry_headers

__all__ = [
    "DROPPED_PREFIX",
    "JSON",
    "NOTED",
    "Request",
    "Response",
    "Source",
    "origin_form",
    "without_named",
]

JSON: Final = b"application/json"
_JOIN_BYTES_MAX: Final = 64 * 1024
_PHRASES: Final = {int(status): status.phrase.encode() for status in HTTPStatus}
_BODYLESS: Final = frozenset({204, 304})

# Headers that concern one hop, or are for a front door alone; never forwarded.
_DROPPED: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"modal-flash-upstream",
        b"modal-key",
        b"modal-secret",
        b"modal-session-id",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-stitch-affinity",
        b"x-stitch-exact-version",
        b"x-stitch-min-version",
    }
)
# Forwarded, and also read here.
_NOTED: Final = frozenset({b"accept-encoding", b"content-type", b"last-event-id"})

# Header name, lower-case, to whether it is forwarded, of those kept in `Request.headers`.
# Every other header is forwarded, but for those that begin with DROPPED_PREFIX.
NOTED: Final = dict.fromkeys(_DROPPED, False) | dict.fromkeys(_NOTED, True)
DROPPED_PREFIX: Final = b"x-forwarded-"


class Source(Protocol):
    """What feeds a response and can be told to hold back."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Request:
    """One whole request.

    method: upper-case. target: origin form, with the query. path: without it. lines: the header
    lines to forward, each `Name: value` and CRLF. headers: the noted ones, lower-case names.
    """

    __slots__ = ("body", "headers", "http10", "keep_alive", "lines", "method", "path", "target")

    def __init__(
        self,
        method: str,
        target: bytes,
        lines: list[bytes],
        headers: dict[bytes, bytes],
        body: bytes,
        *,
        http10: bool = False,
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.lines = lines
        self.headers = headers
        self.body = body
        self.http10 = http10
        self.keep_alive = keep_alive

    def without(self, name: bytes) -> list[bytes]:
        """The lines to forward, less the header `name` (lower-case, with its colon)."""
        return [line for line in self.lines if line[: len(name)].lower() != name]


class Response:
    """Writes one response. Everything is dropped silently once the client is gone.

    A head is the status line and header lines, each with CRLF, without framing headers:
    Content-Length or chunked framing and `Connection: close` are decided here.
    """

    __slots__ = (
        "_bare",
        "_chunked",
        "_http10",
        "_transport",
        "_writable",
        "close",
        "complete",
        "source",
        "started",
        "status",
    )

    def __init__(self, transport: asyncio.WriteTransport, request: Request, *, close: bool) -> None:
        self._transport = transport
        self._http10 = request.http10
        self._bare = request.method == "HEAD"
        self._chunked = False
        self._writable: asyncio.Event | None = None
        self.close = close
        self.started = False
        self.complete = False
        self.status = 0
        self.source: Source | None = None

    def send(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        """A whole response of our own. `headers` are complete lines."""
        self.send_raw(_head(status, content_type, headers), body)

    def send_error(self, error: StitchError, *, headers: bytes = b"") -> None:
        """The error as the HTTP contract spells it."""
        self.send(error.http_status, error_body(error), headers=headers + retry_headers(error))

    def send_raw(self, head: bytes, body: bytes) -> None:
        """A whole response with a given head."""
        self._begin(head)
        framing = b"" if self.status in _BODYLESS else b"Content-Length: %d\r\n" % len(body)
        last = b"Connection: close\r\n\r\n" if self.close else b"\r\n"
        if self._bare or self.status in _BODYLESS:
            self._transport.write(b"".join((head, framing, last)))
        elif len(body) <= _JOIN_BYTES_MAX:
            self._transport.write(b"".join((head, framing, last, body)))
        else:
            self._transport.write(b"".join((head, framing, last)))
            self._transport.write(body)
        self.complete = True

    def begin(self, head: bytes, length: int | None) -> None:
        """Start a body written in pieces. With `length` None it is chunked where possible."""
        self._begin(head)
        framing = b""
        if length is not None:
            framing = b"Content-Length: %d\r\n" % length
        elif self.status in _BODYLESS or self._bare:
            pass
        elif self._http10:
            self.close = True
        else:
            self._chunked = True
            framing = b"Transfer-Encoding: chunked\r\n"
        last = b"Connection: close\r\n\r\n" if self.close else b"\r\n"
        self._transport.write(b"".join((head, framing, last)))

    def write(self, data: bytes) -> None:
        """The next piece of the body."""
        if not data or self._bare:
            return
        if self._chunked:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._transport.write(data)

    def end(self) -> None:
        """The body is whole."""
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        self.complete = True

    def abort(self) -> None:
        """Cut the connection, so that the client can't take what it has for the whole."""
        self.complete = True
        self.close = True
        self._transport.abort()

    async def drained(self) -> None:
        """Wait while the client takes data slower than it is written."""
        if self._writable is not None:
            await self._writable.wait()

    def feed_from(self, source: Source | None) -> None:
        """From now on `source` is told when the client is behind."""
        self.source = source
        if source is not None and self._writable is not None:
            source.pause()

    def hold(self) -> None:
        """The connection's buffer is full."""
        if self._writable is None:
            self._writable = asyncio.Event()
        if self.source is not None:
            self.source.pause()

    def unhold(self) -> None:
        """The connection's buffer has room again."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self.source is not None:
            self.source.resume()

    def _begin(self, head: bytes) -> None:
        assert not self.started, "a response starts once"
        self.started = True
        self.status = int(head[9:12])


def _head(status: int, content_type: bytes, headers: bytes) -> bytes:
    phrase = _PHRASES.get(status, b"Unknown")
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n%b" % (status, phrase, content_type, headers)


def origin_form(target: bytes) -> bytes:
    """The path and query of an absolute-form target; empty if it is none."""
    lower = target[:8].lower()
    if not lower.startswith((b"http://", b"https://")):
        return b""
    _, slash, rest = target.partition(b"//")[2].partition(b"/")
    return slash + rest if slash else b"/"


def without_named(lines: list[bytes], connection: bytes) -> list[bytes]:
    """Drop the headers that a Connection header names as this hop's own."""
    named = {token.strip().lower() for token in connection.split(b",")}
    named -= {b"close", b"keep-alive", b"upgrade", b"te", b""}
    if not named:
        return lines
    return [line for line in lines if line.partition(b":")[0].lower() not in named]
