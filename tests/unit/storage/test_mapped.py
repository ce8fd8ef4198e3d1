from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rlhf.errors import NotACheckpoint, StorageError, Untrusted
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.reading import MappedFile, OpenFiles, opened

PAGE = mmap.PAGESIZE


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = os.urandom(20 * PAGE + 123)
    (tmp_path / "x.pt").write_bytes(data)
    return data


def test_views_are_the_files_bytes(tmp_path: Path, content: bytes) -> None:
    file = MappedFile(tmp_path / "x.pt")
    for at, nbytes in ((0, len(content)), (1, 1), (PAGE - 1, 2), (5 * PAGE, 3 * PAGE), (len(content), 0)):
        view = file.view(at, nbytes)
        assert view == content[at : at + nbytes]
        assert view.readonly
        file.release(at, nbytes)
        assert view == content[at : at + nbytes]  # released bytes come back when they are read after all
    file.close()


def test_released_pages_leave_memory(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "large", 32 << 20
    path.write_bytes(bytes(nbytes))
    file = MappedFile(path)
    step, start = 300_000, _resident()
    for at in range(0, nbytes, step):
        part = min(step, nbytes - at)
        file.view(at, part)
        file.release(at, part)
    assert _resident() - start < 4 << 20


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path, content: bytes) -> None:
    file = MappedFile(tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", PAGE)
    assert file.view(0, PAGE) == content[:PAGE]
    with pytest.raises(StorageError, match=f"ends at byte {PAGE}, but bytes 0 to {2 * PAGE} are needed"):
        file.view(0, 2 * PAGE)


def test_a_view_past_the_end_is_refused(tmp_path: Path, content: bytes) -> None:
    file = MappedFile(tmp_path / "x.pt")
    with pytest.raises(StorageError, match="are needed"):
        file.view(len(content), 1)


class _FailingMadvise:
    def __init__(self, number: int) -> None:
        self.number = number

    def madvise(self, *_args: int) -> int:
        ctypes.set_errno(self.number)
        return -1


def test_a_failing_disk_is_an_error_not_a_signal(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MappedFile(tmp_path / "x.pt")
    monkeypatch.setattr(reading, "_libc", _FailingMadvise(errno.EFAULT))
    with pytest.raises(StorageError, match=r"cannot read: Input/output error \(bytes 10 to 30\)"):
        file.view(10, 20)
    file.release(10, 20)


def test_an_old_kernel_just_reads_later(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_libc", _FailingMadvise(errno.EINVAL))
    assert MappedFile(tmp_path / "x.pt").view(10, 20) == content[10:30]


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert MappedFile(tmp_path / "empty").view(0, 0) == b""
    with pytest.raises(NotACheckpoint):
        opened(tmp_path / "none", MappedFile)


def test_files_of_a_checkpoint_are_opened_once_even_by_many_threads(tmp_path: Path, content: bytes) -> None:
    with OpenFiles(tmp_path) as files:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: id(files.open("x.pt")), range(100)))
            views = list(pool.map(lambda at: bytes(files.view("x.pt", at, 100)), range(0, 80_000, 999)))
        assert len(found) == 1
        assert views == [content[at : at + 100] for at in range(0, 80_000, 999)]
        files.release("x.pt", 0, 100)
        kept = files.view("x.pt", 0, 10)
    assert kept == content[:10]  # a view outlives the closing


def test_paths_cannot_leave_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Untrusted):
        OpenFiles(tmp_path / "root").view("../x.pt", 0, 1)


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    """A universal checkpoint has thousands; those that nobody looks at are closed, those in use are not."""
    for number in range(40):
        (tmp_path / f"{number}.pt").write_bytes(bytes([number]) * PAGE)
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles(tmp_path, limit=4) as files:
        held = files.view("0.pt", 0, PAGE)
        for number in range(1, 40):
            assert files.view(f"{number}.pt", 5, 1) == bytes([number])
            files.release(f"{number}.pt", 5, 1)
        assert len(os.listdir("/proc/self/fd")) - before <= 5
        assert held == bytes(PAGE)
        files.release("0.pt", 0, PAGE)
        assert files.view("1.pt", 0, PAGE) == bytes([1]) * PAGE
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_view_that_fails_does_not_keep_its_file_open(tmp_path: Path, content: bytes) -> None:
    with OpenFiles(tmp_path, limit=0) as files:
        with pytest.raises(StorageError):
            files.view("x.pt", len(content), 1)
        files.view("x.pt", 0, 1)
        files.release("x.pt", 0, 1)
        assert [use.views for use in files._open.values()] == [0]
