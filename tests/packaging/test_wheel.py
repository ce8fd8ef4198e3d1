"""Wheel and sdist, built, installed into empty environments and tried there: what a user has who has no clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.distributed.test_resume_check_pytest import PLUGIN, TESTS, TRAINER, run_pytest

PROJECT = Path(__file__).resolve().parents[2]
GOLDENS = PROJECT / "tests" / "goldens" / "megatron"
URL = "https://code.example/people/mcore_rlhf"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _run(*command: object, cwd: Path, url: str = "") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_REQUIRE"))}
    clean |= {"MCORE_RLHF_URL": url} if url else {}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that can build."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    done = _run(folder / "bin" / "python", "-m", "pip", "install", "-q", "hatchling>=1.26", cwd=folder)
    if done.returncode and "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("no package index to build from")
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, built where the project's place is known."""
    folder = tmp_path_factory.mktemp("built")
    done = _run(tools, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder, cwd=PROJECT, url=URL)
    assert done.returncode == 0, done.stderr
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.fixture
def wheel(built: dict[str, Path]) -> Path:
    return built["wheel"]


def _interpreters() -> dict[str, str]:
    """The oldest and the newest that are supported, where they run, and the one that runs here."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for version in ("3.10", "3.13"):
        for name in (
            shutil.which(f"python{version}"),
            *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
        ):
            if name and _run(name, "-c", "import ensurepip, venv", cwd=PROJECT).returncode == 0:
                found.setdefault(version, name)
    return found


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["3.10", "3.11", "3.12", "3.13"])
def bin_folder(
    request: pytest.FixtureRequest, kind: str, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Where the commands of an environment are that has nothing but the package and what it asks for."""
    python = _interpreters().get(request.param)
    if python is None:
        pytest.skip(f"neither the interpreter that runs this, nor one to be found, is Python {request.param}")
    folder = tmp_path_factory.mktemp("empty")
    assert _run(python, "-m", "venv", folder, cwd=folder).returncode == 0
    done = _run(folder / "bin" / "python", "-m", "pip", "install", "-q", built[kind], cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_metadata_say_where_the_project_lives(built: dict[str, Path], tools: Path, tmp_path: Path) -> None:
    about = zipfile.ZipFile(built["wheel"]).read(f"{built['wheel'].name.split('-py3')[0]}.dist-info/METADATA").decode()
    urls = [line for line in about.splitlines() if line.startswith("Project-URL: ")]
    assert f"Project-URL: Homepage, {URL}" in urls
    assert {line.split(": ")[1].split(",")[0] for line in urls} >= {"Documentation", "Source", "Issues", "Changelog"}
    # An sdist keeps them; where nobody knows, and where the clone's own place is no address for others, there are none.
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for known, wanted in (("", True), (None, False)):
        if known is None:
            (unpacked / "PKG-INFO").unlink()
        done = _run(tools, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=unpacked)
        assert done.returncode == 0, done.stderr
        (again,) = (tmp_path / "again").glob("*.whl")
        assert (b"Project-URL: Homepage" in zipfile.ZipFile(again).read(about_in(again))) is wanted


def about_in(wheel: Path) -> str:
    return next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))


def test_an_sdist_has_what_a_clone_has(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    listed = _run("git", "ls-files", cwd=PROJECT)
    if listed.returncode:
        pytest.skip("this is no clone")
    assert set(listed.stdout.splitlines()) <= there


def test_it_holds_what_it_needs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    page = [f"report/{path.name}" for path in (PROJECT / "mcore_rlhf" / "report").glob("*.[!p]*")]
    assert {"report/page.html", "report/page.css", "report/page.js"} <= set(page)
    for name in ("py.typed", *page, "models/meaning/declared.json"):
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


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, in a folder; what it asks for is this interpreter's."""
    folder = tmp_path_factory.mktemp("installed")
    install = ("install", "-q", "--no-deps", "--no-compile", "--target", folder, built["wheel"])
    done = _run(sys.executable, "-m", "pip", *install, cwd=folder)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stderr
    return folder


_TRAINERS = {"vllm", "torchtitan", "accelerate", "trl", "verl", "nemo_rl", "lightning"}
"""Packages that there are seams for, and which are nobody's extra."""
_IMPORTED_AS = {"megatron_core": "megatron"}
_LOAD = """
import importlib.metadata, json, sys
folder, absent = sys.argv[1], json.loads(sys.argv[2])
for name in absent:
    assert name not in sys.modules, name
    sys.modules[name] = None  # as where it is not installed
sys.path.insert(0, folder)
import mcore_rlhf
assert mcore_rlhf.__file__.startswith(folder), mcore_rlhf.__file__
(ours,) = (one for one in importlib.metadata.distributions(path=[folder]) if one.name == "mcore_rlhf")
found = []
for entry in ours.entry_points:
    assert callable(loaded := entry.load()) or loaded.__name__ == entry.value, entry
    found.append([entry.group, entry.name, entry.value])
print(json.dumps(found))
"""


def _extras(folder: Path) -> set[str]:
    """What the package asks for in extras alone, as it is imported."""
    (about,) = folder.glob("mcore_rlhf-*.dist-info/METADATA")
    asked = [line.partition(": ")[2] for line in about.read_text().splitlines() if line.startswith("Requires-Dist: ")]
    names = {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in asked if "extra ==" in line}
    needed = {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in asked if "extra ==" not in line}
    assert {"torch", "megatron_core", "deepspeed", "transformers"} <= names
    return {_IMPORTED_AS.get(name, name) for name in names - needed} - {"mcore_rlhf"}


def test_every_entry_point_loads_and_the_package_needs_no_extra(installed: Path, tmp_path: Path) -> None:
    """Where nothing is that an extra would bring, and no trainer: vLLM loads the plugins of every package, whoever installed it."""
    absent = json.dumps(sorted(_extras(installed) | _TRAINERS))
    done = _run(sys.executable, "-c", _LOAD, installed, absent, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {(group, name, value) for group, name, value in json.loads(done.stdout)} == _declared()


def _declared() -> set[tuple[str, str, str]]:
    """The entry points of ``pyproject.toml``; the oldest Python has no reader of it."""
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    tables = re.findall(r'^\[project\.(scripts|entry-points\."([\w.]+)")\]\n((?:[\w-]+ = .*\n)+)', text, re.MULTILINE)
    assert text.count("\n[project.entry-points") + text.count("\n[project.scripts]") == len(tables) > 1
    return {
        (group or "console_scripts", name, value)
        for _, group, lines in tables
        for name, value in re.findall(r'^([\w-]+) = "(.*)"$', lines, re.MULTILINE)
    }


def test_every_command_is_there(installed: Path, tmp_path: Path) -> None:
    commands = {name for group, name, _ in _declared() if group == "console_scripts"}
    assert commands == {path.name for path in (installed / "bin").iterdir()}
    for name in sorted(commands):
        code = f"import runpy, sys; sys.path.insert(0, {str(installed)!r}); sys.argv = [{name!r}, '--help']; "
        done = _run(
            sys.executable,
            "-c",
            f"{code}runpy.run_path({str(installed / 'bin' / name)!r}, run_name='__main__')",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout or "usage" in done.stdout


def test_the_fixture_of_resume_check_is_there_for_any_test(wheel: Path, tmp_path: Path) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    project.mkdir()
    (project / "train.py").write_text(TRAINER)
    (project / "test_resume.py").write_text(TESTS)
    assert (
        run_pytest(project, "--fixtures", path=site).stdout.count("resume_check -- ") == 1
    )  # found by its entry point
    assert (
        run_pytest(project, "-p", PLUGIN, "--fixtures", path=site).stdout.count("resume_check -- ") == 1
    )  # and named too
    done = run_pytest(project, "-k", "good or generator", path=site)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"first difference: metrics: step [34]/loss", done.stdout)
