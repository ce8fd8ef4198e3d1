"""The small models that real DeepSpeed trains for the matrix, their optimizers, and what DeepSpeed is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

KINDS = ("plain", "tied", "frozen", "actor-critic")
DTYPES = ("fp32", "bf16", "bf16acc32")
VOCAB, LENGTH, BATCH, WIDTH, INNER = 61, 6, 4, 12, 20
WEIGHT_DECAY = (0.1, 0.01)
Batch = tuple[list[list[int]], list[list[int]]]
"""Tokens and labels of a whole step, over all ranks."""


@dataclass(frozen=True)
class Setting:
    """How an engine is set up: the axes of the matrix.

    Args:
        kind: Which model.
        dtype: ``bf16acc32`` is bf16 whose gradients are accumulated in fp32.
        stage: Of ZeRO.
        dp: Ranks.
    """

    kind: str
    dtype: str
    stage: int
    dp: int

    @property
    def exists(self) -> bool:
        """DeepSpeed 0.19.8 refuses fp32 accumulation in stage 0 (``runtime/engine.py``, ``_configure_optimizer``)."""
        return not (self.stage == 0 and self.dtype == "bf16acc32")


@dataclass(frozen=True)
class Tuning:
    """How a model of transformers is trained.

    Args:
        kind: ``llama`` or ``qwen3``.
        config: Fields of its configuration.
        dtype: ``fp32`` or ``bf16``.
        stage, dp: Of ZeRO.
        lr: Learning rate, constant.
        muon: Whether DeepSpeed's own Muon trains the matrices.
        momentum: Of SGD, where that trains.
        frozen: Parts of the names of parameters that are not trained; the optimizer's groups list them all the same.
    """

    kind: str
    config: dict[str, Any]
    dtype: str
    stage: int
    dp: int
    lr: float = 1e-3
    muon: bool = False
    momentum: float = 0.0
    frozen: tuple[str, ...] = ()


class Trunk(nn.Module):
    """Embedding, one layer, norm; odd sizes, and buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x)))
        return self.norm(x + self.shift.sum().to(x.dtype))


class Actor(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = Trunk()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.model(ids)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


class Critic(nn.Module):
    """A value head has a bias of one element, which straddles no ranks but pads most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Trunk()
        self.value_head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.value_head(self.model(ids)).squeeze(-1).float() - ids.float() / VOCAB).pow(2).mean()


class ActorCritic(nn.Module):
    """Both in one engine; the actor is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Actor(tied=True), Critic()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.actor(ids) + 0.1 * self.critic(ids)
        return loss


def trunks(model: nn.Module) -> list[Trunk]:
    return [module for module in model.modules() if isinstance(module, Trunk)]


def build_model(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "actor-critic":
        return ActorCritic()
    model = Actor(tied=kind == "tied")
    if kind == "frozen":
        model.model.embed.requires_grad_(False)
        model.model.up.bias.requires_grad_(False)
    return model


def build_engine(setting: Setting, seed: int, *, universal: bool = False) -> Any:
    """A new engine; its weights are another's, unless the seed is the same."""
    import deepspeed

    model = build_model(setting.kind, seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": WEIGHT_DECAY[0]},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": WEIGHT_DECAY[1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(setting, universal=universal))[0]


def config(setting: Setting, *, universal: bool) -> dict[str, Any]:
    """DeepSpeed's configuration; batches are the same at any number of ranks."""
    zero: dict[str, Any] = {"stage": setting.stage, "sub_group_size": 500}  # several sub-groups, in stage 3
    if setting.stage == 3:  # and functional.linear of the whole process stays as it is
        zero |= {"stage3_param_persistence_threshold": 30, "memory_efficient_linear": False}
    found: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // setting.dp, "steps_per_print": 10**9,
        "gradient_clipping": 1.0, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 3e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
    }  # fmt: skip
    if setting.dtype != "fp32":
        found["bf16"] = {"enabled": True}
    if setting.dtype == "bf16acc32":
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    if universal:
        found["checkpoint"] = {"load_universal": True}
    return found


def batch(step: int, rank: int, dp: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids.chunk(dp)[rank]
