"""The response side of one request to an upstream, as its reader sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from stitch.errors import StitchError

__all__ = ["Exchange", "Link"]


class Link(Protocol):
    """What carries an exchange."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...


class Exchange:
    """The response as it arrives. One reader; `cancel` may come at any time.

    status, length (None if not stated), content_type (lower-case), head (the status line and
    header lines without hop and framing headers, each with CRLF). answered: any byte came.
    stale: the connection was closed by its other end before any did. done: the body is whole.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_head_future",
        "_held",
        "_sink",
        "_waiter",
        "answered",
        "content_type",
        "done",
        "error",
        "head",
        "length",
        "received",
        "stale",
        "status",
    )

    def __init__(self, connection: Link) -> None:
        self._connection: Link | None = connection
        self._head_future: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._held = False
        self._sink: Callable[[bytes], None] | None = None
        self.answered = False
        self.content_type = b""
        self.done = False
        self.error: StitchError | None = None
        self.head = b""
        self.length: int | None = None
        self.received = 0
        self.stale = False
        self.status = 0

    @property
    def event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self.content_type.startswith(b"text/event-stream")

    @property
    def json(self) -> bool:
        """Whether the body is one JSON document."""
        return self.content_type.partition(b";")[0].rstrip() == b"application/json"

    async def head_arrived(self) -> None:
        """Wait for the head. Raises: what the pool raises for a lost exchange."""
        if not self.head and self.error is None:
            self._head_future = asyncio.get_running_loop().create_future()
            try:
                await self._head_future
            finally:
                self._head_future = None
        if not self.head and self.error is not None:
            raise self.error

    async def gather(self, bytes_max: int) -> bool:
        """Wait until the body is whole (True) or `bytes_max` of it are held (False).

        Raises: what the pool raises for a lost exchange. Repeatable after cancellation.
        """
        while not self.done:
            if self.error is not None:
                raise self.error
            if self.received >= bytes_max:
                return False
            await self._change()
        return True

    def peek(self) -> bytes:
        """What is held of the body, left where it is."""
        return b"".join(self._chunks)

    def take(self) -> bytes:
        """What is held of the body; the caller owns it."""
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def pipe(self, sink: Callable[[bytes], None]) -> None:
        """Hand every piece of the body to `sink` until it is whole.

        Raises: what the pool raises for a lost exchange, after all that came was handed over.
        """
        self._sink = sink
        self._read_on()
        if self._chunks:
            sink(self.take())
        try:
            while not self.done:
                if self.error is not None:
                    raise self.error
                await self._change()
        finally:
            self._sink = None

    def pause(self) -> None:
        """Stop reading from the upstream until `resume`: its reader is behind."""
        self._held = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        self._held = False
        self._read_on()

    def cancel(self) -> None:
        """Give up the rest: the connection is cut, unless the body is whole already."""
        if self._connection is not None:
            self._connection.abort()

    async def _change(self) -> None:
        self._read_on()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _read_on(self) -> None:
        if self._connection is not None and not self._held:
            self._connection.resume()

    # The connection's side.

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def got_head(self) -> None:
        future = self._head_future
        if future is not None and not future.done():
            future.set_result(None)

    def deliver(self, data: bytes) -> bool:
        """Take body bytes. False asks the connection to stop reading."""
        self.received += len(data)
        if self._sink is not None:
            self._sink(data)
            return True
        self._chunks.append(data)
        self._wake()
        return self._waiter is not None

    def finish(self, error: StitchError | None) -> None:
        self._connection = None
        if error is None:
            self.done = True
        else:
            self.error = error
        self.got_head()
        self._wake()
