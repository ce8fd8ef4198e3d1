"""Megatron-core, FSDP2, DeepSpeed and transformers' Trainer on a GPU, each without a stand-in, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.runs import listed_steps

PROJECT = Path(__file__).parents[2]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package.partition(".")[0]) is None, reason=f"{package} is not installed")


def started(module: str, *arguments: object, torchrun: bool = True) -> subprocess.CompletedProcess[str]:
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if torchrun else []
    command = [sys.executable, *how, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, cwd=PROJECT, env={**os.environ}, capture_output=True, text=True, timeout=280, check=False
    )


def job(module: str, name: str, folder: Path) -> Any:
    done = started(module, name, folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads((folder / f"{name}.json").read_text())


@needs("megatron.core")
def test_a_mixture_is_copied_behind_its_passes(tmp_path: Path) -> None:
    assert job("tests.gpu.megatron_job", "lazy", tmp_path) == {"wrong": []}


@needs("megatron.core")
@pytest.mark.parametrize("kind", ["offloaded", "half"])
def test_an_optimizer_on_the_cpu(tmp_path: Path, kind: str) -> None:
    found = job("tests.gpu.megatron_job", kind, tmp_path)
    assert found["differs"] == []
    assert found["lossless"]
    assert found["moved"] == (["cpu"] if kind == "offloaded" else ["cpu", "cuda"])
    saved, loaded = found["losses"]
    assert loaded == {step: loss for step, loss in saved.items() if int(step) > 2}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("fsdp2", "cuda"),
        pytest.param("zero-2", "cuda", marks=needs("deepspeed")),
        pytest.param("zero-3", "cuda", marks=needs("deepspeed")),
        pytest.param("zero-3 on the CPU", "cpu", marks=needs("deepspeed")),
    ],
)
def test_shards_are_copied_behind_passes_and_gone_on_with(tmp_path: Path, kind: str, where: str) -> None:
    found = job("tests.gpu.sharded_job", kind, tmp_path)
    assert found["resumed"] == found["went on"]
    assert len(set(found["states"])) == 1
    assert found["moved"] == [where]


@needs("transformers")
def test_transformers_trainer_is_killed_and_goes_on(tmp_path: Path) -> None:
    def run(name: str, folder: str) -> subprocess.CompletedProcess[str]:
        return started("tests.gpu.trainer_job", name, tmp_path / folder, torchrun=False)

    done = run("whole", "a")
    assert done.returncode == 0, done.stderr[-6000:]
    assert run("killed", "b").returncode == -signal.SIGKILL
    assert [step.step for step in listed_steps(tmp_path / "b") if step.state == "committed"] == [2]
    done = run("resumed", "b")
    assert done.returncode == 0, done.stderr[-6000:]
    whole = json.loads((tmp_path / "a-whole.json").read_text())
    assert json.loads((tmp_path / "b-resumed.json").read_text()) == whole[2:]


@pytest.mark.parametrize(("dtype", "profile"), [("float32", "fp32-reduction"), ("bfloat16", "bf16-reduction")])
def test_a_profile_has_room_for_kernels_that_add_in_any_order(tmp_path: Path, dtype: str, profile: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.noisy_job", dtype, "{dir}", "{steps}", "{metrics}", "{again}"]
    check = ["resume-check", "--steps", "3", "--more", "4", "--dir", str(tmp_path), "--profile", profile]
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rlhf", *check, "--", *command], cwd=PROJECT, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
