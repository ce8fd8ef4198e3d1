"""Tensor and expert parallelism of one tensor: which boxes of the whole lie where in a rank's local tensor.

The padded vocabulary is here too: how many rows an embedding has depends on the tensor-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from mcore_rlhf.core.catalog import Box, Shape, dot, row_major
from mcore_rlhf.core.rows import Cut
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.models.spec import Partition


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of an axis: part ``rank`` of ``degree`` equal parts."""

    rank: int = 0
    degree: int = 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class ViewPiece:
    """``box`` of the whole tensor lies at ``offset`` of the local view, with the same shape."""

    box: Box
    offset: Shape


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """A rank's part of a tensor.

    Args:
        shape: Shape of the local tensor as stored.
        view: Shape in which the pieces count; differs from ``shape`` only for stacked experts.
        pieces: Boxes of the whole tensor, and where they lie in the view.
        strides: Of the local tensor where it is stored row by row.
        cut: The pieces then, as a table of chunks has them.
    """

    shape: Shape
    view: Shape
    pieces: tuple[ViewPiece, ...]
    strides: Shape = field(init=False, compare=False)
    cut: Cut = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", row_major(self.shape))
        object.__setattr__(self, "cut", self.cut_of(row_major(self.view)))

    def cut_of(self, strides: Shape) -> Cut:
        """The pieces, where the view has other strides than a tensor that is stored row by row."""
        boxes, starts = zip(*((piece.box, dot(piece.offset, strides)) for piece in self.pieces), strict=True)
        return Cut(boxes, strides, starts)


def whole_layout(shape: Shape) -> LocalLayout:
    """The layout of a rank that has a whole tensor."""
    return LocalLayout(shape, shape, (ViewPiece(Box.whole(shape), (0,) * len(shape)),))


@lru_cache(maxsize=4096)  # layers and experts are cut alike, and so are the states of each
def local_layout(partition: Partition, global_shape: Shape, split: Shard, stack: Shard = WHOLE) -> LocalLayout:
    """The part of a tensor that one rank holds.

    Args:
        partition: How the tensor is cut.
        global_shape: Shape of the whole tensor (stacked experts: with the expert dimension first).
        split: The rank on the axis that cuts ``partition.dim``.
        stack: The rank on the expert axis, for stacked experts.

    Raises:
        LayoutMismatch: A dimension does not divide.
    """
    view, origin = list(global_shape), [0] * len(global_shape)
    if partition.stacked is not None:
        view[0] = _divided(global_shape[0], stack.degree, "experts", "expert-parallel ranks")
        origin[0] = stack.rank * view[0]
    if partition.dim is None:
        pieces: tuple[ViewPiece, ...] = (ViewPiece(Box(tuple(origin), tuple(view)), (0,) * len(view)),)
    else:
        pieces = _split_pieces(partition, global_shape, view, origin, split)
    return LocalLayout(_stored_shape(partition, tuple(view)), tuple(view), pieces)


def _split_pieces(
    partition: Partition, global_shape: Shape, view: list[int], origin: list[int], split: Shard
) -> tuple[ViewPiece, ...]:
    """One piece per block; sets the local extent of the cut dimension in ``view``."""
    dim = partition.dim
    assert dim is not None
    blocks = block_sizes(partition, global_shape[dim])
    cut = [_divided(size, split.degree, f"elements of {what}", "tensor-parallel ranks") for what, size in blocks]
    view[dim] = sum(cut)
    pieces, first, start = [], 0, 0
    for (_, size), part in zip(blocks, cut, strict=True):
        box_start, shape, offset = list(origin), list(view), [0] * len(view)
        box_start[dim], shape[dim], offset[dim] = first + split.rank * part, part, start
        pieces.append(ViewPiece(Box(tuple(box_start), tuple(shape)), tuple(offset)))
        first, start = first + size, start + part
    return tuple(pieces)


def block_sizes(partition: Partition, extent: int) -> list[tuple[str, int]]:
    """What the blocks of a cut dimension are called, and how many elements of the whole each has.

    Args:
        partition: How the tensor is cut.
        extent: Of the whole dimension.

    Raises:
        LayoutMismatch: The dimension is not made of such blocks.
    """
    what = f"dim {partition.dim}"
    if not partition.parts:
        return [(what, _divided(extent, partition.blocks, f"elements of {what}", "blocks"))] * partition.blocks
    if extent != sum(size for _, size in partition.parts):
        said = " + ".join(f"{name} {size}" for name, size in partition.parts)
        raise LayoutMismatch(f"{extent} elements of {what} are not {said}, as the args make them")
    return [(f"{name} in {what}", size) for name, size in partition.parts]


def global_shape_of(
    partition: Partition, local_shape: Shape, split_degree: int, stack_degree: int, experts: int
) -> Shape:
    """The whole shape, from a rank's stored shape: :func:`local_layout` read the other way.

    Args:
        partition: How the tensor is cut.
        local_shape: The stored shape on one rank.
        split_degree: Ranks on the axis that cuts ``partition.dim``.
        stack_degree: Expert-parallel ranks.
        experts: Routed experts of the whole model, for stacked experts.

    Raises:
        LayoutMismatch: It is not made of the blocks that it should have.
    """
    view = list(_view_shape(partition, local_shape, experts // stack_degree if stack_degree else experts))
    if partition.stacked is not None:
        view[0] *= stack_degree
    if partition.dim is not None:
        view[partition.dim] *= split_degree
        if partition.parts:
            block_sizes(partition, view[partition.dim])
    return tuple(view)


def _view_shape(partition: Partition, stored: Shape, local_experts: int) -> Shape:
    """A stacked tensor is *reinterpreted* as (experts, rows, columns), as Megatron's ``GroupedMLP`` does with ``view``.

    Source: megatron-core 0.16.1, ``transformer/moe/experts.py``, ``GroupedMLP.forward``.
    """
    if partition.stacked is None:
        return stored
    inner = list(stored)
    inner[partition.stacked] = _divided(
        stored[partition.stacked], max(1, local_experts), f"elements of stored dim {partition.stacked}", "local experts"
    )
    return (local_experts, *inner)


def _stored_shape(partition: Partition, view: Shape) -> Shape:
    if partition.stacked is None:
        return view
    inner = list(view[1:])
    inner[partition.stacked] *= view[0]
    assert prod(inner) == prod(view)
    return tuple(inner)


def _divided(count: int, parts: int, what: str, among: str) -> int:
    if count % parts:
        raise LayoutMismatch(f"{count} {what} cannot be divided equally over {parts} {among}")
    return count // parts


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of the word embedding for a true vocabulary.

    Source: Megatron-LM core_v0.16.1, ``megatron/training/tokenizer/tokenizer.py``, ``_vocab_size_with_padding``.

    Args:
        vocab_size: Words of the tokenizer, extra ids included.
        divisible_by: Megatron's ``make_vocab_size_divisible_by``.
        tp: Tensor-parallel degree.
    """
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def repadded(padded: int, divisible_by: int, old_tp: int, new_tp: int) -> int | None:
    """The padded size at another degree when the true vocabulary is not known, or None where that is ambiguous.

    ``padded`` rows at ``old_tp`` came from any true size in ``(padded - multiple, padded]``. The answer is certain only
    if all of them lead to the same size.
    """
    multiple = divisible_by * old_tp
    smallest, largest = max(1, padded - multiple + 1), padded
    sizes = {padded_vocab_size(size, divisible_by, new_tp) for size in (smallest, largest)}
    return sizes.pop() if len(sizes) == 1 else None
