"""The state dict in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.convert import ConvertOptions
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.formats.base import FileLayout, FileWriter, TargetFile
from mcore_rlhf.formats.hf.shards import Part
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
    files = tuple(TargetFile(part.names[0], partial(_memory_layout, part, memory)) for part in parts.tensors)
    carry_out(source, parts, files, Path(), ConvertOptions(fsync=False))
    found = {name: memory[part.names[0]].tensor for part in parts.tensors for name in part.names}
    return OrderedDict((name, found[name]) for name in parts.order)


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


def _memory_layout(part: Part, memory: dict[str, _MemoryFile]) -> FileLayout:
    import torch

    name = part.names[0]
    record = Record(name, name, part.dtype, prod(part.shape), 0)

    def create(_: Path) -> FileWriter:
        made = torch.zeros(part.shape, dtype=getattr(torch, part.dtype.name))
        memory[name] = _MemoryFile(made)
        return memory[name]

    return FileLayout([part.placed(record)], [record], create)
