"""What a rank does in real DeepSpeed with a real model of transformers: load what came from Megatron, look, and train on.

Like ``deepspeed_resident``, which it imports, this is imported once, before the ranks are forked.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
from transformers import PreTrainedModel

from tests.reference import deepspeed_live, deepspeed_muon
from tests.reference.deepspeed_live import Live, Seen
from tests.reference.deepspeed_models import Batch, Tuning
from tests.reference.deepspeed_resident import begin

MODELS = {
    "llama": (transformers.LlamaConfig, transformers.models.llama.modeling_llama.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM),
}


def build(tuning: Tuning, *, universal: bool = False) -> Any:
    """An engine around random weights, with the param groups that Megatron makes: matrices decay, vectors do not."""
    begin()
    torch.manual_seed(9)
    config, model_class = MODELS[tuning.kind]
    model: PreTrainedModel = model_class(config(**tuning.config))
    named = list(model.named_parameters())
    for name, param in named:
        param.requires_grad_(not any(part in name for part in tuning.frozen))
    groups = [
        {"params": [param for _, param in named if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for _, param in named if param.dim() < 2], "weight_decay": 0.0},
    ]
    if tuning.muon:
        params = {"lr": tuning.lr, "momentum": 0.9, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True}
        settings = {**_config(tuning, universal), "optimizer": {"type": "Muon", "params": params}}
        return deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=tuning.lr, betas=(0.9, 0.999), eps=1e-8)
    if tuning.momentum:
        optimizer = torch.optim.SGD(groups, lr=tuning.lr, momentum=tuning.momentum)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=_config(tuning, universal))[0]


def _config(tuning: Tuning, universal: bool) -> dict[str, Any]:
    zero = {"memory_efficient_linear": False} if tuning.stage == 3 else {}
    return {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8 // tuning.dp, "steps_per_print": 10**9,
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "bf16": {"enabled": tuning.dtype == "bf16"},
        "zero_optimization": {"stage": tuning.stage, **zero}, "checkpoint": {"load_universal": universal},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": tuning.lr, "warmup_max_lr": tuning.lr}},
    }  # fmt: skip


def look(engine: Any, tuning: Tuning) -> Live:
    """Every rank calls; every rank gets all, of SGD its weights."""
    if tuning.momentum:
        return Live(deepspeed_live.module_of(engine, tuning.stage), {}, [])
    return (deepspeed_muon if tuning.muon else deepspeed_live).look(engine, tuning.stage)


def load_and_train(
    tuning: Tuning, root: str, batches: list[Batch], *, universal: bool = False, save: str | None = None,
    scheduler: bool = True,
) -> Seen:  # fmt: skip
    """Load a checkpoint; save it again as it is, if wished; train on."""
    engine = build(tuning, universal=universal)
    path, _ = engine.load_checkpoint(root, load_lr_scheduler_states=scheduler)
    assert path is not None, f"DeepSpeed found nothing in {root}"
    start = look(engine, tuning)
    if save is not None:
        engine.save_checkpoint(save)
    losses = _train(engine, batches)
    return Seen(start, losses, look(engine, tuning))


def train_and_save(tuning: Tuning, root: str, before: list[Batch], after: list[Batch]) -> Seen:
    """Train from random weights, save, and train on."""
    engine = build(tuning)
    _train(engine, before)
    engine.save_checkpoint(root)
    start, losses = look(engine, tuning), _train(engine, after)
    return Seen(start, losses, look(engine, tuning))


def _train(engine: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for tokens, labels in batches:
        mine = [torch.tensor(part).chunk(dist.get_world_size())[dist.get_rank()] for part in (tokens, labels)]
        logits = engine(input_ids=mine[0], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[1].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses
