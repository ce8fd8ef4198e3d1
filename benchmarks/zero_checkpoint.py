"""Makes a native ZeRO-2 checkpoint of a chosen size with plain ``torch.save``: nothing of this project writes it.

Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``), ``runtime/zero/stage_1_and_2.py`` (``state_dict``).
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from .model import CHANNELS, FFN, GROUPS, HEADS, HIDDEN, VOCABULARY, Shape, layers_for

DP, TAG, STEP = 2, "global_step100", 100
Named = dict[str, Shape]


def make_zero(folder: Path, gigabytes: float) -> Path:
    """The root of a checkpoint of about that many 10^9 bytes, of two ranks; that of an earlier call is kept."""
    root = folder / f"zero2-{gigabytes:g}gb"
    if (root / "latest").is_file():
        return root
    shutil.rmtree(root, ignore_errors=True)
    (root / TAG).mkdir(parents=True)
    groups = param_groups(layers_for(gigabytes))
    for rank in range(DP):
        _write_optimizer(root / TAG, groups, rank)
    _write_model(root / TAG, groups)
    (root / "latest").write_text(TAG)
    return root


def param_groups(num_layers: int) -> list[Named]:
    """Matrices and vectors of a Llama, under the names of transformers."""
    shapes = dict(_params(num_layers))
    return [
        {name: shape for name, shape in shapes.items() if (len(shape) > 1) == matrices} for matrices in (True, False)
    ]


def _params(num_layers: int) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            yield f"{prefix}self_attn.{part}_proj.weight", (heads * CHANNELS, HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", (HIDDEN, HEADS * CHANNELS)
        for part in ("gate", "up"):
            yield f"{prefix}mlp.{part}_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{prefix}input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _masters(shapes: Named, number: int) -> torch.Tensor:
    """A whole group's flat master weights."""
    numel = sum(prod(shape) for shape in shapes.values())
    return torch.empty(numel).normal_(0, 0.02, generator=torch.Generator().manual_seed(number))


def _write_model(folder: Path, groups: list[Named]) -> None:
    module: dict[str, torch.Tensor] = {}
    for number, shapes in enumerate(groups):
        flat, start = _masters(shapes, number).bfloat16(), 0
        for name, shape in shapes.items():
            module[name] = flat[start : start + prod(shape)].view(shape)
            start += prod(shape)
    tree = {
        "module": OrderedDict((name, module[name]) for name in sorted(module)), "buffer_names": [], "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items()) for shapes in groups],
        "frozen_param_shapes": OrderedDict(), "frozen_param_fragments": OrderedDict(), "shared_params": {},
        "lr_scheduler": {"last_batch_iteration": STEP - 1}, "data_sampler": None, "random_ltd": None,
        "skipped_steps": 0, "global_steps": STEP, "global_samples": 64 * STEP, "dp_world_size": DP, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": _config(),
        "ds_version": "0.19.8", "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }  # fmt: skip
    torch.save(tree, folder / "mp_rank_00_model_states.pt")


def _config() -> dict[str, object]:
    return {"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def _write_optimizer(folder: Path, groups: list[Named], rank: int) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    states, masters, paddings, settings = {}, [], [], []
    for number, shapes in enumerate(groups):
        numel = sum(prod(shape) for shape in shapes.values())
        part = -(-numel // (2 * DP)) * 2
        masters.append(_masters(shapes, number)[rank * part : (rank + 1) * part].clone())
        paddings.append(part - masters[-1].numel())
        random = torch.Generator().manual_seed(100 * number + rank + 10)
        moments = [torch.empty(part).normal_(0, 1e-3, generator=random) for _ in range(2)]
        states[number] = {"step": torch.tensor(float(STEP)), "exp_avg": moments[0], "exp_avg_sq": moments[1].square_()}
        settings.append(_settings(number))
    state = {
        "loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "clip_grad": 1.0,
        "base_optimizer_state": {"state": states, "param_groups": settings},
        "single_partition_of_fp32_groups": masters, "zero_stage": ZeroStageEnum(2), "group_paddings": paddings,
        "partition_count": [DP] * len(groups), "ds_version": "0.19.8",
        "param_slice_mappings": [_mappings(shapes, rank) for shapes in groups],
    }  # fmt: skip
    tree = {"optimizer_state_dict": state, "ds_config": _config(), "ds_version": "0.19.8"}
    torch.save(tree, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _settings(number: int) -> dict[str, object]:
    decay = 0.1 if number == 0 else 0.0
    return {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "params": [number]}


def _mappings(shapes: Named, rank: int) -> OrderedDict[str, object]:
    """Which part of which parameter a rank has, counted in its partition."""
    from deepspeed.utils.tensor_fragment import fragment_address

    part = -(-sum(prod(shape) for shape in shapes.values()) // (2 * DP)) * 2
    low, start = rank * part, 0
    found: OrderedDict[str, object] = OrderedDict()
    for name, shape in shapes.items():
        first, last = max(start, low), min(start + prod(shape), low + part)
        if first < last:
            found[name] = fragment_address(numel=last - first, start=first - low)
        start += prod(shape)
    return found
