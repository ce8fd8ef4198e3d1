"""The wheel, built, installed into an empty environment and tried there: what a user has who has no clone."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
GOLDENS = PROJECT / "tests" / "goldens" / "megatron"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_REQUIRE"))}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, PROJECT, cwd=folder)
    if built.returncode and "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("no package index to build from")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of an environment are that has nothing but the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    done = _run(folder / "bin" / "python", "-m", "pip", "install", "-q", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_it_holds_what_it_needs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "report/page.html", "report/page.css", "report/page.js", "models/meaning/declared.json"):
        assert f"mcore_rlhf/{name}" in names
    assert {f"mcore_rlhf/configs/{path.name}" for path in (PROJECT / "configs").glob("*.yaml")} <= set(names)
    assert {name.split("/")[0] for name in names} - {"mcore_rlhf"} == {f"{wheel.name.split('-py3')[0]}.dist-info"}


def test_it_works_where_nothing_else_is(bin_folder: Path, tmp_path: Path) -> None:
    cli, source = bin_folder / "mcore-rlhf", GOLDENS / "tp2pp2dp2_bf16_do"
    for command in (
        ["--version"],
        ["inspect", source],
        ["convert", source, tmp_path / "new", "--tp", 1, "--pp", 1, "--verify"],
        ["report", source, tmp_path / "new", "-o", tmp_path / "page.html"],
        ["configs", "show", "qwen2.5-7b-eval-tp1"],
    ):
        done = _run(cli, *command, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "page.html").stat().st_size > 20_000
    for script in ("reshape-megatron", "to-hf", "zero-to-fp32", "zero-to-universal"):
        assert _run(bin_folder / f"mcore-rlhf-{script}", "--help", cwd=tmp_path).returncode == 0
    torch = _run(bin_folder / "python", "-c", "import torch", cwd=tmp_path)
    assert "No module named 'torch'" in torch.stderr  # none of it needed torch
