"""Chooses tokens from logits, one request at a time, so that batch mates never matter.

Log-probabilities are those of the temperature-scaled distribution, penalties and biases
included, before top-k, top-p and min-p cut it (as SGLang reports them); greedy requests
report the unscaled distribution. Arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stitch.engines.embedded.params import SamplingParams

__all__ = ["Choice", "choose", "log_softmax", "sample_seed", "top_tokens", "uniform_at"]

Array = np.ndarray[Any, Any]

_MASK64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token, its log-probability, and the whole distribution's."""

    token: int
    logprob: float
    logprobs: Array


def choose(
    logits: Array,
    params: SamplingParams,
    *,
    uniform: float,
    output_counts: Mapping[int, int],
    prompt_tokens: frozenset[int],
    barred: frozenset[int] = frozenset(),
) -> Choice | None:
    """Choose the next token.

    Args:
        logits: (vocab,) float32; not changed.
        uniform: in [0, 1); decides among the remaining tokens by inverse distribution.
        output_counts: how often each token was produced so far.
        prompt_tokens: distinct prompt tokens, for the repetition penalty.
        barred: tokens that may not be chosen now (stop tokens before min_new_tokens).
    Returns: None if the logits are not finite.
    """
    scores = logits.astype(np.float64)
    if not np.isfinite(scores).all():
        return None
    _penalize(scores, params, output_counts, prompt_tokens)
    if barred and len(barred) < len(scores):
        scores[list(barred)] = -np.inf
    if not params.greedy:
        scores /= params.temperature
    logprobs = log_softmax(scores)
    if params.greedy:
        token = int(np.argmax(scores))
    else:
        token = _draw(np.exp(logprobs), params, uniform)
    return Choice(token, float(logprobs[token]), logprobs)


def _penalize(
    scores: Array, params: SamplingParams, counts: Mapping[int, int], prompt: frozenset[int]
) -> None:
    if params.penalized:
        produced = np.fromiter(counts.keys(), np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float64, len(counts))
        if params.repetition_penalty != 1.0:
            seen = np.array(sorted(prompt.union(counts)), np.int64)
            held = scores[seen]
            factor = params.repetition_penalty
            scores[seen] = np.where(held > 0, held / factor, held * factor)
        scores[produced] -= params.frequency_penalty * times + params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias


def _draw(shares: Array, params: SamplingParams, uniform: float) -> int:
    cut = params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < len(shares)
    if not cut:
        return _inverse(shares, uniform)
    order = np.argsort(-shares, kind="stable")
    ranked = shares[order]
    keep = len(ranked) if params.top_k < 0 else min(params.top_k, len(ranked))
    if params.top_p < 1.0:
        # A token stays while the mass before it is below top_p; the first always stays.
        before = np.cumsum(ranked) - ranked
        keep = min(keep, max(1, int(np.searchsorted(before, params.top_p, side="left"))))
    if params.min_p > 0.0:
        keep = min(keep, max(1, int(np.count_nonzero(ranked >= params.min_p * ranked[0]))))
    return int(order[_inverse(ranked[:keep], uniform)])


def _inverse(shares: Array, uniform: float) -> int:
    rising = np.cumsum(shares)
    at = int(np.searchsorted(rising, uniform * rising[-1], side="right"))
    if at >= len(shares):
        at = int(np.flatnonzero(shares)[-1])
    return at


def log_softmax(scores: Array) -> Array:
    """Over one row, in float64."""
    shifted = scores.astype(np.float64) - scores.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def top_tokens(logprobs: Array, count: int) -> list[tuple[float, int]]:
    """The `count` most probable tokens with their log-probabilities, best first, ties by id."""
    if count <= 0:
        return []
    order = np.argsort(-logprobs, kind="stable")[:count]
    return [(float(logprobs[token]), int(token)) for token in order]


def sample_seed(seed: int, sample: int) -> int:
    """The seed of the n-th sample of one request; sample 0 keeps the request's own."""
    return (seed + sample * 0x9E3779B97F4A7C15) & _MASK64


def uniform_at(seed: int, position: int) -> float:
    """A number in [0, 1) for one position of one seed: 53 bits of a counter-based hash."""
    return (_mix(_mix(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    # splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
