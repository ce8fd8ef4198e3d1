"""What TRL's trainers hold between two steps and write nowhere: samples generated for several updates, and where among them it is.

A ``GRPOTrainer`` generates once for ``steps_per_generation × num_iterations`` micro-steps. Its own checkpoint, taken in between, has
neither the samples nor the place: resumed, it generates anew, from a policy that has been updated since, and its losses are others
(``_prepare_inputs``: "self._buffered_inputs=None can occur when resuming from a checkpoint"). So both are written beside its files.

Source: TRL 1.16.0, ``trainer/grpo_trainer.py`` (``_step``, ``_buffered_inputs``, ``_prepare_inputs``); RLOO's trainer has the same two.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Incomplete
from mcore_rlhf.storage.beneath import make_folder, write_new
from mcore_rlhf.storage.pt import read_pt

from .run.options import Reporter
from .run.snapshot import dumps

HELD = ("_step", "_buffered_inputs")


def _file(rank: int) -> str:
    return f"mcore_rlhf/rollouts_{rank}.pt"


def save(trainer: Any, folder: Path, rank: int) -> None:
    """Write what a trainer holds; nothing where it is none that does.

    Args:
        trainer: It.
        folder: Its step, being written.
        rank: This process.
    """
    held = {name: getattr(trainer, name) for name in HELD if hasattr(trainer, name)}
    if len(held) == len(HELD):
        path = folder / _file(rank)
        make_folder(path.parent)
        write_new(path, dumps({**held, "world_size": trainer.args.world_size}))


def restore(trainer: Any, folder: Path, rank: int, reporter: Reporter) -> None:
    """Give a trainer back what it held; where the step does not say, or is another world's, it is said.

    Args:
        trainer: It.
        folder: The step that it is about to load.
        rank: This process.
        reporter: Hears of what cannot be restored.

    Raises:
        Incomplete: The file is not what was written.
    """
    if not all(hasattr(trainer, name) for name in HELD):
        return
    path = folder / _file(rank)
    if not path.is_file():
        reporter.say(
            "skip",
            None,
            f"{folder}: has no generated samples of rank {rank}: they are generated anew, from updated weights",
        )
        return
    try:
        pt = read_pt(folder, _file(rank))
        held = torch_values(pt.materialize(pt.tree))
        if not isinstance(held, dict) or not {*HELD, "world_size"} <= held.keys():
            raise Incomplete(f"expected {', '.join(HELD)} and world_size")
    except CheckpointError as error:
        raise Incomplete(
            f"{path}: cannot be read: {error}\nWithout this file, the samples are generated anew."
        ) from error
    if held["world_size"] != trainer.args.world_size:
        reporter.say(
            "skip",
            None,
            f"{folder}: its generated samples are those of {held['world_size']} ranks, and are generated anew",
        )
        return
    for name in HELD:
        setattr(trainer, name, tree_map_only(torch.Tensor, partial(_placed, trainer.args.device), held[name]))


def _placed(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)
