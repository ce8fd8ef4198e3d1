"""A conversion that was killed goes on where it was, if its plan is still the same; the bytes are those of one that was not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.errors import StorageError
from mcore_rlhf.execution import journal
from mcore_rlhf.execution.fingerprint import PlanFingerprint
from mcore_rlhf.execution.journal import Done, Journal, why_not
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.storage import record_file
from mcore_rlhf.storage.notes import FileNotes
from mcore_rlhf.storage.publish import LocalPublication
from tests.helpers.damage import flip_a_bit
from tests.helpers.killed import begun, content, run, start

TO = ("--tp", 1, "--pp", 4, "--workers", 1)
FILES = 8
FINGERPRINT = PlanFingerprint("source", "options", "layouts")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whole") / "out"
    assert run("convert", source, target, *TO, "--no-fsync")[0] == 0
    return target


def killed(source: Path, target: Path, *options: object, after: int = 3, number: int = signal.SIGKILL) -> str:
    code, _, stderr = run("convert", source, target, *TO, *options, after=after, number=number)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number), stderr
    assert not target.exists()
    return stderr


def hidden(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target and path.name.startswith("."))


@pytest.mark.parametrize("options", [(), ("--no-fsync",), ("--workers", 4)])
def test_after_a_kill_at_most_one_file_per_worker_is_made_again(
    source: Path, whole: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    killed(source, target, *options)
    assert [name.partition("-")[0] for name in hidden(target)] == [".out.journal", ".out.lock", ".out.partial"]
    code, stdout, stderr = run("convert", source, target, *TO, *options, log=log)
    assert (code, "lossless" in stdout) == (0, True), stderr
    assert "went on in" in stderr
    assert len(begun(log)) == FILES - 3
    assert content(target) == content(whole)
    assert hidden(target) == []


def test_a_kill_while_it_compares_makes_no_file_again(source: Path, whole: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    killed(source, target, after=FILES + 1)
    assert run("convert", source, target, *TO, log=log)[0] == 0
    assert begun(log) == []
    assert content(target) == content(whole)


def test_killed_again_and_again(source: Path, whole: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    for _ in range(4):
        assert run("convert", source, target, *TO, after=2, log=log)[0] == -signal.SIGKILL
    assert run("convert", source, target, *TO, log=log)[0] == 0
    assert sorted(begun(log)) == sorted(set(begun(log)))
    assert content(target) == content(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_signal_ended_goes_on_as_well(source: Path, whole: Path, tmp_path: Path, number: int) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    stderr = killed(source, target, number=number)
    assert "what is finished is kept" in stderr
    assert run("convert", source, target, *TO, log=log)[0] == 0
    assert len(begun(log)) <= FILES - 3
    assert content(target) == content(whole)


def test_of_a_step_it_is_said_where_it_goes_on(source: Path, tmp_path: Path) -> None:
    step, root = tmp_path / "run" / "global_step_2", tmp_path / "out"
    for role in ("actor", "critic"):
        shutil.copytree(source, step / role)
    code, _, stderr = run("convert", step, root, *TO, after=FILES + 1, number=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert (
        f"nothing was published at {root / step.name}; what is finished is kept in {root}/.{step.name}.partial-"
        in stderr
    )
    code, _, stderr = run("convert", step, root, *TO)
    assert (code, "went on in" in stderr) == (0, True), stderr


def test_what_was_finished_before_the_disk_was_full_is_not_made_again(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, options = tmp_path / "out", ConvertOptions(to="megatron", write=WriteOptions(tp=1, pp=4), workers=1)
    begun, add, run_file = list[str](), Journal.add, FileRun.run

    def counted(self: FileRun) -> object:
        begun.append(self.plan.file)
        return run_file(self)

    def adding(self: Journal, name: str, done: Done) -> None:
        add(self, name, done)
        if len(self.files) == 3:
            filling.setattr(record_file, "pwrite_all", full)

    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileRun, "run", counted)
    kept = r"(?s)What is finished is kept beside the target, in \.out\.partial-"
    with monkeypatch.context() as filling:
        filling.setattr(Journal, "add", adding)
        with pytest.raises(StorageError, match=kept) as refused:
            convert(source, target, options)
    assert "No space left on device" in str(refused.value)
    with monkeypatch.context() as filled:
        filled.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
        with pytest.raises(StorageError, match=kept) as refused:
            convert(source, target, options)
    assert "are needed, but only 1 bytes are free" in str(refused.value)
    begun.clear()
    convert(source, target, options)
    assert len(begun) == FILES - 3
    assert content(target) == content(whole)
    assert hidden(target) == []


def test_no_resume_starts_anew(source: Path, whole: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    killed(source, target)
    assert run("convert", source, target, *TO, "--no-resume", log=log)[0] == 0
    assert len(begun(log)) == FILES
    assert content(target) == content(whole)
    assert hidden(target) == []


def test_other_options_start_anew_and_say_so(source: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    killed(source, target)
    code, _, stderr = run("convert", source, target, "--tp", 1, "--pp", 4, "--dp", 2, log=log)
    assert (code, len(begun(log))) == (0, FILES)
    assert "not gone on with: it is of other options" in stderr
    assert hidden(target) == []


def test_a_source_that_was_changed_in_place_starts_anew(source: Path, tmp_path: Path) -> None:
    """Its length and the time of its last change are set back; what cannot be set back tells."""
    target, log = tmp_path / "out", tmp_path / "log"
    source = Path(shutil.copytree(source, tmp_path / "run"))
    killed(source, target)
    file = max(source.rglob("*.pt"), key=lambda path: path.stat().st_size)
    before = file.stat()
    flip_a_bit(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    code, _, stderr = run("convert", source, target, *TO, log=log)
    assert "not gone on with: it is of another source" in stderr
    assert code == 1  # and what was flipped is found, as ever
    assert "damaged" in stderr
    assert len(begun(log)) == FILES


def test_a_byte_that_only_the_killed_process_read_wrong_is_found(source: Path, tmp_path: Path) -> None:
    """What was read before the kill is held against the source's checksums afterwards, though nobody reads it again."""
    target = tmp_path / "out"
    killed(source, target)
    (journal,) = tmp_path.glob(".out.journal-*")
    notes = FileNotes(journal)
    name = next(name for name in notes.list() if name != "plan")
    told = json.loads(notes.get(name) or b"")
    only_span = next(spans for _, spans in told["done"]["seen"] if len(spans) == 1)[0]
    only_span[2] ^= 1
    notes.put(name, json.dumps(told).encode())
    notes.close()
    code, _, stderr = run("convert", source, target, *TO)
    assert (code, "damaged" in stderr, target.exists()) == (1, True, False), stderr


def test_a_torn_line_and_a_file_of_another_length_are_done_again(source: Path, whole: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    killed(source, target, after=4)
    (journal,), (staging,) = tmp_path.glob(".out.journal-*"), tmp_path.glob(".out.partial-*")
    data = journal.read_bytes()
    journal.write_bytes(data[:-7])
    (staging / "stranger").write_text("?")
    os.truncate(min(staging.rglob("*.pt")), 100)
    assert run("convert", source, target, *TO, log=log)[0] == 0
    assert len(begun(log)) == FILES - 2
    assert content(target) == content(whole)


def test_a_finished_file_that_somebody_touched_is_made_again(source: Path, whole: Path, tmp_path: Path) -> None:
    """Its length and the time of its last change are as before."""
    target, log = tmp_path / "out", tmp_path / "log"
    killed(source, target, after=4)
    (staging,) = tmp_path.glob(".out.partial-*")
    name = begun_in(tmp_path)[0]
    before = (staging / name).stat()
    flip_a_bit(staging / name)
    os.utime(staging / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run("convert", source, target, *TO, log=log)[0] == 0
    assert name in begun(log)
    assert len(begun(log)) == FILES - 3
    assert content(target) == content(whole)


def begun_in(folder: Path) -> list[str]:
    """The files that a killed process's journal lists."""
    (journal,) = folder.glob(".out.journal-*")
    return [json.loads(data)["name"] for name, data in FileNotes(journal).read() if name != "plan"]


def noted(path: Path, *, durable: bool) -> FileNotes:
    """The notes of a journal that was begun, and of nothing that is done."""
    notes = FileNotes(path, durable)
    Journal(notes=notes, fingerprint=FINGERPRINT, publication=LocalPublication(path)).notes.close()
    return notes


def test_a_journal_that_was_begun_durable_stays_so(tmp_path: Path) -> None:
    """Whoever comes after a reboot believes all of it, so that nobody may add what is not on the disk."""
    noted(tmp_path / "journal", durable=True)
    again = noted(tmp_path / "journal", durable=False)
    assert again.durable
    assert why_not(again, FINGERPRINT) == ""


def test_a_journal_that_was_not_durable_is_of_no_use_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    assert why_not(noted(path, durable=False), FINGERPRINT) == ""
    monkeypatch.setattr(journal, "_boot", lambda: "another")
    assert "before this machine started" in why_not(FileNotes(path), FINGERPRINT)
    path.unlink()
    monkeypatch.setattr(journal, "_boot", lambda: "")  # where nothing tells one start from another
    assert "before this machine started" in why_not(noted(path, durable=False), FINGERPRINT)


def test_two_at_once_do_not_disturb_each_other(source: Path, whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    killed(source, target)
    both = [start("convert", source, target, *TO) for _ in range(2)]
    told = [(process.communicate(timeout=240)[1], process.returncode) for process in both]
    assert sorted(code for _, code in told) in ([0, 2], [0, 0]), told
    assert any("exists already" in text for text, code in told if code)
    assert content(target) == content(whole)
    assert hidden(target) == []
