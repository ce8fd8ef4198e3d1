"""A whole run on this rank: build, resume, train, save (what of it, and when), and tell."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rlhf.demo import megatron_args
from mcore_rlhf.demo.rl.metrics import MetricsLog, Value
from mcore_rlhf.demo.rl.models import Models, build_models, digest, optimizer_digest
from mcore_rlhf.demo.rl.options import Options, in_own_words
from mcore_rlhf.demo.rl.settings import RlSettings
from mcore_rlhf.demo.rl.task import Reversal
from mcore_rlhf.demo.rl.trainer import RLTrainer, StepResult
from mcore_rlhf.demo.trainer import DemoTrainer
from mcore_rlhf.engines.megatron.engine import MegatronEngine
from mcore_rlhf.errors import CheckpointError, log_of
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL, FixedKL, KLController
from mcore_rlhf.manager.rlhf.pieces import BestMetric, RunningStatistics
from mcore_rlhf.manager.rlhf.prompts import Prompt
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.manager import CheckpointManager, Resumed
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.manager.run.policies import AnyOf, AtEnd, EverySteps
from mcore_rlhf.manager.run.retention import KeepLast, Retention

logger = log_of("mcore_rlhf.demo.train")


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


def _arguments(trainer: DemoTrainer) -> Callable[[], Namespace]:
    def now() -> Namespace:
        started, consumed = trainer.loaded_iteration, trainer.consumed_train_samples
        return megatron_args.build(trainer.model, trainer.parallel, trainer.training, started, consumed)

    return now


def _frozen_arguments(actor: DemoTrainer) -> Namespace:
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


class Run:
    """Everything that a run consists of on this rank; ``torch.distributed`` must be initialized.

    Args:
        options: What to do.

    Attributes:
        models: Actor, reference, critic.
        sampler: Gives the prompts.
        state: The RLHF state.

    Raises:
        UsageError: The options do not fit the number of processes.
    """

    def __init__(self, options: Options) -> None:
        self.options, settings = options, options.settings
        parallel = options.parallel(dist.get_world_size())
        task = Reversal()
        self.models = build_models(
            options.model(task), parallel, options.training(parallel.dp), critic=options.algorithm == "ppo"
        )
        self.trainer = RLTrainer(self.models, settings, task, options.passes)
        self.sampler = PromptSampler.for_dataset(
            task, seed=settings.seed, group_size=settings.group_size, batch_size=settings.prompts_per_step
        )
        self.state = RlhfState(
            algorithm=options.algorithm,
            kl={"actor": kl_controller(settings)},
            best=BestMetric("reward"),
        )

    def train(self, look: Callable[[Run], None] = lambda run: None) -> list[dict[str, Value]]:
        """Resume, and train to the last step or until a signal asks to stop.

        Args:
            look: Is shown the run before the first step, after it has resumed, and after every step before it is saved.

        Returns:
            What was written of every step.
        """
        lines: list[dict[str, Value]] = []
        with ExitStack() as stack:
            manager = open_manager(self.options, self.models, self.sampler, self.state)
            if manager is not None:
                stack.enter_context(manager)
                self._resume(manager)
            log = self._open_log(stack)
            look(self)
            while self.state.iteration < self.options.steps and not (manager is not None and manager.stopping):
                lines.append(self._step())
                if log is not None:
                    log.append(lines[-1])
                look(self)
                self._save(manager, lines[-1])
        return lines

    def _resume(self, manager: CheckpointManager) -> None:
        try:
            resume(manager, self.options, self.models, self.state)
        except CheckpointError as error:
            raise in_own_words(error) from error

    def _open_log(self, stack: ExitStack) -> MetricsLog | None:
        if self.options.metrics is None or dist.get_rank() != 0:
            return None
        return stack.enter_context(MetricsLog(self.options.metrics))

    def _save(self, manager: CheckpointManager | None, line: Mapping[str, Value]) -> None:
        if manager is None or not self.options.save_interval:
            return
        step = self.state.iteration
        measured = {name: value for name, value in line.items() if isinstance(value, float)}
        manager.maybe_save(step, measured, last=step == self.options.steps)
        if manager.stopping:
            logger.info("rank=%d step=%d event=stop: asked to stop; the step is saved", dist.get_rank(), step)

    def _step(self) -> dict[str, Value]:
        prompts = self.sampler.next_batch()
        kl_coef = self.state.kl["actor"].value
        result = self.trainer.step(prompts, kl_coef)
        self.sampler.acknowledge_all(prompts)
        self._note(prompts, result)
        line = self._line(prompts, result, kl_coef)
        logger.info(
            "rank=%d step=%d event=train reward=%.3f loss=%.5f kl=%.4f kl_coef=%.6f grad_norm=%.3f",
            dist.get_rank(),
            self.state.iteration,
            result.reward,
            result.loss,
            result.kl,
            kl_coef,
            result.grad_norm,
        )
        return line

    def _note(self, prompts: Sequence[Prompt], result: StepResult) -> None:
        """Bring the RLHF state up to date; the same on every rank."""
        state, settings = self.state, self.options.settings
        state.iteration += 1
        state.rollout_step += 1
        state.weight_version += 1
        state.optimizer_steps += settings.updates
        state.prompts_consumed += len(prompts)
        state.samples_consumed += settings.samples_per_step
        state.tokens_consumed += result.tokens
        state.epoch = self.sampler.consumed.epoch
        state.kl["actor"].update(result.kl, settings.samples_per_step)
        state.reward.merge(RunningStatistics.of(result.rewards).merged_across(parallel_state.get_data_parallel_group()))
        if state.best is not None:
            state.best.update(result.reward, state.iteration)

    def _line(self, prompts: Sequence[Prompt], result: StepResult, kl_coef: float) -> dict[str, Value]:
        actor = self.models.actor
        line: dict[str, Value] = {
            "step": self.state.iteration,
            "loss": result.loss,
            "reward": result.reward,
            "kl": result.kl,
            "kl_coef": kl_coef,
            "grad_norm": result.grad_norm,
            "lr": learning_rate(self.models),
            "value_loss": result.value_loss,
            "critic_grad_norm": result.critic_grad_norm,
            "prompt_ids": [prompt.prompt_id for prompt in prompts],
        }
        for role, trainer in self.models.trained.items():
            prefix = "" if trainer is actor else f"{role}_"
            line[f"{prefix}digest"] = digest(trainer)
            line[f"{prefix}optimizer_digest"] = optimizer_digest(trainer)
        return line


def kl_controller(settings: RlSettings) -> KLController:
    """The controller of the KL coefficient, at its beginning."""
    if settings.kl_target is None:
        return FixedKL(settings.kl_coef)
    return AdaptiveKL(settings.kl_coef, settings.kl_target, settings.kl_horizon)


def learning_rate(models: Models) -> float:
    """The policy's learning rate, as the next update will use it."""
    optimizer = models.actor.optimizer
    return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else 0.0
