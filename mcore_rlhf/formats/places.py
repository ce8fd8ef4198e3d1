"""Where parts of tensors lie, in few words: a row of an index, read both ways, and which part of a tensor each of several ranks has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import index
from typing import Any

from mcore_rlhf.core.catalog import Box, Chunk, DType, Record, Shape, TensorEntry, TensorName, dtype_of, row_major
from mcore_rlhf.errors import LayoutMismatch, shown
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.tensor import Shard, local_layout
from mcore_rlhf.models.spec import REPLICATED

Row = Sequence[Any]
"""``[parameter, state, shape, type, [[file, byte, first element, shape], …]]``, in JSON; of what lies whole ``[file, byte]`` is enough."""


def lay(name: TensorName, shape: Shape, dtype: DType, parts: str | Iterable[tuple[str, Box]]) -> TensorEntry:
    """A tensor that is to lie in these files; its container says where in them.

    Args:
        name, shape, dtype: As :meth:`WholeFormat.laid` is given them.
        parts: The file that has all of it; or files, each with a part of it.
    """
    boxes = [(parts, Box.whole(shape))] if isinstance(parts, str) else parts
    return entry_of(
        name.role, [*name[1:], shape, dtype, [(file, 0, box.offset, box.shape) for file, box in boxes if box.numel]]
    )


def entry_of(role: str, row: Row) -> TensorEntry:
    """A tensor, of its row in an index: each part row by row in a record of its own.

    Args:
        role: Whose model it is.
        row: See :data:`Row`; a reader makes one of any other index.
    """
    param, state, shape, dtype, places = row
    kind, shape, chunks = dtype_of(dtype), _numbers(shape), list[Chunk]()
    for number, (file, byte, *of) in enumerate(places):
        offset, size = map(_numbers, of or ((0,) * len(shape), shape))
        record = Record(file, f"{param}:{state}" + f":{number}" * bool(number), kind, prod(size), index(byte))
        chunks.append(Chunk(Box(offset, size), record, 0, row_major(size)))
    return TensorEntry(TensorName(role, param, state), shape, kind, tuple(chunks))


def _numbers(of: Iterable[Any]) -> Shape:
    return tuple(map(index, of))  # of 2.0, "2" or None a TypeError


def row_of(entry: TensorEntry) -> Row:
    """The row of such a tensor.

    Args:
        entry: As :func:`lay` made it.
    """
    places = [(c.record.file, c.record.byte_offset, c.box.offset, c.box.shape) for c in entry.chunks]
    return [*entry.name[1:], entry.global_shape, str(entry.dtype), places]


def rows_of_ranks(shape: Shape, ranks: int) -> Iterator[tuple[int, Box]]:
    """Ranks, and the rows of a tensor that each of them has; a single number is the first's.

    Args:
        shape: The whole tensor's.
        ranks: How many there are.
    """
    if not shape:
        yield 0, Box.whole(shape)
        return
    for rank in range(ranks):
        start, stop = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
        if start < stop:
            yield rank, Box((start, *(0,) * len(shape[1:])), (stop - start, *shape[1:]))


def parts_of_ranks(source: Source, name: TensorName, shape: Shape, ranks: int) -> Iterator[tuple[int, Box]]:
    """Tensor-parallel ranks, and what each has of a tensor as Megatron cuts it, in its order there; of what is not cut every rank has all.

    Args:
        source: Whose it is.
        name, shape: The tensor's.
        ranks: How many there are.

    Raises:
        LayoutMismatch: It cannot be cut into so many.
    """
    spec = source.model.get(name.param)
    partition = REPLICATED if spec is None or len(spec.global_shape) != len(shape) else spec.partition
    for rank in range(ranks):
        try:
            pieces = local_layout(partition, shape, Shard(rank, ranks)).pieces
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{shown(str(name))}: {error}") from None
        yield from ((rank, piece.box) for piece in pieces)
