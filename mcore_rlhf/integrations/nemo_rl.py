"""NeMo-RL's steps, each there as a whole, on the disk and with checksums, and verified before it is resumed from.

::

    from mcore_rlhf.integrations import nemo_rl
    nemo_rl.use()                                    # in the script that calls setup(...), before it does

NeMo-RL writes ``tmp_step_N`` and renames it. What is added: nothing gets its name that is not on the disk, a manifest with checksums lies
in the step, instead of a damaged step the next older one is taken, and events are written. What is kept is for NeMo-RL's own settings to
say, and for rules where some are given. Importing this module does not import NeMo-RL.

Source: NVIDIA-NeMo/RL 7ea279a, ``nemo_rl/utils/checkpoint.py`` (``CheckpointManager``), ``nemo_rl/algorithms/grpo.py`` (``setup`` makes
one and asks it at once for the newest step; ``grpo_train`` has it finalize steps in a thread, and shuts it down);
``_load_checkpoint_history`` reads ``training_info.json`` of every ``step_N`` before one is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager.run import retention
from mcore_rlhf.manager.runs import naming_of
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import OURS, Seam, kept_with

SEAM = Seam(
    "nemo-rl",
    "7ea279a",
    {
        "_rename_checkpoint": ("checkpoint_path",),
        "get_latest_checkpoint_path": (),
        "load_training_info": ("checkpoint_path",),
        "shutdown": (),
    },
)


def use(options: StepOptions | None = None) -> None:
    """Have NeMo-RL's checkpoint managers commit their steps from now on, in this process: the one that drives the run.

    Args:
        options: How they are.

    Raises:
        Unsupported: NeMo-RL cannot be imported, or its class has not what we stand around; what differs is named.
    """
    try:
        own = import_module("nemo_rl.utils.checkpoint").CheckpointManager
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"NeMo-RL's nemo_rl.utils.checkpoint.CheckpointManager: {error}") from error
    attach(own, options)


def attach(manager_class: Any, options: StepOptions | None = None) -> None:
    """See :func:`use`; of the class, which is changed.

    Args:
        manager_class: NeMo-RL's.
        options: How steps are committed.

    Raises:
        Unsupported: It has not what we stand around; what differs is named.
    """
    SEAM.attach(manager_class, options, _around)
    module: Any = import_module(manager_class.__module__)
    own = getattr(module, "shutil", None)
    if own is not None and not isinstance(own, _Removing):
        module.shutil = _Removing(own)


class _Removing:
    """``shutil`` for NeMo-RL's module: a step that it deletes is gone in one rename.

    Killed in the middle of a deletion, its own leaves a step without ``training_info.json``, without which it deletes none any more.
    """

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def rmtree(self, path: Any, *args: Any, **named: Any) -> None:
        """As ``shutil``'s."""
        folder = Path(path).absolute()
        naming = naming_of(folder.parent)
        if naming.step_of(folder.name) is not None and (folder / naming.manifest).is_file():
            retention.delete(folder, naming)
        else:
            self._own.rmtree(path, *args, **named)


def _around(manager_class: Any) -> dict[str, Callable[..., Any]]:
    shut_down = manager_class.shutdown

    def commits(manager: Any) -> _Commits:
        return kept_with(manager, lambda options: _Commits(Path(manager.checkpoint_dir), options))

    def rename(self: Any, checkpoint_path: Any) -> None:
        aside = Path(checkpoint_path)
        found = commits(self).steps
        found.publish(int(aside.name.rpartition("_")[2]), aside, _numbers(self.load_training_info(aside)))

    def latest(self: Any) -> str | None:
        return commits(self).newest()

    def shutdown(self: Any) -> None:
        shut_down(self)
        if (found := vars(self).pop(OURS, None)) is not None:
            found.steps.close()

    return {"_rename_checkpoint": rename, "get_latest_checkpoint_path": latest, "shutdown": shutdown}


class _Commits:
    """The steps of one manager of NeMo-RL's.

    Args:
        root: Its ``checkpoint_dir``.
        options: How.
    """

    def __init__(self, root: Path, options: StepOptions | None) -> None:
        self.steps = TrainerSteps(root, "nemo-rl", options)
        self._has_looked = False

    def newest(self) -> str | None:
        """The step to go on from, verified when it is asked for first: afterwards this run's own are the newest."""
        if self._has_looked:
            there = self.steps.root.candidates(self.steps.reporter)
            return str(there[0].path) if there else None
        found = self.steps.resume("auto")
        self._has_looked = True
        return None if found is None else str(found)


def _numbers(info: Mapping[str, object]) -> dict[str, float]:
    """What NeMo-RL says of a step, for rules that keep the best."""
    return {
        name: float(value) for name, value in info.items() if isinstance(value, int | float) and math.isfinite(value)
    }


__all__ = ["StepOptions", "attach", "use"]
