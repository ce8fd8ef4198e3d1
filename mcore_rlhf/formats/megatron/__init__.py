"""Legacy Megatron checkpoints: ``iter_XXXXXXX/mp_rank_…/{model_optim_rng.pt,distrib_optim.pt}``.

``reader`` opens one (``shards`` → ``optimizer`` → ``parameters``), ``writer`` describes one. Both ask :mod:`mcore_rlhf.families.megatron`
for what Megatron decides by itself: folders, arguments, buffers, groups, the layout of a new run.
"""

from __future__ import annotations

from mcore_rlhf.families.megatron.folders import TRACKER, is_iteration_folder, looks_like_root
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath


class MegatronFormat(Format):
    """The ``torch`` checkpoint format of Megatron-LM."""

    name = "megatron"
    family = "megatron"
    takes = (Takes.MODEL_PARALLEL, Takes.DATA_PARALLEL, Takes.MEGATRON, Takes.DTYPE, Takes.RNG)
    tracker = TRACKER
    markers = ("iter_*", "release", "mp_rank_*")

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the framework is told to load it."""
        return f"--load {path}" + ("" if optimizer or (path / "release").is_dir() else " --no-load-optim")

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder is an iteration, or a root with iterations."""
        return is_iteration_folder(path) or looks_like_root(path)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_megatron

        return read_megatron(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import megatron_target

        return megatron_target(source, options)


FORMAT: Format = MegatronFormat()
