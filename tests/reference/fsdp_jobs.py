"""What each process of the FSDP tests does: real torch trains, our manager saves and loads, torch says what is in the model."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rlhf import CheckpointManager, FsdpEngine, ManagerOptions, Resumed
from mcore_rlhf.errors import CheckpointError
from tests.helpers.latest import copied_at_the_latest
from tests.reference.fsdp_models import Trainer, Wrapped, build

Whole = dict[str, Any]
_OPTIONS = ManagerOptions(timeout=60, catch_signals=False)


@dataclass
class Seen:
    """What one rank saw.

    Args:
        whole: All tensors of the model and its optimizer, put together by torch itself.
        losses: Of the steps after the save or the load.
        report: Lines of the load's report.
        draws: Random numbers that the rank would draw next.
        others: The training script's own values.
        state: torch's random state.
    """

    whole: Whole
    losses: list[float]
    report: list[str]
    draws: list[float]
    others: dict[str, object]
    state: torch.Tensor | None = None


def save_and_go_on(how: Wrapped, root: str, steps: int = 2) -> Seen:
    """Train, save behind training, copy as late as may be, and go on."""
    trainer = build(how, dist.get_rank())
    engine = _engine(trainer, others=lambda: {"note": {"answer": 42}, "rng": _rng()})
    options = replace(_OPTIONS, lazy_snapshot=True)
    with CheckpointManager(root, {"actor": engine}, options=options) as manager, copied_at_the_latest() as waited:
        if steps:
            trainer.train(0, steps)
        whole, draws, state = whole_of(trainer), _draws(), torch.get_rng_state()
        manager.save(2)
        losses = trainer.train(steps, 2) if steps else []
        manager.before_step()
        assert bool(waited) == (trainer.optimizer is not None)
        manager.wait()
    return Seen(whole, losses, [], draws, {}, state)


def load_and_go_on(how: Wrapped, root: str, optimizer: bool = True, trained: int = 0, goes_on: bool = True) -> Seen:
    """Load into other weights, look at them, and go on."""
    trainer = build(how, dist.get_rank())
    if trained:
        trainer.train(5, trained)
    engine = _engine(trainer)
    with CheckpointManager(root, {"actor": engine}, options=_OPTIONS) as manager:
        found = manager.load(must_exist=True, optimizer=optimizer)
        assert found is not None
        whole, draws = whole_of(trainer), _draws()
        losses = trainer.train(2, 2) if goes_on else []
    return Seen(whole, losses, _lines(found), draws, engine.loaded_others)


def two_roles(how: Wrapped, root: str) -> list[str]:
    """A trained actor and a frozen reference model, which is written once, saved and loaded together; returns what is not as it was."""
    kinds = {"actor": how, "reference": replace(how, seed=how.seed + 1, optimizer="none")}
    trainers = {role: build(kind, dist.get_rank()) for role, kind in kinds.items()}
    trainers["actor"].train(0, 2)
    options = replace(_OPTIONS, link_unchanged=True)
    with CheckpointManager(root, {role: _engine(one) for role, one in trainers.items()}, options=options) as manager:
        manager.save(7)
        trainers["actor"].train(2, 1)
        manager.save(8)
    pieces = sorted(Path(root, "global_step_8").rglob("*.distcp"))
    linked = {path.parts[-3] for path in pieces if path.stat().st_nlink == 2}
    assert linked == {"reference"}, [(str(path), path.stat().st_nlink) for path in pieces]
    again = {role: build(kind.other(), dist.get_rank()) for role, kind in kinds.items()}
    with CheckpointManager(root, {role: _engine(one) for role, one in again.items()}, options=_OPTIONS) as manager:
        assert manager.load(8) is not None
    return [
        f"{role}: {name}"
        for role in kinds
        for name in differences(whole_of(trainers[role]), whole_of(again[role]))
    ]  # fmt: skip


def load_folder(how: Wrapped, folder: str, root: str) -> Seen:
    """Load a single model of any format into other weights; the manager's own root is another folder."""
    trainer = build(how, dist.get_rank())
    with CheckpointManager(root, {"actor": _engine(trainer)}, options=_OPTIONS) as manager:
        found = manager.load(Path(folder))
        assert found is not None
        return Seen(whole_of(trainer), [], _lines(found), [], {})


def refused(how: Wrapped, root: str) -> tuple[str, str, bool]:
    """Try to load: the error's class, its text, and whether everything is as it was."""
    trainer = build(how, dist.get_rank())
    if trainer.optimizer is not None:
        trainer.train(0, 1)
    before = whole_of(trainer)
    try:
        with CheckpointManager(root, {"actor": _engine(trainer)}, options=_OPTIONS) as manager:
            manager.load(2)
    except CheckpointError as error:
        return type(error).__name__, str(error), differences(before, whole_of(trainer)) == []
    return "", "", False


def refused_by_the_schedule(how: Wrapped, root: str) -> tuple[str, str, bool]:
    """The schedule does not take its state back: the optimizer had been given its own by then."""
    trainer = build(how, dist.get_rank())
    trainer.train(0, 1)

    def refuse(state: dict[str, Any]) -> None:
        if state["last_epoch"] == 2:
            raise ValueError("no such curve")

    assert trainer.scheduler is not None
    trainer.scheduler.load_state_dict = refuse  # type: ignore[method-assign]
    before = whole_of(trainer)
    try:
        with CheckpointManager(root, {"actor": _engine(trainer)}, options=_OPTIONS) as manager:
            manager.load(2)
    except CheckpointError as error:
        return type(error).__name__, str(error), differences(before, whole_of(trainer)) == []
    return "", "", False


def unsupported(how: Wrapped) -> str:
    """The error that making an engine raises."""
    trainer = build(how, dist.get_rank())
    try:
        FsdpEngine(trainer.model, trainer.optimizer).live(1)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_rank_stays_away(how: Wrapped, root: str) -> str:
    """The last rank does not save."""
    trainer = build(how, dist.get_rank())
    options = ManagerOptions(timeout=2, catch_signals=False)
    manager = CheckpointManager(root, {"actor": FsdpEngine(trainer.model, trainer.optimizer)}, options=options)
    if dist.get_rank() == dist.get_world_size() - 1:
        return ""
    try:
        manager.save(1, blocking=True)
    except CheckpointError as error:
        return str(error)
    return "saved"


def load_by_torch(how: Wrapped, folder: str, states: list[torch.Tensor]) -> Seen:
    """``torch.distributed.checkpoint.load`` of the saved step into the dictionary that RLinf asks for."""
    import torch.distributed.checkpoint as dcp

    trainer = build(how, dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"fsdp_checkpoint": _AsRlinf(trainer)}, checkpoint_id=folder)
    whole = whole_of(trainer)
    if states:  # random states of every rank are in no DCP folder
        torch.set_rng_state(states[dist.get_rank()])
    return Seen(whole, trainer.train(2, 2), [], [], {})


class _AsRlinf:
    """RLinf's ``Checkpoint``, put together anew from what its code does."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        trainer = self.trainer
        assert trainer.scheduler is not None
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=StateDictOptions())
        schedules = [trainer.scheduler.state_dict()]
        return {
            "model": model, "optimizers": optimizer, "lr_schedulers": schedules, "fsdp_version": "fsdp2", "rng": _rng(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        trainer = self.trainer
        assert trainer.scheduler is not None
        set_state_dict(
            trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizers"]
        )
        trainer.scheduler.load_state_dict(state["lr_schedulers"][0])
        torch.set_rng_state(state["rng"]["cpu"])
        np.random.set_state(state["rng"]["numpy"])
        random.setstate(state["rng"]["random"])


def _rng() -> dict[str, Any]:
    """What RLinf's ``get_rng_state`` gives (``rlinf/utils/utils.py``; read, not run)."""
    return {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}


def whole_of(trainer: Trainer) -> Whole:
    """All tensors of model and optimizer, gathered by torch, and the settings of the param groups."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
        found = {f"model.{name}": value.clone() for name, value in model.items()}
        if trainer.optimizer is not None:
            found |= _states(trainer)
    return found


def _states(trainer: Trainer) -> Whole:
    """States by name; ``get_optimizer_state_dict`` would make states that are not there."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    assert trainer.optimizer is not None
    lengths: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(lengths, len(trainer.optimizer.state))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    found: Whole = {
        f"group.{number}.{key}": value for number, group in enumerate(groups) for key, value in group.items()
    }
    if trainer.scheduler is not None:
        found |= {f"schedule.{key}": value for key, value in trainer.scheduler.state_dict().items()}
    if not any(lengths):
        return found
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(trainer.model, trainer.optimizer, options=options)["state"]
    for name, values in state.items():
        found |= {f"state.{name}.{key}": _copied(value) for key, value in values.items()}
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def differences(one: Whole, other: Whole) -> list[str]:
    """Names of what differs by a single bit, in value, type or shape."""
    return [name for name in sorted(one.keys() | other.keys()) if not _same(one.get(name), other.get(name))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _draws() -> list[float]:
    state = torch.get_rng_state()
    found: list[float] = torch.rand(3).tolist()
    torch.set_rng_state(state)
    return found


def _engine(trainer: Trainer, **options: Any) -> FsdpEngine:
    return FsdpEngine(trainer.model, trainer.optimizer, trainer.scheduler, **options)


def _lines(found: Resumed) -> list[str]:
    return [f"{fate.value}: {text}" for fate, text in found.report.lines]
