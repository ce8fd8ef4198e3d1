"""``state.pt``: a module and its optimizer in one file of ``torch.save``, as :class:`~mcore_rlhf.TorchEngine` writes it, and any loop of
one's own with ``torch.save({"model": …, "optimizer": …})``.

``files`` has the names of its parts, ``reader`` opens one, ``writer`` describes one. What torch has no place for lies beside, in
:mod:`mcore_rlhf.families.sidecar`.
"""

from __future__ import annotations

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .files import FILE as FILE
from .files import NAME


class TorchFormat(Format):
    """One file ``state.pt`` of ``torch.save``, as ``TorchEngine`` writes it."""

    name = NAME
    takes = (Takes.DTYPE, Takes.LIKE)
    own_sidecar = holds_adapters = True
    markers = (FILE,)

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How torch is told to load it."""
        return f'torch.load("{path / FILE}", weights_only=True)'

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has the file, with a model in it."""
        if not (path / FILE).is_file():
            return False
        from .reader import is_saved

        return is_saved(path)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open the file."""
        from .reader import read_saved

        return read_saved(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new one."""
        from .writer import torch_target

        return torch_target(source, options)


FORMAT: Format = TorchFormat()
