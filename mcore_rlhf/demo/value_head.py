"""The value head of a critic, in the place of the output layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class ValueHead(torch.nn.Module):
    """One value per token instead of logits.

    Critics of RLinf and verl have the same: ``output_layer.weight`` of one row, whole on every tensor-parallel rank
    (``LinearForLastLayer``; verl/models/mcore/bridge.py). All ranks compute the same values from the same hidden states,
    so its gradients need no communication.

    Args:
        config: Megatron's configuration of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        torch.nn.init.normal_(self.weight, std=config.init_method_std)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Values of hidden states, and no bias: called as Megatron calls its output layer.

        Args:
            hidden: (sequence, batch, hidden).

        Returns:
            (sequence, batch, 1) and None.
        """
        return torch.nn.functional.linear(hidden, self.weight), None
