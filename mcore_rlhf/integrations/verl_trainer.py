"""verl's PPO trainers (GRPO and all others on them), whose ``global_step_N`` is there as a whole or not at all.

::

    export MCORE_RLHF_VERL=1                         # in the environment of all of Ray's processes
    python -m verl.trainer.main_ppo …

``import verl`` loads this module, as an entry point of ``verl.plugins``, and then it attaches itself to verl's trainers; :func:`use` does
it where a script makes the trainer itself. verl's workers write as they do, but aside; when all have, the step is looked at, synced, and
published with ``data.pt``; then the tracker is laid. A resume takes the newest step that is intact. Importing this module does not import
verl unless that variable is set.

Source: verl 0.9.1, ``trainer/ppo/ray_trainer.py`` (``RayPPOTrainer``) and ``trainer/ppo/v1/trainer_base.py`` (``PPOTrainer``):
``_save_checkpoint``, ``_load_checkpoint``; ``verl/__init__.py`` (``VERL_USE_EXTERNAL_MODULES``); ``utils/checkpoint/checkpoint_manager.py``
(``remove_previous_save_local_path``: of names that workers remember, and those are of the folder aside, so nothing is deleted by them).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import Problems, Unsupported
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import Seam, kept_with, temporarily

SEAM = Seam("verl", "0.9.1", {"_save_checkpoint": (), "_load_checkpoint": ()})
VARIABLE = "MCORE_RLHF_VERL"
TRACKERS = ("latest_checkpointed_iteration.txt",)
_TRAINERS = (("verl.trainer.ppo.ray_trainer", "RayPPOTrainer"), ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer"))


def use(options: StepOptions | None = None) -> None:
    """Have verl's trainers commit their steps from now on, in this process: the one that drives the run.

    Args:
        options: How they are.

    Raises:
        Unsupported: verl cannot be imported, or its trainers have not what we stand around; what differs is named.
    """
    found, problems = 0, Problems()
    for module, name in _TRAINERS:
        try:
            attach(getattr(import_module(module), name), options)
            found += 1
        except (ImportError, AttributeError) as error:  # releases before 0.9 have the first alone
            problems.add(Unsupported, f"{module}.{name}: {error}")
    if not found:
        problems.raise_if_any()


def attach(trainer_class: Any, options: StepOptions | None = None) -> None:
    """See :func:`use`; of one class, which is changed.

    Args:
        trainer_class: verl's, or one on it.
        options: How steps are committed.

    Raises:
        Unsupported: It has not what we stand around; what differs is named.
    """
    for one in _below(trainer_class):
        _require_ours(one)
    SEAM.attach(trainer_class, options, _around)


def _below(owner: type[object]) -> Iterator[type[object]]:
    for one in owner.__subclasses__():
        yield one
        yield from _below(one)


def _require_ours(trainer_class: type) -> None:
    """See that what a class on verl's trainer does instead ends in what we stand around.

    Raises:
        Unsupported: It does not, as verl 0.9.1's ``experimental/fully_async_policy/fully_async_trainer.py``: nothing would be committed.
    """
    own = {name: method for name, method in vars(trainer_class).items() if name in SEAM.methods}
    past = [name for name, method in own.items() if name not in unwrap(method).__code__.co_names]
    if past:
        raise Unsupported(
            f"{trainer_class.__module__}.{trainer_class.__qualname__}: has {', '.join(past)} of its own, which does not call verl's: its "
            f"steps would not be committed\nTrain it without {VARIABLE}=1; or have it call super().{past[0]}()."
        )


def _around(trainer_class: Any) -> dict[str, Callable[..., Any]]:
    own_save, own_load = trainer_class._save_checkpoint, trainer_class._load_checkpoint

    def save(self: Any) -> None:
        settings = self.config.trainer

        def write(staging: Path) -> None:
            with temporarily(settings, {"default_local_dir": str(staging)}):
                own_save(self)

        _steps_of(self).save(self.global_steps, write, within=True, trackers=TRACKERS)

    def load(self: Any) -> Any:
        settings, steps = self.config.trainer, _steps_of(self)
        which = {"disable": None, "auto": "auto"}.get(settings.resume_mode, settings.resume_from_path)
        found = steps.resume(Path(which) if which not in (None, "auto") else which)
        if found is None:
            return own_load(self)
        steps.track(found, TRACKERS)  # a kill may have come before they were laid
        with temporarily(settings, {"resume_mode": "resume_path", "resume_from_path": str(found)}):
            return own_load(self)

    def subclassed(cls: Any, /, **named: Any) -> None:
        super(trainer_class, cls).__init_subclass__(**named)
        _require_ours(cls)

    trainer_class.__init_subclass__ = classmethod(subclassed)
    return {"_save_checkpoint": save, "_load_checkpoint": load}


def _steps_of(trainer: Any) -> TrainerSteps:
    settings = trainer.config.trainer

    def steps(options: StepOptions | None) -> TrainerSteps:
        _refuse(trainer.config)
        made = TrainerSteps(settings.default_local_dir, "verl", _kept(settings, options))
        atexit.register(made.end)  # verl says nowhere that a run has ended
        return made

    return kept_with(trainer, steps)


def _kept(settings: Any, given: StepOptions | None) -> StepOptions:
    """``max_actor_ckpt_to_keep`` becomes a rule where no other was given, as verl's own deleting sees no step any more."""
    limits = [settings.get(f"max_{role}_ckpt_to_keep") or 0 for role in ("actor", "critic")]
    if settings.get("remove_previous_ckpt_in_save"):
        limits = [1]
    if (given is not None and given.keep is not None) or not max(limits) > 0:
        return given or StepOptions()
    return replace(given or StepOptions(), keep=Retention([KeepLast(max(limits))]))


def _refuse(config: Any) -> None:
    """What would make a step that is not whole in one folder, or take one away.

    Raises:
        Unsupported: It is asked for; all of it is named.
    """
    settings, problems = config.trainer, Problems()
    if settings.get("default_hdfs_dir") is not None:
        text = "trainer.default_hdfs_dir: is given, and workers would send parts of a step there before it is whole"
        problems.add(Unsupported, text, "Leave it at null, and give a mirror, or copy committed steps.")
    if settings.get("del_local_ckpt_after_load"):
        text = "trainer.del_local_ckpt_after_load=True: workers would take files out of a committed step"
        problems.add(Unsupported, text, "Leave it at False: steps go by rules, such as max_actor_ckpt_to_keep.")
    for role in ("actor_rollout_ref.actor", "critic"):
        part: Any = config
        for name in (*role.split("."), "checkpoint"):
            part = part.get(name) if part is not None else None
        if part is not None and part.get("async_save"):
            text = f"{role}.checkpoint.async_save=True: files would come after the step was to be published"
            problems.add(Unsupported, text, "Leave it at False.")
    problems.raise_if_any()


if os.environ.get(VARIABLE) == "1":
    try:
        use()
    except Unsupported as unfit:  # verl passes over the errors of its plugins
        raise SystemExit(f"{VARIABLE}=1, and verl's steps cannot be committed: {unfit}") from unfit

__all__ = ["StepOptions", "attach", "use"]
