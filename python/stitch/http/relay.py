"""From an upstream's response to the client's, without looking into the body.

What may still fail without the client noticing is waited for first: a JSON or sized body is
held whole up to a bound, a stream until its first bytes. From then on a cut is made visible:
an in-band error event in an event stream, a cut connection elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import orjson

from stitch.errors import StitchError
from stitch.http.errors import error_object
from stitch.http.exchange import Exchange
from stitch.http.message import Request, Response
from stitch.http.sse import encode_event

__all__ = ["StreamTail", "deliver", "deliver_whole", "error_event", "held", "request_head"]

log = logging.getLogger(__name__)

_BODYLESS: Final = frozenset({204, 304})


def request_head(
    request: Request, authority: bytes, lines: list[bytes], body_bytes: int, extra: bytes = b""
) -> bytes:
    """The head to send upstream. `extra` are complete lines."""
    framing = b""
    if body_bytes or request.method not in ("GET", "HEAD", "DELETE"):
        framing = b"Content-Length: %d\r\n" % body_bytes
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b%b\r\n" % (
        request.method.encode("latin-1"),
        request.target,
        authority,
        b"".join(lines),
        extra,
        framing,
    )


async def held(exchange: Exchange, bytes_max: int) -> bool:
    """Wait for what is held back before the first byte goes out. True: the body is whole.

    Raises: what the exchange raises when it is lost before that.
    """
    if exchange.done:
        return True
    length = exchange.length
    if not exchange.event_stream and (
        (length is not None and length <= bytes_max) or exchange.json
    ):
        return await exchange.gather(bytes_max)
    return await exchange.gather(1)


def error_event(error: StitchError, **extra: Any) -> bytes:
    """The event that ends a cut stream. `status` is what a whole response would have had."""
    body = error_object(error) | {"status": error.http_status} | extra
    return encode_event(orjson.dumps({"error": body}, default=str))


class StreamTail:
    """Remembers whether an event stream stands between two events."""

    __slots__ = ("_last", "_response")

    def __init__(self, response: Response) -> None:
        self._response = response
        self._last = b"\n\n"

    def write(self, data: bytes) -> None:
        """Pass a piece on."""
        self._last = data[-4:] if len(data) >= 4 else (self._last + data)[-4:]
        self._response.write(data)

    def end_with(self, event: bytes) -> None:
        """End the stream with `event`, on a line of its own."""
        between = self._last.endswith((b"\n\n", b"\r\n\r\n"))
        self._response.write(event if between else b"\n\n" + event)
        self._response.end()


def deliver_whole(exchange: Exchange, request: Request, response: Response, extra: bytes) -> bool:
    """Send the response on at once if it is whole already. True if it was."""
    if not exchange.done or request.method == "HEAD" or exchange.status in _BODYLESS:
        return False
    response.send_raw(exchange.head + extra, exchange.take())
    return True


async def deliver(
    exchange: Exchange,
    request: Request,
    response: Response,
    *,
    extra: bytes,
    cut_event: Callable[[StitchError], bytes],
    tail: StreamTail | None = None,
) -> StitchError | None:
    """Send the response on. `extra` are header lines to add.

    `cut_event` makes the event for a stream that breaks off; other bodies end in a cut
    connection. Returns: the failure that cut the response, or None if it was whole.
    """
    if deliver_whole(exchange, request, response, extra):
        return None
    head = exchange.head + extra
    if request.method == "HEAD" or exchange.status in _BODYLESS:
        response.begin(head, exchange.length)
        response.end()
        return None
    response.feed_from(exchange)
    response.begin(head, exchange.length)
    readable = exchange.event_stream and b"\r\ncontent-encoding:" not in exchange.head.lower()
    tail = tail or StreamTail(response)
    try:
        await exchange.pipe(tail.write if readable else response.write)
    except StitchError as error:
        log.warning("response cut", extra={"path": request.path, "code": error.code})
        if readable and exchange.length is None:
            tail.end_with(cut_event(error))
        else:
            response.abort()
        return error
    response.end()
    return None
