"""A tensor that was found in a file, but not read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.box import Box, Shape, dot, row_major
from ..core.catalog import Chunk, Record, TensorEntry
from ..core.names import TensorName
from .stubs import NAMESPACES, Namespace


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that was not read, only found.

    Args:
        record: The storage that holds it.
        start: Its first element in the record.
        shape: Its shape.
        strides: Its strides, in elements.
    """

    record: Record
    start: int
    shape: Shape
    strides: Shape

    @classmethod
    def whole(cls, record: Record, shape: Shape) -> StoredTensor:
        """A contiguous tensor that is the whole of a record."""
        return cls(record, 0, shape, row_major(shape))

    @property
    def stop(self) -> int:
        """One past its last element in the record; ``start`` where it is empty."""
        return self.start + (1 + dot(tuple(n - 1 for n in self.shape), self.strides) if 0 not in self.shape else 0)


def whole_entry(name: TensorName, *replicas: StoredTensor) -> TensorEntry:
    """The entry of a tensor that lies whole in each of several places, the preferred one first.

    Args:
        name: Its identity.
        replicas: Those places, one at least; all of one shape and dtype.
    """
    first = replicas[0]
    chunks = tuple(Chunk(Box.whole(one.shape), one.record, one.start, one.strides) for one in replicas)
    return TensorEntry(name, first.shape, first.record.dtype, chunks)


def map_tensors(tree: Any, function: Callable[[StoredTensor], Any]) -> Any:
    """A copy of a nest of dictionaries, lists, tuples and Namespaces with ``function`` applied to its stored
    tensors.
    """
    if isinstance(tree, StoredTensor):
        return function(tree)
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, map_tensors(value, function)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    if type(tree) in NAMESPACES:
        return Namespace({key: map_tensors(value, function) for key, value in vars(tree).items()})
    return tree
