"""transformers' ``Trainer``, and every trainer on it (TRL's GRPOTrainer, …), whose ``checkpoint-N`` is there as a whole or not at all.

::

    from mcore_rlhf.integrations.transformers_trainer import attach
    attach(trainer)                                  # before trainer.train(...)
    trainer.train(resume_from_checkpoint="auto")     # the newest intact step, or a new run where there is none

The files in ``checkpoint-N`` are Trainer's own, and its own resume reads them with or without this package. Importing this module imports
neither transformers nor TRL.

Source: transformers 5.23.0, ``trainer.py`` (``train``, ``_save_checkpoint``, which has barriers and collectives between ``_save``,
``_save_optimizer_and_scheduler`` and ``_save_rng_state``; ``_get_output_dir``, ``_push_from_checkpoint``),
``trainer_jit_checkpoint.py`` (``execute_jit_checkpoint``, with ``enable_jit_checkpoint`` after SIGTERM, at any step); TRL 1.16.0,
``trainer/grpo_trainer.py``, which writes into the folder of ``_get_output_dir`` after ``super()._save_checkpoint``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager import trainer_held
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import Seam

SEAM = Seam(
    "transformers",
    "5.23.0",
    {
        "train": ("resume_from_checkpoint", "trial"),
        "_save_checkpoint": ("model", "trial"),
        "_save": ("output_dir", "state_dict"),
        "_save_optimizer_and_scheduler": ("output_dir",),
        "_save_rng_state": ("output_dir",),
        "_get_output_dir": ("trial",),
        "_push_from_checkpoint": ("checkpoint_folder",),
    },
)
_T = TypeVar("_T")
_MARK = "checkpoint-is-incomplete.txt"
"""What Trainer lays where a step goes, on each rank, before it saves after SIGTERM."""
if TYPE_CHECKING:
    _Trainer: Any = object
else:
    _Trainer = object


class Committing(_Trainer):
    """Stands before a trainer's class: what it saves is written aside and published whole; what it loads was verified."""

    step_options: StepOptions = StepOptions()
    _steps: TrainerSteps | None = None
    _aside: Path | None = None
    _unwritten: list[Exception]
    _to_push: str = ""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **named: Any
    ) -> Any:
        """As the trainer's own; ``auto`` is the newest step that is intact or else a new run, and True insists on one.

        Raises:
            Unsupported: What the trainer is asked for cannot be committed as a whole.
            CheckpointError: The step is damaged; or there is none that is intact, and something is there.
        """
        self._refuse(trial)
        with TrainerSteps(self.args.output_dir, "transformers", self._options()) as self._steps:
            which = "auto" if resume_from_checkpoint is True else resume_from_checkpoint or None
            found = self._steps.resume(which, must_exist=resume_from_checkpoint is True)
            if found is not None:
                trainer_held.restore(self, found, self.args.process_index, self._steps.reporter)
            try:
                return super().train(None if found is None else str(found), trial, *args, **named)
            finally:
                self._steps = None

    def _refuse(self, trial: Any) -> None:
        """What would make a step that is not whole in one folder.

        Raises:
            Unsupported: It is so.
        """
        if trial is not None:
            raise Unsupported("a search for hyperparameters: its trials are not one run; train without this manager")
        if self.args.save_on_each_node and self.args.world_size > 1:
            raise Unsupported(
                "save_on_each_node=True: every host would have a part of the step on a disk of its own, and none could publish it\n"
                "Give an output_dir on a file system that all hosts share, and leave save_on_each_node at False."
            )

    def _options(self) -> StepOptions:
        """As given; ``save_total_limit`` becomes a rule where no other was given, as Trainer's own deleting sees no step any more."""
        limit, given = self.args.save_total_limit, self.step_options
        if given.keep is not None or not limit or limit < 1:
            return given
        return replace(given, keep=Retention([KeepLast(limit)]))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._steps is None:  # not from train()
            return super()._save_checkpoint(model, trial)
        step, self._to_push = self.state.global_step, ""
        name = self._steps.root.folder_of(step).name

        def write(staging: Path) -> None:
            self._aside, self._unwritten = staging, []
            try:
                super(Committing, self)._save_checkpoint(model, trial)
                if not self._unwritten:
                    self._name_best(staging / name)
                    trainer_held.save(self, staging / name, self.args.process_index)
            except Exception as error:
                self._unwritten.append(error)
            finally:
                self._aside = None
            if self._unwritten:
                raise self._unwritten[0]

        best = self.state.best_global_step
        path = self._steps.save(
            step, write, within=True, metrics=self._measured(), protect=() if best is None else (best,), mark=_MARK
        )
        if path is None and self.state.best_global_step == step:
            self.state.best_model_checkpoint = None  # it was not saved
        if path is not None and self._to_push:
            super()._push_from_checkpoint(str(path))
        return None

    def _save(self, *args: Any, **named: Any) -> None:
        self._told(super()._save, *args, **named)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._told(super()._save_optimizer_and_scheduler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._told(super()._save_rng_state, output_dir)

    def _told(self, own: Callable[..., None], *args: Any, **named: Any) -> None:
        """Trainer's own writing of some files. What it meets is told of when all ranks have written: they wait in barriers of Trainer's."""
        try:
            own(*args, **named)
        except Exception as error:
            if self._aside is None:
                raise
            self._unwritten.append(error)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._aside is None else str(self._aside)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not before the step has its place: the upload goes on while the folder is renamed."""
        if self._aside is None:
            super()._push_from_checkpoint(checkpoint_folder)
        self._to_push = checkpoint_folder

    def _name_best(self, aside: Path) -> None:
        """The best step is named by where it will be, and not by where it is written."""
        if self.state.best_model_checkpoint == str(aside):
            self.state.best_model_checkpoint = os.path.join(super()._get_output_dir(None), aside.name)
            if self.args.should_save:
                self.state.save_to_json(str(aside / "trainer_state.json"))

    def _measured(self) -> dict[str, float]:
        """What was logged at this step, for rules that keep the best."""
        found: dict[str, float] = {}
        for entry in self.state.log_history:
            if entry.get("step") == self.state.global_step:
                found |= {str(key): float(value) for key, value in entry.items() if isinstance(value, int | float)}
        return found


def with_checkpoints(trainer_class: type[_T], options: StepOptions | None = None) -> type[_T]:
    """A trainer's class whose steps are committed: ``with_checkpoints(GRPOTrainer)(model=…, args=…)``.

    Args:
        trainer_class: transformers' ``Trainer``, or one on it; one whose steps are committed already is given other options, if any.
        options: How they are.

    Raises:
        Unsupported: The class has not what we stand around; what differs is named.
    """
    bases: tuple[type, ...] = (trainer_class,)
    if not issubclass(trainer_class, Committing):
        SEAM.check(trainer_class)
        bases = (Committing, trainer_class)
    elif options is None:
        return trainer_class
    content = {
        "step_options": options or StepOptions(),
        "__module__": trainer_class.__module__,
        "__doc__": trainer_class.__doc__,
    }
    return type(trainer_class.__name__, bases, content)


def attach(trainer: Any, options: StepOptions | None = None) -> None:
    """Have a trainer that there is already commit its steps. Call it on every rank, before ``train``.

    Args:
        trainer: transformers' ``Trainer``, or one on it.
        options: How they are committed.

    Raises:
        Unsupported: Its class has not what we stand around; what differs is named.
    """
    trainer.__class__ = with_checkpoints(type(trainer), options)


__all__ = ["StepOptions", "attach", "with_checkpoints"]
