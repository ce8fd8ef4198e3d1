"""Records that are added: in groups, in files of one process, and what becomes of them where the disk does not take them."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.storage import appending
from mcore_rlhf.storage.appending import AppendLog, Pace
from mcore_rlhf.storage.framed import FrameReader

QUICK = Pace(write_s=0.002, sync_s=0.01)


def records(folder: Path) -> list[bytes]:
    """Every record of every file, without its header."""
    found: list[bytes] = []
    for path in sorted(folder.glob("*.seg")):
        found += [bytes(frame.payload) for frame in FrameReader(path).read()][1:]
    return found


def closed(folder: Path) -> list[bool]:
    readers = [FrameReader(path) for path in folder.glob("*.seg")]
    return [not [*reader.read()] or reader.closed for reader in readers]


class Fsync:
    """Counts, and fails on demand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.fail, self.real = 0, 0, os.fsync
        patch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        self.calls += 1
        if self.fail and ".seg" in os.readlink(f"/proc/self/fd/{fd}"):
            self.fail -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.real(fd)


@pytest.fixture
def fsync(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fsync]:
    return Fsync(monkeypatch)


def test_all_that_is_added_by_many_threads_is_there_once_and_in_order(tmp_path: Path, fsync: Fsync) -> None:
    log = AppendLog(tmp_path, "w", b"h", QUICK)

    def add(which: int) -> None:
        for at in range(500):
            assert log.add(b"%d %d" % (which, at))

    threads = [threading.Thread(target=add, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = records(tmp_path)
    assert (log.counts.added, log.counts.safe, len(found)) == (2000, 2000, 2000)
    for which in range(4):
        mine = [one for one in found if one.startswith(b"%d " % which)]
        assert mine == [b"%d %d" % (which, at) for at in range(500)]
    assert closed(tmp_path) == [True]
    assert fsync.calls < 200, "one fsync serves for many"


def test_a_record_is_on_its_way_without_being_asked_for(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, "w", b"h", Pace(write_s=0.01, sync_s=60))
    log.add(b"x")
    end = time.monotonic() + 10
    while not records(tmp_path) and time.monotonic() < end:
        time.sleep(0.005)
    assert records(tmp_path) == [b"x"], "a kill loses it no more"
    assert log.counts.safe == 0, "a power failure may"
    log.flush(10)
    assert log.counts.safe == 1
    log.close()


def test_after_a_failed_fsync_the_group_is_written_again_elsewhere(tmp_path: Path, fsync: Fsync) -> None:
    heard: list[StorageError | None] = []
    log = AppendLog(tmp_path, "w", b"h", QUICK, on_problem=heard.append)
    log.add(b"first")
    log.flush(10)
    fsync.fail = 1
    log.add(b"second")
    log.flush(10)
    assert heard == [], "a new file is well: nobody need hear of it"
    assert records(tmp_path).count(b"second") == 2, "what was not confirmed is there twice"
    fsync.fail = 2
    log.add(b"third")
    with pytest.raises(StorageError, match=rf"{tmp_path}/w-.*\.seg: cannot write: Input/output error .*wait for"):
        log.flush(10)
    end = time.monotonic() + 10
    while log.counts.safe < 3 and time.monotonic() < end:
        time.sleep(0.01)
    log.add(b"fourth")
    log.close()
    assert len(list(tmp_path.glob("*.seg"))) == 3
    assert set(records(tmp_path)) == {b"first", b"second", b"third", b"fourth"}
    assert len(heard) == 2
    assert isinstance(heard[0], StorageError)
    assert heard[1] is None


def test_who_asks_for_it_again_is_not_told_of_the_last_try(
    tmp_path: Path, fsync: Fsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full, and is not any more: whoever flushes then hears of a try that is made now, not in five seconds."""
    for name in ("_FIRST_RETRY_S", "_LONGEST_RETRY_S"):
        monkeypatch.setattr(appending, name, 60.0)
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    fsync.fail = 4
    log.add(b"x")
    for _ in range(2):
        with pytest.raises(StorageError, match="Input/output error"):
            log.flush(10)
    assert fsync.fail == 0, "each asked the disk, twice"
    log.flush(10)
    assert (log.counts.safe, log.problem) == (1, None)
    log.close()


def test_a_full_disk_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.write, [True]

    def write(fd: int, data: bytes) -> int:
        if full[0] and ".seg" in os.readlink(f"/proc/self/fd/{fd}"):
            if len(data) > 4:
                return real(fd, data[: len(data) // 2])  # some of it still fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    log = AppendLog(tmp_path, "w", b"h", replace(QUICK, most_waiting=100))
    assert all([log.add(b"x" * 10), log.add(b"y" * 10)])
    with pytest.raises(StorageError, match="No space left"):
        log.flush(10)
    assert [log.add(b"z" * 30) for _ in range(4)] == [True, True, False, False], "no more than 100 bytes are held"
    assert list(tmp_path.glob("*.seg")) == [], "nothing is left of what did not fit"
    full[0] = False
    log.close()
    assert sorted(records(tmp_path)) == [b"x" * 10, b"y" * 10, b"z" * 30, b"z" * 30]
    assert (log.counts.safe, log.counts.dropped) == (4, 2)


def test_who_listens_and_fails_ends_nothing(tmp_path: Path, fsync: Fsync) -> None:
    def listen(problem: StorageError | None) -> None:
        raise ValueError("of the user's")

    log = AppendLog(tmp_path, "w", b"h", QUICK, on_problem=listen)
    fsync.fail = 2
    log.add(b"x")
    with pytest.raises(StorageError):
        log.flush(10)
    log.close()
    assert log.counts.safe == 1


def test_who_wants_it_is_told_by_add(tmp_path: Path, fsync: Fsync) -> None:
    log = AppendLog(tmp_path, "w", b"h", QUICK, on_error="raise")
    fsync.fail = 1 << 20
    log.add(b"x")
    with pytest.raises(StorageError):
        log.flush(10)
    with pytest.raises(StorageError, match="Input/output error"):
        log.add(b"y")
    assert log.counts.added == 1, "what was refused is not waited for"
    with pytest.raises(StorageError):
        log.close()


@pytest.mark.parametrize("how", ["continue", "raise"])
def test_where_there_is_no_thread_it_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Literal["continue", "raise"]
) -> None:
    """A container may have as many processes as it may."""
    real, full, heard = threading.Thread.start, [True], list[StorageError | None]()

    def start(thread: threading.Thread) -> None:
        if full[0]:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    log = AppendLog(tmp_path, "w", b"h", QUICK, on_error=how, on_problem=heard.append)
    for record in (b"one", b"two"):
        if how == "raise":
            with pytest.raises(StorageError, match="the system gives no thread for it"):
                log.add(record)
        else:
            assert log.add(record)
    assert len(heard) == 1
    if how == "continue":
        with pytest.raises(StorageError, match="the system gives no thread for it"):
            log.flush(1)
    full[0] = False
    log.add(b"three")
    log.close()
    assert records(tmp_path) == ([b"one", b"two"] if how == "continue" else []) + [b"three"]


def test_one_that_never_gets_a_thread_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    assert log.add(b"one")
    log.close()
    assert records(tmp_path) == []


def test_a_disk_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), os.fsync

    def hang(fd: int) -> None:
        go.wait(30)
        real(fd)

    monkeypatch.setattr(os, "fsync", hang)
    log = AppendLog(tmp_path, "w", b"h", replace(QUICK, most_waiting=100, patience_s=0.05))
    assert log.add(b"x" * 90)
    assert not log.add(b"y" * 90)
    log.pace = replace(log.pace, patience_s=1000)
    assert not log.add(b"z" * 90), "nobody waits for it a second time"
    with pytest.raises(StorageError, match=rf"{tmp_path}: the disk has not taken 90 bytes of records for 0 s"):
        log.flush(0.05)
    go.set()
    log.close()
    assert records(tmp_path) == [b"x" * 90]


def test_segments_end_by_size_and_by_age(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, "w", b"h", replace(QUICK, segment_nbytes=1000))
    for at in range(30):
        log.add(b"%03d" % at + b"x" * 97)
        log.flush(10)
    log.close()
    assert len(list(tmp_path.glob("*.seg"))) >= 3
    assert all(closed(tmp_path))
    assert sorted(records(tmp_path)) == [b"%03d" % at + b"x" * 97 for at in range(30)]
    idle = tmp_path / "idle"
    idle.mkdir()
    log = AppendLog(idle, "w", b"h", replace(QUICK, segment_s=0.05))
    log.add(b"x")
    end = time.monotonic() + 10
    while closed(idle) != [True] and time.monotonic() < end:
        time.sleep(0.01)
    assert closed(idle) == [True], "one that nobody adds to any more is closed, too"
    log.close()


def test_a_fork_has_files_of_its_own(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    log.add(b"parent")
    log.flush(10)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            log.add(b"child")
            log.flush(10)
            spent = time.process_time()
            time.sleep(0.2)
            code = int(time.process_time() - spent > 0.1)  # it does not think that the parent's flush is its own
            log.close()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    log.add(b"parent again")
    log.close()
    assert sorted(records(tmp_path)) == [b"child", b"parent", b"parent again"]
    assert closed(tmp_path) == [True, True]


def test_a_new_file_that_somebody_is_about_to_remove_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refuse = fcntl.flock, [True]

    def flock(fd: int, how: int) -> None:
        if refuse and refuse.pop():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    log.add(b"x")
    log.flush(10)
    assert not refuse
    (path,) = tmp_path.glob("*.seg")
    with path.open("rb") as other, pytest.raises(BlockingIOError):
        real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.close()
    assert records(tmp_path) == [b"x"]


def test_somebody_removes_the_file_under_it(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    log.add(b"x")
    log.flush(10)
    for path in tmp_path.glob("*.seg"):
        path.unlink()
    log.add(b"y")
    log.close()
    assert records(tmp_path) == [b"y"]


@pytest.mark.parametrize("owner", ["", "a/b", "..", ".x", "a\n", "é", "x" * 101, "a b", "\x1b[2J"])
def test_names_that_are_none(tmp_path: Path, owner: str) -> None:
    with pytest.raises(UsageError, match="expected a name"):
        AppendLog(tmp_path, owner, b"h")


def test_mistakes(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    with pytest.raises(UsageError, match="0 bytes"):
        log.add(b"")
    log.close()
    log.close()
    with pytest.raises(UsageError, match="closed"):
        log.add(b"x")
    with pytest.raises(UsageError, match="sync_s"):
        Pace(sync_s=-1)
    with pytest.raises(UsageError, match="on_error"):
        AppendLog(tmp_path, "w", b"h", QUICK, "ignore")  # type: ignore[arg-type]


class Scarce(list[bytes]):
    """A list that finds no memory to grow, some times."""

    times = 3

    def __iadd__(self, more: object) -> Scarce:  # type: ignore[misc, override]
        if self.times:
            self.times -= 1
            raise MemoryError
        return super().__iadd__(more)  # type: ignore[arg-type, return-value]


def test_a_writer_that_finds_no_memory_holds_what_was_added(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, "w", b"h", QUICK)
    log._group = Scarce()
    added = [b"%d" % at for at in range(50)]
    for record in added:
        assert log.add(record)
    log.flush(10)
    log.close()
    assert (records(tmp_path), log.counts.safe) == (added, 50)
