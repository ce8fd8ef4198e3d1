"""Cutting tensors over ranks, held against torch.chunk."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.layouts.tensor import LocalLayout, Shard, global_shape_of, local_layout
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition

SMALL = st.integers(1, 4)


def gathered(layout: LocalLayout, whole: torch.Tensor) -> torch.Tensor:
    """A rank's local tensor as its layout says; elements that no piece fills are -1."""
    local = torch.full(layout.view, -1, dtype=whole.dtype)
    for piece in layout.pieces:
        to = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.box.shape, strict=True))
        local[to] = whole[tuple(slice(a, b) for a, b in zip(piece.box.offset, piece.box.stop, strict=True))]
    return local.reshape(layout.shape)


def count(*shape: int) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


@settings(max_examples=50)
@given(SMALL, SMALL, SMALL, st.sampled_from([COLUMN, ROW, VOCABULARY, Partition(2), REPLICATED]))
def test_a_plain_split_is_a_chunk(degree: int, per_rank: int, other: int, partition: Partition) -> None:
    dim = partition.dim
    shape = [other + 1, other, 2]
    if dim is not None:
        shape[dim] = degree * per_rank
    whole = count(*shape)
    expected = [whole] * degree if dim is None else whole.chunk(degree, dim)
    for rank in range(degree):
        layout = local_layout(partition, tuple(shape), Shard(rank, degree))
        assert torch.equal(gathered(layout, whole), expected[rank])
        assert global_shape_of(partition, layout.shape, degree, 1, 0) == tuple(shape)


@settings(max_examples=50)
@given(SMALL, SMALL, SMALL, st.integers(2, 3))
def test_blocks_are_cut_one_by_one(degree: int, per_rank: int, width: int, blocks: int) -> None:
    """[gate; up]: a rank holds its part of gate, then its part of up."""
    partition = Partition(0, blocks=blocks)
    whole = count(blocks * degree * per_rank, width)
    parts = [block.chunk(degree) for block in whole.chunk(blocks)]
    for rank in range(degree):
        layout = local_layout(partition, tuple(whole.shape), Shard(rank, degree))
        assert torch.equal(gathered(layout, whole), torch.cat([block[rank] for block in parts]))
        assert global_shape_of(partition, layout.shape, degree, 1, 0) == tuple(whole.shape)


@settings(max_examples=100)
@given(SMALL, st.lists(st.integers(0, 3), min_size=1, max_size=6), SMALL)
def test_blocks_of_unequal_size_are_cut_one_by_one(degree: int, per_rank: list[int], width: int) -> None:
    """Mamba's [z, x, B, C, dt]: a rank holds its part of each, as many elements of each as every other rank."""
    partition = Partition(0, parts=tuple((f"block {i}", n * degree) for i, n in enumerate(per_rank)))
    whole = count(sum(per_rank) * degree, width)
    parts = [block.tensor_split(degree) for block in whole.split([n * degree for n in per_rank])]
    for rank in range(degree):
        layout = local_layout(partition, tuple(whole.shape), Shard(rank, degree))
        assert torch.equal(gathered(layout, whole), torch.cat([block[rank] for block in parts]))
        assert global_shape_of(partition, layout.shape, degree, 1, 0) == tuple(whole.shape)


@settings(max_examples=50)
@given(SMALL, SMALL, SMALL, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_grouped_first_matrix(hidden: int, ffn: int, per_rank: int, ep: int, etp: int, gated: bool) -> None:
    """GroupedMLP.weight1: (hidden, experts · columns) in the file, used as a view of (experts, hidden, columns)."""
    blocks = 2 if gated else 1
    partition = Partition(2, blocks=blocks, stacked=1)
    experts, columns = ep * per_rank, blocks * ffn * etp
    whole = count(experts, hidden, columns)
    for e in range(ep):
        for t in range(etp):
            mine = whole.chunk(ep)[e]
            halves = torch.cat([half.chunk(etp, 2)[t] for half in mine.chunk(blocks, 2)], 2)
            layout = local_layout(partition, tuple(whole.shape), Shard(t, etp), Shard(e, ep))
            assert layout.shape == (hidden, per_rank * blocks * ffn)
            assert torch.equal(gathered(layout, whole), halves.reshape(hidden, -1))
            assert global_shape_of(partition, layout.shape, etp, ep, experts) == tuple(whole.shape)


@settings(max_examples=50)
@given(SMALL, SMALL, SMALL, st.integers(1, 3), st.integers(1, 3))
def test_grouped_second_matrix(hidden: int, ffn: int, per_rank: int, ep: int, etp: int) -> None:
    """GroupedMLP.weight2: (experts · ffn, hidden) in the file, used as a view of (experts, ffn, hidden)."""
    partition = Partition(1, stacked=0)
    experts = ep * per_rank
    whole = count(experts, ffn * etp, hidden)
    for e in range(ep):
        for t in range(etp):
            layout = local_layout(partition, tuple(whole.shape), Shard(t, etp), Shard(e, ep))
            assert layout.shape == (per_rank * ffn, hidden)
            assert torch.equal(gathered(layout, whole), whole.chunk(ep)[e].chunk(etp, 1)[t].reshape(-1, hidden))
            assert global_shape_of(partition, layout.shape, etp, ep, experts) == tuple(whole.shape)


@pytest.mark.parametrize(
    ("partition", "shape", "split", "stack", "words"),
    [
        (COLUMN, (6, 2), Shard(0, 4), Shard(), "6 elements of dim 0"),
        (ROW, (6, 3), Shard(0, 2), Shard(), "3 elements of dim 1"),
        (GATED, (6, 2), Shard(0, 2), Shard(), "3 elements of dim 0"),
        (GATED, (5, 2), Shard(0, 1), Shard(), "2 blocks"),
        (Partition(1, stacked=0), (3, 4, 2), Shard(), Shard(0, 2), "3 experts"),
        (Partition(0, parts=(("x", 4), ("dt", 3))), (7, 2), Shard(0, 2), Shard(), "3 elements of dt in dim 0"),
        (
            Partition(0, parts=(("x", 4), ("dt", 2))),
            (7, 2),
            Shard(0, 2),
            Shard(),
            "7 elements of dim 0 are not x 4 . dt 2",
        ),
    ],
)
def test_what_does_not_divide_is_said(
    partition: Partition, shape: tuple[int, ...], split: Shard, stack: Shard, words: str
) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        local_layout(partition, shape, split, stack)
