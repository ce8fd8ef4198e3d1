"""Where FSDP's parts lie: against torch's own functions, and against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from mcore_rlhf.core.catalog import Box
from mcore_rlhf.engines.fsdp.geometry import FlatSplit, Mesh, MeshSplit, Replicated, Split, cuts_of
from mcore_rlhf.errors import Unsupported

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def _covered(split: Split, ranks: range) -> torch.Tensor:
    """How often each element is written."""
    counts = torch.zeros(split.global_shape, dtype=torch.int64)
    for rank in ranks:
        for box in split.written(rank):
            counts[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))] += 1
    return counts


@given(SHAPES, MESHES, st.data())
def test_a_mesh_cuts_as_torch_does(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [data.draw(st.sampled_from(kinds)) for _ in mesh]
    ranks = range(math.prod(mesh))
    split = MeshSplit(shape, Mesh.of(mesh, ranks), cuts_of("w", shape, mesh, placements), 0)
    for rank in ranks:
        at = list(split.mesh.at[rank])
        local, offset = _compute_local_shape_and_global_offset(shape, mesh, at, placements)
        expected = (Box(tuple(offset), tuple(local)),) if math.prod(local) else ()
        assert split.boxes(rank) == expected
    assert bool((_covered(split, ranks) == 1).all())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_tensor_parallelism_cuts_first(dp: int, tp: int, each: int, columns: int) -> None:
    shape, mesh = (dp * tp * each, columns), (dp, tp)
    placements = [_StridedShard(0, split_factor=tp), Shard(0)]
    ranks = range(dp * tp)
    split = MeshSplit(shape, Mesh.of(mesh, ranks), cuts_of("w", shape, mesh, placements), 0)
    for rank in ranks:
        local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(split.mesh.at[rank]), placements)
        assert split.boxes(rank) == (Box(tuple(offset), tuple(local)),)
    assert bool((_covered(split, ranks) == 1).all())


def test_what_is_no_box_for_each_rank_is_refused() -> None:
    with pytest.raises(Unsupported, match="not even"):
        cuts_of("w", (6, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    with pytest.raises(Unsupported, match="Only Shard and Replicate"):
        cuts_of("w", (6, 2), (2,), [Partial()])


def test_replicas_and_meshes_beside_the_first_write_nothing() -> None:
    hybrid = MeshSplit((4,), Mesh.of((2, 2), range(4)), cuts_of("w", (4,), (2, 2), [Replicate(), Shard(0)]), 0)
    assert [bool(hybrid.written(rank)) for rank in range(4)] == [True, True, False, False]
    assert hybrid.boxes(3) == hybrid.boxes(1) == (Box((2,), (2,)),)
    beside = MeshSplit((4,), Mesh.of((2,), (1, 3)), ((0, 0),), 0)
    assert [beside.written(rank) for rank in (1, 3)] == [(), ()]
    assert beside.boxes(3) == (Box((2,), (2,)),)
    assert beside.boxes(0) == ()


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_flat_parameters_are_dealt_out_whole(shapes: list[tuple[int, ...]], world: int, gap: int) -> None:
    starts, at = [], 0
    for shape in shapes:
        starts.append(at)
        at += math.prod(shape) + gap
    share, mesh = -(-at // world), Mesh.of((world,), range(world))
    for shape, start in zip(shapes, starts, strict=True):
        split = FlatSplit(shape, start, share, mesh)
        whole = torch.arange(math.prod(shape)).reshape(shape)
        found = []
        for rank in range(world):
            first, stop = split.span(rank)
            held = [
                whole[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))]
                for box in split.boxes(rank)
            ]
            assert [int(value) for part in held for value in part.flatten()] == list(range(first, stop))
            found += range(first, stop)
        assert found == list(range(math.prod(shape)))
        assert bool(split.written(split.first))
        assert not any(split.written(rank) for rank in range(split.first))


def test_what_all_have_is_written_once() -> None:
    scalar = Replicated((), 2)
    assert scalar.written(2) == scalar.boxes(0) == (Box((), ()),)
    assert scalar.written(0) == ()
    assert Replicated((0, 3), 0).written(0) == ()
