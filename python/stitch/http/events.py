"""Long-lived event streams: `/events` of a sidecar or gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from stitch.env import Env
from stitch.http import HTTP_PROTOCOL
from stitch.http.message import Request, Response
from stitch.http.sse import KEEPALIVE, encode_event

__all__ = ["EventStreams"]

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"x-stitch-protocol: %d\r\n" % HTTP_PROTOCOL
)


class EventStreams:
    """Serves streams of full snapshots until they are closed.

    Every event is complete in itself, so a reader that comes back with an unknown
    Last-Event-ID starts with a whole one, and a slow reader skips to the newest.
    """

    def __init__(self, *, keepalive_s: float, env: Env) -> None:
        self._keepalive_s = keepalive_s
        self._clock = env.clock
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all streams cleanly, so that their readers come back elsewhere."""
        self._closing.set()

    async def serve(
        self, request: Request, response: Response, events: AsyncIterator[tuple[str, bytes]]
    ) -> None:
        """Stream pairs of event id and one-line data; skip one that the reader has."""
        last_id = request.headers.get(b"last-event-id", b"").decode("latin-1")
        response.begin(_HEAD, None)
        if request.method == "HEAD":
            response.end()
            return
        response.write(b"retry: 250\n\n")
        closing = asyncio.ensure_future(self._closing.wait())
        following: asyncio.Future[tuple[str, bytes]] = asyncio.ensure_future(anext(events))
        try:
            while not closing.done():
                await self._wait(closing, following)
                if not following.done():
                    response.write(KEEPALIVE)
                    continue
                try:
                    event_id, data = following.result()
                except StopAsyncIteration:
                    break
                if event_id != last_id:
                    last_id = event_id
                    response.write(encode_event(data, id=event_id, name="report"))
                await response.drained()
                following = asyncio.ensure_future(anext(events))
            response.end()
        finally:
            closing.cancel()
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await following
            aclose = getattr(events, "aclose", None)
            if aclose is not None:
                await aclose()

    async def _wait(self, *futures: asyncio.Future[Any]) -> None:
        tick = asyncio.ensure_future(self._clock.sleep(self._keepalive_s))
        try:
            await asyncio.wait({*futures, tick}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tick.cancel()
