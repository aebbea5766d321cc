"""Sampling parameters: SGLang's names, checked, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stitch.errors import InvalidInput, Unsupported

__all__ = ["SamplingParams", "parse_sampling_params"]

STOP_STRINGS_MAX: Final = 64
STOP_CHARS_MAX: Final = 1024
# Accepted and without effect here: how text is joined, and hints to other schedulers.
_IGNORED: Final = frozenset(
    {"spaces_between_special_tokens", "stream_interval", "custom_params", "stop_regex_max_len"}
)
_CONSTRAINED: Final = frozenset({"regex", "json_schema", "ebnf", "structural_tag", "stop_regex"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Defaults are SGLang's.

    temperature 0 is greedy; top_k -1 means all. `seed` makes the choice at every position a
    function of (seed, position, logits).
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


def parse_sampling_params(
    raw: Any, *, vocab_size: int, samples_max: int, where: str = "sampling_params"
) -> SamplingParams:
    """Parse one `sampling_params` object. Nulls mean the default.

    Raises: InvalidInput naming the field; Unsupported for constrained decoding.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise InvalidInput(f"{where} must be an object", param=where)
    given = {name: value for name, value in raw.items() if value is not None}
    given.setdefault("seed", given.pop("sampling_seed", None))
    if given["seed"] is None:
        del given["seed"]
    for name in sorted(given):
        if name in _CONSTRAINED:
            raise Unsupported(
                f"{where}.{name}: the embedded engine has no constrained decoding",
                param=f"{where}.{name}",
            )
        if name not in _READERS and name not in _IGNORED:
            raise InvalidInput(f"{where}.{name} is not a known parameter", param=f"{where}.{name}")
    reader = _Reader(given, where, vocab_size, samples_max)
    return SamplingParams(
        **{
            name: getattr(reader, kind)(name, *limits)
            for name, (kind, *limits) in _READERS.items()
            if name in given
        }
    )


_INT_MAX: Final = 2**31 - 1
_READERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_new_tokens": ("integer", 0, _INT_MAX),
    "min_new_tokens": ("integer", 0, _INT_MAX),
    "temperature": ("number", 0.0, 1e4),
    "top_p": ("share", 0.0, 1.0),
    "top_k": ("top_k",),
    "min_p": ("number", 0.0, 1.0),
    "frequency_penalty": ("number", -2.0, 2.0),
    "presence_penalty": ("number", -2.0, 2.0),
    "repetition_penalty": ("share", 0.0, 2.0),
    "stop": ("strings",),
    "stop_token_ids": ("token_ids",),
    "ignore_eos": ("flag",),
    "skip_special_tokens": ("flag",),
    "no_stop_trim": ("flag",),
    "n": ("samples",),
    "seed": ("integer", -(2**63), 2**64 - 1),
    "logit_bias": ("biases",),
}


@dataclass(frozen=True, slots=True)
class _Reader:
    raw: Mapping[str, Any]
    where: str
    vocab_size: int
    samples_max: int

    def _fail(self, name: str, demand: str) -> InvalidInput:
        at = f"{self.where}.{name}"
        return InvalidInput(f"{at} must be {demand}, not {str(self.raw[name])[:80]!r}", param=at)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.raw[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._fail(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        value = self.raw[name]
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not low <= value <= high:
            raise self._fail(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def share(self, name: str, low: float, high: float) -> float:
        value = self.number(name, low, high)
        if value == low:
            raise self._fail(name, f"above {low:g}")
        return value

    def top_k(self, name: str) -> int:
        value = self.raw[name]
        if value == 0 and not isinstance(value, bool):
            return -1  # OpenAI-style clients send 0 for "all"
        return self.integer(name, -1, _INT_MAX)

    def samples(self, name: str) -> int:
        return self.integer(name, 1, self.samples_max)

    def flag(self, name: str) -> bool:
        value = self.raw[name]
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.raw[name]
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(s, str) and s for s in items):
            raise self._fail(name, "text or a list of non-empty texts")
        if len(items) > STOP_STRINGS_MAX or any(len(s) > STOP_CHARS_MAX for s in items):
            raise self._fail(
                name, f"at most {STOP_STRINGS_MAX} texts of {STOP_CHARS_MAX} characters"
            )
        return tuple(items)

    def token_ids(self, name: str) -> frozenset[int]:
        value = self.raw[name]
        good = isinstance(value, list) and all(
            isinstance(t, int) and not isinstance(t, bool) and 0 <= t < self.vocab_size
            for t in value
        )
        if not good:
            raise self._fail(name, f"a list of token ids below {self.vocab_size}")
        return frozenset(value)

    def biases(self, name: str) -> dict[int, float]:
        value = self.raw[name]
        if not isinstance(value, dict):
            raise self._fail(name, "an object of token ids and numbers")
        found = {}
        for token, bias in value.items():
            good = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not good or not math.isfinite(bias) or not str(token).isdecimal():
                raise self._fail(name, "an object of token ids and numbers")
            if int(token) >= self.vocab_size:
                raise self._fail(name, f"about token ids below {self.vocab_size}")
            found[int(token)] = float(bias)
        return found
