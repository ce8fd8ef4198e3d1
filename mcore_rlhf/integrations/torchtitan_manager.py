r"""torchtitan's ``CheckpointManager``, and that of RL on it, whose ``step-N`` is there as a whole or not at all.

::

    from mcore_rlhf.integrations.torchtitan_manager import CommittedCheckpointManager
    config.checkpoint = CommittedCheckpointManager.Config(enable=True, interval=50, keep_latest_k=3)

A step is torchtitan's own DCP folder, which its own manager loads with or without this package. Importing this module imports torchtitan.
Without us, a leftover of a killed save disturbs it: its pattern ``step-(\d+)`` is searched for in every name, and would find
``.step-50.partial-…``; the next start with us removes such leftovers.

Source: torchtitan 0.3.0, ``components/checkpointer/base.py`` (``BaseCheckpointManager``: subclasses override ``_save`` and ``_load`` and
declare a ``Config`` of their own), ``components/checkpointer/dcp.py``; ``trainer.py`` (``Trainer.train`` calls ``save`` after every step,
and goes on while ``should_continue_training``; it is ``states["train_state"]``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mcore_rlhf.errors import Problems, Unsupported
from mcore_rlhf.manager.run.manager import Decisions
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.manager.run.retention import KeepEvery, KeepLast, Retention
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import LOG, Seam

try:
    from torchtitan.components.checkpointer.dcp import CheckpointManager
except ImportError as missing:
    raise Unsupported(
        f"torchtitan's components.checkpointer.dcp cannot be imported: {missing}\n"
        "It is there from torchtitan 0.3 on; runs of older ones are read and converted as they are."
    ) from missing

SEAM = Seam(
    "torchtitan",
    "0.3.0",
    {
        "_save": ("curr_step", "last_step"),
        "_load": ("step",),
        "_close": (),
        "_should_save": ("curr_step", "last_step"),
        "_create_checkpoint_id": ("step", "folder"),
        "_find_load_step": ("folder",),
    },
)
SEAM.check(CheckpointManager)
_GOES_ON = "should_continue_training"
"""What torchtitan's loop asks its trainer before every step. A loop without it could not be ended: signals are left to it."""


class CommittedCheckpointManager(CheckpointManager):
    """As torchtitan's own; every step is written aside and published whole, and was verified when it is loaded.

    Args:
        config: Its :class:`Config`.
        named: What torchtitan's trainer gives to any checkpoint manager.

    Raises:
        Unsupported: Something is asked for of which no step could be published as a whole; all of it is named.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's own settings, and these."""

        keep_every: int = 0
        """Steps of which every multiple is kept, besides the newest keep_latest_k; zero for none."""

        on_error: Literal["raise", "continue"] = "raise"
        """What a save that fails is: an error of the training, or something that is said."""

        fsync: bool = True
        """Whether a step is on the disk before it appears."""

        catch_signals: bool = True
        """Whether SIGTERM and SIGUSR1 at any rank save at the next step boundary, and end the training there."""

    def __init__(self, config: Config, **named: Any) -> None:
        self._aside: Path | None = None
        self._steps: TrainerSteps | None = None
        self._wanted = False
        if config.enable:
            _refuse(config)
        super().__init__(_without_purging(config), **named)  # what is kept is not its thread's to say
        if config.enable:
            self._steps = TrainerSteps(self.folder, "torchtitan", _options(config))
            self._loop = self.states.get("train_state")
            catch = config.catch_signals and callable(getattr(self._loop, _GOES_ON, None))
            options = ManagerOptions(on_error=config.on_error, catch_signals=catch, read_only=self.load_only)
            self._decisions = Decisions(self._steps.world, options, self._steps.reporter)
            self._decisions.listen()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._steps is None:
            return False
        self._decide(curr_step, last_step)
        if not self._should_save(curr_step, last_step):
            return False
        began = time.monotonic()
        self._decisions.clock.save_started()

        def write(staging: Path) -> None:
            self._aside = staging
            try:
                super(CommittedCheckpointManager, self)._save(curr_step, last_step)
            finally:
                self._aside = None

        saved = self._steps.save(curr_step, write) is not None
        self._decisions.clock.save_took(time.monotonic() - began)
        return saved

    def _decide(self, step: int, last: bool) -> None:
        """Whether a signal or a deadline wants a save now, on all ranks alike; after a signal the loop ends by itself."""
        decided = self._decisions.at(step, last, is_due=False)
        self._wanted = decided.reason is not None
        if self._wanted:
            LOG.info("step=%d: saved because of: %s", step, decided.reason)
        if decided.stop:
            setattr(self._loop, _GOES_ON, lambda: False)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step) or (self._wanted and not self.load_only)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return super()._create_checkpoint_id(step, folder) if self._aside is None else str(self._aside)

    def _load(self, step: int = -1) -> bool:
        if self._steps is not None and step != -1:
            self._steps.resume(step, must_exist=True)
        return super()._load(step)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is intact; of another folder, as torchtitan finds it."""
        if self._steps is None or folder not in ("", self.folder):
            return super()._find_load_step(folder)
        found = self._steps.resume("auto")
        number = None if found is None else self._steps.root.trainer.step_of(found.name)
        return -1 if number is None else number

    def _close(self) -> None:
        super()._close()
        if self._steps is not None:
            self._decisions.close()
            self._steps.close()


def _without_purging(config: Any) -> Any:
    return replace(config, keep_latest_k=0)


def _options(config: CommittedCheckpointManager.Config) -> StepOptions:
    last = [KeepLast(config.keep_latest_k)] if config.keep_latest_k else []
    every = [KeepEvery(config.keep_every)] if config.keep_every else []
    keep = Retention([*last, *every]) if last else None
    return StepOptions(keep=keep, on_error=config.on_error, fsync=config.fsync)


def _refuse(config: CommittedCheckpointManager.Config) -> None:
    """What would leave the step's folder unfinished when the save returns, or have it elsewhere.

    Raises:
        Unsupported: It is so.
    """
    problems = Problems()
    if config.async_mode != "disabled":
        problems.add(
            Unsupported,
            f"checkpoint.async_mode={config.async_mode}: the files would come after the step was to be published",
            "Leave it at disabled.",
        )
    if config.last_save_in_hf:
        problems.add(
            Unsupported,
            "checkpoint.last_save_in_hf: a Hugging Face folder is no step that a run goes on from",
            "Leave it out, and make one of the last step: mcore-rlhf convert FOLDER OUT --to hf.",
        )
    if "://" in config.folder:
        problems.add(
            Unsupported, f"checkpoint.folder={config.folder}: steps are published by a rename", "Give a folder."
        )
    problems.raise_if_any()


__all__ = ["CommittedCheckpointManager"]
