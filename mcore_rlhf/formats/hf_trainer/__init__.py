"""Checkpoints of transformers' Trainer, which TRL's trainers are, and of accelerate's ``save_state``: weights in Hugging Face's files, or
an adapter in peft's, with the optimizer in torch's numbers beside them, schedule, counters and random states.

The weights are another format's, which :mod:`..registry` gives: nothing here knows how they lie. ``files`` has the names of both, as two
rows of one table; ``optimizer`` finds out whose the numbers are; ``reader`` opens a folder, ``writer`` describes one, ``like`` reads
what a run of the user's own says of groups and schedule. FSDP's ``pytorch_model_fsdp_0`` is :mod:`..dcp`'s, DeepSpeed's tag
:mod:`..deepspeed`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .files import ACCELERATE, TRANSFORMERS, RunFiles


class HfRunFormat(Format):
    """What the two have in common.

    Args:
        weights: The formats that their weights may have: a whole model's, an adapter's, and an FSDP run's, with its optimizer.
    """

    files: RunFiles
    holds_adapters = True
    takes = (Takes.MODEL_FOLDER, Takes.RNG, Takes.DATA_PARALLEL, Takes.LIKE)
    model_folder = own_sidecar = True

    def __init__(self, weights: Sequence[Format]) -> None:
        self.weights = tuple(weights)

    def _weights_at(self, path: ReadablePath) -> Format:
        """The format of a folder's weights; the first where there are none, which says so."""
        return next((one for one in self.weights if one.detect(path)), self.weights[0])

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has weights, and beside them the optimizer, counters or random states under these names."""
        files = self.files
        marks = (files.optimizer, files.counters or files.rng_name(0, 2))
        return any((path / name).is_file() for name in marks) and any(one.detect(path) for one in self.weights)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_run

        return read_run(path, options, self.files, self._weights_at(path))

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import run_target

        return run_target(source, options, self.files, self.weights)


class HfTrainerFormat(HfRunFormat):
    """A ``checkpoint-N`` of transformers' ``Trainer``, or TRL's: weights, ``optimizer.pt``, ``trainer_state.json``."""

    files = TRANSFORMERS
    name = TRANSFORMERS.format

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the trainer is told to go on from it."""
        return f'trainer.train(resume_from_checkpoint="{path}")'


class HfAccelerateFormat(HfRunFormat):
    """A folder of accelerate's ``save_state``: weights, ``optimizer.bin``, ``random_states_0.pkl``."""

    files = ACCELERATE
    name = ACCELERATE.format

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How accelerate is told to load it."""
        return f'accelerator.load_state("{path}")'
