"""Hugging Face folders written with the safetensors library and json alone, with whatever a test wants in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN, FFN, WORDS, LAYERS = 8, 12, 20, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": WORDS,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False, seed: int = 0) -> Tensors:
    """A whole Llama, random."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}self_attn.{part}_proj.weight": (rows, HIDDEN) for part, rows in (("q", 8), ("k", 4), ("v", 4))
        }
        shapes |= {f"{layer}self_attn.o_proj.weight": (HIDDEN, 8), f"{layer}mlp.down_proj.weight": (HIDDEN, FFN)}
        shapes |= {f"{layer}mlp.{part}_proj.weight": (FFN, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{layer}{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
    if not tied:
        shapes["lm_head.weight"] = (WORDS, HIDDEN)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, *, shards: int = 1) -> Path:
    """Write a folder; ``config`` None for none."""
    folder.mkdir(parents=True)
    names = list(tensors)
    where: dict[str, str] = {}
    for number in range(shards):
        mine = names[number::shards]
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in mine}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(mine, file)
    if shards > 1:
        write_index(folder, where)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_index(folder: Path, where: dict[str, str]) -> None:
    """Write the index of several files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def index_of(folder: Path) -> dict[str, str]:
    """Which tensor the index says is in which file."""
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def tensors_in(folder: Path) -> Tensors:
    """All tensors of a folder, as the safetensors library reads them."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_in(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON file of a folder."""
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found
