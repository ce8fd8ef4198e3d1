"""From what was unpickled to the tree that was saved: stored tensors, arrays, containers, stubs.

The result holds no cycles, is no deeper than :data:`MAX_DEPTH`, and is not much larger than the pickle even when every reference is
followed, so that whoever walks it later need not remember where it has been.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from math import prod
from typing import Any

from ..core.catalog import Record, dtype_of
from ..errors import Corrupt, Unportable, Unsupported, Untrusted, shown
from .meanings import STORAGES, Resolver, Unfit, class_value, meaning_of, shape_of
from .pickle_scan import MAX_KEYS_WEIGHT
from .stored import StoredTensor, Stub, StubType
from .torchzip import Directory
from .unpickle import ADVICE, PLAIN, Storage, Vocabulary, unpickle

MAX_DEPTH = 64
_VALUES = 1_000_000
_VALUES_PER_BYTE = 16
_VALUES_OF_A_TENSOR = 200
"""What a tensor counts for: less than the bytes of an honest one's pickle allow, and far more than those of a call that repeats another."""
_TENSORS, _BYTES_OF_A_TENSOR = 1 << 15, 1 << 8
"""Tensors in a file: so many, whatever they hold, and one for every so many bytes of it: an empty one with a record of its own takes more,
in the pickle and in the zip."""
_CLAIMED, _CLAIMED_PER_BYTE = 64 << 20, 64
"""Bytes that the tensors of a file may have together, those that lie in the same place counted each time: so many, and so many for every
byte that is stored. Expanded masks and layers that share their weights need some; 10¹² elements in a kilobyte are none of these."""
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_BUSY = object()

Subclass = Callable[[Resolver, str, tuple[Any, ...], Any], Any]
"""Makes a value of a tensor of another class than torch's: name of the class, arguments of its function, state."""


def read_tree(
    data: bytes,
    file: str,
    directory: Directory,
    stubs: Collection[str] = (),
    vocabulary: Vocabulary = PLAIN,
    subclass: Subclass | None = None,
) -> Any:
    """The object that a pickle inside a zip of torch's holds. No byte of a tensor is read, and nothing of the pickle is run.

    Args:
        data: The pickle.
        file: Path of the zip's file, relative to the checkpoint's root.
        directory: The zip's records.
        stubs: Full names of classes to load as stubs, besides those of the known frameworks.
        vocabulary: What else is known in this kind of file.
        subclass: What becomes of tensors of other classes; without it they are refused.

    Raises:
        Untrusted: It asks for classes or functions that are not allowed, or for more memory or time than an honest file.
        Incomplete: It is cut off.
        Corrupt: It cannot be read, or a tensor or array in it contradicts itself or the file.
        Unsupported: Something in it is not supported; says what and where.
    """
    tree = unpickle(data, str(directory.path), stubs, vocabulary)
    return TreeResolver(file, directory, _VALUES + _VALUES_PER_BYTE * len(data), subclass).root(tree)


class TreeResolver:
    """Replaces stubs whose meaning is known by values; the same result for the same object, so that sharing is kept.

    Args:
        file: The file's path relative to the checkpoint's root, for records.
        directory: The records of the file.
        budget: How many values may be met, those in shared objects as often as they are referred to.
        subclass: See :func:`read_tree`.
    """

    __slots__ = (
        "_budget",
        "_claims",
        "_depth",
        "_directory",
        "_done",
        "_file",
        "_keys",
        "_path",
        "_records",
        "_subclass",
        "_tensors",
    )

    def __init__(self, file: str, directory: Directory, budget: int, subclass: Subclass | None = None) -> None:
        self._file, self._directory, self._budget, self._subclass = file, directory, budget, subclass
        self._keys, self._depth, self._claims = MAX_KEYS_WEIGHT, 0, _CLAIMED + _CLAIMED_PER_BYTE * directory.nbytes
        self._tensors = _TENSORS + directory.nbytes // _BYTES_OF_A_TENSOR
        self._records: dict[tuple[str, str], Record] = {}
        self._done: dict[int, tuple[Any, Any, int]] = {}
        self._path: list[Any] = []

    def root(self, tree: Any) -> Any:
        """The whole tree.

        Raises:
            CheckpointError: See :func:`read_tree`.
        """
        try:
            return self.resolve(tree)
        except Unfit as unfit:
            path = [str(key)[:100] for key in self._path]
            where = ".".join(path if len(path) <= 10 else [*path[:8], "…", path[-1]])
            advice = f"\n{ADVICE}" if unfit.kind is Corrupt else ""
            raise unfit.kind(f"{self._directory.path}: {where or 'the saved object'} is {unfit}.{advice}") from None

    def charge(self, count: int) -> None:
        """Count values that are met or copied.

        Raises:
            Unfit: There are more than an honest file has.
        """
        self._budget -= count
        if self._budget < 0:
            raise Unfit(Untrusted, "part of an object that refers to itself so often that it would fill the memory")

    def resolve(self, value: Any) -> Any:
        """One object of the tree.

        Raises:
            Unfit: It, or something in it, is wrong or not supported.
        """
        if type(value) in _LEAVES:
            return value
        known = self._done.get(id(value))
        if known is not None:
            if known[1] is _BUSY:
                raise Unfit(Unsupported, "an object that holds itself")
            self.charge(known[2])
            return known[1]
        if self._depth == MAX_DEPTH:
            raise Unfit(Unsupported, f"nested too deeply: more than {MAX_DEPTH} levels")
        self._done[id(value)] = (value, _BUSY, 0)
        before = self._budget
        self.charge(1)
        self._depth += 1
        result = self._resolved(value)
        self._depth -= 1
        self._done[id(value)] = (value, result, before - self._budget)
        return result

    def _resolved(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return self._dict(value)
        if kind is list:
            return self._list(value)
        if kind is tuple:
            if _LEAVES.issuperset(map(type, value)):  # a generator's state has hundreds of numbers
                self.charge(len(value))
                return value
            items = self._list(list(value))
            return tuple(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if isinstance(value, Stub):
            return self._stub(value)
        if kind is set or kind is frozenset:
            items = self._list(list(value))
            return self.hashed(items, lambda: kind(items))
        if kind is StubType:
            return class_value(value)
        name = value.type_name if isinstance(value, Storage) else kind.__name__
        raise Unfit(Unsupported, f"an object of the type {name}")

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        self.charge(len(value))
        renamed = {}
        for key, item in value.items():
            if type(key) is not str and type(key) not in _LEAVES:
                renamed[key] = self._at("a key", key)
            if type(item) not in _LEAVES:
                value[key] = self._at(key, item)  # no new key: the dictionary keeps its order and size
        if any(new is not old for old, new in renamed.items()):
            made: dict[Any, Any] = {}
            fill = partial(made.update, ((renamed.get(key, key), item) for key, item in value.items()))
            self.hashed(list(renamed.values()), fill)
            return made
        return value

    def _list(self, value: list[Any]) -> list[Any]:
        self.charge(len(value))
        for index, item in enumerate(value):
            if type(item) not in _LEAVES:
                value[index] = self._at(index, item)
        return value

    def _at(self, key: Any, value: Any) -> Any:
        self._path.append(key)
        result = self.resolve(value)
        self._path.pop()
        return result

    def _stub(self, stub: Stub) -> Any:
        meaning = meaning_of(type(stub).stub_name)
        if meaning is None:
            stub.stub_args = tuple(self._list(list(stub.stub_args)))
            stub.stub_state, stub.stub_items = self.resolve(stub.stub_state), self.resolve(stub.stub_items)
            return stub
        if (stub.stub_state is not None and not meaning.state) or (stub.stub_items is not None and not meaning.items):
            raise Unfit(Unsupported, f"a {type(stub).stub_name} with a state or items of its own")
        return meaning.build(self, stub)

    def hashed(self, keys: list[Any], build: Callable[[], Any]) -> Any:
        """Build a container that hashes these values.

        Raises:
            Unfit: They cannot be hashed, or not in a time that is worth it.
        """
        self._keys -= sum(_weight(key) for key in keys if type(key) in (tuple, frozenset))
        if self._keys < 0:
            raise Unfit(Untrusted, f"a container with tuples of more than {MAX_KEYS_WEIGHT} values as keys")
        try:
            return build()
        except TypeError as error:
            raise Unfit(Corrupt, f"a container of values that cannot be its keys: {error}") from None

    def of_subclass(self, name: str, args: tuple[Any, ...], state: Any) -> Any:
        """A tensor of another class than torch's own.

        Raises:
            Unfit: Nothing is known about it.
        """
        if self._subclass is None:
            raise Unfit(Unportable, f"a tensor of the class {name}; only plain tensors can be read here")
        return self._subclass(self, name, args, state)

    def tensor(self, storage: Any, start: Any, shape: Any, strides: Any, dtype: str | None = None) -> StoredTensor:
        """A tensor, where it lies.

        Args:
            storage: Its :class:`~.unpickle.Storage`.
            start: Its first element in it.
            shape: Its shape.
            strides: Its strides, in elements.
            dtype: Its element type where that is not the storage's.

        Raises:
            Unfit: It contradicts itself or the file.
        """
        if not isinstance(storage, Storage):
            raise Unfit(Corrupt, f"a tensor whose storage is a {type(storage).__name__}")
        name = dtype if dtype is not None else STORAGES.get(storage.type_name, storage.type_name)
        record = self._records.get((storage.key, name)) or self._record(storage, name)
        sizes, steps = shape_of(shape), shape_of(strides)
        if type(start) is not int or start < 0 or len(sizes) != len(steps):
            raise Unfit(Corrupt, f"a tensor of {len(sizes)} dimensions with {len(steps)} strides that begins nowhere")
        stored = StoredTensor(record, start, sizes, steps)
        if stored.stop > record.numel:
            raise Unfit(Corrupt, f"a tensor that ends at element {stored.stop} of a storage of {record.numel}")
        declared = storage.numel * dtype_of(STORAGES.get(storage.type_name, name)).itemsize
        if declared != record.nbytes:  # torch.load stops there
            said = f"a storage of {shown(declared)} bytes, whose record {record.key!r} has {record.nbytes}"
            raise Unfit(Corrupt, f"a tensor in {said}")
        self._claims -= prod(sizes) * record.dtype.itemsize
        if self._claims < 0:
            text = (
                f"a tensor of shape {shown(sizes)} in {record.numel} stored elements, or one of many in the same place"
            )
            raise Unfit(Untrusted, f"{text}: they would fill {_CLAIMED_PER_BYTE} times as much memory as the file")
        self.charge(_VALUES_OF_A_TENSOR)
        self._tensors -= 1
        if self._tensors < 0:
            raise Unfit(Untrusted, f"one of more tensors than a file of {self._directory.nbytes:,} bytes has use for")
        return stored

    def _record(self, storage: Storage, name: str) -> Record:
        try:
            dtype = dtype_of(name)
        except ValueError:
            raise Unfit(Unsupported, f"a tensor of the dtype {name}, which is not supported") from None
        member = self._directory.members.get(f"data/{storage.key}")
        if member is None:
            raise Unfit(Corrupt, f"a tensor in the record 'data/{storage.key[:60]}', which the file does not have")
        numel, rest = divmod(member.nbytes, dtype.itemsize)
        if rest:
            raise Unfit(Corrupt, f"a {dtype} tensor in record {member.name!r}, whose length is {member.nbytes} bytes")
        record = self._records[storage.key, name] = Record(self._file, member.name, dtype, numel, member.byte_offset)
        return record


def _weight(key: Any) -> int:
    return 1 + sum(map(_weight, key)) if type(key) in (tuple, frozenset) else 1
