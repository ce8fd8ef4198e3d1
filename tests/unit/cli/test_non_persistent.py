"""What Megatron keeps for a restart alone: a newer step in ``non_persistent/``, and what ranks keep on their own nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import GOLDENS, Cli

NEWER = GOLDENS.parent / "megatron_0_19" / "dist_tp2pp2_bf16_do_fullyreshardable"
"""Of iteration 6; the others here are of iteration 2."""


@pytest.fixture
def root(tp2pp2: Path, tmp_path: Path) -> Path:
    """A run's root with both."""
    shutil.copytree(tp2pp2, tmp_path / "run")
    shutil.copytree(NEWER, tmp_path / "run" / "non_persistent")
    return tmp_path / "run"


def test_a_newer_step_is_said_wherever_an_older_one_is_taken(cli: Cli, root: Path, tmp_path: Path) -> None:
    said = "non_persistent/ holds iteration 6, newer than iteration 2"
    inspected = cli("inspect", root, "--json").json
    assert [note for note in inspected["notes"] if note["text"].startswith(said)]
    assert said in cli("inspect", root).words()
    assert said in cli("convert", root, tmp_path / "out", "--tp", 1, "--no-fsync").words()
    listed = cli("steps", root)
    assert listed.code == 1
    assert "a step of Megatron-LM" in listed.words()
    assert "non_persistent/ holds iteration 6" in listed.words()
    assert f"give {root / 'non_persistent'}" in listed.words()
    (root / "global_step_2").mkdir()
    in_json = cli("steps", root, "--json")
    assert [step["step"] for step in in_json.json] == [2]
    assert "note: non_persistent/ holds iteration 6, newer than iteration 2" in in_json.stderr
    assert "iteration 6" in cli("inspect", root / "non_persistent").words()


@pytest.mark.parametrize("tracked", ["2", "release", "7", "no number", None])
def test_one_that_is_not_newer_or_not_there_is_nothing_to_say(cli: Cli, root: Path, tracked: str | None) -> None:
    tracker = root / "non_persistent" / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if tracked is not None:
        tracker.write_text(tracked)
    assert "non_persistent" not in cli("inspect", root).stdout


@pytest.mark.parametrize("given", ["", "session", "session/1"])
@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_local_checkpoints_are_named_as_what_they_are(cli: Cli, command: str, given: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = tmp_path / "local" / "session" / str(rank)
        folder.mkdir(parents=True)
        (folder / f"iter_0000010_{rank}_local.pt").write_bytes(b"of memory")
    more = (tmp_path / "out", "--to", "hf") if command == "convert" else ()
    outcome = cli(command, tmp_path / "local" / given, *more)
    assert outcome.code == 2
    for words in (
        "nvidia-resiliency-ext",
        "--non-persistent-ckpt-type local",
        "of iteration 10",
        "save a checkpoint that stays",
    ):
        assert words in outcome.stderr
    assert not (tmp_path / "out").exists()
