"""What a generation returns, and how it is read from `/generate`'s JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stitch.errors import CorruptData, StitchError
from stitch.types import Prefix, Ref, Span

__all__ = ["Chunk", "Completion", "parse_completion", "parse_completions"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion and the policy versions that made it.

    `spans` tile the output tokens; empty where the engine cannot tell. `version_start` and
    `version_end` are the least and greatest version, None where unknown. `logprobs` is empty
    unless asked for. `finish_reason` is `stop`, `length` or `abort`. `partial` marks output
    that was cut short. `raw` is the response item as received.
    """

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    run_id: str | None
    version_start: int | None
    version_end: int | None
    finish_reason: str | None
    partial: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one stream event adds. The last chunk carries the whole `completion`."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: Completion | None = None


def parse_completions(body: Any) -> list[Completion]:
    """All completions of a response: one object, or a list where `n > 1` or many prompts.

    Raises: CorruptData if the body is not a `/generate` response.
    """
    items = body if isinstance(body, list) else [body]
    return [parse_completion(item) for item in items]


def parse_completion(item: Any, *, partial: bool = False) -> Completion:
    """One response item. Raises: CorruptData if it is not one."""
    try:
        meta = item["meta_info"]
        spans = tuple(_span(raw) for raw in _spans_of(item, meta))
        finish = _finish_reason(meta.get("finish_reason"))
        return Completion(
            text=str(item.get("text") or ""),
            output_ids=tuple(_output_ids(item, meta)),
            logprobs=tuple(float(e[0]) for e in meta.get("output_token_logprobs") or ()),
            spans=spans,
            run_id=meta.get("weight_run_id") or (spans[0].ref.run_id if spans else None),
            version_start=_version(meta, "weight_version_start", spans, min),
            version_end=_version(meta, "weight_version_end", spans, max),
            finish_reason=finish,
            partial=partial or finish == "abort",
            raw=item,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, StitchError) as error:
        raise CorruptData(
            f"the response is not a /generate item: {type(error).__name__}: {error}"
        ) from error


def _spans_of(item: Mapping[str, Any], meta: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return meta.get("weight_versions") or item.get("weight_versions") or ()


def _span(raw: Mapping[str, Any]) -> Span:
    return Span(
        Ref(raw["run_id"], int(raw["version"])),
        int(raw["start"]),
        int(raw["end"]),
        Prefix(raw.get("prefix", Prefix.EXACT.value)),
    )


def _output_ids(item: Mapping[str, Any], meta: Mapping[str, Any]) -> Sequence[int]:
    found = item.get("output_ids")
    if found is None:
        return [int(entry[1]) for entry in meta.get("output_token_logprobs") or ()]
    return [int(number) for number in found]


def _finish_reason(raw: Any) -> str | None:
    return raw.get("type") if isinstance(raw, dict) else raw


def _version(meta: Mapping[str, Any], key: str, spans: Sequence[Span], choose: Any) -> int | None:
    if key in meta:
        return int(meta[key])
    return choose(span.ref.version for span in spans) if spans else None
