"""Hugging Face's model folders: ``model.safetensors`` or several such files, ``config.json``, a tokenizer.

``reader`` opens one (``series`` → ``config``), ``writer`` describes one (``shards``, ``tokenizer``, ``config``). ``names`` has the file
names of both. What has no place in such a folder lies beside: :mod:`mcore_rlhf.families.sidecar`.
"""

from __future__ import annotations

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pieces import has_pieces

from .series import find_series, weights_folder


class HuggingFaceFormat(Format):
    """A folder that ``from_pretrained`` takes.

    Args:
        number: Which of several models in it, as accelerate counts them.
        alone: The name of the one file of ``torch.save`` in which another program has the state dict; empty for Hugging Face's own names.
    """

    name = "hf"
    packs_experts = False
    weights_only = True
    takes = (Takes.MODEL_FOLDER, Takes.DTYPE, Takes.MASTERS)
    model_folder = own_sidecar = True

    def __init__(self, number: int = 0, alone: str = "") -> None:
        self.number, self.alone = number, alone

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How transformers is told to load it; torch, where it is pieces."""
        if find_series(path) is None and has_pieces(path):
            return f'dcp.load(state, storage_reader=HuggingFaceStorageReader("{path}"))'
        from .config import loading_line

        return loading_line(path)

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has weights under Hugging Face's file names, or is a role's of verl with them."""
        if self.alone:
            return (path / self.alone).is_file()
        if self.number:
            return find_series(path, self.number) is not None
        folder = weights_folder(path)
        return folder.is_dir() and (find_series(folder) is not None or has_pieces(folder))

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a folder."""
        from .reader import read_hf

        return read_hf(path, options, self.number, self.alone)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new folder."""
        from .writer import hf_target

        return hf_target(source, options, self.number, self.alone)


FORMAT: Format = HuggingFaceFormat()
