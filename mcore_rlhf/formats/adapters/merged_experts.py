"""Packed experts with an adapter: one low-rank sum for each, of strided parts of two matrices that all experts share.

Source: peft 0.21.2, ``tuners/lora/layer.py`` (``ParamWrapper.get_delta_weight``): ``A`` is ``(experts · rank, in)``, expert after
expert; ``B`` is ``(out, rank · experts)`` with the expert's number fastest; the weight is ``(experts, out, in)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mcore_rlhf.core.box import Box, row_major
from mcore_rlhf.core.catalog import Chunk, TensorEntry
from mcore_rlhf.core.dtype import DType
from mcore_rlhf.core.lowrank import LowRank, LowRankSum
from mcore_rlhf.formats.peft.names import BASE_LAYER


def adapted_parameter(
    module: str, left: TensorEntry, right: TensorEntry, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Which packed parameter an adapter belongs to, whose place in the nest of wrappers is all that its name says.

    Args:
        module: Its module, with a ``base_layer`` for every wrapper around it.
        left, right: Its ``B`` and ``A``.
        shapes: Of the base's tensors.

    Returns:
        The parameter of that module with the shape that the adapter makes; None where there is none, or no single one.
    """
    owner = module
    while owner.endswith(f".{BASE_LAYER}"):
        owner = owner.removesuffix(f".{BASE_LAYER}")
    made = (left.global_shape[0], right.global_shape[1])
    fitting = [
        name for name, shape in shapes.items()
        if name.rpartition(".")[0] == owner and len(shape) == 3 and shape[1:] == made and right.global_shape[0] % shape[0] == 0
    ]  # fmt: skip
    return fitting[0] if len(fitting) == 1 else None


def expert_sums(
    base: TensorEntry, left: TensorEntry, right: TensorEntry, scale: float, dtype: DType
) -> list[LowRankSum]:
    """The sum of every expert.

    Args:
        base: ``(experts, out, in)``.
        left: ``B``.
        right: ``A``.
        scale: What their products are multiplied by.
        dtype: What the sums are rounded to.
    """
    experts = base.global_shape[0]
    rank = right.global_shape[0] // experts
    return [
        LowRankSum(
            _expert(base, number), LowRank(_columns(left, number, experts), _rows(right, number * rank, rank), scale), dtype
        )
        for number in range(experts)
    ]  # fmt: skip


def packed(entry: TensorEntry, sums: Mapping[str, LowRankSum], dtype: DType) -> TensorEntry:
    """All experts' sums as one tensor.

    Args:
        entry: The base's tensor.
        sums: Of its experts, in order, by the names of their records.
        dtype: What they are rounded to.
    """
    _, rows, columns = entry.global_shape
    strides = row_major((1, rows, columns))
    chunks = (
        Chunk(Box((number, 0, 0), (1, rows, columns)), total.record(name), 0, strides)
        for number, (name, total) in enumerate(sums.items())
    )
    return TensorEntry(entry.name, entry.global_shape, dtype, tuple(chunks))


def _expert(entry: TensorEntry, number: int) -> TensorEntry:
    """One expert as a matrix."""
    shape = entry.global_shape[1:]
    return replace(entry, global_shape=shape, chunks=tuple(_without_first(entry, Box((number, 0, 0), (1, *shape)))))


def _without_first(entry: TensorEntry, wanted: Box) -> Iterator[Chunk]:
    for chunk in entry.primary():
        part = chunk.box.intersect(wanted)
        if part is not None:
            narrow = chunk.narrow(part)
            yield Chunk(Box(part.offset[1:], part.shape[1:]), narrow.record, narrow.start, narrow.strides[1:])


def _rows(entry: TensorEntry, start: int, count: int) -> TensorEntry:
    columns = entry.global_shape[1]
    wanted = Box((start, 0), (count, columns))
    parts = ((chunk, chunk.box.intersect(wanted)) for chunk in entry.primary())
    chunks = (replace(chunk.narrow(part), box=part.shift((start, 0))) for chunk, part in parts if part is not None)
    return replace(entry, global_shape=(count, columns), chunks=tuple(chunks))


def _columns(entry: TensorEntry, first: int, step: int) -> TensorEntry:
    """Every ``step``-th column."""
    rows, columns = entry.global_shape
    chunks = tuple(_strided(entry, first, step))
    return replace(entry, global_shape=(rows, columns // step), chunks=chunks)


def _strided(entry: TensorEntry, first: int, step: int) -> Iterator[Chunk]:
    for chunk in entry.primary():
        begin, stop = chunk.box.offset[1], chunk.box.stop[1]
        at = begin + (first - begin) % step
        count = len(range(at, stop, step))
        if count:
            box = Box((chunk.box.offset[0], (at - first) // step), (chunk.box.shape[0], count))
            start = chunk.start + (at - begin) * chunk.strides[1]
            yield Chunk(box, chunk.record, start, (chunk.strides[0], chunk.strides[1] * step))
