"""Turning a nest of live tensors into a tree of places and the segments that fill them, as ``torch.save`` would lay it out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.stubs import NAMESPACES, Namespace

from .base import Segment

T = TypeVar("T")
SMALL_NBYTES = 1 << 16
"""Storages up to this size are copied at once and stay in the tree: a segment costs more than their bytes."""


@dataclass(slots=True)
class LiveTree:
    """Collects the tensors of one file. Tensors that share a storage share a record, so views and ties survive.

    Args:
        file: The file's path, relative to the role's folder.
    """

    file: str
    segments: list[Segment] = field(default_factory=list)
    _records: dict[int, Record] = field(default_factory=dict)
    _small: dict[int, torch.Tensor] = field(default_factory=dict)
    _count: int = 0
    _kept: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        """The live memory that is in the tree: adopted, or copied."""
        return tuple(self._kept)

    def placed(self, tree: T) -> T:
        """A copy of a nest of dictionaries, lists, tuples and Namespaces in which live tensors are places.

        Containers and arrays are new, so that the live ones may change; other values are taken as they are.
        """
        return self._placed(tree)  # type: ignore[return-value]

    def record(self, dtype: torch.dtype, numel: int) -> Record:
        """A record of its own, which other ranks may fill as well."""
        record = Record(self.file, f"data/{self._count}", dtype_of(dtype), numel, 0)
        self._count += 1
        return record

    def _placed(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            items = ((key, self._placed(item)) for key, item in value.items())
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        if type(value) in (list, tuple):
            assert isinstance(value, list | tuple)
            return type(value)(self._placed(item) for item in value)
        if type(value) in NAMESPACES:
            return Namespace({key: self._placed(item) for key, item in vars(value).items()})
        return value.copy() if isinstance(value, np.ndarray) else value

    def _tensor(self, tensor: torch.Tensor) -> object:
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage.nbytes() <= SMALL_NBYTES:
            return self._copied(tensor, storage)
        record = self._records.get(storage.data_ptr()) or self._adopt(tensor, storage)
        if record.dtype != dtype_of(tensor.dtype):
            record = Record(
                record.file, record.key, dtype_of(tensor.dtype), storage.nbytes() // tensor.element_size(), 0
            )
        return StoredTensor(record, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def _copied(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """A copy on the CPU; views of one small storage stay views of one."""
        known = self._small.get(storage.data_ptr())
        if known is None or storage.data_ptr() == 0:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            known = self._small[storage.data_ptr()] = flat.to("cpu", copy=True)
            self._kept.append(storage)  # while it lives, nobody else gets its address
        typed = torch.empty(0, dtype=tensor.dtype).set_(known.untyped_storage())
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _adopt(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Record:
        record = self.record(tensor.dtype, storage.nbytes() // tensor.element_size())
        self._records[storage.data_ptr()] = record
        self._kept.append(storage)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.segments.append(Segment(record.key, 0, whole[: record.nbytes]))
        return record
