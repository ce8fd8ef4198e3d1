from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.storage import patience, transactions
from mcore_rlhf.storage import publish as publish_module
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication, check_space, replace_text
from mcore_rlhf.storage.transactions import Lock, TransactionPaths, recover
from mcore_rlhf.storage.urls import refuse_overlap

MANIFEST = Manifest({"a": FileEntry(3, 0)})


def publish(target: Path, content: str = "new", **options: Any) -> LocalPublication:
    with LocalPublication(target, **options) as publication:
        (publication.staging / "sub").mkdir()
        (publication.staging / "sub" / "a").write_text(content)
        publication.commit(MANIFEST)
    return publication


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fsync", [True, False])
def test_a_folder_appears_as_a_whole(tmp_path: Path, fsync: bool) -> None:
    target = tmp_path / "deep" / "out"
    with LocalPublication(target, fsync=fsync) as publication:
        (publication.staging / "a").write_text("abc")
        assert not target.exists()
        assert publication.staging.parent == target.parent
        assert publication.commit(MANIFEST) == target
    assert names(target.parent) == ["out"]
    assert names(target) == ["a", MANIFEST_NAME]
    assert Manifest.read(target / MANIFEST_NAME).transaction == publication.transaction


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_without_commit_nothing_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> None:
        with LocalPublication(tmp_path / "made" / "for it" / "out") as publication:
            (publication.staging / "a").write_text("abc")
            raise error

    with pytest.raises(error):
        interrupted()
    assert names(tmp_path) == []


def test_an_existing_target_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    publish(target)
    with pytest.raises(StorageError, match="exists already") as raised:
        publish(target)
    assert "--overwrite" in str(raised.value)
    assert raised.value.exit_code == 2
    assert names(tmp_path) == ["out"]


def test_overwriting_replaces_only_what_may_be_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("x")
    with pytest.raises(StorageError, match="does not look like a checkpoint"):
        publish(home, overwrite=True, replaceable=lambda path: (path / MANIFEST_NAME).exists())
    assert names(home) == ["thesis"]
    publish(home, "newer", overwrite=True, replaceable=lambda path: path == home)
    assert (home / "sub" / "a").read_text() == "newer"
    assert names(tmp_path) == ["home"]


def test_files_and_links_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(StorageError, match="is a file"):
        publish(tmp_path / "file", overwrite=True, replaceable=lambda _: True)
    with pytest.raises(StorageError, match="symbolic link"):
        publish(tmp_path / "link", overwrite=True, replaceable=lambda _: True)


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with LocalPublication(target) as publication:
        target.mkdir()
        (target / "theirs").touch()
        with pytest.raises(StorageError, match="exists already"):
            publication.commit(MANIFEST)
    assert names(target) == ["theirs"]
    assert names(tmp_path) == ["out"]


def test_a_failure_between_the_two_renames_puts_the_old_target_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "out", "old")
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if ".partial-" in str(source):
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StorageError, match="cannot publish: Input/output error"):
        publish(tmp_path / "out", "new", overwrite=True, replaceable=lambda _: True)
    assert (tmp_path / "out" / "sub" / "a").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_rename_that_was_done_but_reported_as_failed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def lying(source: Any, target: Any) -> None:
        rename(source, target)
        raise OSError(errno.ENOENT, "an NFS retry")

    monkeypatch.setattr(os, "rename", lying)
    publish(tmp_path / "out")
    assert names(tmp_path) == ["out"]


CRASH = """
import os, signal, sys
from pathlib import Path
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.publish import LocalPublication
target, where = Path(sys.argv[1]), int(sys.argv[2])
rename, count = os.rename, 0
def counting(a, b):
    global count
    if count == where: os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    rename(a, b)
    if count == where and where == 2: os.kill(os.getpid(), signal.SIGKILL)
os.rename = counting
with LocalPublication(target, overwrite=True, replaceable=lambda _: True) as publication:
    (publication.staging / "sub").mkdir()
    (publication.staging / "sub" / "a").write_text("new")
    publication.commit(Manifest({}))
"""


@pytest.mark.parametrize(
    ("where", "expected"), [(0, "old"), (1, "old"), (2, "new")], ids=["before", "between", "after"]
)
def test_a_kill_at_any_rename_is_recovered(tmp_path: Path, where: int, expected: str) -> None:
    target = tmp_path / "out"
    publish(target, "old")
    killed = subprocess.run([sys.executable, "-c", CRASH, str(target), str(where)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) > 1
    done = recover(target)
    assert done
    assert (target / "sub" / "a").read_text() == expected
    assert names(tmp_path) == ["out"]
    assert recover(target) == []


LOCKS = {"lost": None, "empty": "", "zeroed": "\0" * 12, "another host's": "another-host"}


@pytest.mark.parametrize("text", LOCKS.values(), ids=LOCKS)
def test_what_lies_aside_is_put_back_whatever_became_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(transactions, "PAUSES", (0.001,))
    for transaction in ("1", "2"):  # of two, the newest
        places = TransactionPaths(tmp_path / "o[u]t", transaction)
        publish(places.old, transaction)
    if text is not None:
        places.lock.write_text(text)
    done = recover(places.target)
    assert done == [f"put {places.target} back: its replacement was interrupted"]
    assert (places.target / "sub" / "a").read_text() == "2"
    assert recover(places.target) == []
    assert publish(places.target, "new", overwrite=True, replaceable=lambda _: True).recovered == []


def test_what_a_living_process_moved_aside_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "PAUSES", (0.001,))
    places = TransactionPaths(tmp_path / "out", "1")
    publish(places.old, "old")
    lock = Lock(places.lock)
    assert recover(places.target) == []
    lock.release()
    publish(tmp_path / "its own", "new")
    moves = [lambda: None, lambda: (tmp_path / "its own").rename(places.target)]  # it was about to
    monkeypatch.setattr(time, "sleep", lambda _: moves.pop(0)())
    assert recover(places.target) == []
    assert (places.target / "sub" / "a").read_text() == "new"


def test_what_was_replaced_is_removed_by_whoever_is_alone(tmp_path: Path) -> None:
    published = publish(tmp_path / "out", "new")
    places = TransactionPaths(tmp_path / "out", published.transaction)
    publish(places.old, "old")
    places.lock.write_text("another-host")
    assert recover(places.target) == []
    assert recover(places.target, alone=True) == [
        f"removed {places.old}: what {places.target} was before it was replaced"
    ]
    assert not places.old.exists()


def test_the_lock_is_on_the_disk_before_anything_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, done = tmp_path / "out", list[str]()
    publish(target, "old")
    rename, fsync = os.rename, os.fsync

    def renaming(source: Path, to: Path) -> None:
        done.append(f"rename to {Path(to).name.partition('-')[0]}")
        rename(source, to)

    def syncing(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name.partition('-')[0]}")
        fsync(fd)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "fsync", syncing)
    publish(target, "new", overwrite=True, replaceable=lambda _: True, fsync=True)
    aside = done.index("rename to .out.old")
    assert done[aside - 2 : aside + 3] == [
        "fsync .out.lock", f"fsync {tmp_path.name.partition('-')[0]}", "rename to .out.old", "rename to out",
        f"fsync {tmp_path.name.partition('-')[0]}",
    ]  # fmt: skip


def test_nothing_is_published_that_could_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed holds files that may be lost with the power."""
    genuine, target = os.scandir, tmp_path / "out"

    def fail(folder: Any) -> Any:
        if Path(folder).name == "deep":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        return genuine(folder)

    with LocalPublication(target) as publication:
        (publication.staging / "deep").mkdir()
        (publication.staging / "deep" / "weights").write_bytes(b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", fail)
            with pytest.raises(StorageError, match="deep: cannot read: Input/output error"):
                publication.commit(Manifest({}))
    assert not target.exists()


def test_leftovers_of_the_living_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with LocalPublication(target) as living:
        assert recover(target) == []
        publish(target)
        assert living.staging.is_dir()
    assert names(tmp_path) == ["out"]


def test_leftovers_of_another_host_are_left_alone_for_a_day(tmp_path: Path) -> None:
    places = TransactionPaths(tmp_path / "out", "1")
    places.staging.mkdir()
    places.lock.write_text("another-host")
    assert recover(tmp_path / "out") == []
    os.utime(places.lock, (0, 0))
    assert recover(tmp_path / "out") == [f"removed {places.staging}: it was left half-written"]
    assert names(tmp_path) == []


def test_a_lock_of_another_host_ages_by_the_clock_of_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host's clock may be wrong by days, where the lock is held by one that the kernel does not know of."""
    places = TransactionPaths(tmp_path / "out", "1")
    places.staging.mkdir()
    places.lock.write_text("another-host")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * 24 * 3600)
    assert recover(tmp_path / "out") == []
    os.utime(places.lock, (0, 0))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert recover(tmp_path / "out") == [f"removed {places.staging}: it was left half-written"]
    assert names(tmp_path) == []


def test_a_lock_whose_age_nobody_can_say_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = TransactionPaths(tmp_path / "out", "1")
    places.staging.mkdir()
    places.lock.write_text("another-host")
    os.utime(places.lock, (0, 0))

    def full(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(patience, "write_new", full)
    assert recover(tmp_path / "out") == []
    assert places.staging.is_dir()


def test_a_requeued_job_takes_over_what_it_left_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JOB_ID": "77", "STEP_ID": "0", "PROCID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    places = TransactionPaths(tmp_path / "out", "1")
    places.staging.mkdir()
    places.lock.write_text("another-host 77.0.2")
    assert recover(tmp_path / "out") == []
    places.lock.write_text("another-host 77.0.3")
    assert recover(tmp_path / "out") == [f"removed {places.staging}: it was left half-written"]


def test_an_old_target_is_kept_where_someone_made_a_new_one(tmp_path: Path) -> None:
    places = TransactionPaths(tmp_path / "out", "1")
    lock = Lock(places.lock)
    os.close(lock._fd)  # as if the process had died
    places.old.mkdir()
    places.target.mkdir()
    (places.target / "theirs").touch()
    assert "kept" in recover(places.target)[0]
    assert names(places.target) == ["theirs"]
    assert places.old.exists()


def test_a_leftover_lock_does_not_hinder_the_next_one(tmp_path: Path) -> None:
    places = TransactionPaths(tmp_path / "o[u]t*", "1")
    lock = Lock(places.lock)
    os.close(lock._fd)
    places.staging.mkdir()
    publication = publish(places.target)
    assert publication.recovered == [f"removed {places.staging}: it was left half-written"]
    assert names(tmp_path) == ["o[u]t*"]


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_args: Any, **_options: Any) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(StorageError, match="cannot create: Permission denied"), LocalPublication(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


def test_space_is_checked_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_space(tmp_path / "not" / "yet" / "there", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**9})())
    with pytest.raises(StorageError, match=r"3\.0 GB are needed, but only 1\.0 GB are free"):
        check_space(tmp_path, 3 * 10**9)


def test_source_and_target_may_not_overlap(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    (tmp_path / "alias").symlink_to(source)
    refuse_overlap(source, tmp_path / "runs")
    for target, message in (
        (source, "same folder"),
        (tmp_path / "alias", "same folder"),
        (source / "out", "lies inside"),
        (tmp_path / "alias" / "x" / "y", "lies inside"),
        (tmp_path, "holds the source"),
        (source / ".." / "run" / "out", "lies inside"),
    ):
        with pytest.raises(UsageError, match=message):
            refuse_overlap(source, target)


def test_everything_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(publish_module, "_sync", lambda path, flags: synced.append(path.name))
    publication = publish(tmp_path / "out")
    staging = publication.staging.name
    assert synced == ["a", "sub", MANIFEST_NAME, staging, tmp_path.name]


def test_a_small_text_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest_universal"
    replace_text(path, "step1_uni")
    replace_text(path, "step2_uni", fsync=False)
    assert path.read_text() == "step2_uni"

    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(StorageError, match="latest_universal: cannot write"):
        replace_text(path, "step3_uni")
    assert [p.name for p in tmp_path.iterdir()] == ["latest_universal"]
    assert path.read_text() == "step2_uni"
