"""``doctor``: what it says against what the system itself says."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from mcore_rlhf.cli import doctor
from mcore_rlhf.installation import to_install

from .conftest import Cli

GOLDENS = Path(__file__).parents[2] / "goldens"


def test_versions_folder_and_extras(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("doctor", tmp_path, "--json")
    assert outcome.code == 0
    facts = outcome.json
    assert facts["versions"]["numpy"] == version("numpy")
    assert facts["crc32"]["bytes_per_second"] > 100e6
    expected = subprocess.run(
        ["stat", "-f", "-c", "%a %S", tmp_path], capture_output=True, text=True, check=True
    ).stdout
    blocks, block = map(int, expected.split())
    assert facts["folder"]["free"] == pytest.approx(blocks * block, rel=0.1, abs=1 << 30)
    assert facts["folder"]["locks"] == "hold"
    extras = {one["package"]: one for one in facts["extras"]}
    assert extras["torch"]["version"] == version("torch")
    assert not [one for one in extras.values() if one["fails"]], (
        "an engine cannot be imported as `make setup` leaves things"
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("findmnt"), reason="needs findmnt of util-linux")
def test_the_file_system_is_the_one_that_findmnt_names(cli: Cli, tmp_path: Path) -> None:
    for folder in (tmp_path, Path("/proc"), Path("/dev/shm")):
        told = subprocess.run(
            ["findmnt", "-n", "-o", "FSTYPE,TARGET", "-T", folder], capture_output=True, text=True, check=False
        )
        if told.returncode == 0:
            assert list(doctor._mounted(folder)[:2]) == told.stdout.splitlines()[-1].split()


@pytest.fixture
def unimported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the imports, which take seconds."""
    importing = doctor._importing
    monkeypatch.setattr(doctor, "_importing", lambda statement: importing("pass"))


def test_what_is_installed_and_cannot_be_imported_is_a_problem(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    (broken / "obstore").mkdir(parents=True)
    (broken / "obstore" / "__init__.py").write_text("from typing import nothing_of_the_kind")
    monkeypatch.syspath_prepend(broken)
    monkeypatch.setattr(doctor, "_EXTRAS", [one for one in doctor._EXTRAS if one.package == "obstore"])
    outcome = cli("doctor", tmp_path)
    assert outcome.code == 1
    assert "problem: obstore" in outcome.stdout
    assert "ImportError: cannot import name 'nothing_of_the_kind' from 'typing'" in outcome.stdout
    assert f"{version('obstore')}, cannot be imported" in outcome.stdout


def test_an_import_that_hangs_or_dies_without_a_word_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        doctor._outcome(doctor._importing("import os; os._exit(7)"), time.monotonic() + 60)
        == "its process ended with 7"
    )
    hanging = doctor._importing("import time; time.sleep(600)")
    assert "not done" in (doctor._outcome(hanging, time.monotonic()) or "")
    assert hanging.returncode


@pytest.mark.usefixtures("unimported")
def test_what_is_missing_says_what_it_would_bring(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "deepspeed" else known(name))
    text = cli("doctor", tmp_path).words()
    assert f"deepspeed missing: {to_install('deepspeed')} DeepSpeedEngine" in text


@pytest.mark.usefixtures("unimported")
def test_a_requirement_that_is_missing_is_a_problem(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "numpy" else known(name))
    outcome = cli("doctor", tmp_path)
    assert outcome.code == 1
    assert "problem: numpy is not installed" in outcome.stdout


@pytest.mark.usefixtures("unimported")
def test_locks_that_do_not_hold_and_folders_that_cannot_be_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(doctor.fcntl, "flock", lambda *_: None)
        assert "note: locks do not hold here" in cli("doctor", tmp_path).stdout
    if os.path.isdir("/proc"):
        outcome = cli("doctor", "/proc", "--json")
        assert outcome.code == 1
        assert "nothing can be written there" in outcome.json["problems"][0]
    assert cli("doctor", tmp_path / "none").code == 2


def test_a_run_in_the_folder(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its trainer would go on with, as ``will-resume`` has it; a folder without a run has none."""
    monkeypatch.setattr(doctor, "_extras", list)  # each is imported, which takes seconds
    root = tmp_path / "runs"
    shutil.copytree(GOLDENS / "transformers" / "checkpoint-2", root / "checkpoint-2")
    assert cli("doctor", root, "--json").json["run"]["resumes"]
    (root / "checkpoint-2" / "scheduler.pt").unlink()
    outcome = cli("doctor", root)
    assert outcome.code == 1
    assert "scheduler.pt is not there; nothing is said" in outcome.stdout
    assert f"problem: {root}: it resumes, and something is lost" in outcome.stdout
    assert cli("doctor", GOLDENS / "deepspeed" / "z2_bf16_ac_dp2", "--json").json["run"]["trainer"] == "DeepSpeed"
    assert cli("doctor", tmp_path, "--json").json["run"] is None
