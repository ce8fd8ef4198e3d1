"""DeepSpeed's universal checkpoints: ``<tag>_uni/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``.

``reader`` opens one (``files`` → ``opened``), ``writer`` describes one.
"""

from __future__ import annotations

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .files import LATEST, ZERO, is_universal_folder, is_universal_root


class UniversalFormat(Format):
    """DeepSpeed's universal checkpoint."""

    name = "universal"
    holds_adapters = True
    takes = (Takes.PATTERNS, Takes.LIKE)
    deals_groups = True
    tracker = LATEST
    markers = (LATEST, ZERO)
    joins = "latest"
    tags = True

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the framework is told to load it."""
        text = f'engine.load_checkpoint("{path}"{"" if optimizer else ", load_module_only=True"})'
        stage = "" if optimizer else ' and "stage": 3'
        return f'{text}, with "checkpoint": {{"load_universal": true}}{stage} in its configuration'

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder is a ``<tag>_uni``, or a root that has nothing but universal checkpoints."""
        return is_universal_folder(path) or is_universal_root(path)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_universal

        return read_universal(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import universal_target

        return universal_target(source, options)


FORMAT: Format = UniversalFormat()
