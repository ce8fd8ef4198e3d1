"""Rank files of FSDP runs, as verl has them: ``{model,optim,extra_state}_world_size_W_rank_R.pt``, of each kind one for every rank.

``reader`` opens them, ``writer`` describes them; ``files`` says what they are called, ``manner`` what of them depends on the run,
``groups`` what becomes of param groups, ``state`` of random states. DTensors are :mod:`mcore_rlhf.storage.dcp`'s (``rankfile``,
``sharded``); numbers and flat pieces :mod:`mcore_rlhf.families.fsdp`'s.

Source: verl 0.7.0 and 0.9.1, ``verl/utils/checkpoint/fsdp_checkpoint_manager.py`` (``FSDPCheckpointManager``).
"""

from __future__ import annotations

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .files import is_rank_files
from .rank_items import has_items


class FsdpRanksFormat(Format):
    """verl's files of every rank of an FSDP run."""

    name = "fsdp-ranks"
    holds_adapters = True
    takes = (Takes.DATA_PARALLEL, Takes.DTYPE, Takes.RNG, Takes.LIKE)
    own_sidecar = True
    model_beside = "huggingface"

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How verl, or torch_checkpointing, is told to load it."""
        if path.is_dir() and has_items(path):
            items = ", ".join(f'"{item}": …' for item in (("model", "optimizer") if optimizer else ("model",)))
            return f'CheckpointManager(…).load("{path}", into={{{items}}})'
        contents = "" if optimizer else ", with load_contents: [model]"
        return f'FSDPCheckpointManager(…).load_checkpoint("{path}"){contents}; in a run, as global_step_N/actor'

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has the model's files of some ranks."""
        return is_rank_files(path) or (path.is_dir() and has_items(path))

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open the files."""
        from .reader import read_ranks

        return read_ranks(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe new files."""
        from .writer import ranks_target

        return ranks_target(source, options)


FORMAT: Format = FsdpRanksFormat()
