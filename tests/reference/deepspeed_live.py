"""Whole tensors of a live engine, as DeepSpeed itself gives them: by its own accessors, not by this package's layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Live:
    """An engine at one moment, as one rank sees it.

    Args:
        param: What the module computes with, buffers included, by name.
        states: Masters (``fp32``) and moments by (name, state), whole.
        steps: Adam's steps, each once.
        settings: Every param group's lr, weight decay and betas.
        counters: ``global_steps``, ``global_samples`` and the scheduler's state.
    """

    param: dict[str, torch.Tensor]
    states: dict[tuple[str, str], torch.Tensor]
    steps: list[float]
    settings: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """What one rank saw.

    Args:
        start: The engine when the checkpoint was saved or loaded.
        losses: Of the steps after that, summed over the ranks.
        end: The engine after these steps.
        client: The client state that ``load_checkpoint`` gave back.
    """

    start: Live
    losses: list[float]
    end: Live
    client: dict[str, Any] = field(default_factory=dict)


def look(engine: Any, stage: int) -> Live:
    """Every rank calls; every rank gets all."""
    states = dict(_plain_states(engine) if stage == 0 else _zero_states(engine))
    settings = [{k: group[k] for k in ("lr", "weight_decay", "betas")} for group in engine.optimizer.param_groups]
    counters = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "scheduler": engine.lr_scheduler.state_dict(),
    }
    return Live(module_of(engine, stage), states, steps(engine), settings, counters)


def steps(engine: Any) -> list[float]:
    """Adam's step counters, one of each value."""
    return sorted({float(state["step"]) for state in inner(engine).state.values() if "step" in state})


def inner(engine: Any) -> Any:
    """torch's optimizer inside of DeepSpeed's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def module_of(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers."""
    import deepspeed

    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _plain_states(engine: Any) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Stage 0: an optimizer of torch's, or DeepSpeed's wrapper with a master beside each 16-bit parameter."""
    wrapper, optimizer = engine.optimizer, inner(engine)
    masters: dict[torch.Tensor, torch.Tensor] = {}
    if hasattr(wrapper, "fp32_groups"):
        for halves, wholes in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            masters |= dict(zip(halves, wholes, strict=True))
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            master = masters.get(param, param)
            yield (name, "fp32"), master.detach().clone()
            for state in MOMENTS:
                yield (name, state), optimizer.state[master][state].detach().clone()


def _zero_states(engine: Any) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(
        engine.optimizer, "_hp_optimizer_states_linked"
    ):  # DeepSpeed links once, before what was loaded is there
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            yield (name, "fp32"), safe_get_full_fp32_param(param).detach().clone()
            for state in MOMENTS:
                yield (name, state), safe_get_full_optimizer_state(param, state).detach().clone()
