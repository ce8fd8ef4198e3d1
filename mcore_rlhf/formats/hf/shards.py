"""A state dict as files that Hugging Face's loaders take: which tensor goes into which, and the index that says so.

Source: transformers 5.23.0, ``modeling_utils.py`` (``save_pretrained``); huggingface_hub, ``serialization/_base.py``
(``split_state_dict_into_shards_factory``): tensors in order, as many as fit into each file, none ever cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePosixPath

from mcore_rlhf.core.catalog import Chunk, DType, Record, Shape, TensorEntry, TensorName
from mcore_rlhf.formats.base import FileLayout, TargetFile
from mcore_rlhf.storage.safetensors import Safetensors
from mcore_rlhf.storage.stored import StoredTensor

from .names import SAFETENSORS, file_name, index_name

DEFAULT_SHARD = 5 * 10**9
"""Bytes of tensors in a file; 4.x of transformers has the same."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor to be written.

    Args:
        source: Which logical tensor it is.
        shape: Its shape as written: the first rows of a padded vocabulary.
        dtype: Its type as written.
        names: What it is called in the files: more than one name where tied parameters are written under each.
    """

    source: TensorName
    shape: Shape
    dtype: DType
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, once."""
        return prod(self.shape) * self.dtype.itemsize

    def placed(self, record: Record) -> TensorEntry:
        """The tensor as the whole of a record."""
        chunk = Chunk.whole(record, self.shape)
        return TensorEntry(self.source, self.shape, self.dtype, (chunk,))


@dataclass(slots=True)
class Shard:
    """One file.

    Args:
        parts: Its tensors.
        file: Its path.
        nbytes: Bytes of its tensors.
    """

    parts: list[WrittenTensor] = field(default_factory=list)
    file: str = ""
    nbytes: int = 0

    def names(self) -> list[str]:
        """All names in it."""
        return [name for part in self.parts for name in part.names]

    def layout(self) -> FileLayout:
        """What it will hold as a safetensors file, where nothing is shared: a second name is a copy.

        The widest elements come first, as in safetensors' own files: readers want each tensor at a multiple of its width.
        """
        named = [(name, part) for part in self.parts for name in part.names]
        named.sort(key=lambda item: -item[1].dtype.itemsize)
        records = [Record(self.file, name, part.dtype, prod(part.shape), 0) for name, part in named]
        tensors = [StoredTensor.whole(record, part.shape) for record, (_, part) in zip(records, named, strict=True)]
        entries = [part.placed(record) for record, (_, part) in zip(records, named, strict=True)]
        return FileLayout(entries, records, Safetensors(tensors, {"format": "pt"}))

    def target(self) -> TargetFile:
        """The file as part of a target."""
        return TargetFile(self.file, self.layout)


def shards_of(
    parts: Iterable[WrittenTensor],
    stem: str,
    limit: int = DEFAULT_SHARD,
    ending: str = SAFETENSORS,
    *,
    copies: bool = True,
) -> list[Shard]:
    """Deal tensors to files, in order.

    Args:
        parts: The tensors.
        stem: What the files' names begin with; may have a folder before it.
        limit: Bytes of tensors per file; a tensor that is larger has a file of its own.
        ending: ``safetensors`` or ``bin``.
        copies: Whether every further name of a tensor takes its bytes again.
    """
    shards: list[Shard] = []
    for part in parts:
        nbytes = part.nbytes * (len(part.names) if copies else 1)
        if not shards or shards[-1].nbytes + nbytes > limit:
            shards.append(Shard())
        shards[-1].parts.append(part)
        shards[-1].nbytes += nbytes
    for number, shard in enumerate(shards, 1):
        shard.file = file_name(stem, ending, number, len(shards))
    return shards


def index_of(shards: Sequence[Shard], stem: str, ending: str = SAFETENSORS) -> dict[str, str]:
    """The index of several files, by its path; nothing for one file, which needs none."""
    if len(shards) < 2:
        return {}
    weights = {name: PurePosixPath(shard.file).name for shard in shards for name in shard.names()}
    parts = [part for shard in shards for part in shard.parts]
    totals = {
        "total_parameters": sum(prod(part.shape) for part in parts),
        "total_size": sum(part.nbytes for part in parts),
    }
    text = json.dumps({"metadata": totals, "weight_map": weights}, indent=2) + "\n"
    return {index_name(stem, ending): text}
