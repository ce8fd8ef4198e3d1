"""What a rank does in real DeepSpeed outside of the matrix: tensor parallelism, its own experts, odd optimizer files.

Like ``deepspeed_resident``, which it imports, this is imported once, before the ranks are forked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.reference.deepspeed_live import Live, Seen, inner, look
from tests.reference.deepspeed_models import (
    BATCH,
    INNER,
    VOCAB,
    WEIGHT_DECAY,
    WIDTH,
    Setting,
    batch,
    build_engine,
    build_model,
    config,
)
from tests.reference.deepspeed_resident import CLIENT, END, FIRST, SAVED, after_loading_universal, begin, train

EXPERTS = 4
TENSOR_PARALLEL = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
    ],
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.silu(self.up(x)))
        return found


class Experts(nn.Module):
    """Two layers of DeepSpeed's own experts; whose weights are whose is told by their values."""

    def __init__(self, ep: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.moe = nn.ModuleList(
            MoE(WIDTH, Expert(), EXPERTS, ep, capacity_factor=4.0, eval_capacity_factor=4.0, use_rts=False)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, balance = self.embed(ids), torch.zeros(())
        for layer in self.moe:
            y, part, _ = layer(x)
            x, balance = x + y, balance + part
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)) + 0.01 * balance


def tensor_parallel(setting: Setting, root: str, *, load: bool) -> Seen:
    """AutoTP over all ranks, without data parallelism: train and save, or load and train."""
    begin()
    settings = config(setting, universal=False)
    del settings["train_batch_size"]  # DeepSpeed counts all ranks as data-parallel here
    settings["train_micro_batch_size_per_gpu"] = BATCH
    settings["tensor_parallel"] = {"autotp_size": dist.get_world_size(), "partition_config": TENSOR_PARALLEL}
    model = build_model(setting.kind, 9 if load else 1)
    engine = _initialize(model, [{"params": params, "weight_decay": wd} for params, wd in _split(model)], settings)
    return _run(engine, setting, root, load=load, dp=1)


def experts(setting: Setting, ep: int, root: str, *, data_first: bool = False, load: bool = False) -> Seen:
    """DeepSpeed's own experts: train and save, or load a universal checkpoint and train."""
    begin()
    settings = config(setting, universal=load)
    settings["use_data_before_expert_parallelism"] = data_first
    model = Experts(ep, 9 if load else 1)
    groups = [
        {"params": params, "weight_decay": wd, "name": name}
        for (params, wd), name in zip(_split(model), ("matrices", "vectors"), strict=True)
    ]
    engine = _initialize(model, split_params_into_different_moe_groups_for_optimizer(groups), settings)
    return _run(engine, setting, root, load=load, dp=setting.dp)


def elastic(setting: Setting, root: str) -> Seen:
    """``elastic_checkpoint``: files without the settings of param groups."""
    begin()
    settings = config(setting, universal=False)
    settings["zero_optimization"]["elastic_checkpoint"] = True
    model = build_model(setting.kind, 1)
    engine = _initialize(model, [{"params": params, "weight_decay": wd} for params, wd in _split(model)], settings)
    return _run(engine, setting, root, load=False, dp=setting.dp)


def two_rates(setting: Setting, root: str, *, universal: bool = False) -> list[list[float]]:
    """Groups with learning rates of their own and a scheduler that begins at 0: train and save, or load universal files and train.

    Returns:
        The groups' rates at the step that is saved, and after each further one.
    """
    begin()
    settings = config(setting, universal=universal)
    rates = {
        "warmup_min_lr": [0.0, 0.0],
        "warmup_max_lr": [1e-2, 2e-3],
        "warmup_num_steps": 10,
        "warmup_type": "linear",
    }
    settings["scheduler"] = {"type": "WarmupLR", "params": rates}
    model = build_model(setting.kind, 9 if universal else 1)
    groups = [{"params": params, "weight_decay": wd} for params, wd in _split(model)]
    engine = _initialize(model, groups, settings)
    if universal:
        engine.load_checkpoint(root)
    else:
        train(engine, FIRST, SAVED)
        engine.save_checkpoint(root, client_state=CLIENT)
    seen = [[group["lr"] for group in engine.optimizer.param_groups]]
    for step in range(SAVED, END):
        train(engine, step, step + 1)
        seen.append([group["lr"] for group in engine.optimizer.param_groups])
    return seen


def excluded(setting: Setting, root: str, *, universal: bool = False, load: bool = False) -> Seen:
    """Without frozen parameters, which come from where they came from: train and save, or load and train."""
    begin()
    engine = build_engine(setting, 1, universal=universal)
    if load:
        path, _ = engine.load_checkpoint(root, load_module_strict=False)
        assert path is not None, f"DeepSpeed found nothing in {root}"
        if universal:
            after_loading_universal(engine, setting, Path(root))
    else:
        train(engine, FIRST, SAVED)
        engine.save_checkpoint(root, exclude_frozen_parameters=True)
    return Seen(look(engine, setting.stage), train(engine, SAVED, END), Live({}, {}, []))


def _split(model: nn.Module) -> list[tuple[list[nn.Parameter], float]]:
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    return list(zip((matrices, vectors), WEIGHT_DECAY, strict=True))


def _initialize(model: nn.Module, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _run(engine: Any, setting: Setting, root: str, *, load: bool, dp: int) -> Seen:
    client: dict[str, Any] = {}
    if load:
        path, client = engine.load_checkpoint(root)
        assert path is not None, f"DeepSpeed found nothing in {root}"
    else:
        _train(engine, FIRST, SAVED, dp)
        engine.save_checkpoint(root, client_state=CLIENT)
    start = look(engine, setting.stage)
    return Seen(start, _train(engine, SAVED, END, dp), Live({}, {}, []), {key: client.get(key) for key in CLIENT})


def _train(engine: Any, first: int, last: int, dp: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank() % dp, dp))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert inner(engine).state
    return losses
