"""Reading and writing event streams."""

from __future__ import annotations

import pytest

from stitch.errors import CorruptData
from stitch.http.metrics import Counters
from stitch.http.sse import EventReader, encode_event


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_arrive(step: int) -> None:
    stream = (
        b": comment\n\nretry: 5\n\n"
        + encode_event(b'{"a":1}', id="life:1", name="report")
        + b"data: one\r\ndata: two\r\n\r\n"
        + b"id: life:2\ndata:no space\n\n"
        + b"data: unfinished"
    )
    reader = EventReader()
    events = [
        event for at in range(0, len(stream), step) for event in reader.feed(stream[at : at + step])
    ]
    assert [(event.data, event.id, event.name) for event in events] == [
        (b'{"a":1}', "life:1", "report"),
        (b"one\ntwo", "life:1", ""),
        (b"no space", "life:2", ""),
    ]
    assert reader.pending


def test_an_endless_event_is_refused() -> None:
    reader = EventReader(event_bytes_max=100)
    with pytest.raises(CorruptData):
        for _ in range(20):
            list(reader.feed(b"data: 0123456789\n"))


def test_counters_never_go_down_and_never_raise() -> None:
    counters = Counters({"a_total": "A."})
    counters.add("a_total", 2, labels='kind="x"')
    counters.add("a_total", -5, labels='kind="x"')
    counters.add("unknown_total")
    assert counters.value("a_total") == 2
    assert counters.render() == '# HELP a_total A.\n# TYPE a_total counter\na_total{kind="x"} 2\n'
