"""Megatron-core's ``torch_dist`` checkpoints: ``iter_XXXXXXX/{.metadata,common.pt,metadata.json,*.distcp}``.

``reader`` opens one (``folders`` → ``names`` → ``parameters`` → ``optimizer``), ``writer`` describes one; ``objects`` has what belongs to
single ranks. What Megatron decides by itself, such as groups and arguments, is asked of :mod:`mcore_rlhf.families.megatron`.
"""

from __future__ import annotations

from mcore_rlhf.families.megatron.folders import TRACKER, looks_like_root
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath


class MegatronDistFormat(Format):
    """The ``torch_dist`` checkpoint format of Megatron-core.

    Args:
        weights: The format of weights that a trainer has in the place of Megatron's own, beside the optimizer.
        ranks: That of weights as each rank has them, which another has there.
    """

    name = "megatron-dist"
    family = "megatron"
    takes = (
        Takes.MODEL_PARALLEL,
        Takes.DATA_PARALLEL,
        Takes.MEGATRON,
        Takes.TORCH_DIST,
        Takes.DTYPE,
        Takes.RNG,
        Takes.LIKE,
    )
    tracker = TRACKER
    markers = ("iter_*", "release", "dist_*", "model", "metadata.json", ".metadata", "common.pt")
    tokenizer_beside = True

    def __init__(self, weights: Format, ranks: Format) -> None:
        self.weights, self.ranks = weights, ranks

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the framework is told to load it."""
        text = f"--load {path} --ckpt-format torch_dist"
        return text + ("" if optimizer or (path / "release").is_dir() else " --no-load-optim")

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder is an iteration, a root with iterations, or a role's of verl with one."""
        from .folders import is_dist_folder, role_part

        return is_dist_folder(path) or role_part(path) is not None or looks_like_root(path, is_dist_folder)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_dist

        return read_dist(path, options, self.weights, self.ranks)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import dist_target

        return dist_target(source, options, self.weights, self.ranks)
