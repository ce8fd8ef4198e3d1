"""How ranks meet through files: messages that are whole, waits that end, and a commit that is all or nothing."""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.commit import Messages, RankPart, Stopped, Transaction
from mcore_rlhf.storage import publish
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.notes import FolderNotes


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's own patience is not under test."""
    monkeypatch.setattr(os, "fsync", os.fstat)


def late(action: Callable[[], object], seconds: float = 0.05) -> None:
    threading.Timer(seconds, action).start()


def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No file can be given any content, as on a full disk; empty ones can be made."""

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", pwrite)


def messages(folder: Path, timeout: float = 5.0, gone: Callable[[], str] = lambda: "") -> Messages:
    return Messages(FolderNotes(folder), timeout, gone)


# ---- the store


def test_messages(tmp_path: Path) -> None:
    box = messages(tmp_path)
    late(lambda: box.notes.put("late", b"\0\xff"))
    assert box.get("late", "rank 1") == b"\0\xff"
    assert box.get("late", "rank 1") == b"\0\xff", "a message stays, for others to take"
    box.notes.say("values", {"a": [1, 2]})
    assert box.hear(dict[str, tuple[int, ...]], "values", "rank 1") == {"a": (1, 2)}


def test_a_message_that_does_not_come(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(Incomplete) as failure:
        messages(tmp_path, 0.1).get("part-3", "rank 3")
    assert 0.1 <= time.monotonic() - started < 30
    assert str(failure.value).startswith("rank 3 did not deliver its part (part-3) within 0.1 s\n")
    assert "look at its log" in str(failure.value)


def test_a_message_is_never_seen_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there under its name only when it is whole, also if its writer dies."""
    seen: list[list[str]] = []
    real = os.replace

    def rename(source: Path, target: Path) -> None:
        seen.append(os.listdir(tmp_path))
        real(source, target)

    monkeypatch.setattr(os, "replace", rename)
    messages(tmp_path).notes.put("layout", b"x" * 1000)
    assert all("layout" not in names for names in seen)
    assert (tmp_path / "layout").read_bytes() == b"x" * 1000


def test_somebody_fails_while_others_wait(tmp_path: Path) -> None:
    box = messages(tmp_path)
    late(lambda: box.fail("rank 00002", StorageError("disk on fire")))
    with pytest.raises(Stopped, match="rank 00002 could not save: StorageError: disk on fire"):
        box.get("part-2", "rank 2")


def test_on_a_full_disk_the_others_still_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = messages(tmp_path)
    refusing(monkeypatch, errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left"):
        box.notes.put("part-1", b"x")
    box.fail("rank 00001", StorageError("No space left"))
    with pytest.raises(Stopped, match="rank 00001 could not save: its log says why"):
        box.check()


def test_telling_of_a_failure_never_fails(tmp_path: Path) -> None:
    messages(tmp_path / "gone").fail("rank 00001", StorageError("x"))


def test_the_whole_transaction_ends_while_others_wait(tmp_path: Path) -> None:
    ended = threading.Event()
    late(ended.set)
    with pytest.raises(Stopped, match="given up by the coordinating rank"):
        messages(tmp_path, 5.0, lambda: "given up by the coordinating rank" * ended.is_set()).get("part-2", "rank 2")


# ---- the transaction


def opened(root: Path, step: int = 3, *parts: str, timeout: float = 2.0, id: str = "0001") -> list[Transaction]:
    """A transaction as each of its ranks sees it; the first has opened it."""
    made = [Transaction(root, step, id, part, timeout, fsync=False) for part in ("00000", *parts)]
    made[0].open(lambda folder: True)
    for other in made[1:]:
        other.join()
    return made


def put(transaction: Transaction, name: str, data: bytes) -> dict[str, FileEntry]:
    path = transaction.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {name: FileEntry(len(data), zlib.crc32(data))}


def test_two_ranks_commit(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 3, "00001")
    second.deliver(RankPart(put(second, "critic/b.bin", b"22"), ({"role": "critic", "format": "x", "parallel": "1"},)))
    parts = first.parts(["00001"])
    assert parts["00001"].roles == ({"role": "critic", "format": "x", "parallel": "1"},)
    files = {**put(first, "actor/a.bin", b"1"), **parts["00001"].files}
    assert not (tmp_path / "global_step_3").exists()
    committing = threading.Timer(0.05, lambda: first.commit(Manifest(files, step=3)))
    committing.start()
    second.await_commit()
    assert [step.step for step in steps.committed(tmp_path)] == [3]
    committing.join(10)
    assert [step.step for step in steps.committed(tmp_path)] == [3]
    assert sorted(os.listdir(tmp_path)) == ["global_step_3"]
    assert sorted(os.listdir(tmp_path / "global_step_3")) == ["actor", "critic", "manifest.json"]


@pytest.mark.parametrize("break_it", ["missing", "short"])
def test_what_is_not_what_its_writer_says_is_not_committed(tmp_path: Path, break_it: str) -> None:
    (first,) = opened(tmp_path)
    files = put(first, "actor/a.bin", b"123")
    path = first.folder / "actor" / "a.bin"
    path.unlink() if break_it == "missing" else path.write_bytes(b"12")
    with pytest.raises(Incomplete, match=r"a\.bin: (is missing|has 2 bytes); its writer reported 3"):
        first.commit(Manifest(files, step=3))
    first.abort()
    assert os.listdir(tmp_path) == []


def test_the_coordinator_gives_up(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 3, "00001")
    aborting = threading.Timer(0.05, first.abort)
    aborting.start()
    with pytest.raises(Stopped, match="given up"):
        second.await_commit()
    with pytest.raises(CheckpointError):
        second.deliver(RankPart({}))
    aborting.join(10)
    assert os.listdir(tmp_path) == []


def test_the_coordinator_dies(tmp_path: Path) -> None:
    _, second = opened(tmp_path, 3, "00001", timeout=0.1)
    with pytest.raises(Incomplete, match=r"was not committed within 0\.2 s"):
        second.await_commit()


def test_the_coordinator_never_comes(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match=r"did not start the save within 0\.1 s"):
        Transaction(tmp_path, 3, "0001", "00001", 0.1).join()


def test_the_coordinator_gives_up_before_another_world_has_joined(tmp_path: Path) -> None:
    (first,) = opened(tmp_path)
    first.abort("the disk is full")
    late_world = Transaction(tmp_path, 3, "0001", "critic-00000", 20.0, fsync=False)
    with pytest.raises(Stopped, match="given up by another world: the disk is full"):
        late_world.join()
    opened(tmp_path, id="0002")[0].abort()
    with pytest.raises(Stopped, match="the disk is full"):
        late_world.join()
    opened(tmp_path, id="0003")[0].commit(Manifest({}, step=3))
    assert os.listdir(tmp_path) == ["global_step_3"], "the word is removed when every world has joined a later save"


def test_another_rank_says_what_the_coordinator_cannot(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 3, "actor-00001")
    first.abort()
    with pytest.raises(Stopped) as stopped:
        second.await_commit()
    second.abort(str(stopped.value))
    with pytest.raises(Stopped, match="its log says why"):
        Transaction(tmp_path, 3, "0001", "critic-00000", 20.0, fsync=False).join()


def test_a_late_rank_writes_while_its_step_is_removed(tmp_path: Path) -> None:
    """Removing a step that was given up does not stumble over files that are still being made."""
    first, _ = opened(tmp_path, 3, "00001")
    (first.folder / "actor").mkdir()
    stop = threading.Event()

    def write() -> None:
        for number in range(10**6):
            try:
                (first.folder / "actor" / f"{number}").write_bytes(b"")
            except OSError:
                return
            if stop.is_set():
                return

    writing = threading.Thread(target=write)
    writing.start()
    time.sleep(0.02)
    first.abort()
    stop.set()
    writing.join(10)
    assert os.listdir(tmp_path) == []


def test_two_transactions_of_one_step(tmp_path: Path) -> None:
    """The second does not take the first, which lives, for a leftover; the last commit wins, and both were whole."""
    (first,) = opened(tmp_path)
    second = Transaction(tmp_path, 3, "0002", "00000", 1.0, fsync=False)
    second.open(lambda folder: True)
    assert first.folder.is_dir()
    second.commit(Manifest(put(second, "a.bin", b"second"), step=3))
    first.commit(Manifest(put(first, "a.bin", b"first"), step=3))
    assert (tmp_path / "global_step_3" / "a.bin").read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["global_step_3"]


@pytest.mark.parametrize("failing", ["manifest", "rename"])
def test_a_commit_that_fails_puts_the_old_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    (old,) = opened(tmp_path)
    old.commit(Manifest(put(old, "a.bin", b"old"), step=3))
    (new,) = opened(tmp_path, id="0002")
    files = put(new, "a.bin", b"new")
    real = os.replace

    def rename(source: Path, target: Path) -> None:
        if Path(target) == new.target and ".partial-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    def write_new(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if failing == "rename":
            patch.setattr(os, "rename", rename)
        else:
            patch.setattr(publish, "write_new", write_new)
        with pytest.raises(StorageError, match="cannot publish"):
            new.commit(Manifest(files, step=3))
        new.abort()
    assert (tmp_path / "global_step_3" / "a.bin").read_bytes() == b"old"
    assert [step.step for step in steps.committed(tmp_path)] == [3]
    assert sorted(os.listdir(tmp_path)) == ["global_step_3"]


def test_a_rename_that_is_reported_as_failed_and_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry of a network file system: the manifest on the disk decides, not the error."""
    (new,) = opened(tmp_path)
    files = put(new, "a.bin", b"new")
    real = os.replace

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        new.commit(Manifest(files, step=3))
    assert [step.step for step in steps.committed(tmp_path)] == [3]
