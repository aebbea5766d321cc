"""The demo's verifiable task: recite eight digits. Pure; token ids only, no torch.

A prompt is `BOS d1 … d8 SEP`; the right answer repeats the digits in order. Every answer token is
verified on its own, so the reward is dense: a random policy over the 16 ids gets 1/16.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

__all__ = [
    "ANSWER_TOKENS",
    "BOS",
    "EOS",
    "PAD",
    "PROMPT_TOKENS",
    "SEP",
    "VOCABULARY",
    "make_prompt",
    "token_rewards",
]

ANSWER_TOKENS: Final = 8
PROMPT_TOKENS: Final = ANSWER_TOKENS + 2
BOS, SEP, EOS, PAD = 10, 11, 12, 13
# Ids 0 to 9 are the digits; the last two ids only fill the table up to a multiple of eight.
VOCABULARY: Final = (*"0123456789", "<bos>", "<sep>", "<eos>", "<pad>", "<x>", "<y>")


def make_prompt(rng: random.Random) -> list[int]:
    """One prompt of `PROMPT_TOKENS` ids."""
    return [BOS, *(rng.randrange(10) for _ in range(ANSWER_TOKENS)), SEP]


def token_rewards(prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """1.0 for each answer token that is the prompt's digit in that place, else 0.0."""
    digits = prompt[1 : 1 + ANSWER_TOKENS]
    return [float(found == wanted) for found, wanted in zip(answer, digits, strict=False)]
