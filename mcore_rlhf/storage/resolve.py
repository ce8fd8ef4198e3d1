"""From what torch unpickled without data to the tree that was saved: stored tensors, numpy arrays, stubs."""

from __future__ import annotations

import argparse
import io
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.catalog import Record
from ..core.dtype import dtype_of
from ..errors import CheckpointError, Corrupt, Unsupported
from .standins import PickledArray, PickledDtype, PickledScalar
from .stored import StoredTensor
from .stubs import Stub, StubType
from .torchzip import Directory
from .unpickle import Unpickled

if TYPE_CHECKING:
    import torch


class _Found(Exception):
    """A message on its way to where the path in the tree is known."""

    def __init__(self, kind: type[CheckpointError], what: str) -> None:
        super().__init__(what)
        self.kind, self.keys = kind, [""]


@dataclass(slots=True)
class Resolver:
    """Replaces meta tensors by stored ones and stand-ins by real objects, in place where containers are ours
    to change.
    """

    file: str
    directory: Directory
    unpickled: Unpickled
    records: dict[tuple[str, Any], Record] = field(default_factory=dict)
    done: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def resolve_root(self) -> Any:
        """The tree that was saved.

        Raises:
            Corrupt: A tensor or array contradicts itself or the file.
            Unsupported: Something in it is not supported; says what and where.
        """
        try:
            return self.resolve(self.unpickled.tree)
        except _Found as found:
            where = ".".join(key for key in reversed(found.keys) if key)
            raise found.kind(f"{self.directory.path}: {where or 'the saved object'} is {found}.") from None
        except RecursionError:
            raise Unsupported(
                f"{self.directory.path}: the saved object is nested too deeply, or holds itself."
            ) from None

    def resolve(self, value: Any) -> Any:
        """One object of the tree; the same result for the same object, so that sharing is kept."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        known = self.done.get(id(value))
        if known is not None:
            return known[1]
        if kind in _IN_PLACE and id(value) not in self.unpickled.containers.marks:
            self.done[id(value)] = (value, value)  # before its content, which may hold it
        result = self._resolved(value, kind)
        self.done[id(value)] = (value, result)
        return result

    def _resolved(self, value: Any, kind: type) -> Any:
        method = _METHODS.get(kind)
        if method is not None:
            return method(self, value)
        if isinstance(value, Stub):
            return self._stub(value)
        return self._other(value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        keys = [self.resolve(key) for key in value]
        items = [self._at(key, item) for key, item in zip(keys, value.values(), strict=True)]
        value.clear()
        for key, item in zip(keys, items, strict=True):  # not update(), with which a Counter would count
            value[key] = item
        if isinstance(value, OrderedDict):
            self._dict(vars(value))
        return self._marked(value)

    def _list(self, value: list[Any]) -> Any:
        value[:] = [self._at(index, item) for index, item in enumerate(value)]
        return self._marked(value)

    def _marked(self, value: Any) -> Any:
        mark = self.unpickled.containers.marks.get(id(value))
        return value if mark is None else mark.build(value)

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = tuple(self._at(index, item) for index, item in enumerate(value))
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value

    def _set(self, value: set[Any] | frozenset[Any]) -> Any:
        return type(value)(self.resolve(item) for item in value)

    def _namespace(self, value: argparse.Namespace) -> argparse.Namespace:
        self._dict(vars(value))
        return value

    def _stub(self, value: Stub) -> Stub:
        value.stub_args = self._tuple(value.stub_args)
        value.stub_state = self.resolve(value.stub_state)
        return value

    def _numpy(self, value: Any) -> Any:
        try:
            return value.resolve(self.resolve) if isinstance(value, PickledArray) else value.resolve()
        except CheckpointError as error:
            raise _Found(type(error), str(error)) from error

    def _at(self, key: Any, value: Any) -> Any:
        try:
            return self.resolve(value)
        except _Found as found:
            found.keys.append(str(key))
            raise

    def _other(self, value: Any) -> Any:
        """Tensors, and the few other objects of torch."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype | torch.device | torch.Size):
            return value
        stub = getattr(value, "stub", value) if isinstance(value, type) else None
        if isinstance(stub, StubType):
            return stub
        raise _Found(Unsupported, f"an object of the type {type(value).__module__}.{type(value).__name__}")

    def _tensor(self, tensor: torch.Tensor) -> StoredTensor:
        import torch

        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise _Found(Unsupported, "a sparse, quantized or lazily negated tensor; save it as a plain one")
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        key = self.unpickled.keys.get(offset) if isinstance(offset, int) else None
        if key is None:
            raise _Found(Unsupported, "a tensor without stored data (saved on the meta device, or a wrapper)")
        stored = StoredTensor(
            self._record(key, tensor.dtype),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
        )
        if stored.stop > stored.record.numel or stored.start < 0:
            raise _Found(Corrupt, f"a tensor that ends at element {stored.stop} of a storage of {stored.record.numel}")
        return stored

    def _record(self, key: str, dtype: torch.dtype) -> Record:
        known = self.records.get((key, dtype))
        return known if known is not None else self._new_record(key, dtype)

    def _new_record(self, key: str, dtype: torch.dtype) -> Record:
        try:
            kind = dtype_of(dtype)
        except ValueError:
            raise _Found(Unsupported, f"a tensor of the dtype {dtype}, which is not supported") from None
        member = self.directory.members[f"data/{key}"]
        numel, rest = divmod(member.nbytes, kind.itemsize)
        if rest:
            raise _Found(Corrupt, f"a {dtype} tensor in record {member.name!r}, whose length is {member.nbytes} bytes")
        record = self.records[key, dtype] = Record(self.file, member.name, kind, numel, member.byte_offset)
        return record


_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, io.BytesIO})
_IN_PLACE = frozenset({dict, OrderedDict, Counter, list, argparse.Namespace})
_METHODS: dict[type, Any] = {
    dict: Resolver._dict, OrderedDict: Resolver._dict, Counter: Resolver._dict, list: Resolver._list,
    tuple: Resolver._tuple, set: Resolver._set, frozenset: Resolver._set,
    argparse.Namespace: Resolver._namespace,
    PickledArray: Resolver._numpy, PickledScalar: Resolver._numpy, PickledDtype: Resolver._numpy,
}  # fmt: skip
