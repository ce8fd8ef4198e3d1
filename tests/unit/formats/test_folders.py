"""Rank folders: who writes which, against every rank's coordinates; and how folders are recognized."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.megatron.folders import (
    file_ranks,
    folder_name,
    is_iteration_folder,
    looks_like_root,
    numbers_in,
)
from mcore_rlhf.layouts.parallel import Coordinates, ParallelConfig

LAYOUTS = [
    ParallelConfig(), ParallelConfig(tp=2, etp=2, dp=3), ParallelConfig(tp=2, etp=2, pp=3, cp=2, dp=2),
    ParallelConfig(ep=2, dp=4), ParallelConfig(tp=2, etp=2, ep=2, dp=2, pp=2), ParallelConfig(tp=2, etp=1, ep=2, dp=2),
    ParallelConfig(tp=2, etp=1, ep=4, dp=2), ParallelConfig(tp=2, etp=1, ep=4, dp=4, pp=2), ParallelConfig(cp=2, ep=4, dp=2),
    ParallelConfig(tp=2, etp=1), ParallelConfig(tp=4, etp=1, ep=2, dp=1), ParallelConfig(tp=4, etp=2, pp=2, dp=2),
    ParallelConfig(tp=2, etp=1, cp=2, ep=2),
]  # fmt: skip


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_both_first_data_parallel_ranks_write(parallel: ParallelConfig) -> None:
    """``save_checkpoint``: ranks with data-parallel or expert-data-parallel rank 0 write the folder of their (tp, pp, ep).

    Of a context-parallel group several do, with the same content; the first one stands for them.
    """
    expected: dict[str, tuple[int, Coordinates]] = {}
    for rank, at in parallel.ranks():
        if 0 in (at.expert_dp_rank, at.dp_rank):
            expected.setdefault(folder_name(at.tp_rank, at.pp_rank, at.ep_rank, parallel), (rank, at))
    found = file_ranks(parallel)
    assert [rank.folder for rank in found] == list(expected)
    for entry in found:
        rank, at = expected[entry.folder]
        assert entry.rank == rank
        assert (entry.tp_rank, entry.pp_rank, entry.ep_rank, entry.etp_rank) == (
            at.tp_rank,
            at.pp_rank,
            at.ep_rank,
            at.etp_rank,
        )
        assert entry.holds_dense_optimizer == (at.dp_rank == at.cp_rank == 0)
        assert entry.holds_expert_optimizer == (at.expert_dp_rank == 0)
    dense = [(e.tp_rank, e.pp_rank) for e in found if e.holds_dense_optimizer]
    assert sorted(dense) == [(t, p) for t in range(parallel.tp) for p in range(parallel.pp)]


@pytest.mark.parametrize("parallel", [ParallelConfig(etp=2, dp=2), ParallelConfig(tp=2, etp=4, ep=2, dp=4)], ids=str)
def test_layouts_in_which_megatron_itself_loses_shards(parallel: ParallelConfig) -> None:
    with pytest.raises(Unsupported, match="Choose --etp equal to --tp"):
        file_ranks(parallel)


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        (ParallelConfig(), "mp_rank_03"),
        (ParallelConfig(pp=2), "mp_rank_03_001"),
        (ParallelConfig(ep=4, dp=4), "mp_rank_03_002"),
        (ParallelConfig(pp=2, ep=4, dp=4), "mp_rank_03_001_002"),
    ],
    ids=str,
)
def test_names(parallel: ParallelConfig, name: str) -> None:
    assert folder_name(3, 1, 2, parallel) == name
    assert numbers_in(name) == tuple(int(part) for part in name.split("_")[2:])


def test_what_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000020").mkdir()
    assert looks_like_root(tmp_path)
    assert not is_iteration_folder(tmp_path)
    assert is_iteration_folder(tmp_path / "iter_0000010")
    assert not is_iteration_folder(tmp_path / "iter_0000020")
    assert not looks_like_root(tmp_path / "iter_0000020")
    assert numbers_in("mp_rank_for_expert_00") == ()
