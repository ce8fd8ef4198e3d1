"""Megatron-LM's legacy checkpoint (``--ckpt-format torch``), as Megatron-LM core_v0.16.1 saves and loads it.

Megatron-LM's own code for this (``megatron/training/checkpointing.py``) is not on PyPI. What is written here is the
same files with the same dictionaries, and every tensor in them comes from a method of megatron-core:
``state_dict``, ``save_parameter_state``, ``load_parameter_state``. Nothing of the rest of this package is used, so
that its converter and manager can be checked against this module.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mcore_rlhf.demo import megatron_args
from mcore_rlhf.demo.trainer import DemoTrainer
from mcore_rlhf.engines.megatron.importing import unwrapped
from mcore_rlhf.families.megatron.folders import TRACKER

_FLOPS_PER_PARAMETER_AND_TOKEN = 6.0


def save(trainer: DemoTrainer, root: str | Path) -> Path:
    """Write a checkpoint of all ranks.

    Args:
        trainer: What to save; every rank calls.
        root: Megatron's ``--save``.

    Returns:
        The folder of the iteration.
    """
    step = Path(root) / f"iter_{trainer.iteration:07d}"
    folder = step / rank_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if trainer.optimizer is not None and trainer.training.optimizer == "distributed":
        # collective: gathers over the data-parallel ranks, of which the first writes
        trainer.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if 0 in (parallel_state.get_data_parallel_rank(), parallel_state.get_expert_data_parallel_rank()):
        torch.save(_state(trainer), folder / "model_optim_rng.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(root) / TRACKER).write_text(str(trainer.iteration))
    dist.barrier()
    return step


def load(trainer: DemoTrainer, root: str | Path, *, rng: bool = True) -> int:
    """Load the newest checkpoint, as Megatron-LM does on the same layout.

    Args:
        trainer: Receives it; every rank calls.
        root: Megatron's ``--load``.
        rng: Whether to restore the RNG states.

    Returns:
        The iteration; 0 for a release.

    Raises:
        AssertionError: If the tensor- or pipeline-parallel size is another (Megatron cannot convert).
    """
    tracker = (Path(root) / TRACKER).read_text().strip()
    release = tracker == "release"
    folder = Path(root) / (tracker if release else f"iter_{int(tracker):07d}") / rank_folder()
    # Megatron's enums are in the file, so it is read with their code; this module trusts what it wrote
    state = torch.load(folder / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    _check(trainer, state["args"])
    _load_model(trainer, state)
    _load_progress(trainer, state, release)
    if not release and trainer.optimizer is not None:
        _load_optimizer(trainer, state, folder)
    elif trainer.optimizer is not None:
        trainer.optimizer.reload_model_params()
    if rng and not release:
        set_rng_state(state["rng_state"][0])
    dist.barrier()
    return trainer.iteration


def rank_folder() -> str:
    """This rank's folder: ``mp_rank_TT[_PPP][_EEE]``."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def rng_state() -> dict[str, Any]:
    """All RNG states of this rank, under Megatron-LM's names."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` gave."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    if not state["rng_tracker_states"]:
        raise KeyError("rng_tracker_states")
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def model_keys(trainer: DemoTrainer) -> list[str]:
    """The key of each model chunk: ``model``, or ``model0``, ``model1``, … with virtual stages."""
    count = len(trainer.chunks)
    return ["model"] if count == 1 else [f"model{number}" for number in range(count)]


def _state(trainer: DemoTrainer) -> dict[str, Any]:
    started, consumed = trainer.loaded_iteration, trainer.consumed_train_samples
    state: dict[str, Any] = {
        "args": megatron_args.build(trainer.model, trainer.parallel, trainer.training, started, consumed),
        "checkpoint_version": 3.0,
        "iteration": trainer.iteration,
    }
    for key, chunk in zip(model_keys(trainer), unwrapped(trainer.chunks), strict=True):
        state[key] = chunk.state_dict_for_save_checkpoint()
    if trainer.optimizer is not None and not trainer.optimizer.is_stub_optimizer:
        state["optimizer"] = trainer.optimizer.state_dict()
    if trainer.scheduler is not None:
        state["opt_param_scheduler"] = trainer.scheduler.state_dict()
    state["rng_state"] = [rng_state()]
    state["num_floating_point_operations_so_far"] = _flops(trainer)
    return state


def _flops(trainer: DemoTrainer) -> float:
    parameters = sum(param.numel() for chunk in trainer.chunks for param in chunk.parameters())
    tokens = trainer.consumed_train_samples * trainer.model.seq_length
    return _FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens


def _check(trainer: DemoTrainer, saved: Any) -> None:
    """Compare what Megatron-LM compares."""
    wanted = megatron_args.build(trainer.model, trainer.parallel, trainer.training, 0, 0)
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "add_position_embedding",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ):
        found, expected = getattr(saved, name), getattr(wanted, name)
        assert found == expected, f"{name} is {found} in the checkpoint and {expected} in this run"


def _load_model(trainer: DemoTrainer, state: dict[str, Any]) -> None:
    for key, chunk in zip(model_keys(trainer), trainer.chunks, strict=True):
        chunk.load_state_dict(state[key], strict=True)


def _load_progress(trainer: DemoTrainer, state: dict[str, Any], release: bool) -> None:
    trainer.iteration = trainer.loaded_iteration = 0 if release else state["iteration"]
    trainer.consumed_train_samples = getattr(state["args"], "consumed_train_samples", 0)


def _load_optimizer(trainer: DemoTrainer, state: dict[str, Any], folder: Path) -> None:
    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.training.optimizer == "distributed":
        trainer.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    trainer.scheduler.load_state_dict(state["opt_param_scheduler"])
