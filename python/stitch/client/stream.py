"""Reading a `/generate` stream: events in, chunks out, the partial output kept. Pure.

Events carry the output so far (cumulative, as SGLang sends it); chunks carry what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from stitch.client.completion import Chunk, Completion, parse_completion
from stitch.client.failure import Interrupted, wire_error
from stitch.errors import CorruptData
from stitch.http.sse import EventReader

__all__ = ["StreamReader"]

_DONE = b"[DONE]"


class StreamReader:
    """Feed it bytes; it yields chunks. `finish` says whether the stream was whole."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._last: dict[str, Any] | None = None
        self._text = ""
        self._ids = 0
        self._logprobs = 0
        self._done = False
        self.completion: Completion | None = None

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks that `data` completes.

        Raises: Interrupted for an error event or an aborted generation, with the partial
            output; CorruptData for an event that is no `/generate` item.
        """
        for event in self._events.feed(data):
            if event.data == _DONE:
                self._done = True
                continue
            try:
                item = orjson.loads(event.data)
            except orjson.JSONDecodeError as error:
                raise CorruptData("a stream event is not JSON") from error
            if isinstance(item, dict) and "error" in item:
                raise self._failed(item)
            yield self._chunk(item)

    def finish(self) -> Completion:
        """Call at the end of the stream. Raises: Interrupted if it was cut."""
        if self.completion is None or not self._done:
            raise self.cut("the stream ended before the generation did")
        return self.completion

    def cut(self, message: str) -> Interrupted:
        """The error for a stream that ends here."""
        return Interrupted(message, partial=self._partial())

    def _chunk(self, item: Any) -> Chunk:
        found = parse_completion(item)
        self._last = item
        if found.partial:
            raise Interrupted(
                "the generation was aborted", partial=self._partial(), cause_code="abort"
            )
        chunk = Chunk(
            text=found.text[len(self._text) :],
            output_ids=found.output_ids[self._ids :],
            logprobs=found.logprobs[self._logprobs :],
            completion=found if found.finish_reason is not None else None,
        )
        self._text, self._ids = found.text, len(found.output_ids)
        self._logprobs = len(found.logprobs)
        self.completion = chunk.completion or self.completion
        return chunk

    def _failed(self, item: dict[str, Any]) -> Interrupted:
        cause = wire_error(int(item["error"].get("status", 503)), item)
        failure = Interrupted(
            f"the generation ended early: {cause.message}",
            partial=self._partial(),
            cause_code=cause.fields.get("wire_code"),
        )
        failure.__cause__ = cause
        return failure

    def _partial(self) -> Completion | None:
        return None if self._last is None else parse_completion(self._last, partial=True)
