"""``tools/zero_to_universal.py``, and universal checkpoints that are put into a run."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mcore_rlhf.convert as converting
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.damage import snapshot, truncate

PROJECT = Path(__file__).resolve().parents[3]
GOLDENS = PROJECT / "tests" / "goldens" / "deepspeed"
ACTOR, CRITIC = "z2_bf16_ac_dp2", "z3_bf16_frozen_dp2"
OPTIONS = ConvertOptions(to="universal", fsync=False)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "zero_to_universal", PROJECT / "mcore_rlhf" / "cli" / "tools" / "zero_to_universal.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(name: str, folder: Path) -> Path:
    """A run as DeepSpeed leaves it."""
    shutil.copytree(GOLDENS / name / "step3", folder / "step3")
    shutil.copy(GOLDENS / name / "latest", folder / "latest")
    return folder


def _is_whole(folder: Path) -> bool:
    return verify(folder, ReadOptions(), Depth.DEEP).intact


def test_one_run(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(CRITIC, tmp_path / "run")
    assert tool.main([str(run), "--no_fsync"]) == 0
    assert (run / "latest_universal").read_text() == "step3_uni"
    assert (run / "latest").read_text().strip() == "step3"
    assert sorted(path.name for path in run.iterdir()) == ["latest", "latest_universal", "step3", "step3_uni"]
    assert _is_whole(run / "step3_uni")
    said = capsys.readouterr().out
    assert "17 parameters; 17 frozen ones and buffers" in said
    assert f"written: {run / 'step3_uni'}" in said


def test_openrlhfs_directories(tool: ModuleType, tmp_path: Path) -> None:
    for role, name in (("_actor", ACTOR), ("_critic", CRITIC)):
        _run(name, tmp_path / "ckpt" / role)
    assert tool.main([str(tmp_path / "ckpt"), "--no_fsync"]) == 0
    for role, trained in (("_actor", 50), ("_critic", 17)):
        folder = tmp_path / "ckpt" / role
        assert (folder / "latest_universal").read_text() == "step3_uni"
        source = open_checkpoint(folder / "step3_uni", ReadOptions())
        assert sum(spec.trainable for spec in source.model.params) == trained


def test_no_tracker_moves_where_the_critic_fails(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Actor and critic go on from one step, or not at all."""
    for role, name in (("_actor", ACTOR), ("_critic", CRITIC)):
        _run(name, tmp_path / "ckpt" / role)
        (tmp_path / "ckpt" / role / "latest_universal").write_text("step1_uni")
    broken = next((tmp_path / "ckpt" / "_critic" / "step3").glob("*_optim_states.pt"))
    truncate(broken, 0.5)
    assert tool.main([str(tmp_path / "ckpt"), "--no_fsync"]) == 1
    assert broken.name in capsys.readouterr().err
    for role in ("_actor", "_critic"):
        assert (tmp_path / "ckpt" / role / "latest_universal").read_text() == "step1_uni"
    assert not (tmp_path / "ckpt" / "_critic" / "step3_uni").exists()


def test_deepspeeds_own_flags(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(ACTOR, tmp_path / "run")
    flags = [
        "--num_extract_workers",
        "2",
        "--num_merge_workers",
        "2",
        "--keep_temp_folder",
        "--no_strict",
        "--inject_missing_state",
    ]
    made = tmp_path / "elsewhere" / "any_name"
    assert tool.main(["--input_folder", str(run / "step3"), "--output_folder", str(made), *flags]) == 0
    assert sorted(path.name for path in made.iterdir()) == [
        "mcore_rlhf.json", "mp_rank_00_model_states.pt", "zero", "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ]  # fmt: skip
    assert not (run / "latest_universal").exists()  # as ds_to_universal
    said = capsys.readouterr().out
    assert all(
        f"--{name} is ignored" in said for name in ("num_extract_workers", "keep_temp_folder", "inject_missing_state")
    )
    theirs, ours = GOLDENS / ACTOR / "step3_uni" / "zero", made / "zero"
    name = "critic.value_head.bias/exp_avg.pt"
    assert torch.equal(
        torch.load(theirs / name, weights_only=True)["param"], torch.load(ours / name, weights_only=True)["param"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either one run"),
        (["{run}", "--input_folder", "{run}/step3", "--output_folder", "{run}/x"], "give either one run"),
        (["--input_folder", "{run}/step3"], "both --input_folder and --output_folder"),
        (["--input_folder", "{run}/step3", "--output_folder", "{run}/step3"], "are the same"),
        (["{run}/step3"], "there is no file `latest`"),
        (["{run}/nowhere"], "there is no file `latest`"),
        (["--input_folder", "{run}/none", "--output_folder", "{run}/x"], "no such file or folder"),
    ],
)
def test_what_it_is_given_must_make_sense(
    tool: ModuleType, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(CRITIC, tmp_path / "run")
    before = snapshot(tmp_path)
    assert tool.main([argument.format(run=run) for argument in arguments]) == 2
    assert words in capsys.readouterr().err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("tag", ["step4", "", "../run/step3"])
def test_latest_that_points_nowhere(
    tool: ModuleType, tmp_path: Path, tag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(CRITIC, tmp_path / "run")
    (run / "latest").write_text(tag)
    assert tool.main([str(run)]) == 1
    assert str(run / "latest") in capsys.readouterr().err


def test_an_existing_one_is_replaced_only_when_asked(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(CRITIC, tmp_path / "run")
    assert tool.main([str(run), "--no_fsync"]) == 0
    assert tool.main([str(run), "--no_fsync"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert tool.main([str(run), "--no_fsync", "--overwrite"]) == 0
    assert _is_whole(run / "step3_uni")


class TestIntoRun:
    """``convert --to universal`` into a run that is there."""

    def test_the_run_itself_may_be_the_target(self, tmp_path: Path) -> None:
        run = _run(CRITIC, tmp_path / "run")
        before = snapshot(run / "step3")
        convert(run, run, OPTIONS)
        assert (run / "latest_universal").read_text() == "step3_uni"
        assert snapshot(run / "step3") == before
        assert not (run / "mcore_rlhf.json").exists()  # the manifest is the checkpoint's, not the run's
        assert (run / "step3_uni" / "mcore_rlhf.json").is_file()

    def test_the_tracker_comes_last(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = _run(CRITIC, tmp_path / "run")
        (run / "latest_universal").write_text("step1_uni")
        seen: list[bool] = []

        def refuse(path: Path, text: str, *, fsync: bool = True) -> None:
            seen.append(_is_whole(path.parent / text))
            raise StorageError("no space")

        monkeypatch.setattr(converting, "write_text", refuse)
        with pytest.raises(StorageError):
            convert(run, run, OPTIONS)
        assert seen == [True]  # whole, and under its name, before anything names it
        assert (run / "latest_universal").read_text() == "step1_uni"

    def test_another_run_gets_it_beside_what_it_has(self, tmp_path: Path) -> None:
        source, run = _run(ACTOR, tmp_path / "a"), _run(CRITIC, tmp_path / "b")
        convert(run, run, OPTIONS)
        with pytest.raises(StorageError, match="exists already"):
            convert(source, run, OPTIONS)  # of the same tag
        assert (run / "latest_universal").read_text() == "step3_uni"
        assert "actor" not in " ".join(path.name for path in (run / "step3_uni" / "zero").iterdir())

    def test_a_failure_leaves_the_run_as_it_was(self, tmp_path: Path) -> None:
        run = _run(CRITIC, tmp_path / "run")
        truncate(next((run / "step3").glob("*_optim_states.pt")), 0.5)
        before = snapshot(run)
        with pytest.raises(Exception, match="cut off"):
            convert(run, run, OPTIONS)
        assert snapshot(run) == before

    def test_a_universal_checkpoint_is_not_its_own_target(self, tmp_path: Path) -> None:
        run = _run(CRITIC, tmp_path / "run")
        convert(run, run, OPTIONS)
        with pytest.raises(UsageError, match="same folder"):
            convert(run / "step3_uni", run, OPTIONS)

    def test_a_new_root_is_published_as_a_whole(self, tmp_path: Path) -> None:
        run = _run(CRITIC, tmp_path / "run")
        convert(run, tmp_path / "new", OPTIONS)
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
            "latest_universal",
            "mcore_rlhf.json",
            "step3_uni",
        ]
        with pytest.raises(StorageError, match="exists already"):
            convert(run, tmp_path / "new", OPTIONS)
