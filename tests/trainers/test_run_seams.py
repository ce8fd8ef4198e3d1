"""verl, NeMo-RL and Megatron-Bridge save and resume by their own code with our commit: killed, damaged, gone on with, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.runs import listed_steps
from tests.helpers.damage import flip_a_bit
from tests.trainers.lab import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
VERL = {"MCORE_RLHF_VERL": "1", "VERL_USE_EXTERNAL_MODULES": "mcore_rlhf.integrations.verl_trainer"}


def run(
    trainers: Path, release: str, module: str, job: str, folder: Path, ranks: int = 1, **env: str
) -> tuple[int, Any, str]:
    """The first rank's exit status, what it saw, and what was said; where it dies, the others are ended."""
    found = trainers / release
    if not found.is_dir():
        pytest.skip(f"{release}: its repository could not be fetched")
    path = os.pathsep.join(map(str, [PROJECT, found, found / "src", trainers / "needs"]))
    result = folder.with_name(f"{folder.name}-{job}.json")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, job, str(folder), str(result)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(ranks), **env},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = started[0].communicate(timeout=200)[0]
    finally:
        for one in started:
            one.kill()
            one.wait()
    return started[0].returncode, json.loads(result.read_text()) if result.is_file() else None, said


def states(root: Path) -> dict[int, str]:
    return {step.step: step.state for step in listed_steps(root)}


@pytest.mark.parametrize("release", ["verl-0.9.1", "verl-0.7.0"])
def test_verl(trainers: Path, tmp_path: Path, release: str) -> None:
    def verl(job: str, folder: Path) -> tuple[int, Any, str]:
        return run(trainers, release, "tests.trainers.verl_seam", job, folder, **VERL)

    status, alone, said = verl("alone", tmp_path / "a")
    assert status == 0, said[-3000:]
    assert states(tmp_path / "a") == {4: "committed", 6: "committed"}, "max_actor_ckpt_to_keep is 2"
    assert verl("killed", tmp_path / "b")[0] == -9
    assert {number: state for number, state in states(tmp_path / "b").items() if state == "committed"} == {
        2: "committed"
    }
    tracker = tmp_path / "b" / "latest_checkpointed_iteration.txt"
    tracker.unlink()  # as if the kill had come before it was laid
    status, resumed, said = verl("resumed", tmp_path / "b")
    assert resumed == alone[2:], said[-3000:]
    assert tracker.read_text() == "6"
    flip_a_bit(tmp_path / "b" / "global_step_6" / "actor" / "model_world_size_1_rank_0.pt")
    status, resumed, said = verl("again", tmp_path / "b")
    assert resumed == alone[4:], said[-3000:]
    assert states(tmp_path / "b") == {4: "committed", 6: "committed"}


def test_verl_refuses_what_cannot_be_whole(trainers: Path, tmp_path: Path) -> None:
    status, _, said = run(trainers, "verl-0.9.1", "tests.trainers.verl_seam", "refused", tmp_path / "a", **VERL)
    assert status != 0
    for name in ("default_hdfs_dir", "del_local_ckpt_after_load", "async_save"):
        assert name in said
    assert not (tmp_path / "a").exists()


def test_verl_refuses_a_trainer_that_saves_past_us(trainers: Path, tmp_path: Path) -> None:
    """verl's fully asynchronous trainer has a ``_save_checkpoint`` of its own, and was never committed."""
    status, _, said = run(trainers, "verl-0.9.1", "tests.trainers.verl_seam", "of another save", tmp_path / "a", **VERL)
    assert status == 1
    assert "FullyAsyncTrainer: has _save_checkpoint of its own, which does not call verl's" in said.splitlines()[-2]


def test_nemo_rl(trainers: Path, tmp_path: Path) -> None:
    def nemo(job: str) -> tuple[int, Any, str]:
        return run(trainers, "NeMo-RL-7ea279a", "tests.trainers.nemo_seam", job, tmp_path / "run")

    assert nemo("killed")[0] == -9
    assert [name for name, state in states(tmp_path / "run").items() if state == "committed"] == [1]
    status, seen, said = nemo("resumed")
    assert (status, seen) == (0, ["step_1", "step_4"]), said[-3000:]
    assert states(tmp_path / "run") == {1: "committed", 2: "committed", 4: "committed"}, (
        "keep_top_k is 2, and the newest"
    )
    flip_a_bit(tmp_path / "run" / "step_4" / "policy" / "weights" / "model.pt")
    status, seen, said = nemo("again")
    assert (status, seen) == (0, ["step_2", "step_5"]), said[-3000:]
    assert "step_4 is not resumed from: damaged" in (tmp_path / "run" / "events.jsonl").read_text()


def test_megatron_bridge(trainers: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks, the distributed optimizer between them."""

    def bridge(job: str, name: str) -> tuple[int, Any, str]:
        return run(trainers, "Megatron-Bridge-067f987", "tests.trainers.bridge_seam", job, tmp_path / name, ranks=2)

    status, alone, said = bridge("alone", "a")
    assert status == 0, said[-3000:]
    assert states(tmp_path / "a") == {4: "committed", 6: "committed"}, "most_recent_k is 2"
    assert bridge("killed", "b")[0] == -9
    committed = [number for number, state in states(tmp_path / "b").items() if state == "committed"]
    assert committed == [2]
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "2"
    status, resumed, said = bridge("resumed", "b")
    assert resumed == alone[2:], said[-3000:]
    flip_a_bit(next((tmp_path / "b" / "iter_0000006").glob("__0_0.distcp")))
    (tmp_path / "b" / "latest_train_state.pt").unlink()
    status, resumed, said = bridge("again", "b")
    assert resumed == alone[4:], said[-3000:]
    assert "iter_0000006 is not resumed from: damaged" in (tmp_path / "b" / "events.jsonl").read_text()


def test_megatron_bridge_whose_save_fails(trainers: Path, tmp_path: Path) -> None:
    """Rank 0 fails in the middle: it says so, the other does not wait for ever, and nothing is published."""
    status, _, said = run(
        trainers, "Megatron-Bridge-067f987", "tests.trainers.bridge_seam", "fails", tmp_path / "a", ranks=2
    )
    assert status == 1
    assert "CUDA error: an illegal memory access was encountered" in said
    assert not states(tmp_path / "a")
    assert not list((tmp_path / "a").glob("iter_*"))


@pytest.mark.parametrize(
    ("seam", "release"),
    [
        ("verl", "verl-0.9.1"), ("nemo", "NeMo-RL-7ea279a"), ("bridge", "Megatron-Bridge-067f987"),
        ("titan", "torchtitan-0.3.0"), ("lightning", "lightning-2.6.6"),
    ],
)  # fmt: skip
def test_killed_at_random(trainers: Path, tmp_path: Path, seam: str, release: str) -> None:
    """See ``seam_kills``; ``SEAM_KILLS`` times, 4 unless more are asked for."""
    if not (trainers / release).is_dir():
        pytest.skip(f"{release}: its repository could not be fetched")
    path = os.pathsep.join(map(str, [PROJECT, trainers / release, trainers / release / "src", trainers / "needs"]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainers.seam_kills", seam, os.environ.get("SEAM_KILLS", "4"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(VERL if seam == "verl" else {})},
        cwd=PROJECT, capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    print(done.stdout)
