"""Jobs that damage a checkpoint in a way that it still loads: a comparison that does not notice proves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def change_one_moment(file: str) -> None:
    """Change the last bit of the first element of Adam's first moments in a ``distrib_optim.pt``."""
    import torch

    def change(buffers: dict[Any, Any]) -> None:
        moments = next(iter(buffers.values()))["exp_avg"]
        moments.view(torch.int32)[0] ^= 1

    content = torch.load(file, weights_only=True)
    change(content[0])
    torch.save(content, file)


def change_one_weight(file: str) -> None:
    """Change the last bit of one bf16 weight in a ``model_optim_rng.pt``, and leave its master as it is."""
    import torch

    content = torch.load(file, map_location="cpu", weights_only=False)  # needs Megatron's classes: a worker's job
    content["model"]["decoder.layers.1.mlp.linear_fc2.weight"].view(torch.int16)[3, 5] ^= 1
    torch.save(content, file)


def swap_gate_and_up(file: str) -> None:
    """Swap the two halves of a SwiGLU weight in a ``model_optim_rng.pt``; shapes stay as they are."""
    import torch

    content = torch.load(file, map_location="cpu", weights_only=False)  # needs Megatron's classes: a worker's job
    weight = content["model"]["decoder.layers.0.mlp.linear_fc1.weight"]
    weight.copy_(weight.roll(len(weight) // 2, dims=0).clone())
    torch.save(content, file)


def rank_file(root: Path, name: str, folder: str = "mp_rank_00") -> str:
    return str(root / "iter_0000002" / folder / name)
