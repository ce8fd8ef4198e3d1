"""This rank's random states: Megatron's tracker, its own list in the model file, and states for another layout.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1,
``tensor_parallel/random.py``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.rng import NAMES, RngMaker, RngState


def tracker_states() -> dict[str, torch.Tensor]:
    """Copies of the tracker's states by name, on the CPU."""
    return {name: _tensor(state) for name, state in get_cuda_rng_tracker().get_states().items()}


def set_tracker_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what :func:`tracker_states` gave."""
    tracker = get_cuda_rng_tracker()
    live = tracker.get_states()
    if any(isinstance(state, torch.Generator) for state in live.values()):  # CUDA graphs hold on to the generators
        for name, generator in live.items():
            generator.set_state(states[name])
        return
    tracker.set_states({name: state.clone() for name, state in states.items()})


def megatron_state() -> RngState:
    """All random states of this rank, as ``rng_state[0]`` of the model file holds them."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tracker_states(),
    }


def derived_state(first: Mapping[str, object], step: int, at: FileRank, dp_rank: int) -> dict[str, object]:
    """States of this rank for a layout that was not saved, under the manager's names.

    Args:
        first: What was saved of rank 0, under the manager's names.
        step: The step that was loaded; goes into the seeds.
        at: This rank.
        dp_rank: Its data-parallel rank in runs whose data-parallel ranks draw differently, otherwise 0.
    """
    saved = {NAMES[name]: value for name, value in first.items() if name in NAMES and value is not None}
    made = RngMaker(saved, step, seed=0).derived(at, dp_rank)
    return {name: made[theirs] for name, theirs in NAMES.items()}


def _tensor(state: object) -> torch.Tensor:
    """Of a tracker that keeps generators instead of their states (CUDA graphs), the state."""
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach().to("cpu", copy=True)
