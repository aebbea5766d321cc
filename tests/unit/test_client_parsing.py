"""Reading `/generate` items: what may be absent, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.client.completion import parse_completion, parse_completions
from stitch.client.failure import is_retryable, wire_error
from stitch.client.stream import StreamReader
from stitch.errors import CorruptData, EngineUnavailable, NeverSatisfiable, NotReady, StitchError
from stitch.types import Prefix, Ref, Span


def item(**meta: Any) -> dict[str, Any]:
    return {"text": "ab", "output_ids": [1, 2], "meta_info": {"finish_reason": "stop", **meta}}


def test_an_engine_that_cannot_tell_leaves_labels_out() -> None:
    found = parse_completion(item())
    assert found.spans == ()
    assert (found.run_id, found.version_start, found.version_end) == (None, None, None)
    assert found.logprobs == ()
    assert found.finish_reason == "stop"


def test_versions_follow_from_spans() -> None:
    spans = [
        {"run_id": "r", "version": 4, "start": 0, "end": 1, "prefix": "exact"},
        {"run_id": "r", "version": 6, "start": 1, "end": 2, "prefix": "carried"},
    ]
    found = parse_completion(item(weight_versions=spans))
    assert found.spans[1] == Span(Ref("r", 6), 1, 2, Prefix.CARRIED)
    assert (found.run_id, found.version_start, found.version_end) == ("r", 4, 6)


def test_ids_may_come_with_the_logprobs_alone() -> None:
    raw = item(output_token_logprobs=[[-0.1, 7, None], [-0.2, 8, "b"]])
    del raw["output_ids"]
    assert parse_completion(raw).output_ids == (7, 8)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        7,
        {},
        {"meta_info": None},
        item(weight_versions=[{"version": 1}]),
        item(weight_versions=[{"run_id": "/", "version": 1, "start": 0, "end": 2}]),
        item(weight_version_start="x"),
        item(output_token_logprobs=[["x"]]),
    ],
)
def test_what_is_no_item_is_corrupt(raw: Any) -> None:
    with pytest.raises(CorruptData):
        parse_completions(raw)


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (409, {"error": {"code": "WeightVersionNotReady", "retryable": True}}, NotReady, True),
        (409, {"error": {"code": "WeightVersionNotReady", "retryable": False}}, NotReady, False),
        (409, {"error": {"type": "NeverSatisfiable"}}, NeverSatisfiable, False),
        (502, None, EngineUnavailable, True),
        (500, "text", StitchError, False),
        (418, {"error": "odd"}, StitchError, False),
    ],
)
def test_errors_by_code_then_by_status(
    status: int, body: Any, kind: type[StitchError], retryable: bool
) -> None:
    found = wire_error(status, body)
    assert type(found) is kind
    assert is_retryable(found) is retryable
    assert found.message


def test_a_stream_may_be_cut_anywhere_in_its_bytes() -> None:
    event = b'data: {"text":"a","output_ids":[1],"meta_info":{"finish_reason":null}}\n\n'
    last = b'data: {"text":"ab","output_ids":[1,2],"meta_info":{"finish_reason":"stop"}}\n\n'
    whole = event + last + b"data: [DONE]\n\n"
    for cut in range(len(whole)):
        reader = StreamReader()
        chunks = [*reader.feed(whole[:cut]), *reader.feed(whole[cut:])]
        assert [chunk.text for chunk in chunks] == ["a", "b"]
        assert reader.finish().text == "ab"
