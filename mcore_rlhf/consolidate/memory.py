"""The state dict in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.convert import ConvertOptions
from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.formats.base import FileLayout, FileWriter, TargetFile
from mcore_rlhf.storage.manifest import FileEntry

from .parts import carry_out, open_tag, parts_of

if TYPE_CHECKING:
    import torch


def load_fp32_state_dict(
    path: str | Path, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> OrderedDict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint in memory, for ``model.load_state_dict``.

    Args:
        path: A root, a tag's folder, or whatever else ``mcore-rlhf inspect`` takes.
        tag: Which checkpoint of a root; None for that in ``latest``.
        exclude_frozen_parameters: Leave frozen parameters out.

    Returns:
        Contiguous tensors on the CPU, in the module's order. Tied names are one tensor.

    Raises:
        CheckpointError: It is incomplete or damaged: every byte that is used is checked.
    """
    source = open_tag(Path(path), tag, ())
    parts = parts_of(source, exclude_frozen_parameters)
    memory: dict[str, _MemoryFile] = {}
    files = tuple(TargetFile(part.name.param, partial(_memory_layout, part, memory)) for part in parts.entries)
    carry_out(source, parts, files, Path(), ConvertOptions(fsync=False))
    names = {owner: memory[owner].tensor for owner in memory}
    shared = {alias: names[owner] for alias, owner in parts.aliases.items()}
    return OrderedDict((name, {**names, **shared}[name]) for name in parts.order)


@dataclass(slots=True)
class _MemoryFile:
    """A tensor that is filled as if it were a file."""

    tensor: torch.Tensor

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into it."""
        import numpy as np
        import torch

        flat = self.tensor.reshape(-1).view(torch.uint8)
        flat.numpy()[byte_offset : byte_offset + len(data)] = np.frombuffer(data, np.uint8)

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> FileEntry:
        """Nothing more to do."""
        return FileEntry(self.tensor.nbytes, next(iter(crcs.values()), 0))


def _memory_layout(part: TensorEntry, memory: dict[str, _MemoryFile]) -> FileLayout:
    import torch

    def create(_: Path) -> FileWriter:
        made = torch.zeros(part.global_shape, dtype=getattr(torch, part.dtype.name))
        memory[part.name.param] = _MemoryFile(made)
        return memory[part.name.param]

    return FileLayout([part], [part.chunks[0].record], create)
