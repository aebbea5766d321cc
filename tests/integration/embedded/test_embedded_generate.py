"""What clients see: batching, sampling, stops, log-probabilities, caches, limits."""

from __future__ import annotations

import asyncio
import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from stitch.engines.base import RouteKind
from stitch.engines.embedded.routes import ROUTES

pytestmark = pytest.mark.engine

PROMPTS = ["a", "hello there", "x" * 300, "The quick brown fox jumps over it. " * 4]


def _tokens_and_logprobs(answer: dict[str, Any]) -> tuple[list[int], list[Any]]:
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


async def test_output_is_bitwise_the_same_alone_and_in_any_company(live: Any) -> None:
    cases = [
        (prompt, params)
        for prompt in PROMPTS
        for params in (
            {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
            {"seed": 7, "top_p": 0.9, "max_new_tokens": 25, "ignore_eos": True},
        )
    ]
    alone = []
    for i, (prompt, params) in enumerate(cases):
        # A cache key of its own: nothing is shared with the runs in company.
        answer = await live.generate(prompt, **params, extra={"extra_key": f"alone-{i}"})
        alone.append(_tokens_and_logprobs(answer))

    async def later(delay_steps: int, prompt: str, params: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.004 * delay_steps)
        return dict(await live.generate(prompt, **params))

    for stride in (1, 3):
        order = [(i * stride) % len(cases) for i in range(len(cases))]
        noise = [live.generate("noise" * n, max_new_tokens=30) for n in range(1, 6)]
        mixed = await asyncio.gather(*noise, *(later(n, *cases[i]) for n, i in enumerate(order)))
        found = [_tokens_and_logprobs(a) for a in mixed[len(noise) :]]
        assert found == [alone[i] for i in order]
    assert (await live.info())["batch_invariant"] is True


async def test_late_arrival_gets_its_first_token_before_running_ones_end(live: Any) -> None:
    seen: list[str] = []

    async def follow(name: str, tokens: int) -> None:
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": "stream " + name, "sampling_params": params}
        first = True
        async for event in live.events("/generate", body):
            if first:
                seen.append(f"{name} first")
                first = False
            if event == "[DONE]":
                seen.append(f"{name} end")

    long = [asyncio.create_task(follow(f"long{i}", 1200)) for i in range(3)]
    await live.until(lambda i: i["running"] == 3, "all long ones are in the batch")
    await follow("late", 5)
    await asyncio.gather(*long)
    assert (
        seen.index("late first")
        < seen.index("late end")
        < min(seen.index(f"long{i} end") for i in range(3))
    )


async def test_seeded_sampling_repeats_and_samples_differ(live: Any) -> None:
    options = {"max_new_tokens": 24, "ignore_eos": True}
    one = await live.generate("seeded", seed=11, **options)
    again = await live.generate("seeded", sampling_seed=11, **options)
    other = await live.generate("seeded", seed=12, **options)
    assert _tokens_and_logprobs(one) == _tokens_and_logprobs(again)
    assert one["output_ids"] != other["output_ids"]
    four = (await live.generate("seeded", seed=11, n=4, **options))["items"]
    assert _tokens_and_logprobs(four[0]) == _tokens_and_logprobs(one)
    assert len({tuple(item["output_ids"]) for item in four}) == 4
    assert len({item["meta_info"]["id"] for item in four}) == 4
    assert all(item["meta_info"]["weight_version"] == "1" for item in four)
    unseeded = [await live.generate("seeded", **options) for _ in range(2)]
    assert unseeded[0]["output_ids"] != unseeded[1]["output_ids"]


async def test_a_batch_answers_in_order_with_ids_of_its_own(live: Any) -> None:
    body = {
        "input_ids": [[65, 66], [67, 68, 69]],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3, "n": 2}],
        "rid": ["left", "right"],
        "extra_key": ["k", None],
    }
    status, items = await live.post("/generate", body)
    assert status == 200
    assert [i["meta_info"]["completion_tokens"] for i in items] == [2, 3, 3]
    assert [i["meta_info"]["id"] for i in items] == ["left", "right-0", "right-1"]
    status, items = await live.post("/generate", {"text": ["a"], "rid": "g"})
    assert status == 200
    assert len(items) == 1  # a list stays a list


async def test_stops_by_string_by_token_and_by_length(live: Any) -> None:
    base = await live.generate("stop", seed=3, max_new_tokens=60, ignore_eos=True)
    ids, text = base["output_ids"], base["text"]
    assert base["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    word = text[10:13]
    options = {"seed": 3, "max_new_tokens": 60, "ignore_eos": True}
    cut = await live.generate("stop", stop=["never there", word], **options)
    assert cut["text"] == text[: text.index(word)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert cut["output_ids"] == ids[: len(cut["output_ids"])]
    kept = await live.generate("stop", stop=word, no_stop_trim=True, **options)
    assert kept["text"] == text[: text.index(word) + len(word)]
    token = ids[20]
    by_token = await live.generate("stop", stop_token_ids=[token], **options)
    assert by_token["output_ids"] == ids[: ids.index(token) + 1]
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    none = await live.generate("stop", max_new_tokens=0)
    assert none["output_ids"] == []
    assert none["meta_info"]["weight_version_start"] == 1
    eos = 258
    ended = await live.generate("stop", logit_bias={str(eos): 100.0}, max_new_tokens=9)
    assert ended["output_ids"] == [eos]
    assert ended["text"] == ""
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    held = await live.generate(
        "stop", logit_bias={str(eos): 100.0}, max_new_tokens=9, min_new_tokens=4
    )
    assert held["output_ids"].index(eos) == 4


@pytest.mark.parametrize("stopped", [False, True])
async def test_streamed_text_grows_to_the_plain_answer(live: Any, stopped: bool) -> None:
    params: dict[str, Any] = {"seed": 5, "max_new_tokens": 50, "ignore_eos": True}
    if stopped:
        whole = await live.generate("stream me", **params)
        # Four characters: a stream that shows the first three of them shows too much.
        params["stop"] = ["never there", whole["text"][20:24]]
    plain = await live.generate("stream me", **params)
    texts: list[str] = []
    last: Any = None
    body = {"text": "stream me", "sampling_params": params, "return_logprob": True}
    async for event in live.events("/generate", body):
        if event != "[DONE]":
            texts.append(event["text"])
            last = event
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert last["text"] == plain["text"]
    assert _tokens_and_logprobs(last) == _tokens_and_logprobs(plain)
    assert last["meta_info"]["weight_versions"] == plain["meta_info"]["weight_versions"]
    assert last["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


async def test_logprobs_are_those_of_a_plain_forward(live: Any, models: dict[int, Path]) -> None:
    # Tolerance: float32 sums in another order; the logits of this model are below 10.
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    prompt = list(range(60, 150))
    extra = {"logprob_start_len": 0, "top_logprobs_num": 3}
    for temperature in (1.0, 0.5):
        answer = await live.generate(
            prompt, temperature=temperature, max_new_tokens=80, ignore_eos=True, extra=extra
        )
        output, meta = answer["output_ids"], answer["meta_info"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output])).logits[0].double()
        raw = torch.log_softmax(logits, -1)
        scaled = torch.log_softmax(logits / temperature, -1)
        triples = meta["input_token_logprobs"]
        assert triples[0] == [None, prompt[0], None]
        assert [t for _, t, _ in triples] == prompt
        for at, (logprob, token, _) in enumerate(triples[1:], start=1):
            assert logprob == pytest.approx(float(raw[at - 1, token]), abs=2e-5)
        for at, (logprob, token, _) in enumerate(meta["output_token_logprobs"]):
            assert token == output[at]
            row = scaled[len(prompt) - 1 + at]
            assert logprob == pytest.approx(float(row[token]), abs=2e-5)
            best = meta["output_top_logprobs"][at][0]
            assert best[0] == pytest.approx(float(row.max()), abs=2e-5)
            assert best[1] == int(row.argmax())


async def test_cut_distributions_stay_within_their_cut(live: Any) -> None:
    cuts = {"top_k": 3, "top_p": 0.3, "min_p": 0.5}
    for name, value in cuts.items():
        answer = await live.generate(
            "cut",
            max_new_tokens=60,
            ignore_eos=True,
            extra={"top_logprobs_num": 128},
            **{name: value},
        )
        meta = answer["meta_info"]
        for token, tops in zip(answer["output_ids"], meta["output_top_logprobs"], strict=True):
            ranked = [t for _, t, _ in tops]
            shares = [2.718281828459045**lp for lp, _, _ in tops]
            at = ranked.index(token)
            if name == "top_k":
                assert at < 3
            elif name == "top_p":
                assert sum(shares[:at]) < 0.3 + 1e-9
            else:
                assert shares[at] >= 0.5 * shares[0] - 1e-9


async def test_prefix_cache_saves_work_and_changes_nothing(live: Any) -> None:
    prompt = "shared prefix " * 8
    options = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    first = await live.generate(prompt, **options)
    second = await live.generate(prompt, **options)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 16 * ((len(prompt) - 1) // 16)
    assert _tokens_and_logprobs(first) == _tokens_and_logprobs(second)
    keyed = await live.generate(prompt, **options, extra={"extra_key": "tenant"})
    assert keyed["meta_info"]["cached_tokens"] == 0
    # Prompt log-probabilities need the logits of every prompt token.
    scored = await live.generate(prompt, **options, extra={"logprob_start_len": 0})
    assert scored["meta_info"]["cached_tokens"] == 0
    assert len(scored["meta_info"]["input_token_logprobs"]) == len(prompt)
    await live.label(1)  # the same version under a new epoch
    fresh = await live.generate(prompt, **options)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert _tokens_and_logprobs(fresh) == _tokens_and_logprobs(first)


BAD = [
    ("/generate", {}, "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text"),
    ("/generate", {"text": 5}, "text"),
    ("/generate", {"text": ""}, "text"),
    ("/generate", {"text": []}, "text"),
    ("/generate", {"input_ids": [1, -1]}, "input_ids"),
    ("/generate", {"input_ids": [1, 10**30]}, "input_ids"),
    ("/generate", {"input_ids": [True]}, "input_ids"),
    ("/generate", {"input_ids": [[1], 2]}, "input_ids"),
    ("/generate", {"input_ids": [1] * 2048}, "input_ids"),
    ("/generate", {"text": "a", "rid": 5}, "rid"),
    ("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ("/generate", {"text": "a", "stream": "yes"}, "stream"),
    ("/generate", {"text": "a", "return_logprob": 1}, "return_logprob"),
    (
        "/generate",
        {"text": "a", "return_logprob": True, "logprob_start_len": 9},
        "logprob_start_len",
    ),
    ("/generate", {"text": "a", "top_logprobs_num": 1000}, "top_logprobs_num"),
    ("/generate", {"text": "a", "extra_key": 4}, "extra_key"),
    ("/generate", {"text": "a", "image_data": "x"}, "image_data"),
    ("/generate", {"text": "a", "sampling_params": 3}, "sampling_params"),
    ("/generate", {"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
    ("/generate", {"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
    ("/generate", {"text": "a", "sampling_params": {"n": 0}}, "n"),
    ("/generate", {"text": "a", "sampling_params": {"n": 10**9}}, "n"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
    ("/generate", {"text": "a", "sampling_params": {"stop": [1]}}, "stop"),
    ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [9999]}}, "stop_token_ids"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a*"}}, "regex"),
    ("/generate", {"text": "a", "sampling_params": {"tempreature": 1}}, "tempreature"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "x"}, "max_new_tokens"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"prompt": "a", "logprobs": 99}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "stream_options": {}, "model": 4}, "model"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 4}]}, "messages[0]"),
    ("/pause_generation", {"mode": "gently"}, "mode"),
    ("/stitch/pause", {}, "mode"),
    ("/stitch/resume", {}, "recompute"),
    ("/stitch/rank", {}, "protocol"),
    ("/stitch/rank", {"protocol": 1, "incarnation": "i", "attempt": 0, "op": "melt"}, "op"),
    ("/abort_request", {}, "rid"),
    ("/update_weights_from_disk", {}, "model_path"),
]


async def test_bad_input_is_a_400_that_names_the_field(live: Any) -> None:
    for path, body, field in BAD:
        status, answer = await live.post(path, body)
        assert status in (400, 501), (path, body, answer)
        error = answer["error"]
        assert error["retryable"] is False
        assert error["param"].split(".")[-1] == field, (path, body, error)
        assert error["message"]
    for raw in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b'{"text": "\\ud800"}'):
        status, answer = await live.post("/generate", raw)
        assert status == 400, raw[:20]
        assert answer["error"]["message"]
    status, answer = await live.post("/generate", io.BytesIO(b" " * (16 * 2**20 + 1)))
    assert (status, answer["error"]["type"]) == (413, "HTTPError")
    assert (await live.post("/nowhere", {}))[0] == 404
    async with live.http.get("/generate") as response:
        assert response.status == 405
    assert (await live.generate("still alive", max_new_tokens=2, ignore_eos=True))["meta_info"][
        "completion_tokens"
    ] == 2


async def test_every_live_route_is_classified(live: Any) -> None:
    async with live.http.get("/stitch/describe") as response:
        routes = {(method, path) for method, path in (await response.json())["routes"]}
    assert routes == set(ROUTES)
    route = live.engine.route
    assert route("POST", "/update_weights_from_disk") is RouteKind.BLOCKED
    assert route("POST", "/generate") is RouteKind.SAMPLING
    assert route("GET", "/v1/models") is RouteKind.READ_ONLY
    assert route("POST", "/something_new") is RouteKind.BLOCKED


async def test_a_full_queue_is_a_429_and_the_rest_are_served(live: Any) -> None:
    async def one(i: int) -> int:
        body = {"text": f"load {i}", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
        async with live.http.post("/generate", json=body) as response:
            if response.status == 429:
                assert response.headers["Retry-After"] == "1"
                assert (await response.json())["error"]["code"] == "Overloaded"
            return response.status

    statuses = await asyncio.gather(*(one(i) for i in range(90)))
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 64
    status, answer = await live.post("/generate", {"text": ["a"] * 65})
    assert status == 429, answer


async def test_abort_ends_one_request_and_keeps_its_tokens(live: Any) -> None:
    params = {"max_new_tokens": 1900, "ignore_eos": True}
    other = asyncio.create_task(live.generate("other", max_new_tokens=60, ignore_eos=True))
    last: Any = None
    body = {"text": "abort me", "sampling_params": params, "rid": "mine"}
    async for event in live.events("/generate", body):
        if event == "[DONE]":
            break
        if last is None:
            await live.engine.abort("mine")
            await live.engine.abort("nobody")
        last = event
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < last["meta_info"]["completion_tokens"] < 1900
    assert (await other)["meta_info"]["completion_tokens"] == 60


async def test_the_name_of_a_running_sample_is_no_free_id(live: Any) -> None:
    body = {"text": "two", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "n": 2}}
    call = asyncio.create_task(live.post("/generate", {**body, "rid": "pair"}))
    await live.until(lambda info: info["running"] == 2, "both samples run")
    status, answer = await live.post("/generate", {"text": "x", "rid": "pair-1"})
    assert (status, answer["error"]["param"]) == (400, "rid")
    await live.engine.abort("pair-1")
    assert (await live.info())["running"] == 2, "a sidecar ends whole requests only"
    await live.engine.abort("pair")
    await call
    status, _ = await live.post(
        "/generate", {"text": "x", "rid": "pair-1", "sampling_params": {"max_new_tokens": 1}}
    )
    assert status == 200


async def test_a_client_that_leaves_frees_its_place(live: Any) -> None:
    params = {"max_new_tokens": 1900, "ignore_eos": True}
    for stream in (False, True):
        body = {"text": "leaving", "sampling_params": params, "stream": stream, "rid": "leaver"}

        async def ask(body: dict[str, Any] = body) -> None:
            async with live.http.post("/generate", json=body) as response:
                await response.read()

        task = asyncio.create_task(ask())
        await live.until(lambda i: i["running"] == 1, "it runs")
        task.cancel()
        await live.until(lambda i: i["running"] == 0, "it is gone")


async def test_a_request_id_in_use_is_refused(live: Any) -> None:
    body = {
        "text": "a",
        "rid": "twice",
        "sampling_params": {"max_new_tokens": 1200, "ignore_eos": True},
    }
    first = asyncio.create_task(live.post("/generate", body))
    await live.until(lambda i: i["running"] == 1, "it runs")
    status, answer = await live.post("/generate", body)
    assert (status, answer["error"]["param"]) == (400, "rid")
    assert (await first)[0] == 200
    body["sampling_params"] = {"max_new_tokens": 1}
    assert (await live.post("/generate", body))[0] == 200  # free again


async def test_preempted_requests_come_back_bit_for_bit(live: Any) -> None:
    # 16 samples of 620 tokens need more pages than the pool has.
    options = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    prompts = [f"{i:02d}" * 240 for i in range(16)]
    together = await asyncio.gather(
        *(live.generate(p, **options, extra={"extra_key": "a"}) for p in prompts)
    )
    async with live.http.get("/metrics") as response:
        page = await response.text()
    count = next(line for line in page.splitlines() if line.startswith("stitch_engine_preemptions"))
    assert int(count.split()[1]) > 0
    for i in (0, 15):
        alone = await live.generate(prompts[i], **options, extra={"extra_key": "b"})
        assert _tokens_and_logprobs(alone) == _tokens_and_logprobs(together[i])
