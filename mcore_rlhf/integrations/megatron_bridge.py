"""Megatron-Bridge's checkpoint manager, whose ``iter_NNNNNNN`` is there as a whole or not at all.

::

    from mcore_rlhf.integrations import megatron_bridge
    megatron_bridge.use(config.checkpoint)           # before pretrain(config, ...) or finetune(config, ...)

A step is what Megatron-Bridge's own manager writes and loads; ours stands around it. Importing this module does not import
Megatron-Bridge, making a manager does.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987, ``src/megatron/bridge/training/checkpointing.py`` (``CheckpointManager``,
``DefaultCheckpointManager``, ``create_checkpoint_manager``), ``training/setup.py`` (``_should_load_checkpoint`` asks for the trackers),
``utils/instantiate_utils.py`` (``register_allowed_target_prefix``: without it, a manager of ours is refused by its name).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rlhf.errors import Problems, Unsupported
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import Seam, temporarily

SEAM = Seam(
    "megatron-bridge",
    "0.7.0",
    {"save": ("ctx", "callback_manager"), "load": ("ctx",), "finalize_async_saves": ("state", "blocking", "terminate")},
)
TRACKERS = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")


def use(checkpoint_config: Any) -> None:
    """Have Megatron-Bridge make our manager. Call it on every rank, with ``config.checkpoint``.

    Raises:
        Unsupported: Megatron-Bridge cannot be imported.
    """
    _imported("megatron.bridge.utils.instantiate_utils").register_allowed_target_prefix("mcore_rlhf")
    checkpoint_config.custom_manager_class = f"{__name__}.{CommittedCheckpointManager.__name__}"


class CommittedCheckpointManager:
    """See Megatron-Bridge's protocol ``CheckpointManager``.

    Args:
        checkpoint_config: Its ``CheckpointConfig``; ``most_recent_k`` becomes a rule on what is kept.

    Raises:
        Unsupported: Something is asked for of which no step could be published as a whole, or the seam is another; all of it is named.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        own = _imported("megatron.bridge.training.checkpointing").DefaultCheckpointManager
        SEAM.check(own)
        _refuse(checkpoint_config)
        self.checkpoint_config = checkpoint_config
        self._own = own(checkpoint_config)
        most = checkpoint_config.most_recent_k
        keep = Retention([KeepLast(most)]) if most > 0 else None
        self._steps: TrainerSteps | None = None
        if checkpoint_config.save:
            self._steps = TrainerSteps(checkpoint_config.save, "megatron-bridge", StepOptions(keep=keep))
            if checkpoint_config.load == checkpoint_config.save:
                self._choose(checkpoint_config)

    def _choose(self, config: Any) -> None:
        """Name the newest intact step as the one to load, and have the trackers there: a kill may have come before they were laid."""
        assert self._steps is not None
        found = self._steps.resume("auto" if config.ckpt_step is None else config.ckpt_step)
        if found is not None:
            self._steps.track(found, TRACKERS)
            config.ckpt_step = self._steps.number_of(found)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """What ``setup`` looks for local checkpoints in."""
        return self._own.checkpointing_context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Have Megatron-Bridge write the step aside, and publish it.

        Raises:
            Unsupported: The data loader's state would lie outside of the step.
            CheckpointError: It failed; nothing is published, and older steps are untouched.
        """
        if ctx.non_persistent_ckpt or self._steps is None:
            return self._own.save(ctx, callback_manager)
        _refuse_loader(ctx)
        step = ctx.state.train_state.step

        def write(staging: Path) -> None:
            with temporarily(ctx.state.cfg.checkpoint, {"save": str(staging), "most_recent_k": -1}):
                self._own.save(ctx, callback_manager)

        self._steps.save(step, write, within=True, trackers=TRACKERS)
        return None

    def load(self, ctx: Any) -> tuple[int, int]:
        """As Megatron-Bridge does; the step was chosen, and verified, when this was made."""
        return self._own.load(ctx)

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Nothing of ours is asynchronous; at the end the root is let go of."""
        self._own.finalize_async_saves(state, blocking, terminate)
        if terminate and self._steps is not None:
            self._steps.close()


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise Unsupported(f"Megatron-Bridge's {name} cannot be imported: {error}") from error


def _refuse(config: Any) -> None:
    problems = Problems()
    for name in ("async_save", "also_save_hf_checkpoint"):
        if getattr(config, name, False):
            advice = "Leave it at False; mcore-rlhf convert STEP OUT --to hf makes a Hugging Face folder of a step."
            problems.add(
                Unsupported, f"checkpoint.{name}=True: files would come after the step was to be published", advice
            )
    problems.raise_if_any()


def _refuse_loader(ctx: Any) -> None:
    """Energon's state lies beside the steps, in the folder that is being written.

    Raises:
        Unsupported: It would be saved, and nobody said where.
    """
    saves = hasattr(getattr(ctx.train_data_iterator, "iterable", None), "save_state")
    if saves and getattr(ctx.state.cfg.dataset, "dataloader_save", None) is None:
        raise Unsupported(
            "dataset.dataloader_save: is not given, and Megatron-Bridge would look for the data loader's state beside the steps\n"
            "Give it a folder: it is saved there by itself, and is no part of the commit."
        )


__all__ = ["CommittedCheckpointManager", "use"]
