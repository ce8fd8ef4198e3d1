"""Megatron-core's ``torch_dist`` checkpoints: ``iter_XXXXXXX/{.metadata,common.pt,metadata.json,*.distcp}``.

``reader`` opens one (``folders`` → ``opened`` → ``names`` → ``parameters`` → ``optimizer``, ``flat`` → ``catalog``, ``ranks``),
``writer`` describes one (``items`` → ``common``). What Megatron decides by itself, such as groups and arguments, is asked of
:mod:`..megatron`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.formats.base import ReadOptions, Source, Target, WriteOptions


@dataclass(frozen=True, slots=True)
class MegatronDistFormat:
    """The ``torch_dist`` checkpoint format of Megatron-core."""

    name: str = "megatron-dist"
    family: str = "megatron"

    def load_hint(self, path: Path) -> str:
        """How the framework is told to load it."""
        return f"--load {path} --ckpt-format torch_dist"

    def detect(self, path: Path) -> bool:
        """Whether a folder is an iteration, or a root with iterations."""
        from mcore_rlhf.formats.megatron.folders import looks_like_root

        from .folders import is_dist_folder

        return is_dist_folder(path) or looks_like_root(path, is_dist_folder)

    def read(self, path: Path, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_dist

        return read_dist(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import dist_target

        return dist_target(source, options)


FORMAT = MegatronDistFormat()
