"""Server-sent events: writing them, and reading a stream of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stitch.errors import CorruptData

__all__ = ["KEEPALIVE", "Event", "EventReader", "encode_event"]

KEEPALIVE: Final = b": keepalive\n\n"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `data` lines are joined by newlines; absent parts are empty."""

    data: bytes
    id: str = ""
    name: str = ""


def encode_event(data: bytes, *, id: str = "", name: str = "") -> bytes:
    """One event whose data is a single line."""
    head = (f"id: {id}\n" if id else "") + (f"event: {name}\n" if name else "")
    return b"%sdata: %s\n\n" % (head.encode(), data)


class EventReader:
    """Cuts a byte stream into events. Comments are dropped; CRLF and LF both end lines."""

    def __init__(self, *, event_bytes_max: int = 4 * 1024 * 1024) -> None:
        self._event_bytes_max = event_bytes_max
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._id = ""
        self._name = ""

    @property
    def pending(self) -> bool:
        """Whether part of an event was read and not yet ended."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that `chunk` completes. Raises: CorruptData for one over the limit."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line:
                self._take(line)
                continue
            if self._data:
                yield Event(b"\n".join(self._data), self._id, self._name)
            self._data, self._name, self._size = [], "", 0
        if self._size + len(self._rest) > self._event_bytes_max:
            raise CorruptData(f"an event is longer than {self._event_bytes_max} bytes")

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._size += len(value)
        elif field == b"id":
            self._id = value.decode("utf-8", "replace")
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
