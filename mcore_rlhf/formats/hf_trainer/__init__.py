"""Checkpoints of transformers' Trainer, which TRL's trainers are, and of accelerate's ``save_state``: weights in Hugging Face's files, or
an adapter in peft's, with the optimizer in torch's numbers beside them, schedule, counters and random states.

The weights are another format's, which :mod:`..registry` gives: nothing here knows how they lie. The names of both are rows of a table,
:mod:`mcore_rlhf.families.trainer_files`; ``optimizer`` finds out whose the numbers are; ``reader`` opens a folder, ``writer`` describes
one, ``like`` reads what a run of the user's own says of groups and schedule. FSDP's ``pytorch_model_fsdp_0`` is :mod:`..dcp`'s,
DeepSpeed's tag :mod:`..deepspeed`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_files import FSDP_WHOLE, RunFiles
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .files import OneModel


class HfRunFormat(Format):
    """One of the two: weights, and beside them the optimizer, schedule, counters and random states.

    Args:
        files: What those are called.
        weights: The formats that the weights may have: a whole model's, an adapter's, and FSDP's: with the optimizer, or in one file.
        numbered: Gives the format of the weights of one of several models, by its number; None where there is never more than one.
    """

    holds_adapters = True
    takes = (Takes.MODEL_FOLDER, Takes.RNG, Takes.DATA_PARALLEL, Takes.LIKE)
    model_folder = own_sidecar = True

    def __init__(
        self, files: RunFiles, weights: Sequence[Format], numbered: Callable[[int], Format] | None = None
    ) -> None:
        self.numbered = numbered
        self.name, self.__doc__, self.files, self.weights = files.format, files.says, files, tuple(weights)

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the trainer, or accelerate, is told to go on from it."""
        return self.files.told.format(path=path)

    def _weights_at(self, path: ReadablePath) -> Format:
        """The format of a folder's weights; the first where there are none, which says so."""
        return next((one for one in self.weights if one.detect(path)), self.weights[0])

    def _files_at(self, path: ReadablePath) -> RunFiles:
        return self.files.of_fsdp if (path / FSDP_WHOLE).is_file() else self.files

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has weights, and beside them the optimizer, counters or random states under these names."""
        files = self.files
        marks = (files.optimizer, files.counters or files.rng_name(0, 2))
        return any((path / name).is_file() for name in marks) and any(one.detect(path) for one in self.weights)

    def roles(self, path: ReadablePath) -> Sequence[str]:
        """Of several models that one Accelerator prepared: a critic is what has a value head, and the other one the actor."""
        from .several import roles_of_models

        return () if self.numbered is None else roles_of_models(path, self.numbered)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_run

        several = self.roles(path)
        if self.numbered is None or not several:
            return read_run(path, options, self._files_at(path), self._weights_at(path))
        from .several import read_one

        return read_one(path, options, self.files, several, self.numbered)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import run_target

        run = options.run_of
        one = self._model(run.number, self.files.of_model(run.trained))
        return run_target(source, options, one, self._shown(options.like, source.role, run.number))

    def _model(self, number: int, files: RunFiles) -> OneModel:
        own = self.weights[0] if not number or self.numbered is None else self.numbered(number)
        return OneModel(files, (own, *self.weights[1:]), number)

    def _shown(self, like: str | None, role: str, number: int) -> OneModel:
        """Which model of the step that shows how the run is has a role; the one of the same number where none has it."""
        folder = Path(like or "").expanduser()
        roles = [*self.roles(folder)] if like is not None and folder.is_dir() else []
        found = roles.index(role) if role in roles else number
        if roles and self.numbered is not None:
            from .several import optimizer_files, ways_to_train

            ways = ways_to_train(folder, ReadOptions(), self.files, roles, self.numbered)
            return self._model(found, optimizer_files(self.files, found, ways))
        return self._model(found, self._files_at(folder).of_model(found))
