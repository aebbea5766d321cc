"""The rank channel's JSON and the adapter's stamps."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from stitch.engines.base import RankOrder, RankReply, TensorSlice
from stitch.engines.embedded import EmbeddedEngine
from stitch.engines.embedded.wire import (
    order_from_wire,
    order_to_wire,
    replies_from_wire,
    replies_to_wire,
)
from stitch.env import Env
from stitch.errors import InvalidInput
from stitch.types import Label, Ref

SLICE = TensorSlice("w", "/f", 8, 4, "BF16", (2, 1), "add1/2/" + "0" * 32)
ORDER = RankOrder("i", 3, "stage", (SLICE,), (SLICE,), "full", Label(Ref("r", 4), 5), "disk")


def test_orders_and_replies_survive_the_wire() -> None:
    assert order_from_wire(orjson.loads(orjson.dumps(order_to_wire(ORDER)))) == ORDER
    plain = RankOrder("i", 0, "state")
    assert order_from_wire(order_to_wire(plain)) == plain
    replies = (RankReply(0, "ok", "", {"a": 1}), RankReply(1, "stale", "old"))
    assert replies_from_wire(orjson.loads(orjson.dumps(replies_to_wire(replies)))) == replies
    with pytest.raises(InvalidInput):
        replies_from_wire({"replies": [{}]})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["protocol"], 2),
        (["incarnation"], ""),
        (["attempt"], -1),
        (["attempt"], True),
        (["op"], "explode"),
        (["scope"], "some"),
        (["via"], "pigeon"),
        (["label"], {"run_id": "r", "version": 1}),
        (["label"], {"run_id": "r", "version": -1, "epoch": 0}),
        (["label"], 3),
        (["tensors"], {}),
        (["tensors", 0, "offset"], -1),
        (["tensors", 0, "nbytes"], "4"),
        (["tensors", 0, "shape"], [2, -1]),
        (["undo_tensors", 0, "name"], None),
    ],
)
def test_malformed_orders_are_refused(path: list[Any], value: Any) -> None:
    raw = orjson.loads(orjson.dumps(order_to_wire(ORDER)))
    place = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(InvalidInput):
        order_from_wire(raw)


def test_stamps_keep_what_the_client_sent() -> None:
    engine = EmbeddedEngine("http://127.0.0.1:1/", Env())
    assert engine.base_url == "http://127.0.0.1:1"
    label = Label(Ref("run", 7), 3)
    key = "run/weight_v000007@3"
    for own, stamped in (
        (None, key),
        ("mine", f"{key}|mine"),
        (["a", None], [f"{key}|a", key]),
    ):
        body: dict[str, Any] = {"extra_key": own} if own is not None else {}
        engine.stamp_request("/generate", body, rid="fresh", label=label)
        assert body == {"rid": "fresh", "extra_key": stamped}
    body = {"rid": ["x", "y"]}
    engine.stamp_request("/generate", body, rid="fresh", label=label)
    assert body["rid"] == ["x", "y"]
    answer = {"text": "as it is"}
    engine.stamp_response("/generate", answer, admitted=label)
    assert answer == {"text": "as it is"}
    assert engine.capabilities.final_responses
