"""What a rank does in real DeepSpeed with a module whose parameters have given names, as transformers 4 gives its experts."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from tests.reference import deepspeed_live
from tests.reference.deepspeed_live import Live
from tests.reference.deepspeed_resident import begin

Named = dict[str, tuple[int, ...]]
"""Names and shapes of a module's parameters, in its order."""


class OfNames(nn.Module):
    """Modules in modules, as dotted names ask for them; every element has a gradient of its own."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(named.items()):
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            at.register_parameter(last, nn.Parameter(values))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        losses = [(param.float() * (scale + number)).sin().mean() for number, param in enumerate(self.parameters())]
        return torch.stack(losses).sum()


def build(named: Named, stage: int, *, universal: bool) -> Any:
    """An engine with three param groups, none of which is in the module's order of all, in bf16."""
    begin()
    module = OfNames(named)
    params = dict(module.named_parameters())
    experts = [name for name in params if ".experts." in name]
    vectors = [name for name in params if params[name].dim() < 2]
    others = [name for name in params if name not in {*experts, *vectors}]
    groups = [
        {"params": [params[name] for name in vectors], "weight_decay": 0.0},
        {"params": [params[name] for name in reversed(experts)], "weight_decay": 0.1},
        {"params": [params[name] for name in others], "weight_decay": 0.1},
    ]
    settings = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=settings)[0]


def save_one(named: Named, stage: int, root: str) -> None:
    """A run's first checkpoint, after a step."""
    engine = build(named, stage, universal=False)
    _step(engine)
    engine.save_checkpoint(root)


def load(named: Named, stage: int, root: str, *, universal: bool) -> tuple[Live, list[float]]:
    """What the engine holds of a checkpoint that it loads, and its next losses."""
    engine = build(named, stage, universal=universal)
    path, _ = engine.load_checkpoint(root, load_lr_scheduler_states=False)
    assert path is not None, f"DeepSpeed found nothing in {root}"
    states = {} if not stage else dict(deepspeed_live._zero_states(engine))
    live = Live(deepspeed_live.module_of(engine, stage), states, deepspeed_live.steps(engine))
    return live, [_step(engine) for _ in range(2)]


def _step(engine: Any) -> float:
    loss = engine(torch.tensor(0.5))
    engine.backward(loss)
    engine.step()
    return float(loss)
