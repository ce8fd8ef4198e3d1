"""What to keep, and deleting the rest."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.errors import NotACheckpoint, StorageError, UsageError
from mcore_rlhf.manager.run import retention, steps
from mcore_rlhf.manager.run.naming import Naming
from mcore_rlhf.manager.run.retention import (
    KeepBest,
    KeepEvery,
    KeepLast,
    Retention,
    SizeCap,
    apply,
    clean_up,
    delete,
    plan_deletions,
)
from mcore_rlhf.manager.run.steps import Step

from .roots import make_step, states


def going(root: Path, *rules: object, cap: int | None = None, **options: object) -> list[int]:
    """The numbers of the steps that would be deleted."""
    policy = Retention(rules, SizeCap(cap) if cap is not None else None)  # type: ignore[arg-type]
    return [found.step for found in plan_deletions(root, policy, **options)]  # type: ignore[arg-type]


def make_steps(root: Path, numbers: range, rewards: dict[int, object] | None = None) -> None:
    for number in numbers:
        value = (rewards or {}).get(number)
        make_step(root, number, metrics={"reward": value} if value is not None else {})


def test_keep_last_counts_committed_steps_only(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 6))
    (tmp_path / "global_step_5" / "actor" / "weights.bin").unlink()
    assert going(tmp_path, KeepLast(2)) == [1, 2]
    assert going(tmp_path, KeepLast(99)) == []


def test_keep_every(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 8))
    assert going(tmp_path, KeepEvery(3)) == [1, 2, 4, 5]


def test_keep_best_by_the_metrics_on_the_disk(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 7), {1: 0.1, 2: 0.9, 3: 0.9, 4: -2, 5: float("nan"), 6: 0.0})
    assert going(tmp_path, KeepBest("reward")) == [1, 2, 4, 5]  # of equals, the newer
    assert going(tmp_path, KeepBest("reward", "max", 2)) == [1, 4, 5]
    assert going(tmp_path, KeepBest("reward", "min")) == [1, 2, 3, 5]


def test_a_metric_that_no_step_has_keeps_everything(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 5))
    assert going(tmp_path, KeepBest("rewrad")) == []
    assert going(tmp_path, KeepBest("rewrad"), KeepLast(1)) == []


def test_rules_are_united(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 10), {2: 5.0, 3: 1.0})
    assert going(tmp_path, KeepLast(2), KeepEvery(4), KeepBest("reward")) == [1, 3, 5, 6, 7]


def test_without_rules_everything_is_kept(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 4))
    assert going(tmp_path) == []


def test_the_cap_takes_the_oldest_of_what_is_kept(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 6))
    each = steps.listed(tmp_path)[0].nbytes
    assert going(tmp_path, cap=5 * each + 5) == []
    assert going(tmp_path, cap=3 * each) == [1, 2]
    assert going(tmp_path, KeepEvery(2), cap=2 * each) == [1, 2, 3]  # 1 and 3 by the rule, then 2
    assert going(tmp_path, cap=3 * each, protect={1}) == [2, 3]


def test_the_cap_never_takes_the_newest(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 4))
    assert going(tmp_path, cap=1) == [1, 2]


def test_by_products_are_counted_and_go_along(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 4))
    each = steps.listed(tmp_path)[0].nbytes
    export = tmp_path / "exports" / "global_step_1"
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(b"x" * 5000)
    (tmp_path / "global_step_2" / "converted.bin").write_bytes(b"x" * 7000)
    assert going(tmp_path, cap=3 * each) == [1, 2]
    one, two = plan_deletions(tmp_path, Retention([KeepLast(1)]))
    assert (one.nbytes, two.nbytes) == (each + 5000, each + 7000)
    assert apply(tmp_path, [one, two]) == [one, two]
    assert states(tmp_path) == {3: "committed"}
    assert sorted(os.listdir(tmp_path)) == ["exports", "global_step_3"]
    assert os.listdir(tmp_path / "exports") == []


def test_nothing_goes_without_a_committed_successor(tmp_path: Path) -> None:
    assert going(tmp_path, KeepLast(1), include_damaged=True) == []
    make_steps(tmp_path, range(1, 4))
    for number in (2, 3):
        (tmp_path / f"global_step_{number}" / "actor" / "weights.bin").unlink()
    assert going(tmp_path, KeepEvery(100), include_damaged=True, cap=1) == []
    make_step(tmp_path, 4)
    assert going(tmp_path, KeepEvery(100), include_damaged=True) == [1, 2, 3]
    assert going(tmp_path, KeepEvery(100)) == [1]


def test_steps_in_quarantine_stay_and_do_not_count(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 5), {1: 9.0, 2: 1.0})
    steps.quarantine(tmp_path / "global_step_1", "look at it")
    steps.quarantine(tmp_path / "global_step_4", "bad")
    assert going(tmp_path, KeepLast(1)) == [2]  # 3 is the newest to resume from
    assert going(tmp_path, KeepBest("reward")) == []  # 2 is the best that can be resumed from
    assert going(tmp_path, KeepLast(1), cap=1, include_damaged=True) == [2]


def test_foreign_hidden_and_newer_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "global_step_1" / "actor" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / ".global_step_3.partial-1-ab").mkdir()
    make_step(tmp_path, 4)
    (tmp_path / "global_step_5").mkdir()
    assert going(tmp_path, KeepLast(1), cap=1) == []
    assert going(tmp_path, KeepLast(1), include_damaged=True) == [2]


@pytest.mark.parametrize(
    "make", [lambda: KeepLast(0), lambda: KeepEvery(0), lambda: KeepBest("x", k=0), lambda: SizeCap(0),
             lambda: KeepBest("x", "most")],
)  # fmt: skip
def test_senseless_rules_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError):
        make()


_NUMBERS = st.lists(st.integers(0, 50), min_size=1, max_size=12, unique=True)
_STATE = st.sampled_from(["committed", "committed", "committed", "damaged", "partial", "foreign", "quarantined"])


@given(st.data())
def test_the_newest_committed_step_survives_every_policy(data: st.DataObject) -> None:
    """Against a brute-force statement of what must hold, for random roots and policies."""
    numbers = sorted(data.draw(_NUMBERS))
    kinds = {number: data.draw(_STATE) for number in numbers}
    sizes = {number: data.draw(st.integers(0, 100)) for number in numbers}
    found = [
        Step(
            number,
            Path("/nowhere") / f"global_step_{number}",
            "committed" if kind == "quarantined" else kind,  # type: ignore[arg-type]
            sizes[number],
            quarantined="x" if kind == "quarantined" else "",
            metrics={"m": data.draw(st.floats(allow_nan=False))} if data.draw(st.booleans()) else {},
        )
        for number, kind in kinds.items()
    ]
    rules = data.draw(
        st.lists(
            st.one_of(
                st.builds(KeepLast, st.integers(1, 5)),
                st.builds(KeepEvery, st.integers(1, 7)),
                st.builds(KeepBest, st.just("m"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
            ),
            max_size=3,
        )
    )
    cap = data.draw(st.one_of(st.none(), st.integers(1, 600)))
    protect = set(data.draw(st.lists(st.sampled_from(numbers), max_size=2)))
    damaged = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "listed", lambda root: found)
        gone = set(going(Path("/nowhere"), *rules, cap=cap, protect=protect, include_damaged=damaged))
    usable = [number for number, kind in kinds.items() if kind == "committed"]
    assert not gone & protect
    if not usable:
        assert not gone
        return
    assert all(number < max(usable) for number in gone)
    allowed = {"committed", *(("damaged", "partial") if damaged else ())}
    assert {kinds[number] for number in gone} <= allowed
    wanted = {number for rule in rules for number in rule.wants([s for s in found if s.resumable])}
    if cap is None:
        assert gone & set(usable) == (set(usable) - wanted - protect - {max(usable)} if rules else set())
    else:
        left = sum(sizes[number] for number in numbers if number not in gone)
        removable = set(usable) - protect - {max(usable)} - gone
        assert left <= cap or not removable


def test_a_deleted_step_leaves_nothing(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 1)
    assert delete(folder) is True
    assert delete(folder) is False
    assert os.listdir(tmp_path) == []


def test_only_steps_can_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(NotACheckpoint, match="is not the folder of a step"):
        delete(tmp_path / "precious")
    assert (tmp_path / "precious").is_dir()


def test_a_link_is_deleted_and_not_what_it_points_to(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    root.mkdir()
    folder = make_step(elsewhere, 1)
    (root / "global_step_1").symlink_to(folder)
    assert delete(root / "global_step_1") is True
    assert os.listdir(root) == []
    assert (folder / "manifest.json").is_file()


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize(("call", "files_removed"), [("rename", False), ("rmtree", False), ("rmtree", True)])
def test_a_crash_leaves_no_half_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, files_removed: bool
) -> None:
    folder = make_step(tmp_path, 1)
    make_step(tmp_path, 2)

    def die(path: Path, *args: object) -> None:
        if files_removed:
            (path / "actor" / "weights.bin").unlink()
        raise Killed

    fds: list[int] = []
    genuine_open = os.open

    def remember(path: object, *args: object, **options: object) -> int:
        fd = genuine_open(path, *args, **options)  # type: ignore[arg-type]
        if ".lock-" in str(path):
            fds.append(fd)
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", remember)
        patch.setattr(retention, {"rename": "move", "rmtree": "remove_tree"}[call], die)
        with pytest.raises(Killed):
            delete(folder)
    assert states(tmp_path)[2] == "committed"
    assert clean_up(tmp_path) == []  # the writer holds its lock: it may be living
    for fd in fds:
        os.close(fd)  # what the kernel does for a dead process
    done = clean_up(tmp_path)
    assert len(done) == (1 if call == "rmtree" else 0)
    left = ["global_step_2"] if call == "rmtree" else ["global_step_1", "global_step_2"]
    assert sorted(os.listdir(tmp_path)) == left
    assert set(states(tmp_path).values()) == {"committed"}


_KILLED_WHILE_DELETING = """
import os, signal, sys
from pathlib import Path
from mcore_rlhf.manager.run import retention

def die(folder):
    (folder / "actor" / "weights.bin").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

retention.remove_tree = die
retention.delete(Path(sys.argv[1]))
"""


def test_a_process_that_is_killed_while_deleting_leaves_no_half_step(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 1)
    make_step(tmp_path, 2)
    died = subprocess.run([sys.executable, "-c", _KILLED_WHILE_DELETING, str(folder)], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert [step.state for step in steps.listed(tmp_path)] == ["partial", "committed"]
    (line,) = clean_up(tmp_path)
    assert "removed" in line
    assert os.listdir(tmp_path) == ["global_step_2"]


def test_a_full_disk_can_be_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_step(tmp_path, 1)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    assert delete(folder) is True
    assert os.listdir(tmp_path) == []


def test_a_refusal_is_an_error_and_the_step_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_step(tmp_path, 1)

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StorageError, match="cannot delete: Permission denied"):
        delete(folder)
    assert states(tmp_path) == {1: "committed"}
    assert os.listdir(tmp_path) == ["global_step_1"]


def test_many_threads_delete_the_same_steps(tmp_path: Path) -> None:
    make_steps(tmp_path, range(1, 30))
    planned = plan_deletions(tmp_path, Retention([KeepLast(1)]))
    done: list[int] = []

    def work() -> None:
        done.extend(gone.step for gone in apply(tmp_path, planned))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(1, 29))
    assert os.listdir(tmp_path) == ["global_step_29"]


def test_what_another_removes_meanwhile_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, genuine, calls = make_step(tmp_path, 1), os.unlink, []

    def late(path: str, **options: int) -> None:
        calls.append(path)
        genuine(path, **options)
        if len(calls) == 1:
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", late)
    assert delete(folder) is True
    assert os.listdir(tmp_path) == []


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for root in (mine, other):
        make_step(root, 1)
        make_step(root, 2)
    (mine / "exports").symlink_to(other)
    with pytest.raises(StorageError, match="symbolic link"):
        delete(mine / "global_step_1")
    assert clean_up(mine) == []
    assert states(other) == {1: "committed", 2: "committed"}


def test_each_deletion_is_a_line_and_one_failure_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_steps(tmp_path, range(1, 4))
    planned = plan_deletions(tmp_path, Retention([KeepLast(1)]))
    genuine = retention.delete

    def fail_once(folder: Path, naming: Naming) -> bool:
        if folder.name == "global_step_1":
            raise StorageError(f"{folder}: cannot delete: busy")
        return genuine(folder, naming)

    monkeypatch.setattr(retention, "delete", fail_once)
    with caplog.at_level(logging.INFO):
        assert [gone.step for gone in apply(tmp_path, planned)] == [2]
    first, second = [record.getMessage() for record in caplog.records]
    assert "could not delete step 1" in first
    assert "deleted" in second
    assert "no rule keeps it" in second
    assert states(tmp_path) == {1: "committed", 3: "committed"}


def test_the_successor_is_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_steps(tmp_path, range(1, 4))
    planned = plan_deletions(tmp_path, Retention([KeepLast(1)]))
    steps.quarantine(tmp_path / "global_step_3", "bad after all")
    assert [gone.step for gone in apply(tmp_path, planned)] == [1]  # now 2 is the newest to resume from
    assert "no newer step is committed any more" in caplog.text
    assert states(tmp_path) == {2: "committed", 3: "committed"}


def test_cleaning_up_nothing(tmp_path: Path) -> None:
    assert clean_up(tmp_path / "nowhere") == []
    make_step(tmp_path, 1)
    assert clean_up(tmp_path) == []
