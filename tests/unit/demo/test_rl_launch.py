"""The launch scripts: they are sound shell, and start what there is."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "tools" / "launch"
SHELL = sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")])


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_the_shell_understands_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    calls = {"convert": "mcore-rlhf convert", "watch": "mcore-rlhf watch"}
    assert calls.get(re.split(r"[._]", script.name)[0], "-m mcore_rlhf.demo.train") in script.read_text()
    assert importlib.util.find_spec("mcore_rlhf.demo.train") is not None


def executed(script: str, folder: Path, arguments: list[str], **environment: str) -> list[str]:
    """The command line that a script ends in, told by stand-ins for the programs that it calls."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").write_text("#!/bin/bash\necho 0\n")
    (programs / "scontrol").write_text("#!/bin/bash\nprintf 'node-7\\nnode-8\\n'\n")
    for name in ("torchrun", "srun"):
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\n" "$MASTER_ADDR" "$MASTER_PORT" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "MASTER_ADDR": "", "MASTER_PORT": "", **environment}
    run = subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments], env=env, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


def test_one_node_passes_arguments_on_as_they_are(tmp_path: Path) -> None:
    words = executed("one_node.sh", tmp_path, ["--tp", "2", "--output-dir", "with space"])
    assert words[-6:] == ["-m", "mcore_rlhf.demo.train", "--tp", "2", "--output-dir", "with space"]
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert "SIGUSR1" in words[words.index("--signals-to-handle") + 1]


def test_many_nodes_meet_at_the_head(tmp_path: Path) -> None:
    words = executed("many_nodes.sh", tmp_path, [], NODES="4", HEAD="node-0")
    assert words[words.index("--nnodes") + 1] == "4"
    assert words[words.index("--rdzv-endpoint") + 1] == "node-0:29500"


def test_many_nodes_says_what_is_missing() -> None:
    script = str(SCRIPTS / "many_nodes.sh")
    run = subprocess.run(["bash", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert run.returncode != 0
    assert "NODES: number of machines" in run.stderr


def test_slurm_meets_on_the_first_node_at_a_port_of_the_job(tmp_path: Path) -> None:
    words = executed("slurm.sbatch", tmp_path, ["--tp", "8"], SLURM_JOB_NODELIST="node-[7-8]", SLURM_JOB_ID="123456")
    assert words[:2] == ["node-7", "23456"]
    assert words[-3:] == ["train", "--tp", "8"]
    assert "RANK=$SLURM_PROCID" in words[-4] or any("RANK=$SLURM_PROCID" in word for word in words)


def test_ray_hands_the_trainer_what_torchrun_would(tmp_path: Path) -> None:
    source = (SCRIPTS / "ray_cluster.py").read_text()
    names = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "mcore_rlhf.demo.train"} <= names
