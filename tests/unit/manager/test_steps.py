"""What lies in a root, asked of folders that were made by hand, good and bad."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from mcore_rlhf.errors import NotACheckpoint, StorageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage.checksum import crc32

from .roots import make_step, states


def test_a_root_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    assert steps.listed(tmp_path / "nowhere") == []
    assert steps.committed(tmp_path / "nowhere") == []
    assert steps.newest(tmp_path / "nowhere") is None


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotACheckpoint, match="is a file"):
        steps.listed(tmp_path / "file")


def test_a_root_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StorageError, match="cannot list: Permission denied"):
        steps.listed(tmp_path)


def test_a_committed_step_says_everything_about_itself(tmp_path: Path) -> None:
    folder = make_step(
        tmp_path, 50, roles=("actor", "critic"), metrics={"reward": 0.5, "bad": float("nan"), "flag": True}
    )
    (folder / "extra.bin").write_bytes(b"x" * 100)
    (step,) = steps.listed(tmp_path)
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert (step.step, step.path, step.state, step.why, step.quarantined) == (50, folder, "committed", "", "")
    assert (step.roles, step.nbytes, step.time) == (("actor", "critic"), on_disk, "2026-01-02T03:04:05Z")
    assert step.metrics == {"reward": 0.5}
    assert steps.is_committed(folder)
    assert (steps.step_of(folder), steps.step_folder(tmp_path, 50)) == (50, folder)


def test_order_is_by_number_and_not_by_name(tmp_path: Path) -> None:
    for number in (100, 9, 20, 0):
        make_step(tmp_path, number)
    assert [step.step for step in steps.listed(tmp_path)] == [0, 9, 20, 100]
    newest = steps.newest(tmp_path)
    assert newest is not None
    assert newest.step == 100


@pytest.mark.parametrize(
    "name", ["global_step_", "global_step_-1", "global_step_007", "global_step_1x", "xglobal_step_1"]
)
def test_other_names_are_no_steps(tmp_path: Path, name: str) -> None:
    make_step(tmp_path, 1).rename(tmp_path / name)
    assert steps.listed(tmp_path) == []
    assert not steps.is_committed(tmp_path / name)
    assert steps.step_of(tmp_path / name) is None


def test_a_file_named_like_a_step_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "global_step_5").write_text("x")
    assert steps.listed(tmp_path) == []


def _cut(folder: Path) -> None:
    (folder / "actor" / "weights.bin").write_bytes(b"short")


def _lengthen(folder: Path) -> None:
    with (folder / "actor" / "weights.bin").open("ab") as file:
        file.write(b"x")


def _lose(folder: Path) -> None:
    (folder / "actor" / "weights.bin").unlink()


def _renumber(folder: Path) -> None:
    _change(folder, step=8)


def _without_number(folder: Path) -> None:
    _change(folder, step=None)


def _half_a_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text[: len(text) // 2])


def _of_the_future(folder: Path) -> None:
    _change(folder, version=99)


def _deeply_nested(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def _huge_metric(folder: Path) -> None:
    _change(folder, report={"metrics": {"reward": 10**400}})


def _manifest_is_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def _leads_out(folder: Path) -> None:
    _change(folder, files={"../../etc/passwd": {"bytes": 1, "crc32": 0}})


def _change(folder: Path, **fields: object) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | fields))


DAMAGES = [
    (_cut, "has 5 bytes, the manifest says 1000"),
    (_lengthen, "has 1001 bytes, the manifest says 1000"),
    (_lose, "is missing"),
    (_renumber, "is of step 8, but the folder is global_step_7"),
    (_without_number, "is of step None"),
    (_half_a_manifest, "not valid JSON"),
    (_of_the_future, "version 99"),
    (_deeply_nested, "nested too deeply"),
    (_huge_metric, "too large"),
    (_manifest_is_a_folder, "is a folder"),
    (_leads_out, "not a plain path"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_one_damaged_step_is_named_and_hides_no_other(tmp_path: Path, damage: object, why: str) -> None:
    make_step(tmp_path, 6)
    assert callable(damage)
    damage(make_step(tmp_path, 7))
    sound, damaged = steps.listed(tmp_path)
    assert (sound.state, damaged.state, damaged.step) == ("committed", "damaged", 7)
    assert why in damaged.why
    assert "\n" not in damaged.why
    newest = steps.newest(tmp_path)
    assert newest is not None
    assert newest.step == 6
    if damage is not _huge_metric:  # its files are all there
        assert not steps.is_committed(damaged.path)


def test_a_flipped_bit_does_not_change_that_it_was_committed(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 7)
    (folder / "actor" / "weights.bin").write_bytes(b"y" * 1000)
    assert states(tmp_path) == {7: "committed"}


@pytest.mark.parametrize("call", ["lstat", "listdir", "scandir"])
def test_a_folder_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    make_step(tmp_path, 6)
    closed = tmp_path / "global_step_7"
    closed.mkdir()
    genuine = getattr(os, call)

    def refuse(path: object, *args: object, **options: object) -> object:
        if str(path).startswith(str(closed)):
            raise PermissionError(errno.EACCES, "no", str(path))
        return genuine(path, *args, **options)

    monkeypatch.setattr(os, call, refuse)
    (seven,) = [step for step in steps.listed(tmp_path) if step.step == 7]
    if call == "lstat":
        assert (seven.state, seven.why) == ("unreadable", f"{closed}: cannot read: Permission denied")
    assert seven.state != "committed"
    assert states(tmp_path)[6] == "committed"


def _megatron(folder: Path) -> None:
    (folder / "actor" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)


def _tracker(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "latest_checkpointed_iteration.txt").write_text("7")


def _own_iterations(folder: Path) -> None:
    (folder / "iter_0000007").mkdir()


def _fsdp(folder: Path) -> None:
    (folder / "actor" / "dcp_checkpoint").mkdir(parents=True)


def _deepspeed(folder: Path) -> None:
    (folder / "critic").mkdir()
    (folder / "critic" / "latest").write_text("global_step7")


@pytest.mark.parametrize("make", [_megatron, _tracker, _own_iterations, _fsdp, _deepspeed])
def test_steps_of_other_trainers_are_foreign(tmp_path: Path, make: object) -> None:
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    assert callable(make)
    make(folder)
    (step,) = steps.listed(tmp_path)
    assert step.state == "foreign"
    assert step.why == "has no manifest.json: another trainer's step"
    assert steps.newest(tmp_path) is None


def test_empty_and_unknown_folders_are_partial(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_2" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_2" / "actor" / "notes.txt").write_text("x")
    empty, unknown = steps.listed(tmp_path)
    assert (empty.state, unknown.state) == ("partial", "partial")
    assert "is empty" in empty.why
    assert "nothing that is known" in unknown.why


def test_hidden_folders_are_partial_whatever_they_hold(tmp_path: Path) -> None:
    make_step(tmp_path, 7).rename(tmp_path / ".global_step_7.partial-123-ab")
    make_step(tmp_path, 7).rename(tmp_path / ".global_step_7.old-122-cd")
    make_step(tmp_path, 7)
    (tmp_path / ".global_step_7.lock-123-ab").write_text("host")
    (tmp_path / ".other.partial-1").mkdir()
    found = steps.listed(tmp_path)
    assert [(step.step, step.state) for step in found] == [(7, "committed"), (7, "partial"), (7, "partial")]
    assert "being replaced" in found[1].why
    assert "being written" in found[2].why
    assert found[2].nbytes > 1000


def test_a_tracker_is_never_trusted(tmp_path: Path) -> None:
    make_step(tmp_path, 7)
    (tmp_path / "global_step_9").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    newest = steps.newest(tmp_path)
    assert newest is not None
    assert newest.step == 7


def test_a_step_that_vanishes_meanwhile_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_step(tmp_path, 6)
    gone = make_step(tmp_path, 7)
    genuine = steps.size_of

    def lose_it(folder: Path) -> int:
        if folder == gone and gone.exists():
            gone.rename(tmp_path / "elsewhere")
        return genuine(folder)

    monkeypatch.setattr(steps, "size_of", lose_it)
    assert states(tmp_path) == {6: "committed"}


def test_quarantine_and_release(tmp_path: Path) -> None:
    make_step(tmp_path, 6)
    folder = make_step(tmp_path, 7)
    steps.quarantine(folder, "  reward collapsed\n")
    listed = steps.listed(tmp_path)
    assert [(step.state, step.quarantined) for step in listed] == [("committed", ""), ("committed", "reward collapsed")]
    assert [step.step for step in steps.committed(tmp_path)] == [6]
    assert [step.step for step in steps.committed(tmp_path, quarantined=True)] == [6, 7]
    newest = steps.newest(tmp_path)
    assert newest is not None
    assert newest.step == 6
    assert steps.is_committed(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "manifest.json", "quarantined.json"]
    assert steps.release(folder) is True
    assert steps.release(folder) is False
    assert [step.step for step in steps.committed(tmp_path)] == [6, 7]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"reason": ""}', "\xff"])
def test_a_note_that_cannot_be_read_still_counts(tmp_path: Path, text: str) -> None:
    folder = make_step(tmp_path, 7)
    (folder / "quarantined.json").write_bytes(text.encode("latin-1"))
    assert steps.newest(tmp_path) is None
    assert steps.listed(tmp_path)[0].quarantined


def test_only_steps_can_be_put_in_quarantine(tmp_path: Path) -> None:
    for folder in (tmp_path / "global_step_7", tmp_path):
        with pytest.raises(NotACheckpoint, match="there is no such step"):
            steps.quarantine(folder, "x")
        with pytest.raises(NotACheckpoint, match="there is no such step"):
            steps.release(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_note_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_step(tmp_path, 7)
    steps.quarantine(folder, "first")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        steps.quarantine(folder, "second")
    assert steps.listed(tmp_path)[0].quarantined == "first"
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "manifest.json", "quarantined.json"]


def test_the_helper_writes_what_the_manifest_module_reads(tmp_path: Path) -> None:
    manifest = steps.read_manifest(make_step(tmp_path, 7))
    assert manifest.files["actor/weights.bin"].crc32 == crc32(b"x" * 1000)
