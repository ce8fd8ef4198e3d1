"""The GRPO and PPO trainer, saved and resumed through the manager: the same run to the last bit, or on another layout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.demo.command import count_equal
from mcore_rlhf.demo.placed_state import assembled
from mcore_rlhf.demo.rl.metrics import read_metrics
from mcore_rlhf.demo.rl.options import Options, parse
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.manager.run import steps
from tests.reference import rl_runs
from tests.reference.rl_runs import Seen, numbers
from tests.reference.test_rl_training import LAYOUTS, SMALL

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TIMEOUT = 200.0
END = 4


def run(pool: WorkerPool, options: Options, world: int, look_at: int = -1) -> list[Seen]:
    return pool.run(rl_runs.train, options, look_at, world_size=world, timeout=TIMEOUT)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if LAYOUTS[name][1] > 2 else []) for name in LAYOUTS]
)
def test_a_resumed_run_is_the_uninterrupted_one(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    options, world = LAYOUTS[layout]
    options = replace(options, output_dir=tmp_path, metrics=tmp_path / "metrics.jsonl")
    whole = run(pool, replace(options, steps=END, metrics=tmp_path / "whole.jsonl"), world)
    saving = replace(options, save_interval=1, async_save=True)
    run(pool, saving, world)
    # from the newest step, and once more from the one before, which does step 2 again
    newest = run(pool, replace(saving, steps=END), world)
    again = run(pool, replace(saving, steps=END, resume="1"), world)
    assert (newest[0].steps[0], again[0].steps[0]) == (2, 1)
    assert all(seen.state == whole[0].state for seen in (*newest, *again))
    assert list(read_metrics(options.metrics).values()) == (tmp_path / "whole.jsonl").read_text().splitlines()  # type: ignore[arg-type]
    assert len(options.metrics.read_text().splitlines()) == 2 + 2 + 3  # type: ignore[union-attr]
    assert [step.step for step in steps.committed(options.root)] == [1, 2, 3, 4]


def test_one_random_number_too_many_is_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    options = replace(SMALL, save_interval=1, output_dir=tmp_path, metrics=tmp_path / "metrics.jsonl")
    run(pool, options, 1)
    pool.run(rl_runs.disturbed, replace(options, resume="1"), world_size=1, timeout=TIMEOUT)
    with pytest.raises(Corrupt, match=r"step 2 was repeated .*: loss, grad_norm, digest, optimizer_digest$"):
        read_metrics(tmp_path / "metrics.jsonl")


OTHER_LAYOUTS = {
    "grpo": (replace(SMALL, tp=2, layers=4), 2, [(dict(pp=2, vpp=2), 4), (dict(tp=2, pp=2), 4), (dict(), 1)]),
    "ppo": (replace(SMALL, algorithm="ppo", tp=2, pp=2), 4, [(dict(), 2), (dict(tp=4), 4)]),
}


@pytest.mark.parametrize("algorithm", OTHER_LAYOUTS)
def test_another_layout_goes_on_with_the_same_model(pool: WorkerPool, tmp_path: Path, algorithm: str) -> None:
    source, world, targets = OTHER_LAYOUTS[algorithm]
    source = replace(source, dropout=0.0, dtype="fp32", output_dir=tmp_path)
    run(pool, replace(source, save_interval=2), world)
    whole = run(pool, replace(source, steps=3, resume="none"), world, look_at=2)
    expected = assembled(piece for seen in whole for piece in seen.pieces)
    for degrees, ranks in targets:
        target = replace(source, tp=1, pp=1, steps=3, resume=str(source.root / "global_step_2"))
        found = run(pool, replace(target, **degrees), ranks, look_at=2)  # type: ignore[arg-type]
        tensors, equal = count_equal(expected, assembled(piece for seen in found for piece in seen.pieces))
        assert equal == tensors > 0, (degrees, equal, tensors)
        (line,), (last) = found[0].lines, whole[0].lines[-1]
        assert line["prompt_ids"] == last["prompt_ids"]
        assert (line["kl_coef"], line["lr"]) == (last["kl_coef"], last["lr"])
        for name, near in (("reward", 1e-9), ("loss", 1e-5), ("kl", 1e-5)):
            assert numbers([line], name) == pytest.approx(numbers([last], name), rel=near, abs=near), (degrees, name)


def test_a_signal_at_one_rank_saves_on_all_and_ends(pool: WorkerPool, tmp_path: Path) -> None:
    options = replace(
        SMALL, tp=2, steps=1000, save_interval=1000, output_dir=tmp_path, metrics=tmp_path / "metrics.jsonl"
    )
    sender = threading.Thread(target=interrupt, args=(pool, tmp_path / "metrics.jsonl"))
    sender.start()
    first, second = run(pool, options, 2)
    sender.join()
    stopped = first.lines[-1]["step"]
    assert first.lines == second.lines
    assert 2 <= stopped < 1000
    assert [step.step for step in steps.committed(options.root)] == [stopped]
    assert run(pool, replace(options, steps=stopped + 1), 2)[0].lines[0]["step"] == stopped + 1


def interrupt(pool: WorkerPool, metrics: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 2:
            os.kill(pool.pids[1], signal.SIGUSR1)
            return
        time.sleep(0.02)


def test_the_newest_steps_are_kept(pool: WorkerPool, tmp_path: Path) -> None:
    options = replace(SMALL, steps=5, save_interval=1, keep_last=2, output_dir=tmp_path)
    run(pool, options, 1)
    assert [step.step for step in steps.committed(options.root)] == [4, 5]


def test_a_configuration_decides_about_checkpoints(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    small = [
        "--prompts-per-step",
        "4",
        "--group-size",
        "4",
        "--tp",
        "1",
        "--steps",
        "5",
        "--save-interval",
        "1",
        "--keep-last",
        "2",
    ]
    options = parse(["--config", str(CONFIGS / "grpo_megatron.yaml"), *small])
    # the workers have the environment of before: what refers to it is filled in here
    (seen,) = pool.run(rl_runs.with_environment, {"RUN_DIR": str(tmp_path)}, options, world_size=1, timeout=TIMEOUT)
    assert seen.steps == [0, 1, 2, 3, 4, 5]
    kept = steps.committed(tmp_path / "grpo-1.5b-16x128" / "checkpoints")
    assert {4, 5} <= {step.step for step in kept} < {1, 2, 3, 4, 5}  # the last two, and the best two by reward
    assert all("reward" in step.metrics for step in kept)


def test_the_command_trains_and_resumes(pool: WorkerPool, tmp_path: Path) -> None:
    """The first time in a process of its own, then where Megatron is imported already."""
    words = ["--save-interval", "1", "--output-dir", str(tmp_path)]
    small = ["--prompts-per-step", "4", "--group-size", "4", "--metrics", str(tmp_path / "metrics.jsonl")]
    command = [sys.executable, "-m", "mcore_rlhf.demo.train", *words, *small, "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    ((code, said),) = pool.run(rl_runs.command, [*words, *small, "--steps", "2"], world_size=1, timeout=TIMEOUT)
    assert code == 0, said
    assert "resumed from global_step_1; next step 2" in said
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [1, 2]
    ((code, said),) = pool.run(rl_runs.command, [*words, "--resume", "9"], world_size=1, timeout=TIMEOUT)
    assert code == 2
    assert "global_step_9: does not exist" in said
    assert "Traceback" not in said
