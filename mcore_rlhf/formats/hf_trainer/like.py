"""``--like``: a checkpoint that the trainer itself wrote, for what depends on the user's run and on nothing else: how many param groups
there are and who is in which, the learning rates from which its schedule starts, its counters, how many ranks it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.crossing.schedule import ticks
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.families.trainer_counters import read_counters
from mcore_rlhf.families.trainer_files import RunFiles
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt

from .optimizer import OptimizerFile

SHARDED = "pytorch_model_fsdp_0"
"""What of an FSDP run's two folders has the model. Source: accelerate 1.15.0, ``utils/fsdp_utils.py`` (``save_fsdp_model``)."""


PICKLED = "pytorch_model.bin"
"""The weights of a run with ``save_safetensors=False``, which then reads no others, until transformers 5, which has no such run.

Source: transformers 4.57.6, ``trainer.py`` (``_load_from_checkpoint``).
"""


def is_sharded(folder: ReadablePath) -> bool:
    """Whether a checkpoint is that of an FSDP run."""
    return (folder / SHARDED).is_dir()


@dataclass(frozen=True, slots=True)
class Like:
    """What such a checkpoint says; empty without one.

    Args:
        groups: Its param groups, with names; empty where it says none.
        scheduler: Its scheduler's state.
        counters: The Trainer's.
        ranks: How many ranks' random states it has; 0 where it has none.
        pickled: Whether its weights are in torch's own file.
    """

    groups: tuple[ParamGroup, ...] = ()
    scheduler: Mapping[str, object] = field(default_factory=dict)
    counters: Mapping[str, object] = field(default_factory=dict)
    ranks: int = 0
    pickled: bool = False

    @classmethod
    def read(
        cls, folder: ReadablePath | None, files: RunFiles, orders: Sequence[list[str]], shapes: Mapping[str, Shape], tied: Mapping[str, str]
    ) -> Like:  # fmt: skip
        """Read one.

        Args:
            folder: The folder that the user gave, or None.
            files: What its files are called.
            orders: The parameters that the run may have given its optimizer, as the module has them: those of the target that are
                trained, as the Trainer does, or all.
            shapes: Of these.
            tied: Second names of parameters: ``{alias: owner}``.

        Raises:
            UsageError: It is no checkpoint of that trainer.
            Unsupported: It is one under DeepSpeed.
            CheckpointError: It is another model's, or damaged.
        """
        if folder is None:
            return cls()
        numbered = not is_sharded(folder) and (folder / files.optimizer).is_file()
        alone = (folder / (files.counters or files.alone)).is_file()  # as after save_only_model
        if not is_sharded(folder) and not numbered and not alone:
            if next(folder.glob("*/*_model_states.pt"), None) is not None:
                raise Unsupported(
                    f"--like: {folder} was saved under DeepSpeed, and --to {files.format} writes the files of a run without it\n"
                    "--to accelerate or --to transformers writes a step as that is, in a run's folder."
                )
            raise UsageError(
                f"--like: {folder} has no {files.optimizer}\nGive a checkpoint that the trainer itself wrote, of any step."
            )
        groups: tuple[ParamGroup, ...] = ()
        if numbered:
            optimizer, notes = OptimizerFile.open(folder, files.optimizer, ()), Report()
            order = next((one for one in orders if optimizer.count <= len(one)), orders[-1])
            optimizer.name(order, shapes, notes, tied)
            groups = optimizer.groups(order, notes)
        scheduler = read_pt(folder, files.scheduler) if (folder / files.scheduler).is_file() else None
        tree = {} if scheduler is None else scheduler.materialize(scheduler.tree)
        counters, ranks = read_counters(folder, files), len(files.rng_files(folder))
        known = tree if isinstance(tree, Mapping) else {}
        return cls(groups, known, counters, ranks, (folder / PICKLED).is_file())

    def epochs_of_schedule(self) -> int:
        """How often the scheduler counts in a step; 0 where nothing says it."""
        taken = [int(float(step)) for group in self.groups if (step := group.fields.get("step")) is not None]  # type: ignore[arg-type]
        return ticks(self.scheduler, max(taken)) if taken and self.scheduler else 0
