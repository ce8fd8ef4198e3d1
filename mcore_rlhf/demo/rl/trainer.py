"""The training step of GRPO and PPO, on whatever layout: answers sampled from the live policy, token by token, through the same sharded
model that is trained; judge, and update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
from megatron.core import parallel_state

from mcore_rlhf.demo.rl import losses
from mcore_rlhf.demo.rl import losses as advantages
from mcore_rlhf.demo.rl.losses import log_probs
from mcore_rlhf.demo.rl.models import Models
from mcore_rlhf.demo.rl.passes import Batch, Passes, global_sum
from mcore_rlhf.demo.rl.settings import RlSettings
from mcore_rlhf.demo.rl.task import PAD, Reversal, answer_length
from mcore_rlhf.demo.trainer import DemoTrainer
from mcore_rlhf.manager.rlhf.prompts import Prompt, shard

_BELOW_ONE = 1.0 - 2.0**-24


def gumbel(seeds: Sequence[int], length: int, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise: the largest of logits plus noise is a sample of their softmax.

    It is drawn on the CPU whatever runs the model, from generators apart from every other one of the process, so a
    sample depends on nothing but its seed and the logits.

    Args:
        seeds: One per sample, from 0 to 2⁶⁴ - 1.
        length: Tokens per sample.
        vocabulary: Choices per token.

    Returns:
        fp32, (samples, length, vocabulary).
    """
    generator = torch.Generator()
    uniform = torch.empty(len(seeds), length, vocabulary)
    for row, seed in zip(uniform, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return -torch.log(-torch.log(uniform.clamp(torch.finfo(torch.float32).tiny, _BELOW_ONE)))


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Answers and what they earned, the same on all ranks of a model-parallel group.

    Args:
        tokens: Prompts and answers, ``<pad>`` after an answer's end; int64, (samples, seq_length).
        log_probs: Of the sampled tokens under the policy that sampled them; fp32, (samples, answer_length).
        mask: 1 up to the answer's end; fp32, (samples, answer_length).
        rewards: fp32, (samples,).
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples answers by full forward passes, one per token.

    A token is the largest logit after Gumbel noise has been added, and the noise of a sample follows from its own
    seed: a sample whose prompt is issued again is the same for the same weights, on whichever rank and beside whatever.

    Args:
        task: Gives prompts and rewards.
        passes: How batches go through the policy.
        temperature: Divides the logits.
    """

    task: Reversal
    passes: Passes
    temperature: float

    def rollouts(self, chunks: Sequence[torch.nn.Module], prompt_ids: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Sample one answer per seed.

        Args:
            chunks: The policy's chunks on this rank.
            prompt_ids: The prompt of each answer.
            seeds: The seed of each answer's noise.
        """
        task = self.task
        tokens = torch.full((len(seeds), task.seq_length), PAD, device="cuda")
        tokens[:, : task.prompt_length] = torch.tensor([task.prompt(number) for number in prompt_ids], device="cuda")
        noise = gumbel(seeds, task.answer_length, self.passes.vocabulary).to(tokens.device)
        chosen = torch.empty(len(seeds), task.answer_length, device="cuda")
        for place in range(task.answer_length):
            sampled = self._next(chunks, {"tokens": tokens, "noise": noise[:, place]}, task.prompt_length + place)
            tokens[:, task.prompt_length + place] = sampled[:, 0].long()
            chosen[:, place] = sampled[:, 1]
        return self._judged(prompt_ids, tokens, chosen)

    def _next(self, chunks: Sequence[torch.nn.Module], batch: Batch, position: int) -> torch.Tensor:
        """The token at ``position`` and its log-probability; fp32, (samples, 2): the vocabulary is below 2²⁴."""

        def choose(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
            before = logits[:, position - 1 : position]
            token = (before[:, 0].float() / self.temperature + batch["noise"]).argmax(dim=-1, keepdim=True)
            return torch.cat([token.float(), log_probs(before, token, self.temperature)], dim=1)

        return self.passes.forward(chunks, batch, choose)

    def _judged(self, prompt_ids: Sequence[int], tokens: torch.Tensor, chosen: torch.Tensor) -> Rollouts:
        """Cut answers at their end, and reward them."""
        start = self.task.prompt_length
        answers: list[list[int]] = tokens[:, start:].tolist()
        lengths = torch.tensor([answer_length(answer) for answer in answers], device="cuda")
        rewards = [self.task.reward(number, answer) for number, answer in zip(prompt_ids, answers, strict=True)]
        mask = torch.arange(self.task.answer_length, device="cuda") < lengths[:, None]
        tokens[:, start:].masked_fill_(~mask, PAD)
        kept = mask.float()
        return Rollouts(tokens, chosen * kept, kept, torch.tensor(rewards, device="cuda"))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, the same on every rank.

    Args:
        loss: The policy's, mean over the updates.
        reward: Mean over the answers.
        rewards: Of this rank's answers; fp32, (samples,).
        tokens: Tokens of all answers.
        kl: Estimated KL per token against the reference policy, when the answers were sampled.
        grad_norm: The policy's at the last update, before clipping.
        value_loss: The critic's, mean over the updates; None for GRPO.
        critic_grad_norm: The critic's at the last update; None for GRPO.
    """

    loss: float
    reward: float
    rewards: torch.Tensor
    tokens: int
    kl: float
    grad_norm: float
    value_loss: float | None = None
    critic_grad_norm: float | None = None


class RLTrainer:
    """Trains the models of a run, a batch of prompts at a time.

    Args:
        models: Actor, reference and, for PPO, critic.
        settings: The algorithm.
        task: Prompts and rewards.
        micro_batches: Parts into which a rank's batch is cut.
    """

    def __init__(self, models: Models, settings: RlSettings, task: Reversal, micro_batches: int) -> None:
        self.models, self.settings, self.task = models, settings, task
        self._policy = Passes(micro_batches, models.actor.model.vocab_size)
        self._values = Passes(micro_batches)
        self._sampler = Sampler(task, self._policy, settings.temperature)

    def step(self, prompts: Sequence[Prompt], kl_coef: float) -> StepResult:
        """Train on prompts.

        Args:
            prompts: Of the whole step, the same on every rank.
            kl_coef: Coefficient of the KL penalty.
        """
        rollouts = self._sample(prompts)
        batch, kl = self._experience(rollouts, kl_coef)
        reports = [self._update(batch, kl_coef) for _ in range(self.settings.updates)]
        for trainer in self.models.trained.values():
            trainer.iteration += 1
            trainer.consumed_train_samples += self.settings.samples_per_step
        means = torch.tensor([[report[name][0] for name in report] for report in reports], dtype=torch.float64).mean(0)
        norms = [norm for _, norm in reports[-1].values()]
        totals = global_sum(torch.stack([rollouts.rewards.double().sum(), rollouts.mask.double().sum(), kl]))
        return StepResult(
            means[0].item(),
            totals[0].item() / self.settings.samples_per_step,
            rollouts.rewards,
            int(totals[1].item()),
            totals[2].item() / parallel_state.get_data_parallel_world_size(),
            norms[0],
            *((means[1].item(), norms[1]) if len(norms) > 1 else ()),
        )

    def _sample(self, prompts: Sequence[Prompt]) -> Rollouts:
        """This data-parallel rank's answers; all answers of a prompt stay on one rank."""
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = shard(prompts, rank, size)
        ids = chain.from_iterable([prompt.prompt_id] * prompt.group_size for prompt in mine)
        seeds = chain.from_iterable(prompt.sample_seeds for prompt in mine)
        return self._sampler.rollouts(self.models.actor.chunks, list(ids), list(seeds))

    def _experience(self, rollouts: Rollouts, kl_coef: float) -> tuple[Batch, torch.Tensor]:
        """What the updates need beside the answers, and this rank's mean KL."""
        batch = {"tokens": rollouts.tokens, "mask": rollouts.mask, "old": rollouts.log_probs}
        batch["reference"] = self._policy.forward(self.models.reference, batch, self._log_probs) * rollouts.mask
        if self.models.critic is None:
            group = advantages.group_advantages(rollouts.rewards, self.settings.group_size)
            batch["advantages"] = group[:, None] * rollouts.mask
        else:
            batch |= self._judged(self.models.critic, batch, rollouts, kl_coef)
        kl = losses.kl_estimate(batch["old"], batch["reference"])
        return batch, losses.masked_mean(kl, rollouts.mask).double()

    def _judged(self, critic: DemoTrainer, batch: Batch, rollouts: Rollouts, kl_coef: float) -> Batch:
        """Values, and the advantages and returns that follow from them."""
        settings, mask = self.settings, rollouts.mask
        values = self._values.forward(critic.chunks, batch, self._answer_values) * mask
        earned = advantages.token_rewards(rollouts.rewards, batch["old"] - batch["reference"], kl_coef, mask)
        raw, returns = advantages.gae(earned, values, mask, settings.discount, settings.gae_lambda)
        whitened = advantages.whiten(raw, mask, global_sum(advantages.moments(raw, mask)))
        return {"values": values, "returns": returns, "advantages": whitened}

    def _update(self, batch: Batch, kl_coef: float) -> dict[str, tuple[float, float]]:
        """One optimizer step of every trained model: its loss and gradient norm, by role."""
        policy_loss = partial(self._policy_loss, kl_coef if self.models.critic is None else 0.0)
        report = {"actor": _optimized(self.models.actor, self._policy, batch, policy_loss)}
        if self.models.critic is not None:
            report["critic"] = _optimized(self.models.critic, self._values, batch, self._value_loss)
        return report

    def _policy_loss(self, kl_coef: float, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The clipped loss; GRPO's KL penalty is part of it, PPO's was part of the rewards."""
        new = self._log_probs(logits, batch)
        loss = losses.policy_losses(new, batch["old"], batch["advantages"], self.settings.clip_ratio)
        if kl_coef:
            loss = loss + kl_coef * losses.kl_estimate(new, batch["reference"])
        if self.settings.entropy_coef:
            answers = logits[:, self.task.prompt_length - 1 : -1]
            loss = loss - self.settings.entropy_coef * losses.entropy(answers, self.settings.temperature)
        mean = losses.masked_mean(loss, batch["mask"])
        return mean, mean[None]

    def _value_loss(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        new = self._answer_values(output, batch)
        loss = losses.value_losses(new, batch["values"], batch["returns"], self.settings.value_clip)
        mean = losses.masked_mean(loss, batch["mask"])
        return mean, mean[None]

    def _log_probs(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Log-probabilities of the answers' tokens; fp32, (samples, answer)."""
        start = self.task.prompt_length
        return losses.log_probs(logits[:, start - 1 : -1], batch["tokens"][:, start:], self.settings.temperature)

    def _answer_values(self, output: torch.Tensor, _: Batch) -> torch.Tensor:
        """Values before each of the answers' tokens; fp32, (samples, answer)."""
        return output[:, self.task.prompt_length - 1 : -1, 0].float()


def _optimized(trainer: DemoTrainer, passes: Passes, batch: Batch, loss: object) -> tuple[float, float]:
    """One optimizer step; the loss and the norm of the gradients."""
    if trainer.optimizer is None or trainer.scheduler is None:
        raise ValueError("a model without an optimizer cannot be trained")
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    report = passes.backward(trainer.chunks, batch, loss)  # type: ignore[arg-type]
    successful, norm, _ = trainer.optimizer.step()
    if successful:
        trainer.scheduler.step(increment=trainer.training.global_batch_size)
    return report[0].item(), float(norm)
