"""Universal checkpoints written with ``torch.save`` alone: as small as DeepSpeed's loaders allow, and with whatever a test wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FIELDS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def write(
    root: Path,
    params: dict[str, dict[str, torch.Tensor]],
    *,
    tag: str = "global_step7",
    step: Any = 7.0,
    groups: list[dict[str, Any]] | None = None,
    keys: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint; returns its folder.

    Args:
        root: Gets ``latest_universal``.
        params: For each parameter its states as files: ``{"fp32": …, "exp_avg": …}``.
        tag: The run's tag.
        step: Each parameter's step, or None for an optimizer that counts none.
        groups: The optimizer's param groups.
        keys: What each file says besides its tensor.
        top: What the model's file says besides what must be there.
    """
    folder = root / f"{tag}_uni"
    for name, states in params.items():
        (folder / "zero" / name).mkdir(parents=True)
        for state, tensor in states.items():
            torch.save({**(keys or {"cat_dim": 0}), "param": tensor}, folder / "zero" / name / f"{state}.pt")
        if step is not None:
            torch.save(torch.tensor(step), folder / "zero" / name / "step.pt")
    listed = groups or [{**FIELDS, "weight_decay": 0.1, "params": [0]}]
    torch.save(
        {"ds_version": "0.19.8", "clip_grad": 1.0, "param_groups": listed}, folder / "zero" / "optimizer_state.pt"
    )
    model = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 7, "global_samples": 56, "skipped_steps": 1}
    torch.save({**model, "lr_scheduler": None, "module": {}, **(top or {})}, folder / "mp_rank_00_model_states.pt")
    (root / "latest_universal").write_text(f"{folder.name}\n")
    return folder


def adam(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The states of a parameter under Adam."""
    made = torch.Generator().manual_seed(seed)
    return {state: torch.randn(shape, generator=made) for state in ("fp32", "exp_avg", "exp_avg_sq")}
