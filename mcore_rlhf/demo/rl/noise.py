"""Noise for sampling: what makes an answer random, and the same every time its seed is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
