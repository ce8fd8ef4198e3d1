"""Pickling a tree with stored tensors the way ``torch.save`` does: protocol 2, torch's own globals, stubs
under their names. Torch itself is not needed.

Whatever tree arrives, and wherever it is from, only what :mod:`.trust` lists is named or called in what leaves.

Source: torch ``_tensor.py`` (``_reduce_ex_internal``), ``serialization.py`` (``_save``), ``_utils.py`` of
2.13; the result is compared opcode for opcode with torch's. Opcodes are those that torch's ``weights_only``
unpickler accepts.
"""

from __future__ import annotations

import argparse
import copyreg
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from mcore_rlhf.storage.torch_values import is_tensor

from ..core.catalog import DType, Record, dtype_of
from ..errors import CheckpointError, Problems, Unsupported, Untrusted
from .meanings import STORAGES
from .nested import calls_of
from .stored import NAMESPACES, Made, Namespace, StoredArray, StoredTensor, Stub, StubType, TorchName, stub_class
from .torch_values import SmallTensor, TorchDevice, TorchDtype, TorchSize, inert, torch_dtype
from .trust import MADE_BY_US, OF_SHARDS, is_harmful, may_be_made, may_stand


@dataclass(slots=True)
class PickledTree:
    """A pickle and the records that it refers to.

    Args:
        data: The pickle.
        records: Length in bytes of every record, by its key (``data/0``), in the order of first use.
        contents: The bytes of the tensors that the tree holds itself, by the key of the record that each one got.
    """

    data: bytes = b""
    records: dict[str, int] = field(default_factory=dict)
    contents: dict[str, memoryview] = field(default_factory=dict)


def pickle_tree(tree: Any, file: str) -> PickledTree:
    """Pickle a tree.

    Args:
        tree: A nest of containers, Namespaces, stubs, numpy arrays and plain values; tensors are
            :class:`~.stored.StoredTensor` of records of ``file``, or :class:`~.torch_values.SmallTensor` or a
            live trainer's own, which get records of their own.
        file: The file that the records belong to.

    Raises:
        Untrusted: It holds something of a checkpoint that is not on the closed list of what is written; all of it is named.
        Unsupported: It holds something that torch could not read back, or that only exists here.
        ValueError: Records contradict each other, or belong to another file.
    """
    found = _find_records(tree, file)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, found)
    try:
        pickler.dump(tree)
        pickler.refuse(tree)
    except CheckpointError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise Unsupported(f"{file}: something in it cannot be saved: {error}.") from error
    found.result.data = buffer.getvalue()
    return found.result


@dataclass(slots=True)
class _Records:
    """The records of a tree, known before pickling: one of two dtypes must be written as untyped."""

    file: str
    result: PickledTree
    dtypes: dict[str, set[DType]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    adopted: dict[int, tuple[Any, str]] = field(default_factory=dict)
    fresh: int = 0

    def note(self, record: Record) -> None:
        if record.file != self.file:
            raise ValueError(f"{self.file}: a tensor of another file ({record.file}) is in its tree")
        if self.lengths.setdefault(record.key, record.nbytes) != record.nbytes:
            raise ValueError(f"{self.file}: record {record.key} has two lengths")
        self.dtypes.setdefault(record.key, set()).add(record.dtype)

    def adopt(self, tensor: Any) -> StoredTensor:
        """Give a tensor's storage a record; a live trainer's that share a storage share it here too."""
        if isinstance(tensor, SmallTensor):
            key = self._key_of(tensor, id(tensor), memoryview(tensor.data))
            record = Record(self.file, key, tensor.dtype, len(tensor.data) // tensor.dtype.itemsize, 0)
            self.note(record)
            return StoredTensor(
                record, 0, (*tensor.shape,), (*tensor.strides,)
            )  # tuples of its own, as torch makes them
        return self._adopt_live(tensor)

    def _adopt_live(self, tensor: Any) -> StoredTensor:
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise Unsupported(f"{self.file}: a sparse, quantized or lazily negated tensor cannot be saved")
        tensor = tensor.detach().cpu()
        storage = tensor.untyped_storage()
        try:
            dtype = dtype_of(tensor.dtype)
        except ValueError:
            raise Unsupported(f"{self.file}: a tensor of the dtype {tensor.dtype} cannot be saved") from None
        data = tensor.new_empty(0, dtype=_live_torch().uint8).set_(storage).numpy().data
        record = Record(
            self.file, self._key_of(storage, storage._cdata, data), dtype, storage.nbytes() // dtype.itemsize, 0
        )
        self.note(record)
        return StoredTensor(record, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _key_of(self, storage: object, identity: int, data: memoryview) -> str:
        known = self.adopted.get(identity)
        if known is not None:
            return known[1]
        while f"data/{self.fresh}" in self.lengths:
            self.fresh += 1
        key = f"data/{self.fresh}"
        self.adopted[identity] = (storage, key)  # held: nothing else gets its address
        self.result.contents[key] = data
        return key

    def use(self, record: Record) -> _Storage:
        """The persistent id of a record that is referred to now."""
        self.note(record)
        self.result.records.setdefault(record.key, record.nbytes)
        key = record.key.removeprefix("data/")
        if self.is_untyped(record):
            return _Storage(("storage", stub_class("torch.storage.UntypedStorage"), key, "cpu", record.nbytes))
        return _Storage(("storage", stub_class(_STORAGES[record.dtype.name]), key, "cpu", record.numel))

    def is_untyped(self, record: Record) -> bool:
        """Whether it has no storage class of its own (float8, uint16, …) or is seen under two dtypes."""
        return record.dtype.name not in _STORAGES or len(self.dtypes[record.key]) > 1


def _find_records(tree: Any, file: str) -> _Records:
    """Note the stored tensors of a tree, before real ones are given keys that are free."""
    found = _Records(file, PickledTree())
    seen: set[int] = set()
    todo = [tree]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind is StoredTensor:
            found.note(value.record)
        elif kind not in _LEAVES and id(value) not in seen:
            seen.add(id(value))
            todo += _parts(value)
    return found


_LEAVES = frozenset((str, int, bool, float, bytes, type(None)))


def _parts(value: Any) -> list[Any]:
    """What an object holds."""
    if isinstance(value, dict):
        return [*value, *value.values(), *(getattr(value, "__dict__", {}).values())]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Made):
        return [value.args, value.state]
    if isinstance(value, Stub):
        return [value.stub_args, value.stub_state, value.stub_items]
    state = getattr(value, "__dict__", None)
    return [] if isinstance(value, type) or not isinstance(state, dict) else list(state.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Stands for a storage while pickling; written as torch's persistent id."""

    pid: tuple[Any, ...]


_STORAGES = {dtype: name for name, dtype in STORAGES.items() if name != "torch.storage.UntypedStorage"}
"""Typed storage classes by dtype; torch calls them legacy and writes them all the same."""


def _live_torch() -> Any:
    """Torch where a live trainer has loaded it; None where no tensor can be its own."""
    return sys.modules.get("torch")


if TYPE_CHECKING:

    class _PythonPickler:
        """What typeshed leaves out of ``pickle._Pickler``."""

        dispatch: ClassVar[dict[type, Any]]
        memo: dict[int, tuple[int, Any]]
        write: Callable[[bytes], Any]
        get: Callable[[int], bytes]

        def __init__(self, file: io.BytesIO, protocol: int) -> None: ...
        def save(self, obj: Any, save_persistent_id: bool = True) -> None: ...
        def save_global(self, obj: Any, name: str | None = None) -> None: ...
        def save_reduce(self, func: Any, args: Any, *rest: Any, obj: Any = None) -> None: ...
        def dump(self, obj: Any) -> None: ...
else:
    _PythonPickler = pickle._Pickler


_BLOBS = (bytes, bytearray, io.BytesIO, SmallTensor)
_PUT = [pickle.BINPUT + bytes((index,)) for index in range(256)]
_INT = [pickle.BININT1 + bytes((value,)) for value in range(256)]


def _contents_of(blob: Any) -> list[bytes]:
    """The bytes that a framework might unpickle: of a tensor of any type, element by element; of a stream, also from where it stands."""
    if isinstance(blob, SmallTensor):
        return [blob.contiguous()]
    if isinstance(blob, io.BytesIO):
        return [blob.getvalue(), blob.getvalue()[blob.tell() :]] if blob.tell() else [blob.getvalue()]
    return [bytes(blob)]


def _name_of(obj: Any, name: str | None = None) -> str:
    """The full name under which something is written."""
    if isinstance(obj, StubType):
        return obj.stub_name
    name = name or obj.__qualname__
    return f"{pickle.whichmodule(obj, name)}.{name}"  # type: ignore[attr-defined]  # missing in typeshed


def _is_vouched(cls: Any) -> bool:
    """Whether the user has vouched for a stub's class, which nobody can for what does harm."""
    return isinstance(cls, StubType) and cls.stub_vouched and not is_harmful(cls.stub_name)


def _path_to(wanted: Any, tree: Any) -> str:
    """Where something is in a tree, for messages."""
    seen, todo = set[int](), [("", tree)]
    for path, value in todo:
        if value is wanted:
            return path or "the whole of it"
        if id(value) not in seen:
            seen.add(id(value))
            inner = (
                value.items()
                if isinstance(value, dict)
                else enumerate(value)
                if isinstance(value, list | tuple)
                else ()
            )
            named = getattr(value, "__dict__", {}) if isinstance(value, NAMESPACES) else {}
            todo += ((f"{path}.{key}".lstrip("."), item) for key, item in (*inner, *named.items()))
            todo += ((path, part) for part in _parts(value) if isinstance(value, Stub))
    return "something in it"


class _Pickler(_PythonPickler):
    """Python's own pickler in Python: only there a class can be written under another name than its own."""

    def __init__(self, buffer: io.BytesIO, records: _Records) -> None:
        super().__init__(buffer, protocol=2)
        self.write = buffer.write  # past the frames, which protocol 2 does not have
        self._records = records
        self._refused: dict[str, Any] = {}
        torch = _live_torch()
        self._live: tuple[type, ...] = (torch.Tensor, torch.Size, torch.dtype, torch.device) if torch else ()

    def refuse(self, tree: Any) -> None:
        """Name everything that was met and may not be written.

        Raises:
            Untrusted: There is something of a checkpoint.
            Unsupported: There is something of a live trainer's.
        """
        problems = Problems()
        for name, held in self._refused.items():
            where, what = (
                _path_to(held, tree),
                f"{name!r}, which is not on the closed list of what is written into a pickle",
            )
            if isinstance(held, Stub | StubType):
                advice = "--stub NAME writes it all the same, as the source has it: only for a class that you know, since loaders run it."
                problems.add(Untrusted, f"{self._records.file}: {where} needs {what}", advice)
            elif isinstance(held, _BLOBS):
                advice = "No honest checkpoint needs it: do not load the source with anything else either."
                problems.add(
                    Untrusted, f"{self._records.file}: {where} holds a pickle of its own that calls {name!r}", advice
                )
            else:
                problems.add(
                    Unsupported,
                    f"{self._records.file}: {where} cannot be saved: it needs {what}",
                    "Keep plain values there.",
                )
        problems.raise_if_any()

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if type(obj) is _Storage else None

    def memoize(self, obj: Any) -> None:
        """As Python's does it, whose opcode is another from 256 on."""
        index = len(self.memo)
        self.write(_PUT[index] if index < 256 else pickle.LONG_BINPUT + index.to_bytes(4, "little"))
        self.memo[id(obj)] = index, obj

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        kind = type(obj)
        plain = self._plain.get(kind)
        if plain is not None:  # most of what there is, which nothing but the memo is asked about
            known = self.memo.get(id(obj))
            if known is None:
                plain(self, obj)
            else:
                self.write(self.get(known[0]))
            return
        if isinstance(obj, _BLOBS):
            for call in (call for content in _contents_of(obj) for call in calls_of(content)):
                self._refused.setdefault(call, obj)
        special = self._special.get(kind)
        if special is not None:
            special(self, obj)
        elif isinstance(obj, Stub):
            self._once(obj, self._save_stub)
        elif isinstance(obj, self._live):
            self._save_torch(obj)
        else:
            super().save(obj, save_persistent_id)

    def _once(self, obj: Any, save: Callable[[Any], None]) -> None:
        known = self.memo.get(id(obj))
        if known is not None:
            self.write(self.get(known[0]))
        else:
            save(obj)

    def _save_torch(self, obj: Any) -> None:
        """Our stand-in for something of torch's, or a live trainer's own."""

        def write(obj: Any) -> None:
            if is_tensor(obj):
                self._save_stored(self._records.adopt(obj), obj)
                return
            meant = inert(obj)
            if isinstance(meant, TorchDtype):
                self.save(stub_class(str(meant)))
            elif isinstance(meant, TorchSize):
                self.save_reduce(stub_class("torch.Size"), (tuple(meant),), obj=obj)
            else:
                self.save_reduce(stub_class("torch.device"), meant.args, obj=obj)

        self._once(obj, write)

    def _save_tensor(self, stored: StoredTensor) -> None:
        self._once(stored, lambda tensor: self._save_stored(tensor, tensor))

    def _save_stored(self, stored: StoredTensor, memo_as: Any) -> None:
        record = stored.record
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (self._records.use(record), stored.start, stored.shape, stored.strides, False, hooks)
        if self._records.is_untyped(record):
            dtype = torch_dtype(record.dtype.name)
            self.save_reduce(stub_class("torch._utils._rebuild_tensor_v3"), (*args, dtype), obj=memo_as)
        else:
            self.save_reduce(stub_class("torch._utils._rebuild_tensor_v2"), args, obj=memo_as)

    def _save_stub(self, stub: Stub) -> None:
        cls, items = type(stub), stub.stub_items
        lists = iter(items) if isinstance(items, list) else None
        dicts = iter(items.items()) if isinstance(items, dict) else None
        if stub.stub_called:
            self.save_reduce(cls, stub.stub_args, stub.stub_state, lists, dicts, obj=stub)
        else:
            new: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # missing in typeshed
            self.save_reduce(new, (cls, *stub.stub_args), stub.stub_state, lists, dicts, obj=stub)

    def _save_namespace(self, space: Namespace) -> None:
        """As the real ``argparse.Namespace``."""

        def write(space: Namespace) -> None:
            self.save(argparse.Namespace)
            self.save(())
            self.write(pickle.NEWOBJ)
            self.memoize(space)
            if vars(space):
                self.save(vars(space))
                self.write(pickle.BUILD)

        self._once(space, write)

    def _save_made(self, made: Made) -> None:
        """An object of torch's as torch writes it: by a call, or by its class and its attributes."""

        def write(made: Made) -> None:
            self.save(made.of)
            self.save(made.args)
            self.write(pickle.NEWOBJ if made.new else pickle.REDUCE)
            self.memoize(made)
            if made.state is not None:
                self.save(made.state)
                self.write(pickle.BUILD)

        self._once(made, write)

    def _save_name(self, name: TorchName) -> None:
        if name.name not in OF_SHARDS:
            raise ValueError(f"{self._records.file}: {name.name} is no name that we write")
        module, _, last = name.name.rpartition(".")

        def write(cls: StubType) -> None:
            self.write(pickle.GLOBAL + f"{module}\n{last}\n".encode())
            self.memoize(cls)

        self._once(stub_class(name.name), write)

    def save_reduce(self, func: Any, args: Any, *rest: Any, obj: Any = None) -> None:
        """Whatever is called, or made by a class: the one place where opcodes for it are written, but for a Namespace."""
        new = func is copyreg.__newobj__  # type: ignore[attr-defined]  # missing in typeshed
        cls, given = (args[0], tuple(args[1:])) if new else (func, args)
        state, lists, dicts, setter = (*rest, None, None, None, None)[:4]
        items, name = lists is not None or dicts is not None, _name_of(cls)
        ours = name in MADE_BY_US and not isinstance(obj, Stub)
        if setter is not None or not (
            ours or _is_vouched(cls) or may_be_made(name, new=new, args=given, state=state, items=items)
        ):
            self._refused.setdefault(name, obj)
        super().save_reduce(func, args, *rest, obj=obj)

    def _save_stub_class(self, cls: StubType) -> None:
        if not may_stand(cls.stub_name) and not _is_vouched(cls):
            self._refused.setdefault(cls.stub_name, cls)

        def write(cls: StubType) -> None:
            self.write(pickle.GLOBAL + f"{cls.__module__}\n{cls.__name__}\n".encode())
            self.memoize(cls)

        self._once(cls, write)

    def _save_array(self, stored: StoredArray) -> None:
        self.save(stored.array())

    def _save_set(self, obj: set[Any] | frozenset[Any]) -> None:
        """In a fixed order: that of a set of strings changes from process to process."""

        def write(obj: set[Any] | frozenset[Any]) -> None:
            try:
                items = sorted(obj)
            except TypeError:
                items = sorted(obj, key=repr)
            self.save_reduce(type(obj), (items,), obj=obj)

        self._once(obj, write)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = str(getattr(obj, "__module__", ""))
        if module.partition(".")[0] == __name__.partition(".")[0]:
            raise Unsupported(f"{self._records.file}: {obj!r} exists only in this program and cannot be saved")
        if not may_stand(_name_of(obj, name)):
            self._refused.setdefault(_name_of(obj, name), obj)
        super().save_global(obj, name)

    def _save_int(self, number: int) -> None:
        if 0 <= number < 256:
            self.write(_INT[number])
        else:
            _PythonPickler.dispatch[int](self, number)

    _plain: ClassVar[dict[type, Callable[[_Pickler, Any], None]]] = {
        kind: _PythonPickler.dispatch[kind] for kind in (str, bool, float, type(None), tuple, list, dict)
    } | {int: _save_int}
    _special: ClassVar[dict[type, Callable[[_Pickler, Any], None]]] = {
        StoredTensor: _save_tensor, StoredArray: _save_array, StubType: _save_stub_class, set: _save_set, frozenset: _save_set,
        Made: _save_made, TorchName: _save_name,
        Namespace: _save_namespace, SmallTensor: _save_torch, TorchSize: _save_torch, TorchDtype: _save_torch,
        TorchDevice: _save_torch,
    }  # fmt: skip
    dispatch: ClassVar[dict[type, Any]] = {**_PythonPickler.dispatch, type: save_global, FunctionType: save_global}
