"""The launch files for conversions by parts: each is run as the cluster would run it, or as near as that can be had here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.helpers.conversions import GOLDENS
from tests.helpers.forked_cli import forking
from tests.helpers.killed import PROJECT, content, run

LAUNCH = PROJECT / "tools" / "launch"
SOURCE = GOLDENS / "tp1_bf16_do"
SRUN = """#!/usr/bin/env bash
shift  # --kill-on-bad-exit=0
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_STEP_ID=0 SLURM_PROCID=$task "$@" & done
wait
"""
SCONTROL = """#!/usr/bin/env bash
echo "   Command={launch}/convert.sbatch x y"
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """An environment in which ``mcore-rlhf`` is this source, and SLURM's commands are there."""
    folder = tmp_path_factory.mktemp("bin")
    for name, text in {"srun": SRUN, "scontrol": SCONTROL.format(launch=LAUNCH)}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    with forking(folder, environment):
        yield environment


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whole") / "out"
    assert run("convert", SOURCE, target, "--tp", 2, "--no-fsync")[0] == 0
    return target


def do(*command: object, env: Mapping[str, str]) -> None:
    done = subprocess.run(list(map(str, command)), cwd=PROJECT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_slurm(commands: Mapping[str, str], whole: Path, tmp_path: Path) -> None:
    env = {**commands, "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "77"}
    shutil.copy(LAUNCH / "convert.sbatch", tmp_path / "spooled")  # SLURM runs a copy
    do("bash", tmp_path / "spooled", SOURCE, tmp_path / "out", "--tp", 2, "--no-fsync", env=env)
    assert content(tmp_path / "out") == content(whole)


def test_torchrun_with_another_number_of_processes_afterwards(
    commands: Mapping[str, str], whole: Path, tmp_path: Path
) -> None:
    options = (SOURCE, tmp_path / "out", "--tp", 2, "--no-fsync")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    script = LAUNCH / "convert_part.sh"
    do("bash", script, *options, env={**commands, "PARTS": "3", "RANK": "1", "WORLD_SIZE": "3"})
    do(*torchrun, "--nproc-per-node", 2, script, *options, env={**commands, "PARTS": "3"})
    do("mcore-rlhf", "convert", *options, "--finish", env=commands)
    assert content(tmp_path / "out") == content(whole)


def test_kubernetes(commands: Mapping[str, str], tmp_path: Path) -> None:
    parts, joining = yaml.safe_load_all((LAUNCH / "convert_job.yaml").read_text())
    for job in (parts, joining):
        assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = parts["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    where = {"SOURCE": str(SOURCE), "TARGET": str(tmp_path / "out")}
    for index in range(spec["completions"]):
        _run_container(spec, {**commands, **where, "JOB_COMPLETION_INDEX": str(index)})
    _run_container(joining["spec"], {**commands, **where})
    assert run("convert", SOURCE, tmp_path / "other", "--tp", 1, "--no-fsync")[0] == 0
    assert content(tmp_path / "out") == content(tmp_path / "other")


def _run_container(job: Mapping[str, object], env: Mapping[str, str]) -> None:
    """As the kubelet does, with a degree that the golden can have and fewer workers."""
    (container,) = job["template"]["spec"]["containers"]  # type: ignore[index]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}  # type: ignore[index]
    assert {one["name"] for one in container["env"]} == {"SOURCE", "TARGET"}
    (text,) = container["args"]
    do(*container["command"], text.replace("--tp 8", "--tp 1 --no-fsync"), env=env)
