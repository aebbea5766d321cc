"""The OpenAI routes, read by the stock client."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

openai = pytest.importorskip("openai", reason="the openai package is not installed")


@pytest.fixture
async def client(live: Any) -> Any:
    stock = openai.AsyncOpenAI(
        base_url=f"{live.process.base_url}/v1", api_key="none", max_retries=0
    )
    yield stock
    await stock.close()


LABELS = {"weight_version_start": 1, "weight_version_end": 1, "weight_run_id": "run-a"}


async def test_plain_answers_parse_and_carry_labels(live: Any, client: Any) -> None:
    done = await client.completions.create(
        model="tiny", prompt=["one", "two"], n=2, max_tokens=6, logprobs=2, seed=3, echo=False
    )
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    assert all(c.finish_reason in ("length", "stop") for c in done.choices)
    assert all(len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) for c in done.choices)
    assert done.usage.prompt_tokens == 6
    assert done.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in done.choices)
    for name, value in LABELS.items():
        assert done.model_extra[name] == value
    for choice in done.choices:
        (span,) = choice.model_extra["weight_versions"]
        assert (span["version"], span["prefix"]) == (1, "exact")
    chat = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    (choice,) = chat.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == 5
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert chat.model_extra["weight_version_start"] == 1
    assert choice.model_extra["weight_versions"][0]["end"] == 5


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("usage", [True, False])
async def test_streams_parse_and_end_with_the_labels(
    live: Any, client: Any, labelled: bool, usage: bool
) -> None:
    if not labelled:
        await live.label(None)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    options |= {"seed": 9, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    messages = [{"role": "user", "content": "stream"}]
    whole = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        **{k: v for k, v in options.items() if k != "stream_options"},
    )
    text = ""
    last: Any = None
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=messages, stream=True, **options
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        last = chunk
    assert text == whole.choices[0].message.content
    assert last.choices == []
    assert (last.usage is not None) is usage
    if usage:
        assert last.usage.completion_tokens == 12
    extra = last.model_extra
    assert {k: extra[k] for k in LABELS if k in extra} == (LABELS if labelled else {})
    joined = ""
    async for chunk in await client.completions.create(
        model="tiny", prompt="stream", stream=True, logprobs=1, **options
    ):
        joined += "".join(choice.text for choice in chunk.choices)
    plain = await client.completions.create(
        model="tiny", prompt="stream", **{k: v for k, v in options.items() if k != "stream_options"}
    )
    assert joined == plain.choices[0].text


async def test_errors_parse_as_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "request.temperature"
    models = await client.models.list()
    assert models.data[0].object == "model"


async def test_echo_puts_the_prompt_first(client: Any) -> None:
    done = await client.completions.create(model="tiny", prompt="say", echo=True, max_tokens=2)
    assert done.choices[0].text.startswith("say")


async def test_ids_and_cache_keys_may_be_given_per_prompt(live: Any) -> None:
    body = {"prompt": ["a" * 40, "b" * 40], "rid": ["x", "y"], "extra_key": ["k", None]}
    for cached in (0, 64):
        status, answer = await live.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["id"] == "x"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    status, answer = await live.post("/v1/completions", {**body, "extra_key": "other"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    status, answer = await live.post("/v1/completions", {**body, "rid": ["x"]})
    assert (status, answer["error"]["param"]) == (400, "rid")
