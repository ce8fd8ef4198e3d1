"""What a rank does to see real DeepSpeed go wrong: each function shows one fault, with DeepSpeed's own files and tools alone."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from tests.reference import deepspeed_variants
from tests.reference.deepspeed_live import inner, look, module_of
from tests.reference.deepspeed_models import Setting, build_engine, build_model, config
from tests.reference.deepspeed_resident import CLIENT, FIRST, SAVED, begin, train


def universal_by_deepspeed(folder: str, target: str) -> str:
    """Its own tool; the error, if it fails."""
    options = Namespace(
        input_folder=folder, output_folder=target, num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
        strict=True, inject_missing_state=True,
    )  # fmt: skip
    try:
        ds_to_universal(options)
    except Exception as error:  # whatever it is: that is what is looked at
        return f"{type(error).__name__}: {error}"
    return ""


def after_universal(setting: Setting, root: str) -> dict[str, Any]:
    """Load a universal checkpoint as DeepSpeed does, and train three steps."""
    begin()
    engine = build_engine(setting, seed=9, universal=True)
    try:
        engine.load_checkpoint(root)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    live, states = look(engine, setting.stage), list(inner(engine).state.values())
    train(engine, SAVED, SAVED + 3)
    return {
        "param": live.param,
        "weight_decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
        "sub_groups": len(states),
        "step_tensors": len({id(state["step"]) for state in states}),
        "steps": (live.steps, look(engine, setting.stage).steps),
    }


def after_native(setting: Setting, root: str) -> str:
    """Load native files of another layout; the error."""
    begin()
    engine = build_engine(setting, seed=9)
    try:
        path, _ = engine.load_checkpoint(root)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"loaded {path is not None}"


def weights_alone(setting: Setting, root: str) -> dict[str, torch.Tensor] | str:
    """Load a universal checkpoint without an optimizer; what came of the parameters, or the error."""
    begin()
    engine = build_engine(setting, seed=9, universal=True)
    try:
        engine.load_checkpoint(root, load_module_only=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return module_of(engine, setting.stage)


def fp32_by_deepspeed(root: str) -> dict[str, torch.Tensor] | str:
    """Its own consolidation; the error, if it fails."""
    try:
        found = get_fp32_state_dict_from_zero_checkpoint(root)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def tiny_group(stage: int, dp: int, root: str, *, load: bool) -> None:
    """A param group of one element: the parts of all ranks but the first are padding. Save, or load a universal checkpoint."""
    begin()
    setting = Setting("actor-critic", "bf16", stage, dp)
    model = build_model(setting.kind, 1)
    tiny = model.critic.value_head.bias
    rest: list[nn.Parameter] = [param for param in model.parameters() if param is not tiny]
    groups = [{"params": rest}, {"params": [tiny], "weight_decay": 0.0}]
    engine = deepspeed_variants._initialize(model, groups, config(setting, universal=load))
    if load:
        engine.load_checkpoint(root)
        return
    train(engine, FIRST, SAVED)
    engine.save_checkpoint(root, client_state=CLIENT)


def round_robin(setting: Setting, root: str) -> tuple[int, int]:
    """How many parameters DeepSpeed's own accessor gives as they are, rounded; and of how many."""
    begin()
    settings = config(setting, universal=False)
    settings["zero_optimization"]["round_robin_gradients"] = True
    model = build_model(setting.kind, 1)
    groups = [{"params": params, "weight_decay": wd} for params, wd in deepspeed_variants._split(model)]
    engine = deepspeed_variants._initialize(model, groups, settings)
    train(engine, FIRST, SAVED)
    engine.save_checkpoint(root, client_state=CLIENT)
    named = list(engine.module.named_parameters())
    right = [torch.equal(safe_get_full_fp32_param(param).to(param.dtype), param) for _, param in named]
    return sum(right), len(right)
