"""Putting back what is no model tensor: param groups, steps, loss scale, counters, schedule.

Sources: deepspeed 0.19.8, ``runtime/engine.py`` (``_load_checkpoint``), ``runtime/zero/stage_1_and_2.py``
(``_load_global_state``), ``runtime/zero/stage3.py`` (``_rigid_load_state_dict``); torch ``optim/optimizer.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rlhf.families.module import is_dynamic, loose_values
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.storage.stored import Stub

from ..stateful import Undo
from .model import Flat, LiveOptimizer, States

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
WRAPPER = ("clip_grad", "overflow", "cur_iter")
"""What DeepSpeed's optimizers keep besides; ``cur_iter`` is stage 0's count of steps for its loss scale."""

_OWN = frozenset(
    {
        *_COUNTERS, "data_sampler", "random_ltd", "ds_version", "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
        "autoep_layers", "ds_zero_partition_groups", "sparse_tensor_module_names", "optimizer",
    }
)  # fmt: skip
"""DeepSpeed's own top-level keys that are in ``TrainingState.other``."""


def client_state_of(other: Mapping[str, object]) -> dict[str, object]:
    """What the training script gave to the save, without DeepSpeed's own keys.

    Args:
        other: The top level of the model file, apart from the layout.
    """
    return {key: value for key, value in other.items() if key not in _OWN}


def load_groups(live: LiveOptimizer, groups: Sequence[ParamGroup], states: States) -> None:
    """Set the param groups, and allocate the states that are filled in afterwards; tensors that exist are kept.

    Args:
        live: The live optimizer.
        groups: What each group becomes.
        states: Names of every flat tensor's states.
    """
    by_held = {id(flat.tensor): flat for flat in live.flats}
    with live.with_members():
        numbered: dict[int, dict[str, object]] = {}
        packed, count = [], 0
        for group, was in zip(groups, live.inner.param_groups, strict=True):
            numbers = list(range(count, count + len(was["params"])))
            count += len(numbers)
            for number, held in zip(numbers, was["params"], strict=True):
                flat = by_held[id(held)]
                state = _state(live, flat, group, states.get(flat.number, ()))
                if state:
                    numbered[number] = state
            fields = {key: copy.deepcopy(value) for key, value in group.fields.items() if key not in group.scalars}
            kept = {key: value for key, value in was.items() if key != "params"}
            packed.append({**kept, **fields, "params": numbers})
        live.inner.load_state_dict({"state": numbered, "param_groups": packed})
    link_states(live)


def _state(live: LiveOptimizer, flat: Flat, group: ParamGroup, states: Sequence[str]) -> dict[str, object]:
    """A flat tensor's state: its own scalars, since ``step`` is counted in place."""
    was = live.state_of(flat)
    held = flat.tensor.detach()
    found: dict[str, object] = {}
    for key in group.scalars:
        value = group.fields[key]
        found[key] = _like(value.clone() if isinstance(value, torch.Tensor) else value, was.get(key))
    for name in states:
        known, numel = was.get(name), flat.numel(name)
        fits = isinstance(known, torch.Tensor) and known.numel() == numel
        found[name] = known if fits else torch.zeros_like(held) if numel == held.numel() else held.new_zeros(numel)
    return found


def _like(value: Any, was: object) -> object:
    """A step as this optimizer counts it: torch has tensors, DeepSpeed's CPU Adam whole numbers."""
    if isinstance(was, torch.Tensor) and not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=was.dtype)
    if isinstance(was, int) and isinstance(value, torch.Tensor):
        return int(value)
    return value


def link_states(live: LiveOptimizer) -> None:
    """Stages 1 and 2 hand out states by parameter, through views that DeepSpeed would leave at the old tensors."""
    wrapper = live.wrapper
    if hasattr(wrapper, "_link_all_hp_params"):
        wrapper._link_all_hp_params()
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        if all(live.state_of(flat) for flat in live.flats):
            wrapper._lazy_init_hp_params_optimizer_state()


def load_rates(scheduler: Any) -> None:
    """The learning rates of the moment, as the schedule says, where the checkpoint does not say them.

    Args:
        scheduler: DeepSpeed's, which computes them from its count, or torch's, which stores them.
    """
    rates = scheduler.get_lr() if hasattr(scheduler, "last_batch_iteration") else scheduler.get_last_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def round_slices(live: LiveOptimizer) -> None:
    """Stage 3: the weights that the model computes with, from their masters, as DeepSpeed's own load does it."""
    wrapper = live.wrapper
    for flat in live.flats:
        if flat.model is not None:
            flat.model.copy_(flat.tensor)
            slices = wrapper.fp16_partitioned_groups[flat.number]
            for param, part in zip(slices, wrapper.unflatten(flat.model, slices), strict=True):
                param.data = part.data


def forget_states(live: LiveOptimizer) -> None:
    """Weights alone were loaded: masters are copied from them, and states begin at zero."""
    for flat in live.flats:
        for value in live.state_of(flat).values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    refresh = getattr(live.wrapper, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()


def load_wrapper(live: LiveOptimizer, scaler: Stub | None, values: Mapping[str, object]) -> None:
    """The loss scale and what else DeepSpeed's optimizer keeps.

    Args:
        live: The live optimizer.
        scaler: The stored loss scaler, or None.
        values: See :data:`WRAPPER`.
    """
    wrapper = live.wrapper
    loose = getattr(wrapper, "loss_scale_config", None)
    for key, value in values.items():
        for owner in (wrapper, loose):
            if hasattr(owner, key):
                setattr(owner, key, value)
    own = getattr(wrapper, "loss_scaler", None)
    if scaler is None or not fits_scaler(live, scaler):
        return
    if own is not None and hasattr(own, "cur_scale"):
        for key in vars(own):
            if key != "dtype" and hasattr(scaler, key):
                setattr(own, key, getattr(scaler, key))
    for key, value in loose_values(scaler).items() if loose is not None else ():
        if key in (scaler.stub_state or {}):
            setattr(loose, key, value)


def keep_wrapper(live: LiveOptimizer, undo: Undo) -> None:
    """Say how all that :func:`load_wrapper` sets is put back."""
    undo.attributes(live.wrapper, WRAPPER)
    for name in ("loss_scaler", "loss_scale_config"):
        owner = getattr(live.wrapper, name, None)
        undo.attributes(owner, getattr(owner, "__dict__", ()))


def fits_scaler(live: LiveOptimizer, scaler: object) -> bool:
    """Whether the stored loss scaler adapts itself as the live one does, or does not, as it."""
    loose = getattr(live.wrapper, "loss_scale_config", None)
    default = getattr(loose, "dynamic_loss_scale", is_dynamic(scaler))
    dynamic = getattr(getattr(live.wrapper, "loss_scaler", None), "dynamic", default)
    return bool(dynamic) == is_dynamic(scaler)


def load_counters(engine: Any, iteration: int, other: Mapping[str, object], undo: Undo) -> None:
    """DeepSpeed's own counters, and the two samplers that it keeps."""
    undo.attributes(engine, _COUNTERS)
    engine.global_steps = iteration
    samples = other.get("global_samples")
    engine.global_samples = samples if isinstance(samples, int) else iteration * engine.train_batch_size()
    skipped = other.get("skipped_steps")
    engine.skipped_steps = skipped if isinstance(skipped, int) else 0
    random_ltd: Any = other.get("random_ltd")
    if random_ltd is not None and engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
        undo.handed(engine.random_ltd_scheduler, random_ltd)
    sampler: Any = other.get("data_sampler")
    if sampler is not None and engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        undo.handed(engine.training_dataloader.data_sampler, sampler)
