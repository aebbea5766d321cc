"""The demo's learner: GRPO-style policy gradient with importance correction for lag.

Each prompt's samples form a group. The advantage of a token is its own verified reward against
the group's in the same place, scaled by the group's spread. The ratio of the learner's policy to
the behaviour policy (the engine's reported log-probabilities, at whatever version made the token)
corrects for lag and is clipped, as in PPO. The learner keeps fp32 master weights and publishes
their bf16 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from stitch.demo.model import load_model, output_logprobs
from stitch.rl.trajectory import Trajectory

__all__ = ["Learner", "LearnerConfig", "StepReport"]

# Trajectories per forward pass: activations of more fall out of the cache of a small machine.
_PART: Final = 64


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Settings of the learner.

    lr: AdamW's step size. ratio_min, ratio_max: clip of the per-token importance ratio;
    ratio_bound: its bound for tokens with a negative advantage (dual clip).
    entropy: weight of the entropy bonus; it also keeps late versions apart in log-probability.
    spread_min: added to a group's reward deviation. norm_max: gradient norm clip.
    """

    lr: float = 1e-3
    ratio_min: float = 0.8
    ratio_max: float = 1.25
    ratio_bound: float = 3.0
    entropy: float = 0.02
    spread_min: float = 0.1
    norm_max: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. `clipped` is the fraction of tokens whose ratio was clipped."""

    reward: float
    entropy: float
    clipped: float
    ratio_max: float
    gradient_norm: float


class Learner:
    """Owns the master weights. Not thread-safe; one caller."""

    def __init__(self, checkpoint: Path, config: LearnerConfig) -> None:
        self._config = config
        self._model = load_model(checkpoint)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as published: fresh bf16 tensors by checkpoint name."""
        return {
            name: parameter.detach().to(torch.bfloat16)
            for name, parameter in self._model.named_parameters()
        }

    def step(self, batch: Sequence[Trajectory]) -> StepReport:
        """One optimizer step on whole groups of equally long trajectories."""
        config = self._config
        rewards = torch.tensor([t.rewards for t in batch])
        advantages = self._advantages(rewards, torch.tensor([t.group for t in batch]))
        self._optimizer.zero_grad(set_to_none=True)
        parts = [
            self._backward(batch[at : at + _PART], advantages[at : at + _PART], rewards.numel())
            for at in range(0, len(batch), _PART)
        ]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.norm_max)
        self._optimizer.step()
        return StepReport(
            reward=float(rewards.mean()),
            entropy=sum(entropy for entropy, _, _ in parts),
            clipped=sum(clipped for _, clipped, _ in parts),
            ratio_max=max(ratio for _, _, ratio in parts),
            gradient_norm=float(norm),
        )

    def _backward(
        self, part: Sequence[Trajectory], advantages: torch.Tensor, tokens: int
    ) -> tuple[float, float, float]:
        """Add the gradient of one part of the batch, whose loss is a mean over `tokens` in all.

        Returns: the part's share of entropy and clipped fraction, and its greatest ratio.
        """
        config = self._config
        behaviour = torch.tensor([t.logprobs for t in part])
        chosen, every = output_logprobs(self._model, part)
        ratio = (chosen - behaviour).exp()
        clipped = ratio.clamp(config.ratio_min, config.ratio_max)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        # The minimum does not bound a bad token that has become far more likely since.
        gain = torch.maximum(gain, advantages.clamp(max=0.0) * config.ratio_bound).where(
            advantages < 0, gain
        )
        gain = gain.sum() / tokens
        entropy = -(every.exp() * every).sum() / tokens
        loss = -gain - config.entropy * entropy
        loss.backward()
        with torch.no_grad():
            share = float((ratio != clipped).sum()) / tokens
            return float(entropy), share, float(ratio.max())

    def _advantages(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        advantages = torch.empty_like(rewards)
        for group in groups.unique():
            rows = groups == group
            mine = rewards[rows]
            spread = mine.std(dim=0, correction=0) + self._config.spread_min
            advantages[rows] = (mine - mine.mean(dim=0)) / spread
        return advantages
