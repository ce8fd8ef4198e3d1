"""A naive writer of native ZeRO-1/2/3 checkpoints from whole tensors, in the variants that DeepSpeed has. Nothing of mcore_rlhf.

The plain variants were loaded and trained on by DeepSpeed 0.19.8 itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

MASTER = "master"


@dataclass
class Recipe:
    """What to write.

    Args:
        tensors: Masters and optimizer states by (name, state), whole.
        groups: Names per param group, in the optimizer's order.
        stage, dp: ZeRO stage and data-parallel degree.
        dtype: Of the weights.
        frozen: Further weights that are not trained.
        buffers: Further tensors of the module.
        shared: ``{alias: owner}``.
        round_robin: Whether groups are dealt to the ranks.
        align: Every parameter starts at a multiple of so many elements.
        elastic: ``elastic_checkpoint``.
        bf16_optimizer: ``BF16_Optimizer``'s files.
        scalars: What the optimizer keeps once per group.
        client: Client state.
    """

    tensors: dict[tuple[str, str], torch.Tensor]
    groups: list[list[str]]
    stage: int = 2
    dp: int = 2
    dtype: torch.dtype = torch.float32
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    round_robin: bool = False
    align: int = 1
    elastic: bool = False
    bf16_optimizer: bool = False
    scalars: dict[str, Any] = field(default_factory=lambda: {"step": torch.tensor(3.0)})
    client: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The optimizer's states."""
        return list(dict.fromkeys(state for _, state in self.tensors if state != MASTER))


def write_zero(root: Path, recipe: Recipe, tag: str = "global_step3") -> Path:
    """Write a checkpoint below ``root``; returns ``root``."""
    folder = root / tag
    folder.mkdir(parents=True)
    (root / "latest").write_text(tag)
    prefix = "bf16_" if recipe.dtype == torch.bfloat16 else ""
    for rank in range(recipe.dp):
        tree = {"optimizer_state_dict": _sliced(recipe, rank) if recipe.stage == 3 else _flat(recipe, rank)}
        tree |= {"ds_config": {}, "ds_version": "0.19.8"}
        torch.save(tree, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if recipe.stage == 3:
            torch.save(_model(recipe, rank), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if recipe.stage < 3:
        torch.save(_model(recipe, 0), folder / "mp_rank_00_model_states.pt")
    return root


def _order(recipe: Recipe, group: list[str]) -> list[str]:
    dealt = recipe.round_robin and recipe.stage < 3
    return [name for j in range(recipe.dp) for name in group[j :: recipe.dp]] if dealt else list(group)


def _gaps(recipe: Recipe, names: list[str]) -> list[int]:
    gaps, offset = [], 0
    for name in names:
        offset += recipe.tensors[name, MASTER].numel()
        gaps.append(-offset % recipe.align if name != names[-1] else 0)
        offset += gaps[-1]
    return gaps


def _flat(recipe: Recipe, rank: int) -> dict[str, Any]:
    masters, states, paddings, mappings, all_gaps = [], [], [], [], []
    for group in recipe.groups:
        names = _order(recipe, group)
        gaps = _gaps(recipe, names)
        flats = {
            key: torch.cat([
                piece
                for name, gap in zip(names, gaps, strict=True)
                for piece in (recipe.tensors[name, key].reshape(-1), torch.zeros(gap))
            ])
            for key in (MASTER, *recipe.keys)
        }  # fmt: skip
        total = flats[MASTER].numel()
        part = -(-total // (2 * recipe.dp)) * 2
        low, high = rank * part, (rank + 1) * part
        pad = min(part, max(0, high - total))
        cut = {
            key: torch.cat([flat, torch.zeros(part * recipe.dp - total)])[low:high].clone()
            for key, flat in flats.items()
        }
        masters.append(cut[MASTER] if recipe.bf16_optimizer else cut[MASTER][: part - pad].clone())
        lean = part - pad if recipe.elastic else part
        states.append({**({} if recipe.elastic else recipe.scalars), **{k: cut[k][:lean].clone() for k in recipe.keys}})
        paddings.append(pad)
        all_gaps.append(gaps)
        mappings.append(OrderedDict())
    inner: Any = {
        "state": dict(enumerate(states)),
        "param_groups": [{"lr": 0.1 + i, "weight_decay": 0.1 * i, "params": [i]} for i in range(len(states))],
    }
    tree = {"clip_grad": 1.0, "base_optimizer_state": states if recipe.elastic else inner}
    if recipe.elastic:
        tree["base_optimizer_state_step"] = 3
    tree |= {"single_partition_of_fp32_groups": masters, "group_paddings": paddings, "ds_version": "0.19.8"}
    tree |= {"partition_count": [recipe.dp] * len(masters), "param_slice_mappings": mappings}
    if not recipe.bf16_optimizer:
        tree |= {"zero_stage": recipe.stage, "param_alignment_paddings": all_gaps, "overflow": False}
    return tree


def _sliced(recipe: Recipe, rank: int) -> dict[str, Any]:
    masters, states = [], []
    for group in recipe.groups:
        cut = {
            key: torch.cat([_slice(recipe.tensors[n, key], rank, recipe.dp) for n in group])
            for key in (MASTER, *recipe.keys)
        }
        masters.append(cut.pop(MASTER))
        states.append({**recipe.scalars, **cut})
    groups = [{"lr": 0.1 + i, "weight_decay": 0.1 * i, "params": [i]} for i in range(len(states))]
    inner = {"state": dict(enumerate(states)), "param_groups": groups}
    return {"zero_stage": 3, "partition_count": recipe.dp, "optimizer_state_dict": inner, "fp32_flat_groups": masters}


def _slice(tensor: torch.Tensor, rank: int, dp: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    q = -(-flat.numel() // dp)
    return torch.cat([flat, torch.zeros(q * dp - flat.numel(), dtype=flat.dtype)])[rank * q : (rank + 1) * q].clone()


def _model(recipe: Recipe, rank: int) -> dict[str, Any]:
    weights = {n: recipe.tensors[n, MASTER].to(recipe.dtype) for group in recipe.groups for n in group}
    module = OrderedDict({**recipe.buffers, **weights, **recipe.frozen})
    module |= {alias: module[owner] for alias, owner in recipe.shared.items()}
    fragments: dict[str, torch.Tensor] = dict(recipe.frozen)
    if recipe.stage == 3:
        fragments = {name: _slice(value, rank, recipe.dp) for name, value in recipe.frozen.items()}
        module = OrderedDict(
            (n, v if n in recipe.buffers else torch.empty(0, dtype=v.dtype)) for n, v in module.items()
        )
    shapes = [
        OrderedDict((n, recipe.tensors[n, MASTER].shape) for n in _order(recipe, group)) for group in recipe.groups
    ]
    late = recipe.stage >= 2
    zero = {"stage": recipe.stage, "round_robin_gradients": recipe.round_robin, "parameter_alignment": recipe.align > 1}
    return {
        "module": module, "buffer_names": list(recipe.buffers), "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((n, v.shape) for n, v in recipe.frozen.items()) if late else None,
        "shared_params": recipe.shared if rank == 0 else {}, "frozen_param_fragments": OrderedDict(fragments) if late else None,
        "lr_scheduler": {"last_batch_iteration": 2}, "data_sampler": None, "random_ltd": None, "skipped_steps": 0,
        "global_steps": 3, "global_samples": 24, "dp_world_size": recipe.dp, "mp_world_size": 1,
        "ds_config": {"zero_optimization": zero}, "ds_version": "0.19.8", **recipe.client,
    }  # fmt: skip


def whole_tensors(
    shapes: dict[str, tuple[int, ...]], keys: tuple[str, ...], seed: int = 0
) -> dict[tuple[str, str], torch.Tensor]:
    """Masters and states of random values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, key): torch.randn(shape, generator=generator)
        for name, shape in shapes.items() for key in (MASTER, *keys)
    }  # fmt: skip


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a shape."""
    return prod(shape)
