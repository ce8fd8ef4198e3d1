"""What of a run is in its checkpoints, and when they are written."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
from mcore_rlhf.demo import megatron_args
from mcore_rlhf.demo.rl.models import Models
from mcore_rlhf.demo.rl.options import Options
from mcore_rlhf.demo.trainer import Trainer
from mcore_rlhf.engines.megatron import MegatronEngine
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions, Resumed
from mcore_rlhf.manager.run.policies import AnyOf, AtEnd, EverySteps
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.manager.state import RlhfState


def engines(models: Models) -> dict[str, MegatronEngine]:
    """The models by role.

    The reference policy is a role of its own, weights only: a step then says by itself against which policy the KL was
    measured, and loads on any layout, for an eighth of what the actor takes (2 of 18 bytes per parameter in bf16).
    Rebuilding it from the seed would do for neither: initial weights depend on the layout.
    """
    named = {
        role: MegatronEngine(trainer.chunks, trainer.optimizer, trainer.scheduler, args=_arguments(trainer))
        for role, trainer in models.trained.items()
    }
    return {**named, "reference": MegatronEngine(models.reference, args=_frozen_arguments(models.actor))}


def _arguments(trainer: Trainer) -> Callable[[], Namespace]:
    def now() -> Namespace:
        started, consumed = trainer.loaded_iteration, trainer.consumed_train_samples
        return megatron_args.build(trainer.model, trainer.parallel, trainer.training, started, consumed)

    return now


def _frozen_arguments(actor: Trainer) -> Namespace:
    frozen = replace(actor.training, optimizer="none")
    return megatron_args.build(actor.model, actor.parallel, frozen, 0, 0)


def open_manager(
    options: Options, models: Models, sampler: PromptSampler, state: RlhfState
) -> CheckpointManager | None:
    """The manager of a run; None where nothing is saved and nothing named is resumed from.

    Raises:
        StorageError: The root cannot be written, or another run saves there.
    """
    if not options.save_interval and options.resume in ("auto", "none"):
        return None
    return CheckpointManager(
        options.root, dict(engines(models)), data=sampler, state=state, options=manager_options(options)
    )


def manager_options(options: Options) -> ManagerOptions:
    """When to save and what to keep, as the command line or the configuration says; the former wins.

    Raises:
        UsageError: They contradict each other.
    """
    if options.config is not None:
        return _configured(options, options.config)
    return ManagerOptions(
        save=AnyOf((EverySteps(options.save_interval), AtEnd())) if options.save_interval else AnyOf(),
        keep=Retention((KeepLast(options.keep_last),)) if options.keep_last else None,
        asynchronous=options.async_save,
        read_only=not options.save_interval,
    )


def _configured(options: Options, path: Path) -> ManagerOptions:
    from mcore_rlhf.manager.config.options import manager_options as of_config
    from mcore_rlhf.manager.config.run import load_run_config

    overrides = [
        f"runner.save_interval={options.save_interval or -1}",
        f"checkpoint.asynchronous={str(options.async_save).lower()}",
        *([f"checkpoint.keep.last={options.keep_last}"] if options.keep_last else []),
    ]
    return of_config(load_run_config(path, overrides), read_only=not options.save_interval)


def resume(manager: CheckpointManager, options: Options, models: Models, state: RlhfState) -> Resumed | None:
    """Restore what the options ask for, and the counters that Megatron's ``args`` are made from."""
    resumed = manager.load(options.resume, must_exist=options.must_exist)
    if resumed is not None:
        for trainer in models.trained.values():
            trainer.iteration = trainer.loaded_iteration = resumed.step
            trainer.consumed_train_samples = state.samples_consumed
    return resumed
