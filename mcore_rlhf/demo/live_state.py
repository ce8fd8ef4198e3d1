"""Every live tensor of a rank: parameters, fp32 masters and moments, whole again over the data-parallel ranks."""

from __future__ import annotations

from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_rlhf.demo.megatron_checkpoint import model_keys
from mcore_rlhf.demo.trainer import DemoTrainer
from mcore_rlhf.engines.megatron.importing import unwrapped

StateKey = tuple[str, str]
_MOMENTS = ("exp_avg", "exp_avg_sq")


def coordinates() -> dict[str, int]:
    """This rank's place on every parallel axis, by the name of the axis' rank."""
    return {
        "rank": dist.get_rank(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "ep_rank": parallel_state.get_expert_model_parallel_rank(),
        "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "edp_rank": parallel_state.get_expert_data_parallel_rank(),
    }


def full_state(trainer: DemoTrainer) -> dict[StateKey, torch.Tensor]:
    """Copies of all live tensors of this rank's model, by state and name.

    The states are ``param``, ``buffer`` (persistent ones, such as the router's bias), and with an optimizer
    ``master`` (fp32), ``exp_avg`` and ``exp_avg_sq``. What data-parallel ranks share out among them is gathered, so
    every rank calls. Names are local, as in the checkpoint file; with virtual stages the file's key comes before
    (``model1.decoder.layers.0…``).

    Returns:
        CPU tensors of the shape that the parameter has on this rank.
    """
    parameters = _named_parameters(trainer)
    state = {("param", name): param.detach().clone().cpu() for name, param in parameters.items()}
    state |= {("buffer", name): buffer for name, buffer in _named_buffers(trainer).items()}
    for optimizer in trainer.optimizer.chained_optimizers if trainer.optimizer is not None else []:
        if isinstance(optimizer, DistributedOptimizer):
            state |= _distributed_state(optimizer, parameters)
        else:
            state |= _plain_state(optimizer, parameters)
    return state


def _prefixes(trainer: DemoTrainer) -> list[str]:
    keys = model_keys(trainer)
    return [""] if keys == ["model"] else [f"{key}." for key in keys]


def _named_parameters(trainer: DemoTrainer) -> dict[str, torch.nn.Parameter]:
    chunks = zip(_prefixes(trainer), unwrapped(trainer.chunks), strict=True)
    return {prefix + name: param for prefix, chunk in chunks for name, param in chunk.named_parameters()}


def _named_buffers(trainer: DemoTrainer) -> dict[str, torch.Tensor]:
    """Tensors of the state dictionary that are no parameters."""
    parameters = _named_parameters(trainer)
    return {
        prefix + name: value.detach().clone().cpu()
        for prefix, chunk in zip(_prefixes(trainer), unwrapped(trainer.chunks), strict=True)
        for name, value in chunk.state_dict_for_save_checkpoint().items()
        if isinstance(value, torch.Tensor) and prefix + name not in parameters
    }


def _distributed_state(
    optimizer: DistributedOptimizer, parameters: dict[str, torch.nn.Parameter]
) -> dict[StateKey, torch.Tensor]:
    """Gather the ranges that the data-parallel ranks own, each told by the optimizer itself."""
    if optimizer.is_stub_optimizer:
        return {}
    own = [
        (name, optimizer._get_model_param_range_map(param)["param"].start, _own_tensors(optimizer, param))
        for name, param in parameters.items()
        if param in optimizer.model_param_group_index_map
    ]
    gathered: list[Any] = [None] * optimizer.data_parallel_group.size()
    dist.all_gather_object(gathered, own, group=optimizer.data_parallel_group)
    whole: dict[StateKey, torch.Tensor] = {}
    for name, start, tensors in (part for parts in gathered for part in parts):
        for state, values in tensors.items():
            target = whole.setdefault(
                (state, name),
                torch.full(parameters[name].shape, torch.nan if values.is_floating_point() else 0, dtype=values.dtype),
            )
            target.view(-1)[start : start + values.numel()] = values
    return whole


def _own_tensors(optimizer: DistributedOptimizer, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    tensors = optimizer._get_main_param_and_optimizer_states(param)
    named = {"master": tensors["param"], **{moment: tensors[moment] for moment in _MOMENTS if moment in tensors}}
    return {state: tensor.detach().clone().cpu() for state, tensor in named.items()}


def _plain_state(optimizer: Any, parameters: dict[str, torch.nn.Parameter]) -> dict[StateKey, torch.Tensor]:
    """Masters and moments of an optimizer that holds whole parameters; an fp32 parameter is its own master."""
    if optimizer.is_stub_optimizer:
        return {}
    held = {param for group in optimizer.optimizer.param_groups for param in group["params"]}
    state: dict[StateKey, torch.Tensor] = {}
    for name, param in parameters.items():
        master = getattr(param, "main_param", param)
        if master in held:
            state["master", name] = master.detach().clone().cpu()
            moments = optimizer.optimizer.state[master]
            state |= {(moment, name): moments[moment].clone().cpu() for moment in _MOMENTS if moment in moments}
    return state
