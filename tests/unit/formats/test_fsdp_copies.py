"""Flat pieces of FSDP1 where the mesh's first axis replicates: each copy's ranks have the whole, one copy behind another."""

from __future__ import annotations

from math import prod

import pytest

from mcore_rlhf.core.catalog import FLOAT32, Record
from mcore_rlhf.families.fsdp.order import Unit
from mcore_rlhf.formats.fsdp_ranks.pieces import FlatPieces, Flattened
from mcore_rlhf.storage.pt import StoredTensor


def pieces(*sizes: int) -> tuple[StoredTensor, ...]:
    """One of each rank, in a file of its own."""
    records = (Record(f"rank_{rank}", "data/0", FLOAT32, size, 0) for rank, size in enumerate(sizes))
    return tuple(StoredTensor(record, 0, (record.numel,), (1,)) for record in records)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_each_copy_has_all(flat: bool, copies: int) -> None:
    shape = (5, 3)
    unit = Unit({"norm": (4,), "weight": shape, "bias": (2,)})
    parts = (
        Flattened("weight", unit, pieces(*([11] * 2 * copies)), copies)
        if flat
        else FlatPieces(shape, pieces(*([7, 8] * copies)), copies)
    )
    of_copy: dict[int, list[int]] = {}
    for chunk in parts.chunks():
        of_copy.setdefault(int(chunk.record.file.removeprefix("rank_")) // 2, []).append(prod(chunk.box.shape))
    assert {number: sum(found) for number, found in of_copy.items()} == dict.fromkeys(range(copies), prod(shape))


def test_copies_that_are_cut_in_several_ways_are_no_parameters() -> None:
    assert FlatPieces((15,), pieces(7, 8, 7, 8), 2).numel == 15
    assert FlatPieces((15,), pieces(7, 8, 8, 7), 2).numel == -1
    assert FlatPieces((15,), pieces(7, 8, 15), 2).numel == -1
    assert list(FlatPieces((0,), pieces(0, 0), 2).chunks()) == []
