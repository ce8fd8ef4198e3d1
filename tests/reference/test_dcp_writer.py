"""Ranks of real FSDP2 save through ``mcore_rlhf.dcp.Writer``: torch's own reader, which knows nothing of it, says what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.reference import dcp_jobs, dcp_writer_jobs
from tests.reference.dcp_jobs import Looked
from tests.reference.dcp_writer_jobs import STYLE
from tests.reference.fsdp_jobs import Whole, differences
from tests.reference.fsdp_models import Wrapped

TIMEOUT = 100.0
HOW = Wrapped()


def run(pool: WorkerPool, job: Any, how: Wrapped, *args: object) -> list[Any]:
    return pool.run(job, how, *args, world_size=how.world, timeout=TIMEOUT)


def by_torch(pool: WorkerPool, folder: Path, world: int = 2) -> Looked:
    """What ``dcp.load`` reads into a model of other weights."""
    found: Looked = run(pool, dcp_jobs.load_and_go_on, HOW.other(mesh=(world,)), str(folder), STYLE)[0]
    return found


def assert_holds(pool: WorkerPool, folder: Path, wanted: Whole) -> None:
    """Torch loads those values, and the manifest says of every file what it is."""
    assert differences(wanted, by_torch(pool, folder).whole) == []
    manifest = Manifest.read(folder / "mcore_rlhf.json")
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "mcore_rlhf.json"}
    assert not check(folder, manifest)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("by", ["save", "thread", "process"])
def test_torch_reads_what_its_own_writer_would_have_written(fsdp_pool: WorkerPool, tmp_path: Path, by: str) -> None:
    ours, torchs = tmp_path / "runs" / "ours", tmp_path / "torchs"
    saved = run(fsdp_pool, dcp_writer_jobs.save_both, HOW, str(ours), str(torchs), by)
    files = {path.name for path in torchs.iterdir()}
    assert {path.name for path in ours.iterdir()} == files | {
        "mcore_rlhf.json"
    } or by == "save"  # two threads, two files
    for name in (name for name in files if name.endswith(".distcp") and by != "save"):
        assert (ours / name).read_bytes() == (torchs / name).read_bytes()
    assert left_in(ours.parent) == []
    assert_holds(fsdp_pool, ours, saved[0].whole)
    assert by_torch(fsdp_pool, ours).losses == saved[0].losses
    assert differences(saved[0].whole, by_torch(fsdp_pool, ours, 3).whole) == []
    verdict = verify(ours, ReadOptions(), Depth.DEEP)
    assert not verdict.problems
    convert(ours, tmp_path / "there", ConvertOptions(to="universal", fsync=False, workers=1))
    convert(tmp_path / "there", tmp_path / "back", ConvertOptions(to="dcp", fsync=False, workers=1))
    assert differences(saved[0].whole, by_torch(fsdp_pool, tmp_path / "back" / "dcp_checkpoint").whole) == []


def test_a_byte_that_flips_is_found(fsdp_pool: WorkerPool, tmp_path: Path, rng: Any) -> None:
    folder = tmp_path / "ours"
    run(fsdp_pool, dcp_writer_jobs.save_both, HOW, str(folder), str(tmp_path / "torchs"), "save")
    path = rng.choice(
        [path for path in sorted(folder.iterdir()) if path.stat().st_size and path.name != "mcore_rlhf.json"]
    )
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    try:
        problems = verify(folder, ReadOptions(), Depth.FULL).problems
    except CheckpointError:
        return
    assert problems, path.name


def test_one_writer_saves_many_times(fsdp_pool: WorkerPool, tmp_path: Path) -> None:
    """Into one folder, which is replaced each time, with plans that torch keeps."""
    saved = run(fsdp_pool, dcp_writer_jobs.save_many, HOW, str(tmp_path / "ours"), 3)
    assert_holds(fsdp_pool, tmp_path / "ours", saved[0][-1].whole)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("where", ["write", "plan"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_and_nothing_is_published(
    fsdp_pool: WorkerPool, tmp_path: Path, rank: int, where: str
) -> None:
    folder = tmp_path / "ours"
    found = run(fsdp_pool, dcp_writer_jobs.save_with_one_that_fails, HOW, str(folder), rank, where)
    for said, left, _ in found:
        assert "No space left on device" in said
        assert where == "plan" or f"{folder}: not saved: rank {rank}: OSError" in said
        assert left == ["ours"]
    assert_holds(fsdp_pool, folder, found[0][2].whole)
    wanted = run(fsdp_pool, dcp_writer_jobs.trained, HOW, 2)[0].whole
    assert_holds(fsdp_pool, tmp_path / "ours-next", wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_leaves_what_was_there(fsdp_pool: WorkerPool, tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "ours"
    with pytest.raises(WorkerError, match="died"):
        run(fsdp_pool, dcp_writer_jobs.save_and_die, HOW, str(folder), rank)
    assert left_in(tmp_path) or rank == 1  # the coordinating rank, where it lives, hears of it and cleans up
    assert_holds(fsdp_pool, folder, run(fsdp_pool, dcp_writer_jobs.trained, HOW, 1)[0].whole)
    run(fsdp_pool, dcp_writer_jobs.save_both, HOW, str(tmp_path / "next"), str(tmp_path / "torchs"), "save")
    assert left_in(tmp_path) == []
