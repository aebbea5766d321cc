"""Sampling parameters and the choice of tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from stitch.engines.embedded.params import SamplingParams, parse_sampling_params
from stitch.engines.embedded.sampling import (
    choose,
    log_softmax,
    sample_seed,
    top_tokens,
    uniform_at,
)
from stitch.errors import InvalidInput, Unsupported

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, 3.0], np.float32)


def _choose(params: SamplingParams, uniform: float = 0.5, **state: Any) -> Any:
    counts = Counter(state.get("produced", []))
    return choose(
        state.get("logits", LOGITS),
        params,
        uniform=uniform,
        output_counts=counts,
        prompt_tokens=frozenset(state.get("prompt", [])),
        barred=frozenset(state.get("barred", [])),
    )


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    values = [uniform_at(seed, at) for seed in (0, 1, 2**64 - 1) for at in range(1000)]
    assert values == [uniform_at(seed, at) for seed in (0, 1, 2**64 - 1) for at in range(1000)]
    assert len(set(values)) == 3000
    assert all(0 <= v < 1 for v in values)
    # Mean of 3000 uniforms: standard deviation 0.0053.
    assert abs(np.mean(values) - 0.5) < 0.03
    assert sample_seed(9, 0) == 9
    assert len({sample_seed(9, i) for i in range(100)}) == 100


def test_the_choice_follows_the_distribution() -> None:
    params = SamplingParams(temperature=0.7)
    shares = np.exp(log_softmax(LOGITS / 0.7))
    draws = Counter(_choose(params, uniform_at(3, i)).token for i in range(4000))
    for token, share in enumerate(shares):
        # Four standard deviations of a binomial share.
        assert abs(draws[token] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5 + 1e-3


def test_greedy_and_its_logprob() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1, temperature=0.3)):
        choice = _choose(params, 0.999)
        assert choice.token == 4
        assert choice.logprob == pytest.approx(float(log_softmax(LOGITS)[4]), abs=1e-12)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {4, 0}),
        (SamplingParams(top_p=0.6), {4}),
        (SamplingParams(top_p=0.7), {4, 0}),
        (SamplingParams(min_p=0.3), {4, 0}),
        (SamplingParams(min_p=1.0), {4}),
        (SamplingParams(top_p=1e-9), {4}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
    ],
)
def test_cuts_keep_exactly_the_right_tokens(params: SamplingParams, allowed: set[int]) -> None:
    found = {_choose(params, i / 5000).token for i in range(5000)}
    assert found == allowed
    # The reported value is that of the uncut distribution.
    assert _choose(params, 0.0).logprob == pytest.approx(
        float(log_softmax(LOGITS)[_choose(params, 0.0).token]), abs=1e-12
    )


def test_penalties_biases_and_bars() -> None:
    greedy = {"temperature": 0.0}
    assert _choose(SamplingParams(presence_penalty=2.0, **greedy), produced=[4]).token == 0
    assert _choose(SamplingParams(frequency_penalty=0.6, **greedy), produced=[4]).token == 4
    assert _choose(SamplingParams(frequency_penalty=0.6, **greedy), produced=[4, 4]).token == 0
    assert _choose(SamplingParams(repetition_penalty=2.0, **greedy), prompt=[4]).token == 0
    assert _choose(SamplingParams(logit_bias={3: 9.0}, **greedy)).token == 3
    assert _choose(SamplingParams(**greedy), barred=[4, 0]).token == 1


def test_logits_that_are_not_finite_choose_nothing() -> None:
    for bad in (np.nan, np.inf):
        logits = LOGITS.copy()
        logits[1] = bad
        assert _choose(SamplingParams(), logits=logits) is None


def test_tops_are_ordered_and_ties_go_by_id() -> None:
    tops = top_tokens(np.array([0.0, 1.0, 1.0, -5.0]), 3)
    assert tops == [(1.0, 1), (1.0, 2), (0.0, 0)]
    assert top_tokens(LOGITS, 0) == []


def test_parameters_take_their_defaults_from_nulls() -> None:
    assert _parse(None) == SamplingParams()
    assert _parse({"temperature": None, "stop": None, "seed": None}) == SamplingParams()
    parsed = _parse({"stop": "a", "sampling_seed": 5, "top_k": 0, "stop_token_ids": [3, 3]})
    assert parsed == SamplingParams(stop=("a",), seed=5, stop_token_ids=frozenset({3}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("top_k", -2),
        ("n", 129),
        ("max_new_tokens", 1.5),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"10": 1}),
        ("seed", "7"),
        ("nonsense", 1),
    ],
)
def test_wrong_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        _parse({name: value})
    assert caught.value.fields["param"] == f"sampling_params.{name}"


def test_constrained_decoding_is_unsupported() -> None:
    with pytest.raises(Unsupported):
        _parse({"json_schema": "{}"})


def _parse(raw: object) -> SamplingParams:
    return parse_sampling_params(raw, vocab_size=10, samples_max=128)
