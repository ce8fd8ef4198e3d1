"""A loop of one's own around accelerate, whose ``save_state`` is there as a whole or not at all.

::

    from mcore_rlhf.integrations.accelerate_state import CommittedState
    saved = CommittedState(accelerator, "runs/a")    # after accelerator.prepare(...)
    done = saved.load("auto")                        # steps that are done; 0 where there is nothing to resume from
    saved.save(step)                                 # on every rank

A step is what ``save_state`` writes, with whatever was given to ``register_for_checkpointing`` and what hooks of
``register_save_state_pre_hook`` add, in ``checkpoint_N``; ``load_state`` reads it with or without this package. Under FSDP or DeepSpeed it
is theirs, as accelerate has them write it. Importing this module does not import accelerate.

Source: accelerate 1.15.0, ``accelerator.py`` (``save_state``, ``load_state``: with ``automatic_checkpoint_naming`` they choose the folder).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import Seam

SEAM = Seam("accelerate", "1.15.0", {"save_state": ("output_dir",), "load_state": ("input_dir",)})


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
        SEAM.check(type(accelerator))
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise Unsupported(
                "automatic_checkpoint_naming=True: accelerate would choose the folder, and none could be written aside\n"
                "Leave it at False: steps are called checkpoint_N here as well."
            )
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


__all__ = ["CommittedState", "StepOptions"]
