"""Deterministic batches: a sample depends on the seed, the step and its place in the global batch, on nothing else."""

from __future__ import annotations

import numpy as np
import torch

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def _mixed(state: np.ndarray) -> np.ndarray:
    """One round of splitmix64, elementwise on uint64 (arithmetic wraps)."""
    state = state + _INCREMENT
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(seed: int, step: int, index: int, length: int, vocab_size: int) -> torch.Tensor:
    """The tokens of one sample.

    Args:
        seed: Of the run.
        step: Training step, from 0.
        index: Place in the global batch.
        length: Number of tokens.
        vocab_size: Tokens are below it.

    Returns:
        int64, (length,).
    """
    state = np.array([seed], dtype=np.uint64)
    for number in (step, index):
        state = _mixed(state ^ np.array([number], dtype=np.uint64))
    tokens = _mixed(state + np.arange(length, dtype=np.uint64) * _INCREMENT) % np.uint64(vocab_size)
    return torch.from_numpy(tokens.astype(np.int64))


def micro_batch(seed: int, step: int, indices: range, seq_length: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """The samples ``indices`` of a step as the model takes them.

    Returns:
        ``tokens``, ``labels`` and ``position_ids``, each int64, (samples, seq_length).
    """
    rows = torch.stack([sample(seed, step, index, seq_length + 1, vocab_size) for index in indices])
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "position_ids": torch.arange(seq_length).expand(len(indices), -1).contiguous(),
    }
