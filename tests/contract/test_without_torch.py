"""Reading, planning, converting, verifying and comparing need no torch, and installing what does them brings none."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mcore_rlhf.installation import to_install
from tests.helpers.without_torch import commands

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("pairs", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_every_command_where_torch_cannot_be_imported(tmp_path: Path, pairs: str) -> None:
    code = [sys.executable, "-m", "tests.helpers.without_torch", str(tmp_path), pairs]
    done = subprocess.run(code, cwd=PROJECT, capture_output=True, text=True, timeout=280)
    *failed, last = done.stdout.splitlines()
    merging = [line for line in failed if line.startswith("merging exits with 2: ")]
    assert merging, done.stdout[-3000:] + done.stderr[-3000:]
    assert "torch, which is not installed here" in done.stdout
    assert f"Install it with: {to_install('torch')}" in done.stdout
    assert not [line for line in failed if line.startswith("exits with")], done.stdout[-3000:]
    assert last == f"{len(list(commands(tmp_path, pairs == 'few')))} commands; torch: False"


def requirements(extra: str = "") -> set[str]:
    """The packages that ``pip install mcore_rlhf[extra]`` brings: those of pyproject.toml, and what they ask for in their turn."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo = [Requirement(text) for text in project["dependencies"]]
    todo += [Requirement(text) for text in project["optional-dependencies"].get(extra, [])]
    found: set[str] = set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):  # not installed here
            asked = map(Requirement, distribution(name).requires or [])
            todo += [
                r for r in asked if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *one.extras))
            ]
    return found


def test_the_offline_tool_is_installed_without_torch() -> None:
    found = requirements()
    assert {"numpy", "ml-dtypes", "click", "safetensors"} <= found
    assert not {name for name in found if name.startswith(("torch", "nvidia", "triton", "megatron", "deepspeed"))}


@pytest.mark.parametrize("extra", ["torch", "megatron", "deepspeed", "hf"])
def test_what_trains_is_installed_with_torch(extra: str) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {Requirement(text).name for text in project["optional-dependencies"][extra]}
    assert "torch" in named or "mcore_rlhf" in named
    assert all("mcore_rlhf[torch]" in project["optional-dependencies"][extra] for _ in named if "torch" not in named)


def test_a_name_that_needs_torch_says_how_to_get_it() -> None:
    code = """
import sys
from tests.helpers.without_torch import NoTorch
sys.meta_path.insert(0, NoTorch())
import mcore_rlhf
mcore_rlhf.convert_checkpoint, mcore_rlhf.open_checkpoint, mcore_rlhf.verify_checkpoint, mcore_rlhf.ReadOptions
try:
    mcore_rlhf.CheckpointManager
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout == (
        f"mcore_rlhf.CheckpointManager needs torch, which is not installed here; install it with: {to_install('torch')}\n"
    ), done.stderr
