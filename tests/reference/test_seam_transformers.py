"""transformers' own Trainer, its steps committed: the same files and losses as without us, whatever moment it is killed at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.trainer_jit_checkpoint import CheckpointManager as JitManager

from mcore_rlhf.errors import CheckpointError, Incomplete, NotACheckpoint, StorageError, Unsupported, UsageError
from mcore_rlhf.integrations.transformers_trainer import StepOptions, attach, with_checkpoints
from mcore_rlhf.manager.run import retention
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.manager.run.retention import KeepBest, KeepEvery, KeepLast, Retention
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.trainer_steps import TrainerSteps
from tests.helpers.damage import flip_a_bit
from tests.reference import seam_worker
from tests.trainers import hf_runs

PROJECT = Path(__file__).parents[2]
LAST = seam_worker.LAST


def train(
    folder: Path, seed: int = 1, which: Any = None, options: StepOptions | None = None, **arguments: Any
) -> hf_runs.Seen:
    return seam_worker.train(folder, seed, which, options, **arguments)


def steps(folder: Path) -> dict[int, str]:
    return {step.step: step.state + (" in quarantine" if step.quarantined else "") for step in listed_steps(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, hf_runs.Seen]:
    """A run of Trainer alone."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, seam_worker.train(folder, 1, options=seam_worker.ALONE)


def kills(folder: Path, seed: int, most: int) -> None:
    command = [sys.executable, "-m", "tests.reference.seam_worker", str(folder), str(seed), str(most)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    about, *found = json.loads(done.stdout.splitlines()[-1])
    assert about["changes"] > 50
    assert len(about["whole"]) == LAST
    for one in found:
        where = f"killed at change {one['at']}, second {one['after']}"
        assert one["status"] in ((9,) if not one["after"] else (14, 0)), where
        assert not [why for _, why in one["there"] if why], where
        newest = max((step for step, _ in one["there"]), default=0)
        if newest < LAST:
            assert one["seen"] == about["whole"][newest:], where
        assert one["alone"] or not one["left"], where


def test_killed_at_some_moments_and_gone_on_with(tmp_path: Path, seed: int) -> None:
    kills(tmp_path, seed, 2)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_killed_at_every_moment_and_gone_on_with(tmp_path: Path, seed: int) -> None:
    kills(tmp_path, seed, 1000)


@pytest.mark.slow
def test_two_ranks_go_on_and_fail_together(tmp_path: Path) -> None:
    """The step that is damaged is passed over on both; one rank's error is both ranks', and nothing is published."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.reference.seam_ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert seen["whole"] == seen["alone"]
        assert seen["resumed"] == seen["alone"][4:]
        assert len(seen["resumed"]) == 1
        assert seen["error"].startswith("StorageError: writing")
        assert ("failed on rank 1" in seen["error"]) == (rank == 0)
        assert seen["full"] == seen["alone"], "and no rank waits for the one whose disk is full"
        assert "No space left on device" in seen["said"][0]
    for folder, there in (("run", (2, 4, 5)), ("failed", (2, 4)), ("full", (2, 5))):
        found = steps(tmp_path / folder)
        assert set(found) == set(there)
        assert found[there[-1] if folder == "full" else 4] == "committed"
        assert not list((tmp_path / folder).glob(".checkpoint-*"))


def test_trainers_files_are_its_own_and_so_are_the_losses(whole: tuple[Path, hf_runs.Seen], tmp_path: Path) -> None:
    folder, seen = whole
    assert train(tmp_path / "a") == seen
    for step in (2, 4, 5):
        plain, ours = folder / f"checkpoint-{step}", tmp_path / "a" / f"checkpoint-{step}"
        assert {path.name for path in ours.iterdir()} == {path.name for path in plain.iterdir()} | {"mcore_rlhf.json"}
        for name in ("model.safetensors", "trainer_state.json"):
            assert (ours / name).read_bytes() == (plain / name).read_bytes()
    assert steps(tmp_path / "a") == dict.fromkeys((2, 4, 5), "committed")
    assert train(tmp_path / "a", 9, str(tmp_path / "a" / "checkpoint-2")) == seen[2:]


def test_a_damaged_newest_step_is_passed_over(whole: tuple[Path, hf_runs.Seen], tmp_path: Path) -> None:
    events: list[Event] = []
    train(tmp_path)
    for step in (4, 5):
        flip_a_bit(tmp_path / f"checkpoint-{step}" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: is damaged: CRC-32"):
        train(tmp_path, 9, str(tmp_path / "checkpoint-5"))
    assert train(tmp_path, 9, True, StepOptions(on_event=events.append)) == whole[1][2:]
    said = [event.text for event in events if event.kind == "skip"]
    assert "checkpoint-4 is not resumed from: damaged:" in said[1]
    assert "checkpoint-5 is not resumed from: damaged:" in said[0]
    assert steps(tmp_path) == dict.fromkeys((2, 4, 5), "committed")


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no step to resume from"):
        train(tmp_path, 1, True)
    assert len(train(tmp_path, 1, "auto")) == LAST
    for step in (2, 4, 5):
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").unlink()
    with pytest.raises(NotACheckpoint, match="no committed step that is intact"):
        train(tmp_path, 1, "auto")
    with pytest.raises(UsageError, match="does not exist"):
        train(tmp_path, 1, str(tmp_path / "checkpoint-3"))


def test_steps_of_trainer_alone_are_no_committed_ones(whole: tuple[Path, hf_runs.Seen], tmp_path: Path) -> None:
    seam_worker.train(tmp_path, 1, options=seam_worker.ALONE)
    with pytest.raises(NotACheckpoint, match="mcore-rlhf adopt"):
        train(tmp_path, 9, "auto")
    assert train(tmp_path, 9, str(tmp_path / "checkpoint-2")) == whole[1][2:]
    assert steps(tmp_path) == {2: "foreign", 4: "committed", 5: "committed"}


def test_another_runs_steps_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path)
    monkeypatch.setattr(retention, "_OF_THIS_RUN", set())  # as in a process that has not seen them
    keep = Retention([KeepLast(1)])
    with pytest.raises(UsageError, match=r"neither loaded nor written \(2, 4, 5\)"):
        train(tmp_path, options=StepOptions(keep=keep), max_steps=3)
    assert steps(tmp_path) == dict.fromkeys((2, 4, 5), "committed")
    train(tmp_path, options=StepOptions(on_existing="continue", keep=keep), max_steps=3)
    assert steps(tmp_path) == {3: "committed", 4: "committed in quarantine", 5: "committed in quarantine"}


def test_rules_on_what_is_kept(tmp_path: Path) -> None:
    keep = Retention([KeepLast(1), KeepEvery(4)])
    train(tmp_path / "a", options=StepOptions(keep=keep), save_steps=1)
    assert sorted(steps(tmp_path / "a")) == [4, 5]
    train(tmp_path / "b", save_steps=1, save_total_limit=2)
    assert sorted(steps(tmp_path / "b")) == [4, 5]
    seen = train(tmp_path / "c", options=StepOptions(keep=Retention([KeepBest("loss", "min")])), save_steps=1)
    best = min(range(LAST), key=lambda step: (seen[step][0], -step)) + 1
    assert sorted(steps(tmp_path / "c")) == sorted({best, LAST})


def test_the_best_step_is_named_by_its_place(tmp_path: Path) -> None:
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    plain = transformers.Trainer.__init__

    def evaluated(self: Any, *args: Any, **named: Any) -> None:
        plain(self, *args, **named, eval_dataset=hf_runs._data())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "__init__", evaluated)
        train(tmp_path, metric_for_best_model="loss", greater_is_better=False, **arguments)
    for path in tmp_path.glob("checkpoint-*"):
        state = json.loads((path / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{state['best_global_step']}")
    assert state["best_global_step"] in steps(tmp_path)


@pytest.mark.parametrize("stopped_at", [3, 4], ids=["between two saves", "where it has just saved"])
def test_sigterm_saves_where_trainer_marks_the_steps_place(
    tmp_path: Path, whole: tuple[Path, hf_runs.Seen], monkeypatch: pytest.MonkeyPatch, stopped_at: int
) -> None:
    """``enable_jit_checkpoint`` lays a file where the step goes, or into the one that is there, before it calls for a save."""
    done = iter(range(1, 100))
    plain, before = transformers.Trainer.training_step, signal.getsignal(signal.SIGTERM)

    def stepped(self: Any, *args: Any, **named: Any) -> Any:
        if next(done) == stopped_at + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **named)

    monkeypatch.setattr(transformers.Trainer, "training_step", stepped)
    monkeypatch.setattr(
        JitManager, "_sigterm_handler", lambda self, *frame: self._enable_checkpoint()
    )  # without its 3 s
    try:
        train(tmp_path, enable_jit_checkpoint=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped_at in steps(tmp_path)
    assert set(steps(tmp_path).values()) == {"committed"}
    marks = list(tmp_path.rglob("checkpoint-is-incomplete.txt"))
    assert not marks, "what says that a step is not whole lies in one that is"
    named = str(tmp_path / f"checkpoint-{stopped_at}")
    assert train(tmp_path, 2, named) == whole[1][stopped_at:]


def test_a_mark_that_a_kill_left_is_no_step(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, save_steps=1)
    marked = tmp_path / "checkpoint-3" / "checkpoint-is-incomplete.txt"
    marked.parent.mkdir()
    marked.write_text("Checkpoint started at step 3 and in progress...")
    train(tmp_path, 2, "auto", save_steps=1)
    assert steps(tmp_path) == dict.fromkeys((1, 2, 3, 4, 5), "committed")


@pytest.mark.parametrize("on_error", ["raise", "continue"])
def test_a_hook_that_raises_in_the_middle_of_a_save(
    tmp_path: Path, on_error: Any, whole: tuple[Path, hf_runs.Seen]
) -> None:
    events: list[Event] = []
    saved = transformers.Trainer._save_scaler

    def failing(self: Any, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        saved(self, output_dir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "_save_scaler", failing)
        options = StepOptions(on_error=on_error, on_event=events.append)
        if on_error == "raise":
            with pytest.raises(StorageError, match="No space left"):
                train(tmp_path, options=options)
        else:
            assert train(tmp_path, options=options) == whole[1]
    assert steps(tmp_path) == dict.fromkeys((2, 5) if on_error == "continue" else (2,), "committed")
    assert [event.step for event in events if event.kind == "failed"] == [4]
    assert not list(tmp_path.glob(".checkpoint*"))


def test_a_step_that_its_trainer_would_not_take_is_not_published(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.TrainerState, "save_to_json", lambda self, path: None)
        with pytest.raises(Incomplete, match=r"wrote no step of its own: trainer_state\.json"):
            train(tmp_path)
    assert not steps(tmp_path)


def test_a_seam_that_changed_is_named() -> None:
    class Other:
        def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> None: ...
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any) -> None: ...
        def _get_output_dir(self, trial: Any) -> str: ...

    with pytest.raises(Unsupported) as raised:
        with_checkpoints(Other)
    text = str(raised.value)
    assert "Other._save_checkpoint: expected (model, trial), found (model, trial, metrics)" in text
    assert "Other._push_from_checkpoint(checkpoint_folder): is not there" in text
    assert f"transformers {transformers.__version__}; the seam was read in, and run with, 5.23.0" in text


def test_attached_to_one_that_is_there(tmp_path: Path) -> None:
    with hf_runs.on_cpu():
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True)
        trainer = transformers.Trainer(hf_runs.model(1), args, hf_runs._batch, hf_runs._data())
        attach(trainer)
        kind = type(trainer)
        attach(trainer)  # once more is once
        assert type(trainer) is kind
        attach(trainer, StepOptions(keep=Retention([KeepLast(1)]), fsync=False))  # but for options
        assert isinstance(trainer, transformers.Trainer)
        trainer.train()
        with pytest.raises(Unsupported, match="hyperparameters"):
            trainer.train(trial={"learning_rate": 1.0})
    assert steps(tmp_path) == {2: "committed"}
    assert trainer.step_options.keep == Retention([KeepLast(1)])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"on_error": "ignore"}, "on_error: expected 'raise' or 'continue'"),
        ({"keep": 3}, "keep: expected a Retention"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        StepOptions(**wrong)


def test_a_trainer_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'mine' is not known"):
        TrainerSteps(tmp_path, "mine")
