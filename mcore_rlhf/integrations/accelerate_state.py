"""A loop of one's own around accelerate, whose ``save_state`` is there as a whole or not at all.

With steps, retention and a resume from the newest one that is intact::

    from mcore_rlhf.integrations.accelerate_state import CommittedState
    saved = CommittedState(accelerator, "runs/a")    # after accelerator.prepare(...)
    done = saved.load("auto")                        # steps that are done; 0 where there is nothing to resume from
    saved.save(step)                                 # on every rank

Or in a script that stays as it is, whatever it calls its folders::

    from mcore_rlhf.integrations.accelerate_state import attach
    attach(accelerator)
    accelerator.save_state("runs/a/step_10")         # as ever
    accelerator.load_state("runs/a/step_10")         # as ever, and verified before

A folder is what ``save_state`` writes, with whatever was given to ``register_for_checkpointing`` and what hooks of
``register_save_state_pre_hook`` add; ``load_state`` reads it with or without this package. Under FSDP or DeepSpeed it is theirs, as
accelerate has them write it. Importing this module does not import accelerate.

Hooks of ``register_{save,load}_state_pre_hook`` come too late for this: the folder is made, and FSDP's or DeepSpeed's files are in it,
before the first; and ``load_state`` does not get as far as a hook where a kill left the folder aside.

Source: accelerate 1.15.0, ``accelerator.py`` (``save_state``, ``load_state``: with ``automatic_checkpoint_naming`` they choose the folder).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager.tagged import TagOptions, Tags
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import Seam

SEAM = Seam("accelerate", "1.15.0", {"save_state": ("output_dir",), "load_state": ("input_dir",)})
if TYPE_CHECKING:
    _Accelerator: Any = object
else:
    _Accelerator = object


class CommittedState:
    """Saves and loads the state of an ``Accelerator``, step by step. Every rank makes one, and makes the same calls.

    Args:
        accelerator: It, with everything prepared.
        root: The folder of all steps, on a file system that all ranks share.
        options: How they are committed.

    Raises:
        Unsupported: It chooses folders by itself, or has not what we stand around.
    """

    def __init__(self, accelerator: Any, root: str | Path, options: StepOptions | None = None) -> None:
        _refuse(accelerator)
        self._accelerator = accelerator
        self._steps = TrainerSteps(root, "accelerate", options)

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Save everything that is prepared or registered, as ``checkpoint_<step>``.

        Args:
            step: Steps that are done.
            metrics: Numbers to keep with it, for retention of the best.

        Returns:
            Where it lies; None where that failed, and it is to go on.

        Raises:
            Exception: What accelerate, or a hook, raised; nothing is published, and older steps are untouched.
        """

        def write(staging: Path) -> None:
            self._accelerator.save_state(str(staging))

        return self._steps.save(step, write, metrics=metrics)

    def load(self, which: str | int | Path | None = "auto") -> int:
        """Load a step that is intact, and say how many steps are done: zero where there is nothing to resume from.

        Args:
            which: See :meth:`~mcore_rlhf.manager.trainer_steps.TrainerSteps.resume`.

        Raises:
            CheckpointError: It is damaged or does not exist; nothing is intact, and something is there.
        """
        found = self._steps.resume(which)
        if found is None:
            return 0
        self._accelerator.load_state(str(found))
        return self._steps.number_of(found)

    def close(self) -> None:
        """Let go of the root."""
        self._steps.close()


class CommittingAccelerator(_Accelerator):
    """Stands before an accelerator's class: what it saves is written aside and published whole; what it loads was verified."""

    _mcore_rlhf_tags: Tags

    def save_state(self, output_dir: str | os.PathLike[str], *args: Any, **named: Any) -> Path:
        """As accelerate's own; a checkpoint that is there is replaced once the new one is whole. Collective.

        Raises:
            Exception: What accelerate, or a hook, raised; nothing is published, and what was there is untouched.
        """
        path = Path(output_dir)

        def write(staging: Path) -> None:
            super(CommittingAccelerator, self).save_state(str(staging / path.name), *args, **named)

        self._mcore_rlhf_tags.save(path.parent, path.name, write)
        return path

    def load_state(self, input_dir: str | os.PathLike[str], *args: Any, **named: Any) -> Any:
        """As accelerate's own; a folder that was committed is verified first. Collective.

        Raises:
            CheckpointError: It is damaged; all that is wrong is named, with the folders beside it that are whole.
        """
        path = Path(os.path.expanduser(input_dir))
        self._mcore_rlhf_tags.check(path.parent, path.name)
        return super().load_state(str(path), *args, **named)


def attach(accelerator: Any, options: TagOptions | None = None) -> None:
    """Have an accelerator commit what it saves. Call it on every rank.

    Args:
        accelerator: It; one that is attached already is given other options, if any.
        options: How folders are committed.

    Raises:
        Unsupported: It chooses folders by itself, or on every host, or has not what we stand around; nothing was changed.
    """
    attached = isinstance(accelerator, CommittingAccelerator)
    if attached and options is None:
        return
    _refuse(accelerator)
    accelerator._mcore_rlhf_tags = Tags("accelerate", options)
    if attached:
        return
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (CommittingAccelerator, kind), {"__module__": kind.__module__})


def _refuse(accelerator: Any) -> None:
    """What leaves no one folder that could be published.

    Raises:
        Unsupported: It is so.
    """
    SEAM.check(type(accelerator))
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise Unsupported(
            "automatic_checkpoint_naming=True: accelerate would choose the folder, and none could be written aside\n"
            "Leave it at False: CommittedState calls its steps checkpoint_N as well."
        )
    if accelerator.project_configuration.save_on_each_node and accelerator.num_processes > 1:
        raise Unsupported(
            "save_on_each_node=True: every host would have a part of the folder on a disk of its own, and none could publish it\n"
            "Save on a file system that all hosts share, and leave it at False."
        )


__all__ = ["CommittedState", "StepOptions", "TagOptions", "attach"]
