"""Missing, superfluous and misplaced folders and files, trackers, and targets that are in the way."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import (
    CheckpointError,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    StorageError,
    UsageError,
)
from mcore_rlhf.families.options import ReadOptions
from tests.helpers.conversions import GOLDENS, golden, options
from tests.helpers.damage import ITERATION, MODEL, OPTIMIZER, copied, snapshot
from tests.helpers.independent_reader import differences, read
from tests.unit.formats.refusal import refused

MANY, ONE = "tp2pp2dp2_bf16_do", "tp1_bf16_do"
TRACKER = "latest_checkpointed_iteration.txt"


def test_a_missing_rank_folder(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    shutil.rmtree(source / ITERATION / "mp_rank_01_000")
    refused(source, Incomplete, "mp_rank_01_000", "TP2×PP2", "missing")


def test_the_first_rank_folder_missing(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    shutil.rmtree(source / ITERATION / "mp_rank_00_000")
    refused(source, Incomplete, "mp_rank_00_000", "mp_rank_00_001")


def test_a_superfluous_rank_folder(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    shutil.copytree(source / ITERATION / "mp_rank_01_000", source / ITERATION / "mp_rank_02_000")
    refused(source, LayoutMismatch, "mp_rank_02_000", "not expected")


def test_folders_of_another_layout(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    (source / ITERATION / "mp_rank_01_001").rename(source / ITERATION / "mp_rank_02_000")
    refused(source, LayoutMismatch, "mp_rank_02_000", "mp_rank_01_001", "4 rank folders")


def test_missing_files_are_listed_together(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    for folder in ("mp_rank_00_001", "mp_rank_01_001"):
        (source / ITERATION / folder / MODEL).unlink()
    refused(source, Incomplete, "2 problems", "mp_rank_00_001", "mp_rank_01_001", MODEL)


def test_a_missing_optimizer_file(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    (source / ITERATION / "mp_rank_01_000" / OPTIMIZER).unlink()
    refused(source, Incomplete, "mp_rank_01_000", OPTIMIZER, "--no-optimizer")


def test_a_missing_optimizer_file_of_an_expert_rank(tmp_path: Path) -> None:
    source = copied("ep2dp2_moe_seq_bf16_do", tmp_path)
    (source / ITERATION / "mp_rank_00_001" / OPTIMIZER).unlink()
    refused(source, Incomplete, "mp_rank_00_001", OPTIMIZER)


def test_several_iterations_and_no_tracker(tmp_path: Path) -> None:
    source = copied(ONE, tmp_path)
    shutil.copytree(source / ITERATION, source / "iter_0000004")
    (source / TRACKER).unlink()
    refused(source, UsageError, "iter_0000002", "iter_0000004", "--step")
    target = tmp_path / "chosen"
    convert(source, target, replace(options(), read=ReadOptions(step=2)))
    assert (target / TRACKER).read_text() == "2"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("7", NotACheckpoint, ["iter_0000007", ITERATION]),
        ("soon", LayoutMismatch, ["soon", "--step"]),
        ("", LayoutMismatch, []),
    ],
)
def test_a_tracker_that_points_nowhere(
    tmp_path: Path, text: str, kind: type[CheckpointError], words: list[str]
) -> None:
    source = copied(ONE, tmp_path)
    (source / TRACKER).write_text(text)
    refused(source, kind, TRACKER, *words)


def test_a_folder_of_another_iteration(tmp_path: Path) -> None:
    source = copied(ONE, tmp_path)
    (source / ITERATION).rename(source / "iter_0000009")
    (source / TRACKER).write_text("9")
    refused(source, LayoutMismatch, "iter_0000009", "iteration 9", "iteration 2")


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    refused(copied(ONE, tmp_path), NotACheckpoint, "iter_0000009", "--step", read=ReadOptions(step=9))


def test_a_release_stays_one(tmp_path: Path) -> None:
    source = copied(ONE, tmp_path)
    (source / ITERATION).rename(source / "release")
    (source / TRACKER).write_text("release")
    target = tmp_path / "target"
    job = convert(source, target, options(tp=2))
    assert job.source.state.release
    assert (target / TRACKER).read_text() == "release"
    assert sorted(p.name for p in (target / "release").iterdir()) == ["mp_rank_00", "mp_rank_01"]
    assert differences(golden(ONE), read(target)) == []


def test_an_iteration_folder_can_be_given_itself(tmp_path: Path) -> None:
    source, target = copied(ONE, tmp_path), tmp_path / "target"
    convert(source / ITERATION, target, options(pp=2))
    assert differences(golden(ONE), read(target)) == []


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", NotACheckpoint, "no such file")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", NotACheckpoint, "found a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", NotACheckpoint, "empty")


def test_a_target_that_exists(tmp_path: Path) -> None:
    source, target = GOLDENS / ONE, tmp_path / "target"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    for overwrite in (False, True):  # a folder that is no checkpoint is never replaced
        with pytest.raises(StorageError, match=r"target") as caught:
            convert(source, target, replace(options(), overwrite=overwrite))
        assert caught.value.exit_code == 2
        assert snapshot(target).keys() == {"precious.txt"}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_checkpoint_is_replaced_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "target"
    convert(GOLDENS / ONE, target, options(tp=2))
    with pytest.raises(StorageError, match="--overwrite"):
        convert(GOLDENS / ONE, target, options(pp=2))
    convert(GOLDENS / ONE, target, replace(options(pp=2), overwrite=True))
    assert sorted(p.name for p in (target / ITERATION).iterdir()) == ["mp_rank_00_000", "mp_rank_00_001"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("target", ["source", "source/inside", "."])
def test_source_and_target_may_not_lie_in_one_another(tmp_path: Path, target: str) -> None:
    source = copied(ONE, tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / target, replace(options(), overwrite=True))
    assert caught.value.exit_code == 2
    assert snapshot(tmp_path) == before


class Interrupting:
    """Progress that is interrupted in the middle."""

    def stage(self, text: str, total_bytes: int) -> None:
        self.text = text

    def advance(self, nbytes: int) -> None:
        raise KeyboardInterrupt


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(GOLDENS / ONE, tmp_path / "target", options(tp=2), Interrupting())
    assert list(tmp_path.iterdir()) == []
