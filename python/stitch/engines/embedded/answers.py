"""Response bodies: label keys, token triples, `/generate` items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stitch.engines.embedded.generation import Generation, Progress
from stitch.engines.embedded.text import TextCodec
from stitch.types import Ref, Span

__all__ = ["choice_spans", "generate_item", "label_keys", "token_triples"]


def choice_spans(generation: Generation, count: int) -> list[dict[str, Any]] | None:
    """`weight_versions` of one choice; None if the engine cannot tell."""
    spans = generation.spans(count)
    return None if spans is None else [span.to_wire() for span in spans]


def label_keys(generations: Sequence[tuple[Generation, int]]) -> dict[str, Any]:
    """`weight_version_start`, `_end` and `weight_run_id` over choices of given token counts.

    Keys that cannot be told are absent: unknown labels, no token yet, more than one run.
    """
    refs: list[Ref] = []
    for generation, count in generations:
        spans: list[Span] | None = generation.spans(count)
        if spans is None:
            return {}
        refs += [span.ref for span in spans]
        if not spans and generation.prompt_label is not None:
            refs.append(generation.prompt_label.ref)
    if not refs or len({ref.run_id for ref in refs}) > 1:
        return {}
    versions = [ref.version for ref in refs]
    return {
        "weight_version_start": min(versions),
        "weight_version_end": max(versions),
        "weight_run_id": refs[0].run_id,
    }


def generate_item(
    generation: Generation, progress: Progress, codec: TextCodec, *, with_text: bool
) -> dict[str, Any]:
    """One `/generate` result, cumulative: text, ids and `meta_info` so far.

    with_text: put each token's text into the log-probability triples.
    """
    ask, count = generation.ask, progress.tokens
    meta: dict[str, Any] = {
        "id": ask.rid,
        "finish_reason": None if progress.finish is None else public_finish(progress.finish),
        "prompt_tokens": generation.prompt_length,
        "completion_tokens": count,
        "cached_tokens": generation.cached_tokens or 0,
    }
    if ask.return_logprob:
        texts = codec if with_text else None
        output = generation.output[:count]
        meta["output_token_logprobs"] = token_triples(generation.logprobs[:count], output, texts)
        start = generation.prompt_length if ask.logprob_start is None else ask.logprob_start
        known = len(generation.input_logprobs)
        ids = ask.prompt[start : start + known]
        meta["input_token_logprobs"] = token_triples(generation.input_logprobs, ids, texts)
        if ask.top_logprobs:
            meta["output_top_logprobs"] = [_tops(tops, texts) for tops in generation.tops[:count]]
            meta["input_top_logprobs"] = [
                None if tops is None else _tops(tops, texts) for tops in generation.input_tops
            ]
    spans = choice_spans(generation, count)
    if progress.finish is not None and spans is not None:
        labels = label_keys([(generation, count)])
        if "weight_version_start" in labels:
            # The start version as text, as trainers append it to their samples.
            meta["weight_version"] = str(labels["weight_version_start"])
        if labels or spans:
            meta["weight_versions"] = spans
        meta.update(labels)
    return {"text": progress.text, "output_ids": generation.output[:count], "meta_info": meta}


def public_finish(finish: Mapping[str, Any]) -> dict[str, Any]:
    """The finish reason without the engine's own marks."""
    return {key: value for key, value in finish.items() if key != "failed"}


def token_triples(
    logprobs: Sequence[float | None], tokens: Sequence[int], codec: TextCodec | None
) -> list[list[Any]]:
    """`[logprob, token id, text or null]` per token."""
    return [
        [logprob, token, None if codec is None else token_text(token, codec)]
        for logprob, token in zip(logprobs, tokens, strict=True)
    ]


def token_text(token: int, codec: TextCodec) -> str:
    """One token's own text; special tokens by name."""
    return codec.decode([token], skip_special_tokens=False)


def _tops(tops: Sequence[tuple[float, int]], codec: TextCodec | None) -> list[list[Any]]:
    return token_triples([lp for lp, _ in tops], [token for _, token in tops], codec)
