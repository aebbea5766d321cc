"""Bodies made at random: always an answer of the contract, never a dead engine."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytestmark = pytest.mark.engine

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    1.5,
    1e308,
    10**25,
    "",
    "a",
    "é€",
    [],
    [1, 2],
    [[1], [2]],
    ["a"],
    [None],
    {},
    {"a": 1},
    {"5": 1},
    [{"role": "user", "content": "hi"}],
    [{"role": "x", "content": ["a"]}],
]
SAMPLING = [
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "n",
    "seed",
    "logit_bias",
    "frequency_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "ignore_eos",
    "skip_special_tokens",
]
ROUTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/generate": (
        {"text": "a", "sampling_params": {"max_new_tokens": 2}},
        [
            "text",
            "input_ids",
            "sampling_params",
            "rid",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "stream",
            "extra_key",
            "return_text_in_logprobs",
        ],
    ),
    "/v1/completions": (
        {"prompt": "a", "max_tokens": 2},
        [
            "prompt",
            "n",
            "temperature",
            "logprobs",
            "echo",
            "stop",
            "stream",
            "stream_options",
            "seed",
            "logit_bias",
            "best_of",
            "rid",
            "extra_key",
            "model",
            "response_format",
        ],
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        [
            "messages",
            "n",
            "logprobs",
            "top_logprobs",
            "stop",
            "stream",
            "chat_template_kwargs",
            "tools",
            "rid",
        ],
    ),
    "/stitch/rank": (
        {"protocol": 1, "incarnation": "hostile", "attempt": 1, "op": "state"},
        [
            "protocol",
            "incarnation",
            "attempt",
            "op",
            "tensors",
            "undo_tensors",
            "scope",
            "label",
            "via",
        ],
    ),
    "/abort_request": ({}, ["rid", "abort_all"]),
    "/update_weights_from_disk": ({}, ["model_path", "weight_version"]),
}


@pytest.mark.parametrize("seed", range(4))
async def test_random_bodies_get_an_answer(live: Any, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(120):
        path = rng.choice(list(ROUTES))
        base, keys = ROUTES[path]
        body = json.loads(json.dumps(base))
        for key in rng.sample(keys, rng.randint(0, min(3, len(keys)))):
            body[key] = rng.choice(VALUES)
        if isinstance(body.get("sampling_params"), dict):
            body["sampling_params"][rng.choice(SAMPLING)] = rng.choice(VALUES)
        async with live.http.post(path, json=body) as response:
            raw = await response.read()
            assert response.status in (200, 400, 501), (path, body, raw)
            if response.status != 200 and path != "/update_weights_from_disk":
                assert json.loads(raw)["error"]["message"], (path, body)
    answer = await live.generate("still here", max_new_tokens=2, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == 2
