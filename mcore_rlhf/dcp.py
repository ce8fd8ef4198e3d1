"""torch's own doors: ``dcp.load(…, storage_reader=AnyReader(PATH))`` and ``dcp.save(…, storage_writer=Writer(PATH))``.

:class:`AnyReader` fills a state dict out of a checkpoint of any format; :class:`Writer` has a folder appear as a whole, with checksums.

``dcp.load`` asks for each tensor that a rank has, as a whole or for its part of a DTensor, and copies what it is given: so FSDP2, tensor-
parallel and plain models are filled alike, resharding as they read. Source: torch 2.13.0, ``distributed/checkpoint/storage.py``
(``StorageReader``), ``default_planner.py`` (``create_default_local_load_plan``), ``state_dict.py`` (``get_state_dict``).

``dcp.save`` has the coordinating rank hand every rank its plan, has all of them write, and hands the coordinator what they say of it: no
more words are needed here, and there are no collectives of our own. Source: torch 2.13.0, ``state_dict_saver.py`` (``_save_state_dict``),
``filesystem.py`` (``_FileSystemWriter``), ``utils.py`` (``_DistWrapper``); run with 2.6.0, 2.9.1 and 2.15.0, too.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from mcore_rlhf.consolidate import torch_tensor
from mcore_rlhf.convert import is_checkpoint
from mcore_rlhf.core.catalog import Box
from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError, UsageError, headline, log_of
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import CONVERTED, Passage, through
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.dcp import FORMAT as DCP
from mcore_rlhf.formats.dcp.content import Constant, Content, Part, Planned
from mcore_rlhf.formats.dcp.keys import KeyLayout, joined
from mcore_rlhf.formats.dcp.writer import keyed
from mcore_rlhf.formats.hf.files import WrittenTensor
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.in_memory import Bytes, Memory
from mcore_rlhf.storage.manifest import FileEntry, Manifest, entry_of, provenance
from mcore_rlhf.storage.paths import local_path
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication
from mcore_rlhf.storage.transactions import occupants, recover_in
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.weights import Wanted, read

LOG = log_of("mcore_rlhf.dcp")
_METADATA = ".metadata"
_ENDS_S = 1.0
"""How long a thread may take to end whose save has."""


class AnyReader(StorageReader):
    """Reads a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    Keys are those of ``get_state_dict``: ``{"model": …, "optimizer": …}`` with parameters' names in both, or a model's state dict alone.
    Names are a module's own; Megatron's become Hugging Face's. Trained parameters come from their fp32 masters where the checkpoint has
    them; torch converts to the type of what it fills. Every rank makes one, and reads what it needs.

    Args:
        path: A root, a step, a role's folder or whatever else ``mcore-rlhf inspect`` takes; a URL of a store as well. ``checkpoint_id``
            of ``dcp.load`` is another way to say it.
        model: What the model's part of the state dict is called.
        optimizer: What the optimizer's is called; None to leave it unread.
        reference_config: The folder, or file, of the model's ``config.json``, where nothing in the checkpoint describes it.
        read_options: How the checkpoint is opened: ``role``, ``step``, ``follow_links`` and so on.
        write_options: What is made of it on the way, as by ``convert``: ``merge_adapter`` with ``base_model``, ``dequantize``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: str = "model",
        optimizer: str | None = "optimizer",
        reference_config: str | None = None,
        read_options: ReadOptions | None = None,
        write_options: WriteOptions | None = None,
    ) -> None:
        self._path, self._layout = path, KeyLayout((model,), None if optimizer is None else (optimizer,))
        how = write_options or WriteOptions()
        described = reference_config or how.reference_config
        self._write = replace(how, reference_config=described, no_optimizer=how.no_optimizer or optimizer is None)
        self._read = read_options or ReadOptions()
        self._content: Content | None = None
        self._whole: Source | None = None
        self._parts: dict[str, Part] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it may be a checkpoint; opening it says more."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new read begins."""
        self._path = self._path if checkpoint_id is None else checkpoint_id
        self._content = self._whole = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is, under the keys that a state dict may have.

        Raises:
            UsageError: No path was given.
            CheckpointError: It is none, is damaged, or has other names.
        """
        if self._path is None:
            raise UsageError("AnyReader: no path was given\nGive it one, or give checkpoint_id to dcp.load.")
        path = checkpoint_path(Path(self._path))
        opened = open_checkpoint(path, replace(self._read, optimizer=not self._write.no_optimizer), partial=True)
        write = replace(self._write, no_optimizer=self._write.no_optimizer or bool(opened.unread))
        passage = Passage(opened, DCP, write, self._read, open_checkpoint)
        seen = through(CONVERTED, passage)
        self._whole, self._content = passage.whole, keyed(seen, passage.write, self._layout)
        self._parts = dict(self._keyed(self._content))
        return Metadata({key: _described(part) for key, part in self._parts.items()})

    def _keyed(self, content: Content) -> Iterator[tuple[str, Part]]:
        """Every part by its key; a model's also by its name alone, which is all that a state dict of a model has."""
        for part in content.parts():
            yield joined(part.path), part
            if part.path[:-1] == self._layout.model:
                yield str(part.path[-1]), part

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: every rank has opened the checkpoint itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a rank asks for, and hand it over.

        Raises:
            CheckpointError: The checkpoint is damaged, or cannot be read.
        """
        tensors: list[tuple[ReadItem, Planned]] = []
        for item in plan.items:
            part = self._parts[item.storage_index.fqn]
            if isinstance(part, Planned):
                tensors.append((item, part))
            elif isinstance(part, Constant):
                data = np.frombuffer(bytearray(part.data), np.uint8)
                _hand_over(planner, item, torch_tensor(data, part.dtype, part.shape))
            elif item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(part.data))
        if tensors:
            self._read_tensors(tensors, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, asked: list[tuple[ReadItem, Planned]], planner: LoadPlanner) -> None:
        assert self._whole is not None
        assert self._content is not None
        parts, boxes = [], []
        for item, part in asked:
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            parts.append(WrittenTensor(part.name, part.shape, part.dtype, (item.storage_index.fqn,)))
            boxes.append(None if box == Box.whole(part.shape) else box)

        def complete(number: str, data: Bytes) -> None:
            item, part = asked[int(number)]
            _hand_over(planner, item, torch_tensor(data, part.dtype, tuple(item.lengths)))

        wanted = Wanted(self._whole, self._content.source, self._content.view, parts, boxes)
        read(wanted, Memory(complete=complete))


def _hand_over(planner: LoadPlanner, item: ReadItem, found: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    target.copy_(found)
    planner.commit_tensor(item, target)


def _described(part: Part) -> TensorStorageMetadata | BytesStorageMetadata:
    """A tensor as one piece, of which any part can be asked for."""
    if not isinstance(part, Planned | Constant):
        return BytesStorageMetadata()
    size = torch.Size(part.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(part.shape)), size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, part.dtype.name)), size, [chunk])


@dataclass(frozen=True, slots=True)
class _Place:
    """What the coordinating rank tells another one in its plan: what its files are called, and the hidden folder that they go into."""

    prefix: str
    folder: str


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

    Args:
        path: The folder, on a file system that all ranks share.
        overwrite: Whether a checkpoint that is there is replaced, once the new one is whole; otherwise it is refused.
        fsync: Whether everything is on the disk before it appears.
        single_file_per_rank: As ``FileSystemWriter``'s.
        thread_count: Threads of a rank that write, each a file of its own.
        per_thread_copy_ahead: As ``FileSystemWriter``'s.
        cache_staged_state_dict: As ``FileSystemWriter``'s, for ``async_save``.

    Raises:
        UsageError: The path is a URL.
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
        self._target = None if path is None else _absolute(path)
        super().__init__(
            self._target or "",
            single_file_per_rank=single_file_per_rank,
            sync_files=fsync,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        self._publication: LocalPublication | None = None
        self._thread: threading.Thread | None = None
        self._ending: weakref.finalize[..., Writer] | None = None

    def __getstate__(self) -> dict[str, object]:
        """For the process of an ``async_save``; a save that has begun stays here."""
        return {**self.__dict__, "_publication": None, "_thread": None, "_ending": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder that is saved, wherever its files are being written."""
        return self._target or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a folder may be called so."""
        try:
            return bool(_absolute(checkpoint_id).name)
        except CheckpointError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins."""
        super().reset()
        self._target = self._target if checkpoint_id is None else _absolute(checkpoint_id)

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
        assert self._target is not None
        for line in clean_up(self._target.parent):
            LOG.info("%s", line)
        if not self.overwrite and self._target.is_dir() and occupants(self._target):
            raise StorageError(
                f"{self._target}: exists already.\nSave under another name, or with Writer(overwrite=True)."
            )
        publication = LocalPublication(self._target, self.overwrite, self.sync_files, is_checkpoint)
        publication.__enter__()
        self._publication, self._thread = publication, threading.current_thread()
        # torch tells nobody that another rank has failed before it wrote, or that the save was interrupted.
        self._ending = weakref.finalize(self, _settle, publication, os.getpid())
        folder = str(publication.staging)
        return [replace(plan, storage_data=_Place(f"__{rank}_", folder)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and read them back for their checksums; what goes wrong is for the coordinating rank to say."""
        results: list[WriteResult] = []
        try:
            place = self._place(plan)
            self.path = folder = Path(place.folder)
            results = super().write_data(plan, planner).wait()
            if len(results) != len(plan.items):  # a thread of torch's that fails says so nowhere else
                raise Incomplete(
                    f"{len(results)} of {len(plan.items)} items were written; this rank's output says why a thread ended"
                )
            files = sorted(path for path in folder.iterdir() if path.name.startswith(place.prefix))
            share = _Share({path.name: entry_of(path) for path in files})
        except Exception as error:
            LOG.exception("%s: not saved", self._target)
            share = _Share(failed=f"{type(error).__name__}: {headline(str(error))}")
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(MANIFEST_NAME), 0, share)])
        return done

    def _place(self, plan: SavePlan) -> _Place:
        """Where this rank writes. A planner that keeps plans gives that of an earlier save: then it is the newest folder there is."""
        place, target = plan.storage_data, self._target
        assert isinstance(place, _Place)
        assert target is not None
        if not Path(place.folder).is_dir():
            begun = sorted(name for name in names_in(target.parent) if name.startswith(f".{target.name}.partial-"))
            if not begun:
                raise StorageError(
                    f"{place.folder}: is not there, where the coordinating rank has made it\nDo all ranks see one file system?"
                )
            place = _Place(place.prefix, str(target.parent / begun[-1]))
        return place

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what is where, and publish, on the coordinating rank.

        Raises:
            StorageError: A rank failed, or the folder could not be published; what was there before is still there.
            Incomplete: A file is not what its writer says.
        """
        publication, shares = self._publication, [rank[-1].storage_data for rank in results]
        assert publication is not None
        try:
            failed = [f"rank {rank}: {share.failed}" for rank, share in enumerate(shares) if share.failed]
            if failed:
                raise StorageError(
                    f"{self._target}: not saved: {'; '.join(failed)}\nNothing was published; what was there before is untouched."
                )
            self.path = publication.staging
            super().finish(metadata, [rank[:-1] for rank in results])
            files = {name: entry for share in shares for name, entry in share.files.items()}
            _check_lengths(self.path, files)
            files[_METADATA] = entry_of(self.path / _METADATA)
            publication.commit(Manifest(files, provenance=provenance(ranks=len(results))))
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
        folder: The folder in which the checkpoints lie.

    Returns:
        What was done, one line each.
    """
    return recover_in(_absolute(folder))


def _settle(publication: LocalPublication, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it, which ends
        publication.__exit__(None, None, None)


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(local_path(path)))


def _check_lengths(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """See that every rank's files are here, as long as it said.

    Raises:
        Incomplete: One is not.
    """
    for name, entry in files.items():
        found = -1
        with suppress(OSError):
            found = (folder / name).stat().st_size
        if found != entry.nbytes:
            what = "is missing" if found < 0 else f"has {found} bytes"
            raise Incomplete(
                f"{folder / name}: {what}; its writer reported {entry.nbytes}\nDo all ranks see one file system?"
            )
