"""Labelling responses of an engine that does not label them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from stitch.http.sse import EventReader, encode_event

__all__ = ["relabel_json", "relabel_stream"]

Stamp = Callable[[dict[str, Any]], None]


def relabel_json(data: bytes, stamp: Stamp) -> bytes:
    """Stamp one JSON body: an object, or a list of objects (one per prompt)."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    for item in body if isinstance(body, list) else [body]:
        if isinstance(item, dict):
            stamp(item)
    return orjson.dumps(body)


def relabel_stream(write: Callable[[bytes], None], stamp: Stamp) -> Callable[[bytes], None]:
    """A sink that stamps every JSON event and hands all events on to `write`."""
    reader = EventReader()

    def sink(chunk: bytes) -> None:
        for event in reader.feed(chunk):
            data = event.data if event.data == b"[DONE]" else relabel_json(event.data, stamp)
            write(encode_event(data, id=event.id, name=event.name))

    return sink
