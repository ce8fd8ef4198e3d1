"""Commands that read a step while the run deletes it, saves it again, or lies on a disk that fails: none of that is damage."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.storage import manifest, patience
from tests.unit.manager.roots import make_step

from .conftest import GOLDENS, Cli


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "global_step_2"
    shutil.copytree(GOLDENS / "tp1_bf16_do", folder / "actor")
    adopt(folder)
    return folder


def meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have something happen between a look at the manifest and the first one at a file that it lists."""
    genuine, happened = manifest._check_file, list[bool]()

    def check(root: Any, name: str, *more: Any) -> None:
        if not happened:
            happened.append(True)
            action()
        genuine(root, name, *more)

    monkeypatch.setattr(manifest, "_check_file", check)


COMMANDS = [("verify",), ("verify", "--role", "actor"), ("inspect",), ("diff",)]


def words(command: tuple[str, ...], step: Path) -> list[object]:
    return [command[0], step, *([step] if command[0] == "diff" else []), *command[1:]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_step_that_is_deleted_meanwhile(
    cli: Cli, step: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    meanwhile(monkeypatch, lambda: shutil.rmtree(step))
    outcome = cli(*words(command, step))
    assert outcome.code == 2
    assert f"{step}: was deleted while it was read" in outcome.stderr
    assert "damaged" not in outcome.stderr + outcome.stdout


@pytest.mark.parametrize("slow", [False, True], ids=["", "seen between the renames"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_step_that_is_saved_again_meanwhile(
    cli: Cli, step: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], slow: bool
) -> None:
    """What is there now is sound, though not what the manifest that was read first says."""
    again, aside = step.parent / "again" / step.name, step.with_name(".global_step_2.old-1")
    shutil.copytree(step / "actor", again / "actor")
    adopt(again)
    (step / "more.txt").write_text("more")
    (step / "manifest.json").unlink()
    adopt(step)

    def replaced() -> None:
        step.rename(aside)
        if slow:
            monkeypatch.setattr(time, "sleep", lambda _: again.rename(step) if again.exists() else None)
        else:
            again.rename(step)
            shutil.rmtree(aside)

    meanwhile(monkeypatch, replaced)
    outcome = cli(*words(command, step))
    assert outcome.code == 0, outcome.stderr
    assert "damaged" not in outcome.stderr + outcome.stdout


def test_a_listing_looks_again_where_a_step_vanished(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saved step 2 after the folder was listed, and deleted step 1 before it was looked at."""
    make_step(tmp_path, 1)
    newer = make_step(tmp_path / "elsewhere", 2)

    def saved() -> None:
        newer.rename(tmp_path / "global_step_2")
        shutil.rmtree(tmp_path / "global_step_1")

    meanwhile(monkeypatch, saved)
    outcome = cli("steps", tmp_path, "--json")
    assert [(found["step"], found["state"]) for found in outcome.json] == [(2, "committed")]


def failing(monkeypatch: pytest.MonkeyPatch, under: Path, number: int = errno.EIO, times: int = 10**9) -> None:
    genuine, left = os.open, [times]

    def fail(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(str(under)) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return genuine(path, *args, **options)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(patience, "_PAUSES", (0.0, 0.0))


@pytest.mark.parametrize("under", ["manifest.json", "actor/iter_0000002/mp_rank_00/model_optim_rng.pt"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_disk_that_fails(
    cli: Cli, step: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], under: str
) -> None:
    with monkeypatch.context() as once:
        failing(once, step / under, times=2)
        assert cli(*words(command, step)).code == 0
    failing(monkeypatch, step / under)
    outcome = cli(*words(command, step))
    assert outcome.code == 2
    assert f"{step / under}: cannot read: Input/output error" in outcome.stderr + outcome.stdout
    assert "damaged" not in outcome.stderr + outcome.stdout


@pytest.mark.parametrize("command", ["verify", "inspect", "export"])
def test_an_older_step_is_not_taken_for_one_that_cannot_be_read(
    cli: Cli, step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    newer = make_step(step.parent, 9)
    failing(monkeypatch, newer, errno.EACCES)
    more = [tmp_path / "out", "--to", "hf"] if command == "export" else []
    outcome = cli("convert" if command == "export" else command, step.parent, *more)
    assert outcome.code == 2
    assert f"{newer}: cannot be read, and may be sound" in outcome.stderr
    assert "Permission denied" in outcome.stderr
    assert "--quarantine 9" in outcome.stderr


OF_A_ROOT = [
    ("verify",),
    ("inspect",),
    ("plan", "--to", "hf"),
    ("convert", "OUT", "--to", "hf"),
    ("diff", "OTHER"),
]


@pytest.mark.parametrize("command", OF_A_ROOT, ids=" ".join)
@pytest.mark.parametrize("named", ["the root", "the step"])
def test_an_older_step_is_not_taken_for_one_that_lies_aside(
    cli: Cli, step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], named: str
) -> None:
    """A run was killed while it saved step 2 again; or it is about to put the new one there."""
    monkeypatch.setattr(steps, "PAUSES", (0.0,))
    root, aside = step.parent, step.with_name(".global_step_2.old-1")
    make_step(root, 1)
    places = {"OUT": tmp_path / "out", "OTHER": shutil.copytree(step, tmp_path / "other" / step.name)}
    step.rename(aside)
    asked = [command[0], root if named == "the root" else step, *(places.get(word, word) for word in command[1:])]
    outcome = cli(*asked)
    assert outcome.code == 2
    assert f"{step}: lies aside, as .global_step_2.old-…: its replacement was interrupted" in outcome.stderr
    monkeypatch.setattr(time, "sleep", lambda _: aside.rename(step) if aside.exists() else None)
    if named == "the root":
        outcome = cli(*asked)
        assert outcome.code == 0, outcome.stderr
        assert "global_step_1" not in outcome.stdout


@pytest.mark.parametrize("name", [".global_step_1.partial-1", "global_step_1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_vanishes_beside_the_step_that_is_meant(
    cli: Cli, step: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    other, genuine = step.with_name(name), os.listdir
    other.mkdir()

    def removed(folder: Any = ".") -> list[str]:
        if Path(folder) == other and other.exists():
            other.rmdir()
        return genuine(folder)

    monkeypatch.setattr(os, "listdir", removed)
    outcome = cli(*words(command, step.parent))
    assert outcome.code == 0, outcome.stderr
    assert not other.exists()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_never_was_there_was_not_deleted(cli: Cli, step: Path, command: tuple[str, ...]) -> None:
    outcome = cli(*words(command, step.with_name("global_step_3")))
    assert outcome.code == 2
    assert "no such file or folder; did you mean 'global_step_2'?" in outcome.stderr


def test_prune_deletes_nothing_because_it_could_not_be_read(
    cli: Cli, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with ``--include-damaged``, and not what the rules keep while it could be read."""
    root = step.parent
    for number in (3, 4, 9):
        make_step(root, number)
    failing(monkeypatch, root / "global_step_3", errno.EIO)
    assert cli("prune", root, "--keep-last", 2, "--include-damaged").code == 0
    assert sorted(path.name for path in root.iterdir() if path.name.startswith("g")) == [
        "global_step_3", "global_step_4", "global_step_9",
    ]  # fmt: skip
    make_step(root, 1)
    failing(monkeypatch, root / "global_step_9", errno.EIO)
    outcome = cli("prune", root, "--keep-last", 1, "--include-damaged")
    assert outcome.code == 2
    assert "global_step_9: cannot be read, and may be sound" in outcome.stderr
    assert (root / "global_step_1").is_dir()


def test_steps_says_what_cannot_be_read(cli: Cli, step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, step, errno.EACCES)
    outcome = cli("steps", step.parent)
    assert outcome.code == 2
    assert "unreadable" in outcome.stdout
    assert "Permission denied" in outcome.stdout
