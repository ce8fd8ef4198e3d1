"""What each process of the tests of :class:`mcore_rlhf.dcp.Writer` does: real FSDP2 trains, and torch saves through us."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mcore_rlhf.dcp import Writer
from mcore_rlhf.storage.objects import ObjectStore, open_url
from tests.reference import dcp_jobs
from tests.reference.dcp_jobs import Looked
from tests.reference.fsdp_jobs import whole_of
from tests.reference.fsdp_models import Trainer, Wrapped, build

STYLE = "rlinf"


def in_store(how: Wrapped, environment: Mapping[str, str], job: Callable[..., Any], *args: object) -> Any:
    """Do another job, where the environment names a store."""
    os.environ.update(environment)
    return job(how, *args)


def save_both(how: Wrapped, ours: str, torchs: str, by: str) -> Looked:
    """Train, save by torch through us and by torch alone, and go on."""
    trainer = build(how, dist.get_rank())
    trainer.train(0, 2)
    whole, state = whole_of(trainer), dcp_jobs._state(trainer, STYLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=torchs)
        if by == "save":
            dcp.save(state, storage_writer=Writer(ours, thread_count=2))
        else:
            kind = AsyncCheckpointerType.PROCESS if by == "process" else AsyncCheckpointerType.THREAD
            saved: Any = dcp.async_save(state, storage_writer=Writer(ours, fsync=False), async_checkpointer_type=kind)
            saved.result()
    dist.barrier()
    return Looked(whole, dcp_jobs._go_on(trainer))


def save_many(how: Wrapped, folder: str, times: int) -> list[Looked]:
    """Train and save again and again into one folder, with one writer and a planner that keeps its plans."""
    trainer, writer = build(how, dist.get_rank()), Writer(overwrite=True, fsync=False)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = folder  # torch keeps them for a class, whatever is saved
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(times):
            trainer.train(number, 1)
            dcp.save(dcp_jobs._state(trainer, STYLE), storage_writer=writer, checkpoint_id=folder, planner=planner)
            seen.append(Looked(whole_of(trainer), []))
    return seen


class Failing(DefaultSavePlanner):
    """Does something where one rank is to write, or to plan."""

    def __init__(self, action: Callable[[], None], where: str) -> None:
        super().__init__()
        self._action, self._where = action, where

    def create_local_plan(self) -> SavePlan:
        if self._where == "plan":
            self._action()
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._where == "write":
            self._action()
        return super().resolve_data(write_item)


def save_with_one_that_fails(how: Wrapped, folder: str, rank: int, where: str) -> tuple[str, list[str], Looked]:
    """Save, replace that by a save that fails on one rank, and save again with the same writer.

    Returns:
        What was raised, what lay beside the folder then, and what was saved first.
    """
    trainer, writer = build(how, dist.get_rank()), Writer(folder, overwrite=True, fsync=False)
    trainer.train(0, 1)
    before = Looked(whole_of(trainer), [])

    def full_disk() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    planner = Failing(full_disk, where) if dist.get_rank() == rank else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dcp_jobs._state(trainer, STYLE), storage_writer=writer)
        trainer.train(1, 1)
        said = ""
        try:
            dcp.save(dcp_jobs._state(trainer, STYLE), storage_writer=writer, planner=planner)
        except BaseException as error:  # torch gathers those of all ranks in a class that is no Exception
            said = str(error)
        dist.barrier()
        left = _beside(folder)
        dist.barrier()
        dcp.save(dcp_jobs._state(trainer, STYLE), storage_writer=writer, checkpoint_id=f"{folder}-next")
    return said, left, before


def _beside(folder: str) -> list[str]:
    """What lies beside a folder; of a store, below it: everything that is there, without the transaction's name."""
    if "://" not in folder:
        return sorted(os.listdir(Path(folder).parent))
    store, top = open_url(folder).store, open_url(folder).path
    assert isinstance(store, ObjectStore)
    return sorted(PurePosixPath(item["path"]).name for item in store.objects(str(top)))


def save_and_die(how: Wrapped, folder: str, rank: int) -> None:
    """Save, and have a rank killed while a second save, which is to replace the first, is being written."""
    trainer = build(how, dist.get_rank())
    trainer.train(0, 1)
    planner = Failing(lambda: os.kill(os.getpid(), signal.SIGKILL), "write") if dist.get_rank() == rank else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dcp_jobs._state(trainer, STYLE), storage_writer=Writer(folder))
        trainer.train(1, 1)
        dcp.save(dcp_jobs._state(trainer, STYLE), storage_writer=Writer(folder, overwrite=True), planner=planner)


def trained(how: Wrapped, steps: int) -> Looked:
    """A run that saves nothing."""
    trainer: Trainer = build(how, dist.get_rank())
    for number in range(steps):
        trainer.train(number, 1)
    return Looked(whole_of(trainer), [])
