"""A root with the steps of another run: nothing is saved among them unless that was asked for."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.manager.run import retention as branches
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from tests.distributed.forked import SERVER

from .roots import make_step

QUIET = ManagerOptions(catch_signals=False, fsync=False, asynchronous=False, keep=Retention([KeepLast(1)]))
CONTINUE = replace(QUIET, on_existing="continue")


def _be_another_run(root: Path, numbers: tuple[int, ...]) -> None:
    with CheckpointManager(root, torch.nn.Linear(3, 2), options=ManagerOptions(catch_signals=False)) as manager:
        for step in numbers:
            manager.save(step)


def another_run(root: Path, *numbers: int) -> None:
    """Save steps in a process of their own."""
    child = SERVER.Process(target=_be_another_run, args=(root, numbers))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def manager(root: Path, options: ManagerOptions = QUIET) -> CheckpointManager:
    return CheckpointManager(root, torch.nn.Linear(3, 2), options=options)


def committed(root: Path) -> list[int]:
    return [step.step for step in steps.committed(root)]


def test_the_first_save_refuses_and_names_three_ways_out(tmp_path: Path) -> None:
    make_step(tmp_path, 1)
    make_step(tmp_path, 7)
    with manager(tmp_path) as run:
        for _ in range(2):
            with pytest.raises(UsageError) as refused:
                run.save(3)
        assert run.load(None) is None
        with pytest.raises(UsageError):
            run.save(3)
    for said in ("(1, 7)", "load('auto')", "a root of its own", "on_existing='continue'"):
        assert said in str(refused.value)
    assert committed(tmp_path) == [1, 7]


def test_whoever_loads_one_goes_on(tmp_path: Path) -> None:
    another_run(tmp_path, 1, 2)
    with manager(tmp_path) as run:
        with pytest.raises(UsageError):
            run.save(3)
        assert run.load(1) is not None
        run.save(3)
    assert committed(tmp_path) == [1, 3]  # the one that was loaded stays


def test_what_it_went_back_from_is_left_behind_though_it_saves_beyond_it(tmp_path: Path) -> None:
    another_run(tmp_path, 4, 5)
    with manager(tmp_path, replace(QUIET, keep=None)) as run:
        assert run.load(4) is not None
        run.save(6)
        run.save(7)
    assert committed(tmp_path) == [4, 6, 7]  # 5 is in quarantine
    assert "a run that saved step 6" in steps.reason_of(tmp_path / "global_step_5")


def test_a_run_may_open_several_managers(tmp_path: Path) -> None:
    for number in (1, 2):
        with manager(tmp_path) as run:
            run.save(number)
    assert committed(tmp_path) == [2]


def test_a_manager_that_only_loads_counts_for_the_run(tmp_path: Path) -> None:
    another_run(tmp_path, 4)
    with manager(tmp_path, replace(QUIET, read_only=True)) as run:
        assert run.load() is not None
    with manager(tmp_path) as run:
        run.save(5)
    assert committed(tmp_path) == [5]


def test_loading_from_elsewhere_does_not_count(tmp_path: Path) -> None:
    another_run(tmp_path / "theirs", 4)
    make_step(tmp_path / "mine", 1)
    with manager(tmp_path / "mine") as run:
        assert run.load(tmp_path / "theirs" / "global_step_4") is not None
        with pytest.raises(UsageError, match="neither loaded nor written"):
            run.save(5)


def test_whoever_says_so_goes_on(tmp_path: Path) -> None:
    make_step(tmp_path, 1)
    make_step(tmp_path, 7)
    with manager(tmp_path, CONTINUE) as run:
        run.save(3)
    assert committed(tmp_path) == [3]
    assert steps.found_at(tmp_path / "global_step_7").quarantined  # type: ignore[union-attr]


@pytest.mark.parametrize("there", ["nothing", "damaged", "quarantined"])
def test_what_no_resume_would_take_is_in_nobody_s_way(tmp_path: Path, there: str) -> None:
    if there != "nothing":
        folder = make_step(tmp_path, 1)
        steps.quarantine(folder, "bad") if there == "quarantined" else (folder / "actor" / "weights.bin").unlink()
    with manager(tmp_path) as run:
        run.save(3)
    assert committed(tmp_path) == [3]


def test_the_root_is_known_by_whichever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    with manager(tmp_path / "link") as run:
        run.save(1)
    with manager(tmp_path / "root") as run:
        run.save(2)
    monkeypatch.setattr(branches, "_OF_THIS_RUN", set())
    with manager(tmp_path / "link") as run, pytest.raises(UsageError, match="neither loaded nor written"):
        run.save(3)


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another user's folder."""
    genuine = os.open

    def refuse(path: object, *args: Any, **options: Any) -> int:
        if str(path).startswith(f"{folder}/manifest"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return genuine(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)


def test_a_step_that_cannot_be_read_may_be_another_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as closed, manager(tmp_path) as run:
        unreadable(closed, make_step(tmp_path, 1))
        with pytest.raises(StorageError, match=r"global_step_1: cannot be read, and may be sound: .*Permission denied"):
            run.save(3)
    assert committed(tmp_path) == [1]


def test_a_newer_one_that_cannot_be_read_is_left_behind_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next resume took it, once it can be read."""
    another_run(tmp_path, 1, 7)
    with monkeypatch.context() as closed, manager(tmp_path, CONTINUE) as run:
        run.load(1)
        unreadable(closed, tmp_path / "global_step_7")
        run.save(2)
    assert committed(tmp_path) == [1, 2]
    assert "left behind" in steps.reason_of(tmp_path / "global_step_7")
