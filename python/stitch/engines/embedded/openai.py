"""`POST /v1/completions` and `/v1/chat/completions`: bodies that the stock client parses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from stitch.engines.embedded.answers import choice_spans, label_keys, token_text
from stitch.engines.embedded.generation import Ask, Generation, Progress
from stitch.engines.embedded.http_face import SseWriter, json_response, read_object
from stitch.engines.embedded.openai_ask import OpenAiAsk, parse_chat, parse_completion
from stitch.engines.embedded.service import Service, Ticket

__all__ = ["handle_chat", "handle_completion"]

_FINISH: Final = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What differs between the two routes."""

    chat: bool
    prefix: str
    whole: str
    chunk: str


_COMPLETION: Final = _Shape(False, "cmpl-", "text_completion", "text_completion")
_CHAT: Final = _Shape(True, "chatcmpl-", "chat.completion", "chat.completion.chunk")


async def handle_completion(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer `/v1/completions`."""
    ask = parse_completion(service, await read_object(request))
    return await _answer(service, request, ask, _COMPLETION)


async def handle_chat(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer `/v1/chat/completions`."""
    ask = parse_chat(service, await read_object(request))
    return await _answer(service, request, ask, _CHAT)


async def _answer(
    service: Service, request: web.Request, ask: OpenAiAsk, shape: _Shape
) -> web.StreamResponse:
    asks: list[Ask] = []
    for prompt_index, prompt in enumerate(ask.prompts):
        group, rid = ask.rids[prompt_index]
        for sample, seed in enumerate(service.seeds(ask.params.seed, ask.params.n)):
            asks.append(
                Ask(
                    rid=rid if ask.params.n == 1 else f"{rid}-{sample}",
                    group=group,
                    prompt=prompt,
                    params=ask.params,
                    seed=seed,
                    stream=ask.stream,
                    return_logprob=ask.logprobs is not None,
                    top_logprobs=ask.logprobs or 0,
                    extra_key=ask.extra_keys[prompt_index],
                )
            )
    head = {
        "id": ask.rids[0][0] if ask.rid_given else f"{shape.prefix}{ask.rids[0][0]}",
        "created": int(service.env.clock.wall()),
        "model": ask.model or service.model_name,
    }
    ticket = service.submit(asks)
    try:
        if ask.stream:
            return await _stream(service, request, ask, shape, head, ticket)
        final = await ticket.finished()
        pairs = list(zip(ticket.generations, final, strict=True))
        choices = [
            _choice(service, ask, shape, index, generation, progress)
            for index, (generation, progress) in enumerate(pairs)
        ]
        body = {**head, "object": shape.whole, "choices": choices}
        body["usage"] = _usage(ask, pairs)
        body.update(label_keys([(g, p.tokens) for g, p in pairs]))
        return json_response(body)
    finally:
        service.release(ticket)


def _choice(
    service: Service,
    ask: OpenAiAsk,
    shape: _Shape,
    index: int,
    generation: Generation,
    progress: Progress,
) -> dict[str, Any]:
    text = progress.text
    if ask.echo:
        text = _prompt_text(service, generation) + text
    choice: dict[str, Any] = {"index": index}
    if shape.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice["logprobs"] = _logprobs(service, ask, shape, generation, 0, progress.tokens)
    _end(choice, generation, progress)
    return choice


def _end(choice: dict[str, Any], generation: Generation, progress: Progress) -> None:
    """Finish reason, stop match and spans of a choice that has ended."""
    finish = progress.finish
    assert finish is not None, "only ended choices carry an end"
    choice["finish_reason"] = _FINISH[finish["type"]]
    choice["matched_stop"] = finish.get("matched")
    spans = choice_spans(generation, progress.tokens)
    if spans:
        choice["weight_versions"] = spans


def _prompt_text(service: Service, generation: Generation) -> str:
    return service.codec.decode(generation.ask.prompt, skip_special_tokens=True)


def _usage(ask: OpenAiAsk, pairs: Sequence[tuple[Generation, Progress]]) -> dict[str, Any]:
    prompt = sum(len(p) for p in ask.prompts)
    completion = sum(progress.tokens for _, progress in pairs)
    cached = sum((g.cached_tokens or 0) for g, _ in pairs[:: ask.params.n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _logprobs(
    service: Service, ask: OpenAiAsk, shape: _Shape, generation: Generation, start: int, end: int
) -> dict[str, Any] | None:
    if ask.logprobs is None:
        return None
    codec = service.codec
    tokens = generation.output[start:end]
    texts = [token_text(t, codec) for t in tokens]
    values = generation.logprobs[start:end]
    tops = generation.tops[start:end]
    if shape.chat:
        content = [
            {
                **_token(text, value),
                "top_logprobs": [_token(token_text(t, codec), lp) for lp, t in top],
            }
            for text, value, top in zip(texts, values, tops, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = []
    at = len(_prompt_text(service, generation)) if ask.echo else 0
    at += sum(len(token_text(t, codec)) for t in generation.output[:start])
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [{token_text(t, codec): lp for lp, t in top} for top in tops],
        "text_offset": offsets,
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


async def _stream(
    service: Service,
    request: web.Request,
    ask: OpenAiAsk,
    shape: _Shape,
    head: dict[str, Any],
    ticket: Ticket,
) -> web.StreamResponse:
    base = {**head, "object": shape.chunk}
    shown = [(0, 0)] * len(ticket.generations)  # characters and tokens sent, per choice
    final: dict[int, Progress] = {}
    async with SseWriter(request) as sse:
        for index, generation in enumerate(ticket.generations):
            opening = _prompt_text(service, generation) if ask.echo else ""
            if shape.chat:
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                await sse.send({**base, "choices": [first]})
            elif opening:
                first = {"index": index, "text": opening, "logprobs": None, "finish_reason": None}
                await sse.send({**base, "choices": [first]})
        async for index, progress in ticket.news():
            if not await sse.check(progress):
                return sse.response
            generation = ticket.generations[index]
            characters, tokens = shown[index]
            text = progress.text[characters:]
            if text or progress.finish is not None:
                shown[index] = (len(progress.text), progress.tokens)
                choice: dict[str, Any] = {"index": index}
                choice.update({"delta": {"content": text}} if shape.chat else {"text": text})
                end = progress.tokens
                choice["logprobs"] = _logprobs(service, ask, shape, generation, tokens, end)
                choice["finish_reason"] = None
                if progress.finish is not None:
                    _end(choice, generation, progress)
                    final[index] = progress
                await sse.send({**base, "choices": [choice]})
        pairs = [(g, final[i]) for i, g in enumerate(ticket.generations)]
        last = {**base, "choices": [], **label_keys([(g, p.tokens) for g, p in pairs])}
        if ask.include_usage:
            last["usage"] = _usage(ask, pairs)
        await sse.send(last)
        await sse.send_done()
    return sse.response
