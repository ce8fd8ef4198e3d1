"""Training runs as jobs for :class:`~mcore_rlhf.demo.workers.WorkerPool`: plain values in, plain values out.

This module does not import Megatron until a job runs, so the owner of a pool need not either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Run:
    """A training run, or the continuation of one.

    Args:
        model: What is trained.
        parallel: On which layout.
        training: How.
        steps: The iteration to end at.
        load: Checkpoint root to start from; ``None`` for new weights.
        load_rng: Whether its random states are restored.
        save: Checkpoint root to write to.
        save_at: Iterations after which to save there.
        states_at: Iterations after which all live tensors are reported (0: before the first step).
    """

    model: TinyGPT = field(default_factory=TinyGPT)
    parallel: Parallel = field(default_factory=Parallel)
    training: Training = field(default_factory=Training)
    steps: int = 4
    load: str | None = None
    load_rng: bool = True
    save: str | None = None
    save_at: tuple[int, ...] = ()
    states_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw.

    Args:
        coordinates: Its place on every parallel axis.
        losses: Mean loss over the global batch, by iteration (the first step is 1).
        states: All live tensors, by iteration, then by (state, local name).
        param_groups: The optimizer's groups without their tensors, at the end.
    """

    coordinates: dict[str, int]
    losses: dict[int, float]
    states: dict[int, dict[tuple[str, str], torch.Tensor]] = field(default_factory=dict)
    param_groups: list[dict[str, object]] = field(default_factory=list)


def train(run: Run) -> RankReport:
    """Do a run on this rank; every rank of the layout calls."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint
    from mcore_rlhf.demo.trainer import Trainer

    trainer = Trainer(run.model, run.parallel, run.training)
    if run.load is not None:
        megatron_checkpoint.load(trainer, run.load, rng=run.load_rng)
    losses: dict[int, float] = {}
    states: dict[int, dict[tuple[str, str], torch.Tensor]] = {}
    if trainer.iteration in run.states_at:
        states[trainer.iteration] = live_state.full_state(trainer)
    while trainer.iteration < run.steps:
        loss = trainer.train_step()
        losses[trainer.iteration] = loss
        if run.save is not None and trainer.iteration in run.save_at:
            megatron_checkpoint.save(trainer, run.save)
        if trainer.iteration in run.states_at:
            states[trainer.iteration] = live_state.full_state(trainer)
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return RankReport(live_state.coordinates(), losses, states, plain)
