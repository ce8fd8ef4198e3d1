"""``dcp.save(state_dict, storage_writer=Writer(PATH))``, and ``async_save``: a checkpoint that is there as a whole or not at all.

``dcp.save`` has the coordinating rank hand every rank its plan, has all of them write, and hands the coordinator what they say of it: no
more words are needed here, and there are no collectives of our own. Source: torch 2.13.0, ``state_dict_saver.py`` (``_save_state_dict``),
``filesystem.py`` (``_FileSystemWriter``), ``utils.py`` (``_DistWrapper``); run with 2.6.0, 2.9.1 and 2.15.0, too.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError, UsageError, headline, log_of
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication
from mcore_rlhf.storage.settings import SETTINGS, stores_with
from mcore_rlhf.storage.upload import StorePublication

from .targets import Files, SaveTarget, manifest_of, target_of

LOG = log_of("mcore_rlhf.dcp")
_METADATA = ".metadata"
_ENDS_S = 1.0
"""How long a thread may take to end whose save has."""
_HEAD_NBYTES = 4096
"""Of a tensor in torch's file: what is not its elements, at most."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What the coordinating rank tells another one in its plan: what its files are called, and by what word it finds where they go."""

    prefix: str
    word: str


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank tells the coordinating one of its files; or why there are none."""

    files: Mapping[str, FileEntry] = field(default_factory=dict)
    failed: str = ""


class Writer(FileSystemWriter):
    """Saves for ``torch.distributed.checkpoint.save`` and ``async_save``: the folder is there as a whole or not at all.

    The files are torch's own, and ``FileSystemReader`` reads them, with or without this package. Every file's length and CRC-32 stand in
    ``mcore_rlhf.json`` beside them, which ``mcore-rlhf verify`` asks. Every rank makes one; one may save many times, with
    ``checkpoint_id`` of ``dcp.save``.

    In a store, files are sent while torch writes them, and nothing of them touches a disk; what lies there is read by :class:`.AnyReader`.

    Args:
        path: The folder, on a file system that all ranks share; or the URL of one in an object store, which is asked as
            :func:`~mcore_rlhf.storage.settings.stores_with` says when the writer is made.
        overwrite: Whether a checkpoint that is there is replaced, once the new one is whole; otherwise it is refused.
        fsync: Whether everything is on the disk before it appears; a store always has it.
        single_file_per_rank: As ``FileSystemWriter``'s.
        thread_count: Threads of a rank that write, each a file of its own.
        per_thread_copy_ahead: As ``FileSystemWriter``'s.
        cache_staged_state_dict: As ``FileSystemWriter``'s, for ``async_save``.

    Raises:
        UsageError: The path is a URL under which nothing can be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        fsync: bool = True,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
    ) -> None:
        self._target: SaveTarget | None = None
        self._fsync, self._settings = fsync, SETTINGS.get()
        super().__init__(
            "",
            single_file_per_rank=single_file_per_rank,
            sync_files=fsync,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        self._publication: LocalPublication | StorePublication | None = None
        self._word = ""
        self._thread: threading.Thread | None = None
        self._ending: weakref.finalize[..., Writer] | None = None
        if path is not None:
            self._aim(path)

    def _aim(self, path: str | os.PathLike[str]) -> None:
        with stores_with(self._settings):  # async_save says in a thread of its own where to
            self._target = target_of(path)
        self.sync_files = self._fsync and self._target.waits

    def __getstate__(self) -> dict[str, object]:
        """For the process of an ``async_save``; a save that has begun stays here."""
        return {**self.__dict__, "_publication": None, "_thread": None, "_ending": None, "fs": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder that is saved, wherever its files are being written."""
        return self._target.id if self._target is not None else ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a folder may be called so."""
        try:
            return bool(target_of(checkpoint_id).path.name)
        except CheckpointError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins."""
        super().reset()
        if checkpoint_id is not None:
            self._aim(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A new save begins; what is left of one that failed is removed.

        Raises:
            UsageError: No path was given, ranks are not to hear of each other, or a save with this writer goes on.
        """
        self._refuse_while_saving()
        self._end()
        if self._target is None:
            raise UsageError("Writer: no path was given\nGive it one, or give checkpoint_id to dcp.save.")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: no rank would know when all have written, and the folder could not appear as a whole\n"
                "Leave it out, or save with torch's FileSystemWriter."
            )
        self._target.forget()

    def _refuse_while_saving(self) -> None:
        """A save that failed on another rank before that wrote has left as much as one that goes on; but its thread has ended."""
        thread = self._thread
        if self._publication is None or thread in (None, threading.current_thread(), threading.main_thread()):
            return
        assert thread is not None
        thread.join(_ENDS_S)
        if thread.is_alive():
            raise UsageError(
                f"Writer: the save of {self._publication.target} has not ended\n"
                "Wait for the future of async_save, or give every save a Writer of its own."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: nothing is made where the folder will be."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin, on the coordinating rank, and say where.

        Raises:
            StorageError: The folder exists and may not be replaced, or nothing can be written there.
        """
        target = self._target
        assert target is not None
        for line in target.clean_up():
            LOG.info("%s", line)
        if not self.overwrite and target.is_taken():
            raise StorageError(
                f"{target.path}: exists already.\nSave under another name, or with Writer(overwrite=True)."
            )
        publication, self._word = target.begin(overwrite=self.overwrite, fsync=self._fsync)
        self._publication, self._thread = publication, threading.current_thread()
        # torch tells nobody that another rank has failed before it wrote, or that the save was interrupted.
        self._ending = weakref.finalize(self, _settle, publication, os.getpid())
        return [replace(plan, storage_data=_Place(f"__{rank}_", self._word)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; what goes wrong is for the coordinating rank to say."""
        results: list[WriteResult] = []
        try:
            target, place = self._target, plan.storage_data
            assert target is not None
            assert isinstance(place, _Place)
            files = self._into(target.files(target.current(place.word), _most_nbytes(plan)))
            results = super().write_data(plan, planner).wait()
            if len(results) != len(plan.items):  # a thread of torch's that fails says so nowhere else
                raise Incomplete(
                    f"{len(results)} of {len(plan.items)} items were written; this rank's output says why a thread ended"
                )
            share = _Share(files.written(place.prefix))
        except Exception as error:
            LOG.exception("%s: not saved", self.checkpoint_id)
            share = _Share(failed=f"{type(error).__name__}: {headline(str(error))}")
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(MANIFEST_NAME), 0, share)])
        return done

    def _into(self, files: Files) -> Files:
        """Have torch write there."""
        self.path = files.root
        self.fs = files  # type: ignore[assignment]  # as torch's FsspecWriter does
        return files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what is where, and publish, on the coordinating rank.

        Raises:
            StorageError: A rank failed, or the folder could not be published; what was there before is still there.
            Incomplete: A file is not what its writer says.
        """
        publication, target, shares = self._publication, self._target, [rank[-1].storage_data for rank in results]
        assert publication is not None
        assert target is not None
        try:
            failed = [f"rank {rank}: {share.failed}" for rank, share in enumerate(shares) if share.failed]
            if failed:
                raise StorageError(
                    f"{target.path}: not saved: {'; '.join(failed)}\nNothing was published; what was there before is untouched."
                )
            files = self._into(target.files(self._word))
            super().finish(metadata, [rank[:-1] for rank in results])
            entries = {name: entry for share in shares for name, entry in share.files.items()}
            files.check(entries)
            entries.update(files.written(_METADATA))
            publication.commit(manifest_of(target.path.name, entries, len(results)))
        finally:
            self._end()

    def _end(self) -> None:
        """Settle what was begun, whether it was committed or not."""
        if self._ending is not None:
            self._ending()
        self._publication = self._ending = self._thread = None


def clean_up(folder: str | os.PathLike[str]) -> list[str]:
    """Clean up what saves into a folder left that were killed: half-written ones go, one that was being replaced is put back.

    Every save does it; call it before looking for a step to load. Safe at any time, in any number of processes.

    Args:
        folder: The folder in which the checkpoints lie. In a store nothing is to be put back, and nobody can say who is dead: what was
            never published goes with ``mcore-rlhf prune --dead``, a day later.

    Returns:
        What was done, one line each.
    """
    return target_of(os.path.join(folder, "step")).clean_up()


def _settle(publication: LocalPublication | StorePublication, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it, which ends
        publication.__exit__(None, None, None)


def _most_nbytes(plan: SavePlan) -> int:
    """How long a file of a rank is at most, but for what is no tensor: in a store, of so many parts."""
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(prod(one.chunk.sizes) * one.properties.dtype.itemsize + _HEAD_NBYTES for one in tensors)
