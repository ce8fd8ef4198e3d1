"""Folders of torch.distributed.checkpoint (DCP) that FSDP and FSDP2 runs write: RLinf's, torchtitan's, a plain ``dcp.save``.

``reader`` opens one: ``folders`` → ``keys`` → ``groups``, ``state``; ``plain`` where there are weights alone. ``writer`` describes one,
and ``content`` what goes into it. ``keys`` is the relation between names and keys, read both ways; what FSDP has no place for lies
beside, in :mod:`mcore_rlhf.families.sidecar`. The bytes are :mod:`mcore_rlhf.storage.dcp`'s.
"""

from __future__ import annotations

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.run_folders import RLINF_FOLDER
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .folders import detect, is_apart, is_dcp


class DcpFormat(Format):
    """torch.distributed.checkpoint (DCP) folders of FSDP runs.

    Args:
        apart: Whether model and optimizer lie in accelerate's two folders: the weights of :mod:`..hf_trainer`, and no format by itself.
    """

    name = "dcp"
    holds_adapters = True
    takes = (Takes.DATA_PARALLEL, Takes.DTYPE, Takes.RNG, Takes.LIKE)
    own_sidecar = lays_out_keys = True

    def __init__(self, *, apart: bool = False) -> None:
        self.apart = apart

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How torch is told to load it."""
        folder = path / RLINF_FOLDER if not is_dcp(path) and is_dcp(path / RLINF_FOLDER) else path
        return f'dcp.load(state, checkpoint_id="{folder}")'

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder is one, or RLinf's actor with one, or a root with ``step-N`` folders."""
        return is_apart(path) if self.apart else detect(path)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_dcp

        return read_dcp(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import dcp_target

        return dcp_target(source, options, apart=self.apart)


FORMAT: Format = DcpFormat()
APART: Format = DcpFormat(apart=True)
