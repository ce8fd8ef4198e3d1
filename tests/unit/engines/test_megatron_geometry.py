"""Flat ranges of local tensors as boxes of the whole: checked against tensors that torch itself cuts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Record, dtype_of, row_major
from mcore_rlhf.engines.load import range_chunks
from mcore_rlhf.layouts.tensor import Shard, local_layout
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, Partition

CUTS = {
    "replicated": (REPLICATED, lambda whole, rank, tp: whole),
    "column": (COLUMN, lambda whole, rank, tp: whole.chunk(tp)[rank]),
    "row": (ROW, lambda whole, rank, tp: whole.chunk(tp, dim=1)[rank]),
    "gated": (GATED, lambda whole, rank, tp: torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])),
}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Partition, torch.Tensor, torch.Tensor, int, int, int, int]:
    name = draw(st.sampled_from(sorted(CUTS)))
    partition, cut = CUTS[name]
    tp = draw(st.integers(1, 3))
    shape = (2 * tp * draw(st.integers(1, 4)), tp * draw(st.integers(1, 5)))
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    rank = draw(st.integers(0, tp - 1))
    local = cut(whole, rank, tp)
    start = draw(st.integers(0, local.numel()))
    stop = draw(st.integers(start, local.numel()))
    return partition, whole, local, rank, tp, start, stop


@given(cuts())
def test_a_range_holds_the_elements_that_torch_puts_there(
    case: tuple[Partition, torch.Tensor, torch.Tensor, int, int, int, int],
) -> None:
    partition, whole, local, rank, tp, start, stop = case
    layout = local_layout(partition, tuple(whole.shape), Shard(rank, tp))
    record = Record("live", "0", dtype_of("int64"), stop - start, 0)
    memory = torch.full((stop - start,), -1)
    written = 0
    for chunk in range_chunks(layout, record, start, stop):
        window = tuple(slice(a, a + n) for a, n in zip(chunk.box.offset, chunk.box.shape, strict=True))
        assert chunk.start >= 0
        memory.as_strided(chunk.box.shape, chunk.strides, chunk.start).copy_(whole[window])
        written += chunk.box.numel
    assert written == stop - start
    assert memory.equal(local.flatten()[start:stop])


def test_packed_experts_are_seen_as_a_stack() -> None:
    """GroupedMLP's second matrix: stored (experts · ffn, hidden), seen as (experts, ffn, hidden), cut along ffn."""
    whole = torch.arange(4 * 6 * 2).reshape(4, 6, 2)  # 4 experts
    local = whole[2:4, 3:6].reshape(-1, 2)  # the second of two expert ranks, the second of two tensor ranks
    layout = local_layout(Partition(1, stacked=0), tuple(whole.shape), Shard(1, 2), Shard(1, 2))
    assert layout.shape == tuple(local.shape)
    record = Record("live", "0", dtype_of("int64"), 7, 0)
    memory = torch.full((7,), -1)
    for chunk in range_chunks(layout, record, 2, 9):
        window = tuple(slice(a, a + n) for a, n in zip(chunk.box.offset, chunk.box.shape, strict=True))
        memory.as_strided(chunk.box.shape, chunk.strides, chunk.start).copy_(whole[window])
    assert memory.equal(local.flatten()[2:9])
    assert row_major(layout.view) == (6, 2, 1)
