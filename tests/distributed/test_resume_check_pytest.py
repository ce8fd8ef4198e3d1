"""The pytest plugin over ``resume-check``: in a pytest of its own, on a user's test file; ``tests/packaging`` runs it from a wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PLUGIN = "mcore_rlhf.integrations.pytest_resume"

TRAINER = """
import json, random, sys, time
import numpy, torch
from mcore_rlhf import CheckpointManager, EverySteps, ManagerOptions, TorchEngine

folder, last, metrics, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
options = ManagerOptions(save=EverySteps(1), fsync=False)
with CheckpointManager(folder, {"actor": TorchEngine(model, optimizer)}, options=options) as manager:
    resumed = manager.load()
    step = resumed.step if resumed else 0
    if resumed and fault == "forgets-generator":
        torch.manual_seed(0)
    if resumed and fault == "skips-step":
        step += 1
    while step < last:
        step += 1
        time.sleep(0.2)
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if fault in ("noise", "skips-step"):
            noise = random.SystemRandom()
            for parameter in model.parameters():
                parameter.grad *= 1 + noise.uniform(-1e-3, 1e-3)
        optimizer.step()
        manager.maybe_save(step)
        with open(metrics, "a") as lines:
            print(json.dumps({"step": step, "loss": loss.item()}), file=lines, flush=True)
"""

TESTS = """
import sys
COMMAND = [sys.executable, "train.py", "{dir}", "{steps}", "{metrics}"]

def test_good(resume_check):
    outcome = resume_check([*COMMAND, "none"], steps=2, more=2)
    assert outcome.verdict == "exact"

def test_made_by_a_function(resume_check):
    made = lambda dir, steps, metrics: [sys.executable, "train.py", dir, steps, metrics, "noise"]
    assert resume_check(made, steps=2, more=2, profile="bf16-reduction").verdict == "within"

def test_forgets_its_generator(resume_check):
    resume_check([*COMMAND, "forgets-generator"], steps=2, more=3)

def test_skips_a_step(resume_check):
    resume_check([*COMMAND, "skips-step"], steps=2, more=3, profile="bf16-reduction")

def test_is_no_list(resume_check):
    resume_check("python train.py {dir} {steps}")

def test_makes_none(resume_check):
    resume_check(lambda dir: None)

def test_names_no_profile(resume_check):
    resume_check([*COMMAND, "none"], profile="bf16-reductions")
"""


def run_pytest(folder: Path, *options: str, path: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(path), "COLUMNS": "200"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(folder / "tmp"),
        *options,
    ]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project: a trainer and tests of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINER)
    (folder / "test_resume.py").write_text(TESTS)
    return folder


@pytest.mark.slow
def test_right_trainers_pass_and_wrong_ones_fail_by_the_name_and_step_of_what_is_off(project: Path) -> None:
    done = run_pytest(project, "-p", PLUGIN)
    out = done.stdout
    assert done.returncode == 1, out + done.stderr
    assert "5 failed, 2 passed" in out
    failures = {part.partition(" ")[0]: part for part in out.split("_ test_")[1:]}
    forgot, skipped = failures["forgets_its_generator"], failures["skips_a_step"]
    assert "DIFFERENT: the resumed run is not the uninterrupted one" in forgot
    assert re.search(r"first difference: metrics: step [34]/loss: run A has \d\.", forgot)
    assert "profile exact" in forgot
    assert re.search(r"first difference: metrics: step [45]", skipped)
    assert "profile bf16-reduction" in skipped
    assert "expected a list of texts, found 'python train.py {dir} {steps}'" in failures["is_no_list"]
    assert "expected a list of texts, found None" in failures["makes_none"]
    assert "expected one of exact, fp32-reduction, bf16-reduction, loose" in failures["names_no_profile"]
    assert "Traceback" not in out
    (rank,) = (project / "tmp").glob("resume-check2/rank-0.json")
    first = json.loads(rank.read_text())["runs"][0]["first_difference"]
    assert first["where"] == "metrics"
    assert first["key"] in ("step 3/loss", "step 4/loss")
    assert not list(
        (project / "tmp").glob("resume-check0/A")
    )  # what passed leaves logs and metrics, and no checkpoints
    assert list((project / "tmp").glob("resume-check0/A.log"))


def test_loading_the_plugin_imports_nothing_that_takes_time(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing():\n"
        "    heavy = {'torch', 'numpy', 'click', 'yaml', 'mcore_rlhf.manager', 'mcore_rlhf.storage', 'mcore_rlhf.errors'}\n"
        "    assert 'mcore_rlhf.integrations.pytest_resume' in sys.modules\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path, "-p", PLUGIN, "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
