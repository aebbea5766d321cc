"""Request bodies of the OpenAI routes, turned into one checked form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from stitch.engines.embedded.fields import read_each, read_flag, read_rids
from stitch.engines.embedded.params import SamplingParams, parse_sampling_params
from stitch.engines.embedded.service import Service
from stitch.errors import InvalidInput, Unsupported

__all__ = ["OpenAiAsk", "parse_chat", "parse_completion"]

COMPLETION_TOKENS_DEFAULT: Final = 16
TOP_LOGPROBS_MAX: Final = 20
PROMPTS_MAX: Final = 1024
# Our names of sampling parameters by the OpenAI routes' names, SGLang's extras included.
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "stop": "stop",
    "n": "n",
    "seed": "seed",
    "logit_bias": "logit_bias",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
}
_UNSUPPORTED: Final = (
    "suffix",
    "tools",
    "functions",
    "audio",
    "regex",
    "ebnf",
    "guided_json",
    "lora_path",
)


@dataclass(frozen=True, slots=True)
class OpenAiAsk:
    """One request. logprobs: how many alternatives per token, None for no log-probabilities.

    rids (group, rid) and extra_keys: one per prompt.
    """

    prompts: list[tuple[int, ...]]
    params: SamplingParams
    rids: list[tuple[str, str]]
    rid_given: bool
    model: str | None
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: bool
    extra_keys: list[str | None]


def parse_completion(service: Service, body: dict[str, Any]) -> OpenAiAsk:
    """Parse `/v1/completions`. Raises: InvalidInput or Unsupported naming the field."""
    prompts = _prompts(service, body.get("prompt"))
    logprobs = _count(body, "logprobs")
    echo = read_flag(body, "echo")
    if echo and logprobs is not None:
        raise Unsupported("echo with logprobs is not supported; use /generate", param="echo")
    best_of = _count(body, "best_of", high=service.config.samples_max)
    if best_of is not None and best_of != (body.get("n") or 1):
        raise Unsupported("best_of other than n is not supported", param="best_of")
    tokens = body.get("max_tokens")
    default = COMPLETION_TOKENS_DEFAULT if tokens is None else tokens
    return _common(service, body, prompts, default, logprobs, echo=echo)


def parse_chat(service: Service, body: dict[str, Any]) -> OpenAiAsk:
    """Parse `/v1/chat/completions`. Raises: InvalidInput or Unsupported naming the field."""
    messages = _messages(body.get("messages"))
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or not all(str(k).isidentifier() for k in options):
        raise InvalidInput("chat_template_kwargs must be an object", param="chat_template_kwargs")
    reserved = {"chat_template", "add_generation_prompt", "tokenize"} & set(options)
    if reserved:
        raise InvalidInput(
            f"chat_template_kwargs may not set {min(reserved)}", param="chat_template_kwargs"
        )
    ids = service.codec.render_chat(messages, **options)
    prompt = service.check_prompt(ids, where="messages")
    top = _count(body, "top_logprobs")
    if top is not None and not read_flag(body, "logprobs"):
        raise InvalidInput("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (top or 0) if read_flag(body, "logprobs") else None
    tokens = body.get("max_completion_tokens")
    tokens = body.get("max_tokens") if tokens is None else tokens
    room = service.scheduler.context_tokens_max - len(prompt)
    return _common(service, body, [prompt], room if tokens is None else tokens, logprobs)


def _common(
    service: Service,
    body: dict[str, Any],
    prompts: list[tuple[int, ...]],
    max_tokens: Any,
    logprobs: int | None,
    *,
    echo: bool = False,
) -> OpenAiAsk:
    for name in _UNSUPPORTED:
        if body.get(name):
            raise Unsupported(f"{name} is not supported by the embedded engine", param=name)
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise Unsupported(
            "response_format other than text is not supported", param="response_format"
        )
    raw = {ours: body[theirs] for theirs, ours in _SAMPLING.items() if theirs in body}
    raw["max_new_tokens"] = max_tokens
    params = parse_sampling_params(
        raw,
        vocab_size=service.model.vocab_size,
        samples_max=service.config.samples_max,
        where="request",
    )
    stream = read_flag(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidInput("stream_options must be an object", param="stream_options")
    if options and not stream:
        raise InvalidInput("stream_options needs stream: true", param="stream_options")
    if not isinstance(body.get("model"), (str, type(None))):
        raise InvalidInput("model must be text", param="model")
    return OpenAiAsk(
        prompts=prompts,
        params=params,
        rids=read_rids(service, body.get("rid"), len(prompts)),
        rid_given=body.get("rid") is not None,
        model=body.get("model"),
        stream=stream,
        include_usage=read_flag(options, "include_usage"),
        logprobs=logprobs,
        echo=echo,
        extra_keys=read_each(body, "extra_key", len(prompts), str, None),
    )


def _prompts(service: Service, raw: Any) -> list[tuple[int, ...]]:
    if isinstance(raw, str):
        raw = [raw]
    if not isinstance(raw, list) or not raw:
        raise InvalidInput("prompt must be text, token ids, or a list of either", param="prompt")
    if isinstance(raw[0], int):
        raw = [raw]
    if len(raw) > PROMPTS_MAX:
        raise InvalidInput(f"prompt may hold at most {PROMPTS_MAX} prompts", param="prompt")
    found = []
    for item in raw:
        if not isinstance(item, (str, list)):
            raise InvalidInput(
                "prompt must be text, token ids, or a list of either", param="prompt"
            )
        ids = service.codec.encode(item) if isinstance(item, str) else item
        found.append(service.check_prompt(ids, where="prompt"))
    return found


def _messages(raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise InvalidInput("messages must be a non-empty list", param="messages")
    found = []
    for i, message in enumerate(raw):
        at = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"{at} must be an object with a role", param=at)
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
                raise Unsupported(f"{at}.content: only text parts are supported", param=at)
            content = "".join(part["text"] for part in content)
        if not isinstance(content, (str, type(None))):
            raise InvalidInput(f"{at}.content must be text", param=at)
        found.append({**message, "content": content or ""})
    return found


def _count(body: dict[str, Any], name: str, *, high: int = TOP_LOGPROBS_MAX) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise InvalidInput(f"{name} must be an integer from 0 to {high}", param=name)
    return value
