"""What several ranks load: the newest step that is sound, the same on all of them, or nothing; and nothing is changed in vain."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.demo.workers import WorkerPool
from tests.distributed import jobs
from tests.distributed.sharded_engine import ShardedEngine

Damage = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    pool.run(jobs.save_steps, root, 1, 2, world_size=3, timeout=60)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """Steps 1 and 2, saved by three ranks."""
    return Path(shutil.copytree(saved, tmp_path / "root"))


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def edit_manifest(folder: Path, **values: Any) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | values))


DAMAGE: dict[str, Damage] = {
    "a flipped byte of a model": lambda step, rng: flip(step / "actor" / "moments.pt", rng),
    "a flipped byte of the random states": lambda step, rng: flip(step / "rng" / "rng_state.pt", rng),
    "a flipped byte of a small text": lambda step, rng: flip(step / "actor" / "about.txt", rng),
    "a truncated file": lambda step, rng: os.truncate(step / "actor" / "weights.pt", 3000),
    "a missing file": lambda step, rng: (step / "actor" / "weights.pt").unlink(),
    "no manifest": lambda step, rng: (step / "manifest.json").unlink(),
    "a manifest cut off": lambda step, rng: os.truncate(step / "manifest.json", 100),
    "a newer manifest": lambda step, rng: edit_manifest(step, version=99),
    "another step's manifest": lambda step, rng: edit_manifest(step, step=1),
}
NOT_READ = {"a flipped byte of a small text"}


def values(size: int, seed: int) -> dict[str, list[float]]:
    engine = ShardedEngine(0, 1, jobs.NUMEL, seed)
    return {name: whole.tolist() for name, whole in engine.values.items()}


def joined(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [x for result in results for x in result["values"][name]] for name in results[0]["values"]}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_newest_step_is_skipped(pool: WorkerPool, root: Path, rng: random.Random, what: str) -> None:
    DAMAGE[what](root / "global_step_2", rng)
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    results = pool.run(jobs.load_and_tell, root, world_size=3, timeout=60)
    expected = 2 if what in NOT_READ else 1
    assert [result["step"] for result in results] == [expected] * 3
    assert joined(results) == values(3, expected)
    if expected == 1:
        skips = [line for line in results[0]["said"] if "event=skip" in line]
        assert len(skips) == 1
        assert "global_step_2 is not resumed from" in skips[0]
        assert len(skips[0].splitlines()[0]) > len("rank=0 step=2 event=skip: global_step_2 is not resumed from: ")


@pytest.mark.parametrize("what", [what for what in DAMAGE if what not in NOT_READ | {"no manifest"}])
def test_a_damaged_step_that_is_named_is_refused(pool: WorkerPool, root: Path, rng: random.Random, what: str) -> None:
    DAMAGE[what](root / "global_step_2", rng)
    for result in pool.run(jobs.load_and_tell, root, 2, world_size=3, timeout=60):
        assert result["step"] is None
        assert result["error"][0] in ("Corrupt", "Incomplete", "Untrusted", "Unsupported"), result["error"]
        assert "global_step_2" in result["error"][1]
        assert result["unchanged"]


def test_all_steps_are_damaged(pool: WorkerPool, root: Path, rng: random.Random) -> None:
    """Training is not quietly begun anew on top of what may be saved."""
    flip(root / "global_step_1" / "actor" / "weights.pt", rng)
    (root / "global_step_2" / "actor" / "weights.pt").unlink()
    for result in pool.run(jobs.load_and_tell, root, world_size=3, timeout=60):
        assert result["error"][0] == "NotACheckpoint"
        assert "no committed step that is intact" in result["error"][1]
        assert result["unchanged"]


def test_every_step_lacks_a_file(pool: WorkerPool, root: Path) -> None:
    for step in (1, 2):
        (root / f"global_step_{step}" / "actor" / "weights.pt").unlink()
    for result in pool.run(jobs.load_and_tell, root, world_size=2, timeout=60):
        assert result["error"][0] == "NotACheckpoint", (
            "as above: what is damaged may be mended, but not what is overwritten"
        )


@pytest.mark.parametrize("which", [7, "/nowhere/at/all"])
def test_a_step_that_does_not_exist(pool: WorkerPool, root: Path, which: int | str) -> None:
    for result in pool.run(jobs.load_and_tell, root, which, world_size=3, timeout=60):
        kind, text = result["error"]
        assert kind == "NotACheckpoint"
        assert "does not exist" in text
        assert "1, 2" in text, "the steps that are there are listed"
        assert result["unchanged"]


def test_a_model_of_another_shape(pool: WorkerPool, root: Path) -> None:
    for which in ("auto", 2):
        for result in pool.run(jobs.load_and_tell, root, which, numel=600, world_size=3, timeout=60):
            assert result["error"][0] == "LayoutMismatch"
            assert "(12000,)" in result["error"][1]
            assert "(600,)" in result["error"][1]
            assert result["unchanged"]


def test_the_same_layout_keeps_every_rank_s_random_numbers(pool: WorkerPool, tmp_path: Path) -> None:
    after = pool.run(jobs.save_steps, tmp_path, 1, world_size=3, timeout=60)
    again = pool.run(jobs.load_and_tell, tmp_path, world_size=3, timeout=60)
    assert [result["rng"] for result in again] == after
    assert len({tuple(result["rng"]) for result in again}) == 3, "ranks have random numbers of their own"
    assert any("random states of every rank" in line for line in again[0]["report"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_another_number_of_ranks(pool: WorkerPool, root: Path, size: int) -> None:
    results = pool.run(jobs.load_and_tell, root, world_size=size, timeout=60)
    assert joined(results) == values(size, 2)
    assert any("seeded from those of rank 0" in line for line in results[0]["report"])
    assert len({tuple(result["rng"]) for result in results}) == size
    again = pool.run(jobs.load_and_tell, root, world_size=size, timeout=60)
    assert [result["rng"] for result in again] == [result["rng"] for result in results], "derived, not drawn"


def test_another_number_of_ranks_refused(pool: WorkerPool, root: Path) -> None:
    for result in pool.run(jobs.load_and_tell, root, rng="refuse", world_size=2, timeout=60):
        assert result["error"][0] == "LayoutMismatch"
        assert "saved at actor S3 on 3 ranks, now actor S2 on 2" in result["error"][1]
        assert result["unchanged"]


def test_random_states_of_another_layout_ignored(pool: WorkerPool, root: Path) -> None:
    results = pool.run(jobs.load_and_tell, root, rng="ignore", world_size=2, timeout=60)
    assert joined(results) == values(2, 2)
    assert any("left as they are" in line for line in results[0]["report"])


def test_a_copy_under_another_name(pool: WorkerPool, root: Path) -> None:
    shutil.copytree(root / "global_step_2", root.parent / "best of all")
    results = pool.run(jobs.load_and_tell, root, str(root.parent / "best of all"), world_size=3, timeout=60)
    assert [result["step"] for result in results] == [2, 2, 2]
    assert torch.equal(torch.tensor(joined(results)["weights.pt"]), torch.tensor(values(3, 2)["weights.pt"]))


def test_ranks_of_a_host_share_what_they_may_hold_as_they_need_it(pool: WorkerPool, tmp_path: Path) -> None:
    """Two vectors of 36 MiB on three ranks, and 48 MiB more on the first: of 60 MiB it is given 36, and each other one 12."""
    mib = 1 << 20
    told = pool.run(jobs.save_in_waves, tmp_path, 60 * mib, 9 * mib, 6 * mib, world_size=3, timeout=120)
    assert [reserved // mib for reserved, _, _ in told] == [36, 12, 12]
    assert all(held == reserved and back for reserved, held, back in told)
