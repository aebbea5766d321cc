"""`POST /generate`: SGLang's native route, single or batched, plain or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from stitch.engines.embedded.answers import generate_item
from stitch.engines.embedded.fields import read_each, read_flag, read_rids
from stitch.engines.embedded.generation import Ask
from stitch.engines.embedded.http_face import SseWriter, json_response, read_object
from stitch.engines.embedded.params import SamplingParams, parse_sampling_params
from stitch.engines.embedded.service import Service, Ticket
from stitch.errors import InvalidInput, Unsupported

__all__ = ["handle_generate"]

BATCH_MAX: Final = 1024
TOP_LOGPROBS_MAX: Final = 128
_UNSUPPORTED: Final = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "lora_path",
    "return_hidden_states",
    "token_ids_logprob",
)


@dataclass(frozen=True, slots=True)
class _Plan:
    asks: list[Ask]
    single: bool
    with_text: bool
    stream: bool


async def handle_generate(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    plan = _parse(service, await read_object(request))
    ticket = service.submit(plan.asks)
    try:
        if plan.stream:
            return await _stream(service, request, plan, ticket)
        final = await ticket.finished()
        items = [
            generate_item(generation, progress, service.codec, with_text=plan.with_text)
            for generation, progress in zip(ticket.generations, final, strict=True)
        ]
        return json_response(items[0] if plan.single else items)
    finally:
        service.release(ticket)


async def _stream(
    service: Service, request: web.Request, plan: _Plan, ticket: Ticket
) -> web.StreamResponse:
    async with SseWriter(request) as sse:
        async for index, progress in ticket.news():
            if not await sse.check(progress):
                return sse.response
            generation = ticket.generations[index]
            item = generate_item(generation, progress, service.codec, with_text=plan.with_text)
            await sse.send(item if plan.single else {**item, "index": index})
        await sse.send_done()
    return sse.response


def _parse(service: Service, body: dict[str, Any]) -> _Plan:
    for name in _UNSUPPORTED:
        if body.get(name):
            raise Unsupported(f"{name} is not supported by the embedded engine", param=name)
    prompts, batched = _prompts(service, body)
    count = len(prompts)
    params = _params(service, body.get("sampling_params"), count)
    logprob = read_each(body, "return_logprob", count, bool, False)
    starts = read_each(body, "logprob_start_len", count, int, -1)
    tops = read_each(body, "top_logprobs_num", count, int, 0)
    keys = read_each(body, "extra_key", count, str, None)
    stream = read_flag(body, "stream")
    rids = read_rids(service, body.get("rid"), count)
    asks: list[Ask] = []
    for i, prompt in enumerate(prompts):
        if not 0 <= tops[i] <= TOP_LOGPROBS_MAX:
            raise InvalidInput(
                f"top_logprobs_num must be from 0 to {TOP_LOGPROBS_MAX}", param="top_logprobs_num"
            )
        start = _logprob_start(starts[i], len(prompt), wanted=logprob[i])
        group, rid = rids[i]
        for sample, seed in enumerate(service.seeds(params[i].seed, params[i].n)):
            asks.append(
                Ask(
                    rid=rid if params[i].n == 1 else f"{rid}-{sample}",
                    group=group,
                    prompt=prompt,
                    params=params[i],
                    seed=seed,
                    stream=stream,
                    return_logprob=logprob[i],
                    logprob_start=start,
                    top_logprobs=tops[i] if logprob[i] else 0,
                    extra_key=keys[i],
                )
            )
    single = not batched and len(asks) == 1
    return _Plan(asks, single, read_flag(body, "return_text_in_logprobs"), stream)


def _prompts(service: Service, body: dict[str, Any]) -> tuple[list[tuple[int, ...]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidInput("give either text or input_ids", param="text")
    if text is not None:
        batched = isinstance(text, list)
        texts = text if batched else [text]
        if not all(isinstance(t, str) for t in texts):
            raise InvalidInput("text must be text or a list of texts", param="text")
        encoded = [service.codec.encode(t) for t in _bounded(texts, "text")]
        return [service.check_prompt(e, where="text") for e in encoded], batched
    if not isinstance(ids, list):
        raise InvalidInput("input_ids must be a list of token ids, or of such", param="input_ids")
    batched = bool(ids) and isinstance(ids[0], list)
    lists = _bounded(ids, "input_ids") if batched else [ids]
    if not all(isinstance(one, list) for one in lists):
        raise InvalidInput("input_ids must be a list of token ids, or of such", param="input_ids")
    return [service.check_prompt(one, where="input_ids") for one in lists], batched


def _bounded(items: list[Any], where: str) -> list[Any]:
    if not 0 < len(items) <= BATCH_MAX:
        raise InvalidInput(f"{where} must hold 1 to {BATCH_MAX} prompts", param=where)
    return items


def _params(service: Service, raw: Any, count: int) -> list[SamplingParams]:
    items = raw if isinstance(raw, list) else [raw] * count
    if len(items) != count:
        raise InvalidInput(
            f"sampling_params has {len(items)} items for {count} prompts", param="sampling_params"
        )
    return [
        parse_sampling_params(
            item, vocab_size=service.model.vocab_size, samples_max=service.config.samples_max
        )
        for item in items
    ]


def _logprob_start(start: int, prompt_length: int, *, wanted: bool) -> int | None:
    if not wanted or start == -1:
        return None
    if not 0 <= start < prompt_length:
        raise InvalidInput(
            f"logprob_start_len must be -1, or from 0 to {prompt_length - 1} for this prompt",
            param="logprob_start_len",
        )
    return start
