"""Answers sampled from the live policy, token by token, through the same sharded model that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch

from mcore_rlhf.demo.rl.losses import log_probs
from mcore_rlhf.demo.rl.passes import Batch, Passes
from mcore_rlhf.demo.rl.task import PAD, Reversal, answer_length

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
