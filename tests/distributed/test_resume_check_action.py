"""The GitHub Action's script as it stands, without GitHub: inputs from the environment, outputs into the files that it would name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.test_resume_check_pytest import TRAINER

PROJECT = Path(__file__).parents[2]
ACTION = PROJECT / ".github" / "actions" / "resume-check"
SCRIPT = ACTION / "resume-check.sh"


def run_action(
    project: Path, command: str, **inputs: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str], str]:
    """Run the script; also its outputs, and its summary."""
    (project / "train.py").write_text(TRAINER)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "INPUT_", "GITHUB_"))
    }
    environment |= {f"INPUT_{name.upper()}": value for name, value in {"command": command, **inputs}.items()}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1",
        "GITHUB_OUTPUT": str(project / "outputs"), "GITHUB_STEP_SUMMARY": str(project / "summary"),
    }  # fmt: skip
    done = subprocess.run(
        [str(SCRIPT)], cwd=project, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    told = (project / "outputs").read_text() if (project / "outputs").exists() else ""
    outputs = dict(line.split("=", 1) for line in told.splitlines())
    return done, outputs, (project / "summary").read_text() if (project / "summary").exists() else ""


def test_the_action_hands_every_input_to_the_script_and_the_script_reads_no_other() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    handed = dict(step["env"])
    assert handed == {
        f"INPUT_{name.upper().replace('-', '_')}": f"${{{{ inputs.{name} }}}}" for name in action["inputs"]
    }
    assert set(re.findall(r"INPUT_[A-Z_]+", SCRIPT.read_text(encoding="utf-8"))) == set(handed)
    for name, given in action["inputs"].items():
        if given.get("default"):
            assert f"INPUT_{name.upper().replace('-', '_')}:-{given['default']}}}" in SCRIPT.read_text(encoding="utf-8")
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.slow
def test_a_right_trainer_passes_and_everything_is_left_for_the_upload(tmp_path: Path) -> None:
    done, outputs, summary = run_action(tmp_path, "python train.py {dir} {steps} {metrics} 'none'", steps="2", more="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outputs == {"verdict": "exact", "folder": "resume-check"}
    assert "resume-check: exact, profile exact, steps 2 + 2" in summary
    assert json.loads((tmp_path / "resume-check/result.json").read_text())["passed"] is True
    assert json.loads((tmp_path / "resume-check/rank-0.json").read_text())["verdict"] == "exact"


@pytest.mark.slow
def test_a_wrong_trainer_fails_and_the_summary_names_what_is_off(tmp_path: Path) -> None:
    command = "python train.py {dir} {steps} {metrics} forgets-generator"
    done, outputs, summary = run_action(tmp_path, command, steps="2", more="3", folder="a b")
    assert done.returncode == 1
    assert outputs == {"verdict": "different", "folder": "a b"}
    assert re.search(r"first difference: metrics: step [34]/loss: \d", summary)
    assert summary in done.stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("  ", "INPUT_COMMAND is empty"),
        ("python 'train.py {dir} {steps}", "a quote is not closed"),
        ("python train.py {steps}", "the command has no {dir}"),
        ("no-such-program {dir} {steps} $(touch pwned) ; touch pwned", "there is no such program"),
    ],
)
def test_what_cannot_be_checked_is_said_and_no_shell_runs_it(tmp_path: Path, command: str, message: str) -> None:
    done, outputs, _ = run_action(tmp_path, command)
    assert done.returncode == 2
    assert message in done.stdout + done.stderr
    assert outputs.get("verdict", "error") == "error"
    assert not (tmp_path / "pwned").exists()
