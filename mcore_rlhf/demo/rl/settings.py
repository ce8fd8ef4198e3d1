"""What an RL run is told: plain values without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mcore_rlhf.errors import UsageError

Algorithm = Literal["grpo", "ppo"]


@dataclass(frozen=True, slots=True)
class RlSettings:
    """The algorithm and its hyper-parameters.

    Args:
        algorithm: GRPO (advantages within the group of a prompt's answers) or PPO (advantages from a critic).
        prompts_per_step: Prompts per training step, over all ranks.
        group_size: Answers sampled per prompt.
        updates: Optimizer steps per batch of rollouts; the ratio is clipped from the second on.
        clip_ratio: How far the ratio of new to old probability counts, on either side of 1.
        value_clip: How far a value counts from the value at sampling (PPO).
        kl_coef: First coefficient of the KL penalty against the reference policy.
        kl_target: KL per token that the adaptive controller steers to; None for a coefficient that stays.
        kl_horizon: Samples over which it does so.
        entropy_coef: Coefficient of the entropy bonus, which keeps the policy from settling too early.
        discount: Discount of later rewards (PPO).
        gae_lambda: Lambda of generalized advantage estimation (PPO).
        temperature: Divides the logits, when sampling and when training.
        seed: Of everything random.
    """

    algorithm: Algorithm = "grpo"
    prompts_per_step: int = 16
    group_size: int = 8
    updates: int = 2
    clip_ratio: float = 0.2
    value_clip: float = 0.2
    kl_coef: float = 0.001
    kl_target: float | None = 2.0
    kl_horizon: float = 10_000
    entropy_coef: float = 0.05
    discount: float = 1.0
    gae_lambda: float = 0.95
    temperature: float = 1.0
    seed: int = 1234

    @property
    def samples_per_step(self) -> int:
        """Answers per training step, over all ranks."""
        return self.prompts_per_step * self.group_size

    def prompts_per_rank(self, dp: int) -> int:
        """Prompts of one data-parallel rank per step; groups stay whole, so that advantages need no communication.

        Raises:
            UsageError: The prompts cannot be divided evenly.
        """
        count, rest = divmod(self.prompts_per_step, dp)
        if rest or not count:
            raise UsageError(
                f"{self.prompts_per_step} prompts per step cannot be divided over {dp} data-parallel ranks\n"
                f"Give --prompts-per-step a multiple of {dp}, or run on fewer ranks."
            )
        return count

    def micro_batch_size(self, dp: int, micro_batches: int) -> int:
        """Answers per forward pass.

        Args:
            dp: Data-parallel ranks.
            micro_batches: Forward passes of one rank per update.

        Raises:
            UsageError: The answers of a rank cannot be divided evenly.
        """
        samples = self.prompts_per_rank(dp) * self.group_size
        size, rest = divmod(samples, micro_batches)
        if rest or not size:
            raise UsageError(
                f"the {samples} answers of a rank cannot be divided into {micro_batches} micro-batches\n"
                "Change --micro-batches, --prompts-per-step or --group-size."
            )
        return size
