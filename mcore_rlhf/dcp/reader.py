"""``dcp.load(state_dict, storage_reader=AnyReader(PATH))``: a state dict filled out of a checkpoint of any format.

``dcp.load`` asks for each tensor that a rank has, as a whole or for its part of a DTensor, and copies what it is given: so FSDP2, tensor-
parallel and plain models are filled alike, resharding as they read. Source: torch 2.13.0, ``distributed/checkpoint/storage.py``
(``StorageReader``), ``default_planner.py`` (``create_default_local_load_plan``), ``state_dict.py`` (``get_state_dict``).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mcore_rlhf.consolidate import torch_tensor
from mcore_rlhf.core.catalog import Box
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import CONVERTED, Passage, through
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.dcp import FORMAT as DCP
from mcore_rlhf.formats.dcp.content import Constant, Content, Part, Planned
from mcore_rlhf.formats.dcp.keys import KeyLayout, joined
from mcore_rlhf.formats.dcp.writer import keyed
from mcore_rlhf.formats.hf.files import WrittenTensor
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.in_memory import Bytes, MemoryFiles
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.patience import read_patiently
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.weights import Wanted, read


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
            CheckpointError: It is none, is damaged, cannot be read, or has other names.
        """
        if self._path is None:
            raise UsageError("AnyReader: no path was given\nGive it one, or give checkpoint_id to dcp.load.")
        path = checkpoint_path(Path(self._path))
        return read_patiently(path, lambda: self._opened(path))

    def _opened(self, path: ReadablePath) -> Metadata:
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
        read(wanted, MemoryFiles(complete=complete))


def _hand_over(planner: LoadPlanner, item: ReadItem, found: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    if not torch.can_cast(found.dtype, target.dtype):
        raise UsageError(
            f"{item.storage_index.fqn}: is asked for as {target.dtype}, and there as {found.dtype}: its values would be cut off\n"
            "Ask for it as floating-point numbers."
        )
    target.copy_(found)
    planner.commit_tensor(item, target)


def _described(part: Part) -> TensorStorageMetadata | BytesStorageMetadata:
    """A tensor as one piece, of which any part can be asked for."""
    if not isinstance(part, Planned | Constant):
        return BytesStorageMetadata()
    size = torch.Size(part.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(part.shape)), size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, part.dtype.name)), size, [chunk])
