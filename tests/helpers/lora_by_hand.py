"""A tiny model with a LoRA, as torch and plain Python write it: the adapter's folder, its base, and both in one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.universal_by_hand import adam, write

ROWS, COLUMNS, RANK, ALPHA, WORDS = 24, 16, 3, 12, 11
PREFIX = "base_model.model."
LAYERS = (0, 1)
Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"
ADAPTED = tuple(name.format(layer) for layer in LAYERS for name in (Q, DOWN))

Tensors = dict[str, torch.Tensor]


def base_model(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensors:
    """The base, under its own names."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (WORDS, COLUMNS)}
    for name in ADAPTED:
        shapes[f"{name}.weight"] = (ROWS, COLUMNS)
        shapes[f"{name}.bias"] = (ROWS,)
    shapes |= {"model.norm.weight": (COLUMNS,), "lm_head.weight": (WORDS, COLUMNS)}
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def adapter(seed: int = 2, rank: int = RANK, modules: tuple[str, ...] = ADAPTED) -> Tensors:
    """The adapter, under the names of peft's file."""
    made = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name in modules:
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, COLUMNS, generator=made)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(ROWS, rank, generator=made)
    return tensors


CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"], "bias": "none",
    "modules_to_save": None, "base_model_name_or_path": "somewhere/base", "task_type": "CAUSAL_LM", "use_rslora": False,
}  # fmt: skip


def write_adapter(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A folder as peft writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter() if tensors is None else tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def write_base(folder: Path, tensors: Tensors | None = None) -> Path:
    """The base alone: a universal checkpoint without an optimizer's states."""
    (folder / "global_step7_uni" / "zero").mkdir(parents=True)
    return write(
        folder, {}, step=None, top={"module": base_model() if tensors is None else tensors, "param_shapes": []}
    )


def write_both(root: Path, wrapper: str = "", name: str = "default", frozen: Tensors | None = None) -> Path:
    """A checkpoint of a running LoRA: frozen base, trained adapter with Adam's states; names as they are in memory."""
    root.mkdir(parents=True, exist_ok=True)
    base = {wrapper + in_memory(key): tensor for key, tensor in (frozen or base_model()).items()}
    lora = {wrapper + key.replace(".weight", f".{name}.weight"): tensor for key, tensor in adapter().items()}
    params = {
        key: {**adam(*value.shape, seed=number), "fp32": value} for number, (key, value) in enumerate(lora.items())
    }
    shapes = {key: tuple(tensor.shape) for key, tensor in lora.items()}
    frozen_shapes = {key: tuple(tensor.shape) for key, tensor in base.items()}
    top = {"module": {**base, **lora}, "param_shapes": [shapes], "frozen_param_shapes": frozen_shapes}
    return write(root, params, top=top)


def in_memory(name: str) -> str:
    """What a base tensor is called in a model with an adapter."""
    module, _, last = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{last}" if module in ADAPTED else PREFIX + name


def merged_by_torch(base: Tensors, lora: Tensors, scale: float = ALPHA / RANK) -> Tensors:
    """The merged model, in torch's own arithmetic: fp32, rounded once."""
    out = dict(base)
    for name in ADAPTED:
        a, b = (lora[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
        weight = base[f"{name}.weight"]
        out[f"{name}.weight"] = (weight.float() + (b @ a) * scale).to(weight.dtype)
    return out
