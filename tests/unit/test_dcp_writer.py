"""``mcore_rlhf.dcp.Writer`` in one process: what is refused, what is left alone, and what torch says nowhere."""

from __future__ import annotations

import os
import pickle
import threading
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from mcore_rlhf.dcp import Writer, clean_up
from mcore_rlhf.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4, 3), value), "bias": torch.full((3,), value)}}


def save(writer: Writer, checkpoint_id: Path | None = None, **named: Any) -> None:
    dcp.save(state(), storage_writer=writer, checkpoint_id=checkpoint_id, **named)


def why(writer: Writer, checkpoint_id: Path | None = None, **named: Any) -> str:
    """What ``dcp.save`` says; torch's class of it is no Exception."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        save(writer, checkpoint_id, **named)
    return str(caught.value)


def test_a_checkpoint_that_is_there_is_replaced_only_where_that_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    save(Writer(folder))
    assert "step_1: exists already.\nSave under another name, or with Writer(overwrite=True)." in why(Writer(folder))
    save(Writer(overwrite=True), folder)
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


@pytest.mark.parametrize("kind", ["file", "home", "link"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "thesis"
    if kind == "file":
        folder.write_text("years of work")
    else:
        (tmp_path / "years").mkdir()
        (tmp_path / "years" / "thesis.txt").write_text("years of work")
        (folder.symlink_to if kind == "link" else (tmp_path / "years").rename)(
            tmp_path / "years" if kind == "link" else folder
        )
    said = {"file": "is a file", "home": "does not look like a checkpoint", "link": "is a symbolic link"}[kind]
    assert said in why(Writer(folder, overwrite=True))
    assert "years of work" in (folder if kind == "file" else folder / "thesis.txt").read_text()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a URL under which nothing can be written"):
        Writer("ftp://host/step_1")
    assert "no path was given" in why(Writer())
    if "use_collectives" in signature(dcp.save).parameters:  # torch 2.6 has no such word
        assert "could not appear as a whole" in why(Writer(tmp_path / "step_1"), use_collectives=False)
    assert not Writer.validate_checkpoint_id("ftp://host/step_1")
    assert os.listdir(tmp_path) == []


class InThreads(DefaultSavePlanner):
    """Fails in all threads but the one that saves."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is full")
        return super().resolve_data(write_item)


class Waiting(DefaultSavePlanner):
    """Writes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.begun.set()
        assert self.go.wait(60)
        return super().resolve_data(write_item)


def test_a_save_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    writer, planner = Writer(tmp_path / "step_1"), Waiting()
    first: Any = dcp.async_save(state(), storage_writer=writer, planner=planner)
    assert planner.begun.wait(60)
    assert f"the save of {tmp_path / 'step_1'} has not ended" in why(writer, tmp_path / "step_2")
    planner.go.set()
    first.result()
    save(writer, tmp_path / "step_2")
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_of_torchs_that_fails_is_noticed(tmp_path: Path) -> None:
    """torch 2.13.0 writes a ``.metadata`` then, in which the thread's items are missing."""
    many = {f"weight{number}": torch.zeros(256, 256) for number in range(64)}
    with pytest.raises(BaseException, match=r"rank 0: Incomplete: \d+ of 64 items were written"):
        dcp.save(many, storage_writer=Writer(tmp_path / "step_1", thread_count=4), planner=InThreads())
    assert os.listdir(tmp_path) == []


def test_what_the_files_hold_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    save(Writer(folder, single_file_per_rank=False))
    found = {"model": {"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder))
    assert torch.equal(found["model"]["weight"], torch.ones(4, 3))
    assert len(list(folder.glob("*.distcp"))) == 2


def test_a_writer_goes_to_another_process_without_its_save(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "step_1")
    save(writer)
    again = pickle.loads(pickle.dumps(writer))
    save(again, tmp_path / "step_2")
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2"]


def test_what_others_left_is_left_to_them(tmp_path: Path) -> None:
    """A step of a manager that was being replaced, and a conversion that can be gone on with."""
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "global_step_5" / "manifest.json").write_text("{}")
    (tmp_path / ".global_step_5.old-1700000000000-0123abcd").mkdir()
    (tmp_path / ".global_step_5.lock-1700000000000-0123abcd").write_text(os.uname().nodename)
    (tmp_path / ".out.partial-1700000000000-0123abcd").mkdir()
    (tmp_path / ".out.journal-1700000000000-0123abcd").write_text("")
    (tmp_path / ".out.lock-1700000000000-0123abcd").write_text(os.uname().nodename)
    (tmp_path / ".step_1.partial-1700000000000-0123abcd").mkdir()
    (tmp_path / ".step_1.lock-1700000000000-0123abcd").write_text(os.uname().nodename)
    before = set(os.listdir(tmp_path))
    assert [line.partition(": ")[2] for line in clean_up(tmp_path)] == ["it was left half-written"]
    assert before - set(os.listdir(tmp_path)) == {name for name in before if name.startswith(".step_1.")}
    assert clean_up(tmp_path / "nowhere") == []
