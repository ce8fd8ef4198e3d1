"""A training run that tells everything about itself at one iteration: the job of every test here.

The module is imported by the tests too, so Megatron is imported only when a worker runs the job.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.trainer import DemoTrainer

LOOK, END = 2, 3

NOT_COMPARED = {
    "rank", "local_rank",  # of the writing process; ours is the first rank that has the shard
    "save", "load",
    # two ways to say the same: we give the number of chunks
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "iteration",  # of the run, like the samples
    "consumed_train_samples",
}  # fmt: skip


@dataclass(frozen=True)
class Session:
    """What to train, from where, and where to save at iteration 2."""

    model: TinyGPT
    parallel: Parallel
    training: Training
    load: str | None = None
    save: str | None = None


@dataclass(frozen=True)
class Observation:
    """What one rank saw: ``states`` by iteration, everything else at iteration 2."""

    coordinates: dict[str, int]
    layers: dict[str, int]
    local_experts: int
    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, dict[tuple[str, str], torch.Tensor]] = field(default_factory=dict)
    evaluation: list[float] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    scaler: list[dict[str, Any]] = field(default_factory=list)
    wrong_arguments: dict[str, tuple[str, str]] = field(default_factory=dict)


def observe(session: Session) -> Observation:
    """Train (or continue) to iteration 3, and look closely at 2 and 3; every rank of the layout calls."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint
    from mcore_rlhf.demo.trainer import DemoTrainer

    trainer = DemoTrainer(session.model, session.parallel, session.training)
    seen = Observation(live_state.coordinates(), layer_numbers(trainer), experts_per_rank(session))
    if session.load is not None:
        megatron_checkpoint.load(trainer, session.load)
        seen.wrong_arguments.update(wrong_arguments(session))
        look(trainer, seen)
    while trainer.iteration < END:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
        if trainer.iteration == LOOK:
            if session.save is not None:
                megatron_checkpoint.save(trainer, session.save)
            look(trainer, seen)
    end(trainer, seen)
    return seen


def end(trainer: DemoTrainer, seen: Observation) -> None:
    """What the run has become, and what the loss of the next batch is: enough to see what the optimizer did, without another step."""
    from mcore_rlhf.demo import live_state

    seen.states[END] = live_state.full_state(trainer)
    seen.losses[END + 1] = trainer.evaluate()


def look(trainer: DemoTrainer, seen: Observation) -> None:
    from mcore_rlhf.demo import live_state

    assert trainer.iteration == LOOK
    seen.states[LOOK] = live_state.full_state(trainer)
    seen.evaluation.append(trainer.evaluate())
    if trainer.optimizer is not None:
        seen.groups.update(group_of_parameters(trainer))
        seen.scheduler.update(trainer.scheduler.state_dict())
        seen.scaler.extend(loss_scalers(trainer))


def layer_numbers(trainer: DemoTrainer) -> dict[str, int]:
    """The global number of every decoder layer, as Megatron's own layers say, by its local name."""
    from mcore_rlhf.demo.megatron_checkpoint import model_keys
    from mcore_rlhf.engines.megatron.importing import unwrapped

    keys = model_keys(trainer)
    prefixes = [""] if keys == ["model"] else [f"{key}." for key in keys]
    return {
        f"{prefix}decoder.layers.{number}": layer.layer_number - 1
        for prefix, chunk in zip(prefixes, unwrapped(trainer.chunks), strict=True)
        for number, layer in enumerate(chunk.decoder.layers)
    }


def experts_per_rank(session: Session) -> int:
    return (session.model.num_experts or 0) // session.parallel.ep


def group_of_parameters(trainer: DemoTrainer) -> dict[str, dict[str, Any]]:
    """The fields of the optimizer group that each parameter of this rank is in."""
    from mcore_rlhf.demo import live_state

    names = {param: name for name, param in live_state._named_parameters(trainer).items()}
    return {
        names[param]: {key: value for key, value in group.items() if key != "params"}
        for optimizer in trainer.optimizer.chained_optimizers
        if not optimizer.is_stub_optimizer
        for param, group in members(optimizer, names)
    }


def members(optimizer: Any, names: dict[Any, str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Pairs of a parameter and its group; the distributed optimizer knows them by number, others hold the master."""
    groups = optimizer.optimizer.param_groups
    if hasattr(optimizer, "model_param_group_index_map"):
        yield from ((param, groups[at]) for param, (at, _) in optimizer.model_param_group_index_map.items())
        return
    masters = {getattr(param, "main_param", param): param for param in names}
    yield from ((masters[held], group) for group in groups for held in group["params"])


def loss_scalers(trainer: DemoTrainer) -> list[dict[str, Any]]:
    scalers = [getattr(optimizer, "grad_scaler", None) for optimizer in trainer.optimizer.chained_optimizers]
    states = [scaler.state_dict() for scaler in scalers if scaler is not None]
    return [
        {key: getattr(value, "tolist", lambda value=value: value)() for key, value in state.items()} for state in states
    ]


def wrong_arguments(session: Session) -> dict[str, tuple[str, str]]:
    """Arguments stored in this rank's file that a run on this layout would not have: (stored, expected)."""
    import torch

    from mcore_rlhf.demo import megatron_args, megatron_checkpoint

    assert session.load is not None
    file = Path(session.load) / f"iter_{LOOK:07d}" / megatron_checkpoint.rank_folder() / "model_optim_rng.pt"
    stored: Namespace = torch.load(file, map_location="cpu", weights_only=False)["args"]
    expected = megatron_args.build(session.model, session.parallel, session.training, 0, 0)
    found, wanted = vars(stored), vars(expected)
    return {
        name: (repr(found.get(name, "missing")), repr(wanted.get(name, "missing")))
        for name in sorted(found.keys() | wanted.keys())
        if name not in NOT_COMPARED and found.get(name, "missing") != wanted.get(name, "missing")
    }
