"""Stand-in for Transformer Engine's attention, which alone serves context parallelism and latent attention.

Megatron's own ("local") attention refuses both. This one has no parameters either, so a checkpoint cannot tell them
apart; everything around it (projections, rotary positions, the split of the sequence) is Megatron's.
"""

from __future__ import annotations

import math
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig


class PlainAttention(torch.nn.Module):
    """Causal attention with softmax and dropout, over the whole sequence also where it is split.

    Keys and values are gathered over the context-parallel group; queries stay where they are.

    Args:
        config: Megatron's configuration.
        softmax_scale: Factor of the scores; one over the root of the head size if not given.
        pg_collection: Process groups, of which the context-parallel one is used.
        other: What Megatron passes to any attention (layer number, mask type, channels).
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout
        self.cp_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (sequence, batch, heads, channels) of this rank.
            key: The same with key/value heads.
            value: The same, with channels of its own.
            attention_mask: Not used; the mask is causal.

        Returns:
            (sequence, batch, heads · value channels).
        """
        query_positions, key_positions = self._positions(query.shape[0])
        key, value = (self._gathered(tensor, query.shape[2]) for tensor in (key, value))
        scale = self.softmax_scale or 1 / math.sqrt(query.shape[-1])
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key) * scale
        future = key_positions[None, :] > query_positions[:, None]
        weights = scores.float().masked_fill(future, -math.inf).softmax(dim=-1).to(query.dtype)
        with get_cuda_rng_tracker().fork():
            weights = torch.nn.functional.dropout(weights, self.dropout, self.training)
        return torch.einsum("bhqk,kbhc->qbhc", weights, value).flatten(2)

    def _gathered(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """The whole sequence (in the order of the ranks), one key/value head per query head."""
        if self.cp_group is not None and self.cp_group.size() > 1:
            tensor = gather_from_sequence_parallel_region(tensor, group=self.cp_group)
        return tensor.repeat_interleave(heads // tensor.shape[2], dim=2)

    def _positions(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of this rank's queries and of the gathered keys: rank r holds chunks r and 2·CP-1-r of 2·CP."""
        size, rank = (self.cp_group.size(), self.cp_group.rank()) if self.cp_group is not None else (1, 0)
        chunks = torch.arange(length * size).chunk(2 * size)
        by_rank = [torch.cat([chunks[number], chunks[2 * size - 1 - number]]) for number in range(size)]
        return by_rank[rank], torch.cat(by_rank)
