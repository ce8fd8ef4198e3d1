"""The steps that a torch optimizer counts: for a whole group, or for each parameter; and the states that it holds besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ

from ..optimizers import STEP


def counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """Whether the step is a state of every parameter (torch), and not of a group (apex, Transformer Engine)."""
    return isinstance(inner, torch.optim.AdamW | torch.optim.Adam)


def count_apart(inner: torch.optim.Optimizer) -> None:
    """Give every parameter a step of its own: where neither Transformer Engine nor apex is there, Megatron's load gives one tensor to all
    of them, and each update then counts it up once for each.

    Args:
        inner: The optimizer inside Megatron's distributed one, as Megatron has loaded it.

    Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py`` (``DistributedOptimizer.load_state_dict``).
    """
    for state in inner.state.values():
        if isinstance(state.get(STEP), torch.Tensor):
            state[STEP] = state[STEP].clone()


def load_plain(
    inner: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Sequence[str],
    scalars: Mapping[str, object],
) -> None:
    """Set the param groups, and allocate the states that are to be filled in afterwards; those that exist are kept.

    Args:
        inner: The optimizer.
        groups: What the live groups become, with their live parameters.
        states: Names of the tensor states.
        scalars: Values kept per parameter (``step``), equal for all.
    """
    numbered: dict[int, dict[str, object]] = {}
    packed = []
    for group in groups:
        fields, shared = _steps(inner, group, scalars)
        numbers = range(len(numbered), len(numbered) + len(group["params"]))
        for number, held in zip(numbers, group["params"], strict=True):
            live = inner.state.get(held, {})
            tensors = {name: live[name] if name in live else torch.zeros_like(held.detach()) for name in states}
            numbered[number] = {**{name: _copied(value) for name, value in shared.items()}, **tensors}
        packed.append({**fields, "params": list(numbers)})
    inner.load_state_dict({"state": numbered, "param_groups": packed})


def with_zeros(state: dict[str, Any], inner: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict with Adam's first moments, where it has not made them yet: a reader would miss them.

    Args:
        state: What Megatron's plain optimizer gives.
        inner: The optimizer inside it.
    """
    content = state.get("optimizer", state)
    if not all("betas" in group for group in inner.param_groups):
        return state
    held = [param for group in inner.param_groups for param in group["params"]]
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    steps = {"step": torch.tensor(0.0)} if counts_per_parameter(inner) else {}
    content["state"] = {
        number: {**steps, **{moment: torch.zeros(param.shape) for moment in (EXP_AVG, EXP_AVG_SQ)}}
        for number, param in zip(numbers, held, strict=True)
    }
    return state


def _steps(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], scalars: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, object]]:
    """The group's fields and what its parameters share, with the step where this optimizer counts it."""
    step = scalars.get("step", group.get("step"))
    fields = {key: value for key, value in group.items() if key != "step"}
    shared = {key: value for key, value in scalars.items() if key != "step"}
    if counts_per_parameter(inner):
        shared["step"] = torch.tensor(float(step or 0))  # type: ignore[arg-type]
    elif step is not None and ("step" in group or "betas" in group):
        fields["step"] = int(step)  # type: ignore[call-overload]
    return fields, shared


def _copied(value: object) -> object:
    """Parameters share no tensor: each counts its own steps."""
    return value.clone() if isinstance(value, torch.Tensor) else value
