"""Ranks of real FSDP2 save through ``mcore_rlhf.dcp.Writer`` into an S3 store: torch's own reader says what was downloaded from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.object_store import S3, downloaded, keys, url
from tests.reference import dcp_jobs, dcp_writer_jobs
from tests.reference.fsdp_jobs import Whole, differences
from tests.reference.test_dcp import without_schedule
from tests.reference.test_dcp_writer import HOW, by_torch, run

KEY = "runs/step_1"


def in_store(pool: WorkerPool, s3: S3, job: Any, *args: object) -> list[Any]:
    return run(pool, dcp_writer_jobs.in_store, HOW, s3.environment, job, *args)


def assert_holds(pool: WorkerPool, s3: S3, folder: Path, wanted: Whole, key: str = KEY) -> None:
    assert differences(wanted, by_torch(pool, downloaded(s3, folder, key)).whole) == []


@pytest.mark.parametrize("by", ["save", "thread", "process"])
def test_torch_reads_what_its_own_writer_would_have_written(
    fsdp_pool: WorkerPool, s3: S3, tmp_path: Path, by: str
) -> None:
    torchs = tmp_path / "torchs"
    saved = in_store(fsdp_pool, s3, dcp_writer_jobs.save_both, url(KEY), str(torchs), by)
    assert_holds(fsdp_pool, s3, tmp_path / "ours", saved[0].whole)
    assert by_torch(fsdp_pool, tmp_path / "ours").losses == saved[0].losses
    assert differences(saved[0].whole, by_torch(fsdp_pool, tmp_path / "ours", 3).whole) == []
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert keys("") == sorted([f"{KEY}/mcore_rlhf.json", *(key for key in keys("") if "/.tx-" in key)])
    assert len(keys("")) == 1 + len(files)
    for path in torchs.glob("*.distcp") if by != "save" else ():  # there, two threads make two files
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes()
    loaded = run(fsdp_pool, dcp_writer_jobs.in_store, HOW.other(mesh=(3,)), s3.environment, dcp_jobs.load_any, url(KEY))
    assert differences(without_schedule(saved[0].whole), without_schedule(loaded[0].whole)) == []
    assert not verify(checkpoint_path(url(KEY)), ReadOptions(), Depth.DEEP).problems


def test_one_writer_saves_many_times(fsdp_pool: WorkerPool, s3: S3, tmp_path: Path) -> None:
    """Into one folder, which is replaced each time, with plans that torch keeps."""
    saved = in_store(fsdp_pool, s3, dcp_writer_jobs.save_many, url(KEY), 3)
    assert_holds(fsdp_pool, s3, tmp_path / "ours", saved[0][-1].whole)
    assert len(keys("")) == 4


@pytest.mark.parametrize("where", ["write", "plan"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_and_nothing_is_published(
    fsdp_pool: WorkerPool, s3: S3, tmp_path: Path, rank: int, where: str
) -> None:
    found = in_store(fsdp_pool, s3, dcp_writer_jobs.save_with_one_that_fails, url(KEY), rank, where)
    for said, left, _ in found:
        assert "No space left on device" in said
        assert where == "plan" or f"{url(KEY)}: not saved: rank {rank}: OSError" in said
        assert left == [".metadata", "__0_0.distcp", "__1_0.distcp", "mcore_rlhf.json"]
    assert_holds(fsdp_pool, s3, tmp_path / "first", found[0][2].whole)
    wanted = run(fsdp_pool, dcp_writer_jobs.trained, HOW, 2)[0].whole
    assert_holds(fsdp_pool, s3, tmp_path / "next", wanted, f"{KEY}-next")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_leaves_what_was_there(fsdp_pool: WorkerPool, s3: S3, tmp_path: Path, rank: int) -> None:
    with pytest.raises(WorkerError, match="died"):
        in_store(fsdp_pool, s3, dcp_writer_jobs.save_and_die, url(KEY), rank)
    wanted = run(fsdp_pool, dcp_writer_jobs.trained, HOW, 1)[0].whole
    assert_holds(fsdp_pool, s3, tmp_path / "first", wanted)
    saved = in_store(fsdp_pool, s3, dcp_writer_jobs.save_both, url("next"), str(tmp_path / "torchs"), "save")
    assert_holds(fsdp_pool, s3, tmp_path / "next", saved[0].whole, "next")
