"""What the files of all ranks must have in common, and what is looked at for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.storage.dcp.rankfile import Local, RankFile
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.torch_values import SmallTensor


def refuse_swapped(files: Sequence[RankFile], ranks: Sequence[Mapping[Any, Any]]) -> None:
    """Tensors know which rank wrote them; a tool that does not care gives all the same number.

    Raises:
        LayoutMismatch: Files lie under each other's names.
    """
    wrote = [next((v.rank for v in values.values() if isinstance(v, Local)), None) for values in ranks]
    if sorted(map(str, wrote)) != sorted(map(str, range(len(files)))):
        return
    problems = Problems()
    for rank, (file, writer) in enumerate(zip(files, wrote, strict=True)):
        if writer != rank:
            text = f"{file.directory.path}: written by rank {writer}, but its name says rank {rank}"
            problems.add(LayoutMismatch, text, "Files of ranks were swapped: give them their names again.")
    problems.raise_if_any()


def told_apart(model: Sequence[RankFile], optimizer: Sequence[RankFile]) -> list[StoredFile]:
    """The files with their ranks, where those hold different parts of the same tensors: none is a copy of another then."""
    parts = [value for value in model[0].tree.values() if isinstance(value, Local)]
    cut = any(len(part.dims) == 1 and part.dims[0] is not None for part in parts)
    numbered = [*enumerate(model), *enumerate(optimizer)]
    return [StoredFile.of_zip(file.file, file.directory, rank if cut else None) for rank, file in numbered]


def refuse_apart(files: Sequence[RankFile], ranks: Sequence[Mapping[Any, Any]], what: str) -> None:
    """All ranks have the same keys, and what is cut on one is cut on all.

    Raises:
        LayoutMismatch: They have not.
    """
    for file, values in zip(files, ranks, strict=True):
        if not isinstance(values, Mapping):
            raise Unsupported(f"{file.directory.path}: {what}expected a dictionary, found a {type(values).__name__}")
        apart = [*sorted(map(str, values.keys() ^ ranks[0].keys()))]
        apart += [
            str(key)
            for key in values
            if not apart and isinstance(values[key], Local) != isinstance(ranks[0][key], Local)
        ]
        if apart:
            raise LayoutMismatch(f"{file.directory.path}: {what}{apart[0]} is not in the files of all ranks")


def brief(value: object) -> str:
    """A value, for a message."""
    return f"{float(value):g}" if isinstance(value, SmallTensor) and value.numel() == 1 else repr(value)[:60]


def scalar_of(file: RankFile, value: Any) -> object:
    """A value of a rank's file, read where it is a tensor."""
    if not isinstance(value, StoredTensor):
        return value
    data, itemsize = file.directory.read(value.record.key), value.record.dtype.itemsize
    return SmallTensor(data[value.start * itemsize :], value.record.dtype, value.shape, value.strides)
