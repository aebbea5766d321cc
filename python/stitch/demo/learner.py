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

import torch

from stitch.demo.model import load_model, output_logprobs
from stitch.rl.trajectory import Trajectory

__all__ = ["Learner", "LearnerConfig", "StepReport"]


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Settings of the learner.

    lr: AdamW's step size. ratio_min, ratio_max: clip of the per-token importance ratio.
    entropy: weight of the entropy bonus; it also keeps late versions apart in log-probability.
    spread_min: added to a group's reward deviation. norm_max: gradient norm clip.
    """

    lr: float = 1e-3
    ratio_min: float = 0.8
    ratio_max: float = 1.25
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
        prompts = torch.tensor([t.prompt_ids for t in batch])
        outputs = torch.tensor([t.output_ids for t in batch])
        behaviour = torch.tensor([t.logprobs for t in batch])
        rewards = torch.tensor([t.rewards for t in batch])
        advantages = self._advantages(rewards, torch.tensor([t.group for t in batch]))
        chosen, every = output_logprobs(self._model, prompts, outputs)
        ratio = (chosen - behaviour).exp()
        clipped = ratio.clamp(config.ratio_min, config.ratio_max)
        gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
        entropy = -(every.exp() * every).sum(dim=-1).mean()
        loss = -gain - config.entropy * entropy
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.norm_max)
        self._optimizer.step()
        return StepReport(
            reward=float(rewards.mean()),
            entropy=float(entropy),
            clipped=float((ratio != clipped).float().mean()),
            ratio_max=float(ratio.max()),
            gradient_norm=float(norm),
        )

    def _advantages(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        advantages = torch.empty_like(rewards)
        for group in groups.unique():
            rows = groups == group
            mine = rewards[rows]
            spread = mine.std(dim=0, correction=0) + self._config.spread_min
            advantages[rows] = (mine - mine.mean(dim=0)) / spread
        return advantages
