"""Steps that a trainer writes itself: what is published, replaced, passed over and refused. The trainer here writes two files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from mcore_rlhf.errors import Incomplete, StorageError, Unsupported, UsageError
from mcore_rlhf.manager import trainer_held
from mcore_rlhf.manager.run import retention
from mcore_rlhf.manager.run.failed import FailedSave
from mcore_rlhf.manager.run.options import Event, Reporter
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.manager.run.steps import quarantine
from mcore_rlhf.manager.run.world import World
from mcore_rlhf.manager.runs import listed_steps, naming_of
from mcore_rlhf.manager.subject import chosen_step
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps


def write(folder: Path, text: str = "state") -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1, "text": text}))
    (folder / "optimizer.pt").write_text(text)


def saved(root: Path, *numbers: int, **options: Any) -> None:
    with TrainerSteps(root, "transformers", StepOptions(**options)) as steps:
        if retention.is_of_this_run(root):
            steps.resume("auto")
        for number in numbers:
            steps.save(number, write)


def states(root: Path) -> dict[int, str]:
    return {step.step: "quarantined" if step.quarantined else step.state for step in listed_steps(root)}


def test_events_are_kept_in_the_root(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep=Retention([KeepLast(1)]))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [
        ("save", 1), ("commit", 1), ("save", 2), ("commit", 2), ("delete", 1), ("save", 3), ("commit", 3), ("delete", 2),
    ]  # fmt: skip


def test_two_runs_do_not_save_into_one_root(tmp_path: Path) -> None:
    with TrainerSteps(tmp_path, "transformers") as first, TrainerSteps(tmp_path, "transformers") as second:
        first.save(1, write)
        with pytest.raises(StorageError, match="another run saves here"):
            second.save(2, write)


def test_a_folder_that_is_no_step_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "thesis.txt").write_text("years of work")
    (tmp_path / "checkpoint-2").mkdir()
    write(tmp_path / "checkpoint-2", "half")
    with TrainerSteps(tmp_path, "transformers") as steps:
        with pytest.raises(StorageError, match="does not look like a checkpoint"):
            steps.save(1, write)
        steps.save(2, write)  # its own, which it would write over
    assert (tmp_path / "checkpoint-1" / "thesis.txt").read_text() == "years of work"
    assert states(tmp_path) == {2: "committed"}


def test_a_link_is_not_published(tmp_path: Path) -> None:
    def linking(folder: Path) -> None:
        write(folder)
        (folder / "weights").symlink_to("/etc/passwd")

    with TrainerSteps(tmp_path, "transformers") as steps, pytest.raises(Incomplete, match="weights: is a link"):
        steps.save(1, linking)
    assert states(tmp_path) == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_dcp_raises_is_an_error_that_a_run_goes_on_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's ``CheckpointException``, by which FSDP's and torchtitan's saves fail, is no ``Exception``."""

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    def by_dcp(folder: Path) -> None:
        dcp.save({"weight": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    said: list[Event] = []
    with TrainerSteps(tmp_path, "torchtitan", StepOptions(on_error="continue", on_event=said.append)) as steps:
        assert steps.save(1, by_dcp) is None
    assert said[-1].text.endswith("step-1: rank 0: OSError: [Errno 28] No space left on device")
    with TrainerSteps(tmp_path, "torchtitan") as steps, pytest.raises(StorageError, match="No space left on device"):
        steps.save(1, by_dcp)


def test_who_goes_on_after_a_failed_save_hears_of_it_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on; that its last save failed is no success, and stands in the root until a save has gone well."""

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    steps = TrainerSteps(tmp_path, "transformers", StepOptions(on_error="continue"))
    assert steps.save(1, full) is None
    found = FailedSave.read(tmp_path)
    assert found is not None
    assert "No space left on device" in found.why
    steps.save(2, write)
    assert FailedSave.read(tmp_path) is None
    steps.close()
    with pytest.raises(Incomplete, match=r"step 3 was not saved.*lost with this process: StorageError.*No space left"):  # noqa: PT012
        steps = TrainerSteps(tmp_path, "transformers", StepOptions(on_error="continue"))
        steps.resume("auto")
        steps.save(3, full)
        steps.close()
    steps.close()
    caplog.clear()
    with TrainerSteps(tmp_path, "transformers", StepOptions(on_error="continue")) as steps:
        steps.resume("auto")
        steps.save(3, full)  # a trainer's script goes on after its training, and may save what it has
    assert [record.levelname for record in caplog.records if "lost with this process" in record.message] == ["ERROR"]


def test_a_rank_that_others_do_not_hear_raises_what_it_met() -> None:
    """They wait in a barrier of the trainer's own, as it has not come there; that they are gone is not what was wrong."""

    class Deaf:
        def all_gather(self, value: object) -> None:
            raise RuntimeError("Timed out waiting 1000ms for send operation to complete")

        def breaks(self) -> None: ...

        def missing(self) -> list[int]:
            return [1]

    def full() -> None:
        raise OSError(28, "No space left on device")

    world = World(0, 2, 1.0, Deaf())  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="No space left on device") as raised:
        world.on_all_ranks("writing", full)
    assert "rank 1" in str(raised.value.__cause__)


def test_a_run_that_goes_back_leaves_the_other_future_behind(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with TrainerSteps(tmp_path, "transformers") as steps:
        assert steps.resume(1) == tmp_path / "checkpoint-1"
        steps.save(2, write)
    assert states(tmp_path) == {1: "committed", 2: "committed", 3: "quarantined"}
    with TrainerSteps(tmp_path, "transformers") as steps:
        assert steps.resume("auto") == tmp_path / "checkpoint-2"


def test_a_step_of_a_newer_release_is_not_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    path = tmp_path / "checkpoint-2" / "mcore_rlhf.json"
    manifest = json.loads(path.read_text())
    del manifest["crc32"]  # one without is read, and not checked
    path.write_text(json.dumps({**manifest, "version": 99}))
    with TrainerSteps(tmp_path, "transformers") as steps, pytest.raises(Unsupported, match="Resume with the release"):
        steps.resume("auto")


def test_what_a_dead_run_left_is_removed_or_put_back(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    os.rename(tmp_path / "checkpoint-2", tmp_path / ".checkpoint-2.old-1-a")
    for name in (".probe-0123456789abcdef-1", ".iter.txt.tmp-0123456789abcdef", ".probe-of-mine", ".tmp-0"):
        (tmp_path / name).touch()
    (tmp_path / ".checkpoint-3.partial-1-b").mkdir()
    (tmp_path / ".unknown-3.partial-1-b").mkdir()
    events: list[Event] = []
    saved(tmp_path, 4, on_event=events.append)
    assert states(tmp_path) == dict.fromkeys((1, 2, 4), "committed")
    left = {path.name for path in tmp_path.glob(".*") if path.suffix != ".lock"}
    assert left == {".unknown-3.partial-1-b", ".probe-of-mine", ".tmp-0"}
    assert len([event for event in events if event.kind == "clean"]) == 4


@pytest.mark.parametrize("which", [7, "7", "nowhere"])
def test_what_is_not_there(tmp_path: Path, which: Any) -> None:
    saved(tmp_path, 1)
    with TrainerSteps(tmp_path, "transformers") as steps, pytest.raises(UsageError, match="does not exist"):
        steps.resume(which)


@pytest.mark.parametrize("content", [b"", b"not a pickle", None])
def test_held_samples_that_are_not(tmp_path: Path, content: bytes | None) -> None:
    trainer = SimpleNamespace(_step=3, _buffered_inputs=None, args=SimpleNamespace(world_size=1, device="cpu"))
    trainer_held.save(trainer, tmp_path, 0)
    path = tmp_path / "mcore_rlhf" / "rollouts_0.pt"
    if content is None:
        path.write_bytes(trainer_held.dumps({"_step": 3}))
    else:
        path.write_bytes(content)
    with pytest.raises(Incomplete, match="cannot be read"):
        trainer_held.restore(trainer, tmp_path, 0, Reporter(0))


def test_held_samples_of_another_world(tmp_path: Path) -> None:
    said: list[Event] = []
    trainer = SimpleNamespace(_step=3, _buffered_inputs=None, args=SimpleNamespace(world_size=2, device="cpu"))
    trainer_held.save(trainer, tmp_path, 0)
    other = SimpleNamespace(_step=0, _buffered_inputs=None, args=SimpleNamespace(world_size=1, device="cpu"))
    trainer_held.restore(other, tmp_path, 0, Reporter(0, said.append))
    assert other._step == 0
    assert "those of 2 ranks" in said[0].text


def flip(folder: Path) -> None:
    (folder / "worker-0.pt").write_text("STATE")


def shorten(folder: Path) -> None:
    (folder / "worker-0.pt").write_text("")


def reported(root: Path, *names: str, which: Any = "auto") -> None:
    """Steps of Ray Train's, whose names may say more than the number."""

    def write_part(folder: Path) -> None:
        (folder / ".metadata.json").write_text("{}")
        (folder / "worker-0.pt").write_text("state")

    with TrainerSteps(root, "ray-train") as steps:
        steps.resume(which)
        for name in names:
            number = steps.root.trainer.step_of(name)
            assert number is not None
            steps.save(number, write_part, name=name)


def gone_on_from(root: Path, which: Any = "auto") -> str:
    with TrainerSteps(root, "ray-train") as steps:
        found = steps.resume(which)
    return "" if found is None else found.name


PLAIN, AGAIN = "checkpoint_step_6", "checkpoint_step_6-02"


@pytest.mark.parametrize(
    ("harm", "harmed", "expected"),
    [(flip, AGAIN, PLAIN), (shorten, AGAIN, PLAIN), (quarantine, AGAIN, PLAIN), (flip, PLAIN, AGAIN), (shorten, PLAIN, AGAIN)],
)  # fmt: skip
def test_of_two_folders_of_a_step_the_intact_one_is_taken(
    tmp_path: Path, harm: Any, harmed: str, expected: str
) -> None:
    reported(tmp_path, "checkpoint_step_4", PLAIN, AGAIN)
    assert gone_on_from(tmp_path) == gone_on_from(tmp_path, 6) == AGAIN
    harm(tmp_path / harmed)
    assert gone_on_from(tmp_path) == expected
    chosen = chosen_step(tmp_path, newest_intact=True)
    assert chosen is not None
    assert chosen.folder.name == expected
    listed = [step.path.name for step in listed_steps(tmp_path)]
    assert listed == ["checkpoint_step_4", AGAIN if harm is flip else expected], (
        "each number once; bytes are not read for a list"
    )


def test_of_many_folders_of_a_step_the_last_name_is_taken(tmp_path: Path) -> None:
    reported(tmp_path, PLAIN, *(f"{PLAIN}-{number:02d}" for number in range(2, 12)))
    assert gone_on_from(tmp_path) == f"{PLAIN}-11"


def test_a_run_that_goes_back_leaves_every_folder_behind(tmp_path: Path) -> None:
    reported(tmp_path, "checkpoint_step_2", PLAIN, AGAIN)
    reported(tmp_path, "checkpoint_step_4", which=2)
    assert gone_on_from(tmp_path) == "checkpoint_step_4"
    assert {path.parent.name for path in tmp_path.glob("*/quarantined.json")} == {PLAIN, AGAIN}


def test_rules_count_a_step_once_and_delete_a_folder_for_what_it_is(tmp_path: Path) -> None:
    reported(
        tmp_path, "checkpoint_step_2", "checkpoint_step_4", "checkpoint_step_4-02", PLAIN, AGAIN, "checkpoint_step_8"
    )

    def going(n: int) -> list[str]:
        rules, naming = Retention([KeepLast(n)]), naming_of(tmp_path)
        found = retention.plan_deletions(tmp_path, rules, include_damaged=True, naming=naming)
        return sorted(one.path.name for one in found)

    assert going(3) == ["checkpoint_step_2"]
    assert going(2) == ["checkpoint_step_2", "checkpoint_step_4", "checkpoint_step_4-02"]
    shorten(tmp_path / "checkpoint_step_4")
    shorten(tmp_path / AGAIN)
    assert going(4) == ["checkpoint_step_4", AGAIN], "the intact one of the same step stays"
