"""A model with a LoRA as peft builds it, without peft: the same modules under the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": {"up", "down"}, "bias": "none",
    "base_model_name_or_path": "models/base",
}  # fmt: skip
WIDTH = 40


class LoraLinear(nn.Module):
    """A linear layer and what is added to it."""

    def __init__(self, base: nn.Linear, rank: int = 3, alpha: float = 6, name: str = "default") -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False)})
        self.scaling, self.name = alpha / rank, name
        self.merged_adapters: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B[self.name](self.lora_A[self.name](x))  # type: ignore[no-any-return]


class Base(nn.Module):
    """Two layers, a norm, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    """What ``PeftModel.base_model`` is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Adapted(nn.Module):
    """What ``get_peft_model`` makes; ``head`` is a further module that is trained."""

    def __init__(self, seed: int = 0, base_seed: int = 0, head: bool = False, rank: int = 3, **config: Any) -> None:
        super().__init__()
        base = Base(base_seed).requires_grad_(False)
        torch.manual_seed(seed)
        base.up, base.down = LoraLinear(base.up, rank), LoraLinear(base.down, rank)  # type: ignore[assignment]
        self.base_model = Wrapper(base)
        self.head = nn.Linear(WIDTH, 1) if head else None
        self.peft_config = {"default": {**CONFIG, "r": rank, **config}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_model.model(x)
        return out if self.head is None else self.head(out)  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses, each a function of the step's number alone."""
    losses = []
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
