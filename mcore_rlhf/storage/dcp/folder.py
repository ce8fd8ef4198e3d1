"""A DCP folder that was opened: what its tensors and objects are, and where each byte of them lies."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, overload

from mcore_rlhf.core.catalog import Box, Chunk, DType, Record, Shape, row_major
from mcore_rlhf.core.rows import Tensor
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported

from ..checksum import crc32
from ..paths import ReadablePath
from ..reading import ByteSource, opened
from ..record_file import StoredFile
from ..torch_values import SmallTensor
from ..torchzip import Directory
from . import METADATA_FILE
from .checks import boxes, check, item_key
from .items import Ends, ItemKinds, item_directory, load_tree
from .metadata import RESTORE, DcpMetadata, ItemPlace, Path_, TensorMeta, read_metadata

if TYPE_CHECKING:
    from mcore_rlhf.core.cast import Words

StoredRecord = tuple[str, int, int, int]
"""``(key, byte offset, bytes, crc32)``"""


class FileRecords(Sequence[StoredRecord]):
    """The parts of a file that have a checksum; whoever wants but the file's path and length pays nothing for them.

    Args:
        find: Reads them; called once, at first use. What it raises, every use raises.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], tuple[StoredRecord, ...]]) -> None:
        self._find = find
        self._found: tuple[StoredRecord, ...] | None = None

    def _all(self) -> tuple[StoredRecord, ...]:
        if self._found is None:
            self._found = self._find()
        return self._found

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[StoredRecord]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> StoredRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StoredRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StoredRecord | tuple[StoredRecord, ...]:
        return self._all()[index]


_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_OPEN_FILES = 64
"""A run on 512 GPUs writes as many files or more; a process may have 1024 open."""

_SHORT = 256
"""Bytes of the pickle of a number."""

At = tuple[str, Shape | None]
"""An item: its name, and a chunk's offset; None for an object."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the folder.

    Args:
        fqn: Its name.
        meta: What ``.metadata`` says.
        folder: Where it lies.
    """

    fqn: str
    meta: TensorMeta
    folder: DcpFolder = field(repr=False)

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.meta.dtype

    @property
    def global_shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self.meta.global_shape

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The parts that are stored, without the empty ones; nothing is read for it."""
        return tuple(boxes(self.meta))

    @property
    def cut(self) -> bool:
        """Whether it is stored in several parts, empty ones included."""
        return len(self.meta.chunks) > 1

    def identity(self) -> object:
        """Type, cut and CRC of every part: tensors with equal ones hold equal bytes.

        Raises:
            CheckpointError: An item is damaged.
        """
        return self.dtype, tuple((box, self.folder.checksum(self, box)) for box in self.boxes)

    def chunks(self) -> tuple[Chunk, ...]:
        """Where the parts lie: reads the two ends of each item, and no tensor data.

        Raises:
            CheckpointError: An item is damaged, or is not what ``.metadata`` says.
        """
        problems, found = Problems(), []
        for box in self.boxes:
            try:
                found.append(self.folder.chunk(self, box))
            except CheckpointError as error:
                problems.add_error(error)
        problems.raise_if_any()
        return tuple(found)

    def as_tensor(self) -> Tensor:
        """The tensor as a table has it; see :meth:`chunks`."""
        return Tensor(self.global_shape, self.dtype, lambda rows: rows.strips(self.chunks()))


@dataclass(frozen=True, slots=True)
class DcpObject:
    """Something of the folder that is not a tensor.

    Args:
        fqn: Its name.
        place: Where its zip lies.
        folder: The folder.
    """

    fqn: str
    place: ItemPlace
    folder: DcpFolder = field(repr=False)

    def load(self) -> Any:
        """The object, with real tensors in it and stubs for classes of frameworks. Nothing of the pickle is run.

        Raises:
            Untrusted: It names a class or function that is not known to be harmless.
            CheckpointError: It is damaged.
        """
        return self.folder.load(self)

    def data(self) -> bytes:
        """Its zip as it is, to be compared; what is written is what was loaded.

        Raises:
            CheckpointError: It cannot be read.
        """
        return self.folder.data(self.place)


@dataclass(slots=True)
class DcpFolder:
    """An opened DCP folder: ``.metadata`` was read and checked against the files, no tensor data was.

    Args:
        folder: The folder with ``.metadata``.
        root: The checkpoint's root, to which the paths of records are relative.
        metadata: What ``.metadata`` says.
        sizes: Lengths of the ``.distcp`` files.
        stubs: Names of classes that may become inert stubs.
    """

    folder: ReadablePath
    root: ReadablePath
    metadata: DcpMetadata
    sizes: Mapping[str, int]
    stubs: tuple[str, ...] = ()
    tensors: Mapping[str, DcpTensor] = field(init=False)
    objects: Mapping[str, DcpObject] = field(init=False)
    _open: dict[str, ByteSource] = field(default_factory=dict, init=False)
    _kinds: ItemKinds = field(default_factory=ItemKinds, init=False)
    _found: dict[At, Ends] = field(default_factory=dict, init=False)
    _by_file: dict[str, list[tuple[At, ItemPlace]]] = field(default_factory=dict, init=False)
    _paths: dict[str, str] = field(default_factory=dict, init=False)
    _values: dict[bytes, Any] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.tensors = {fqn: DcpTensor(fqn, meta, self) for fqn, meta in self.metadata.tensors.items()}
        places = self.metadata.places
        self.objects = {fqn: DcpObject(fqn, places[fqn, None], self) for fqn in self.metadata.objects}

    @classmethod
    def open(
        cls, folder: ReadablePath, root: ReadablePath, stubs: Collection[str] = (), *, tiled: bool = True
    ) -> DcpFolder:
        """Open a folder.

        Args:
            folder: The folder with ``.metadata``.
            root: The checkpoint's root: the folder itself, or one above it.
            stubs: Names of classes that the user allows as inert stubs.
            tiled: Whether the chunks of every tensor must cover it; a folder that leaves gaps is refused then.

        Raises:
            Incomplete: ``.metadata``, files, items or chunks are missing.
            Untrusted: The pickle names what is not known to be harmless, or a file outside the folder.
            Corrupt: The folder contradicts itself.
        """
        metadata = read_metadata(folder, stubs)
        return cls(folder, root, metadata, check(folder, metadata, tiled=tiled), tuple(stubs))

    @property
    def planner_data(self) -> Mapping[str, Path_]:
        """Every name's path in the nest of dictionaries that was saved; empty where the writer left it out."""
        return self.metadata.planner_data

    def path(self, name: str) -> str:
        """A file of the folder, relative to the root."""
        if name not in self._paths:
            self._paths[name] = (self.folder / name).relative_to(self.root).as_posix()
        return self._paths[name]

    def files(self) -> tuple[StoredFile, ...]:
        """All files. Their records are read when they are asked for: the two ends of every item, whose small records are checked.

        The records raise CheckpointError where items are damaged; all that are in the folder are listed then.
        """
        metadata = StoredFile(self.path(METADATA_FILE), (self.folder / METADATA_FILE).stat().st_size)
        ranks = {name: int(match[1]) for name in self.sizes if (match := _OF_RANK.fullmatch(name))}
        lazy = (
            StoredFile(self.path(name), nbytes, FileRecords(partial(self._records, name)), rank=ranks.get(name))
            for name, nbytes in self.sizes.items()
        )
        return metadata, *lazy

    def _records(self, name: str) -> tuple[StoredRecord, ...]:
        problems, found = Problems(), list[StoredRecord]()
        for at, place in self._items_of(name):
            try:
                found += self._records_of(at, place)
            except CheckpointError as error:
                problems.add_error(error)
        if problems:
            self._look_at_others(name, problems)
        problems.raise_if_any()
        return tuple(found)

    def _look_at_others(self, name: str, problems: Problems) -> None:
        """Where one file is damaged, say all that is: the folder has to be copied again, or parts of it."""
        for at, place in self.metadata.places.items():
            if place.file != name:
                try:
                    self._ends(at, place)
                except CheckpointError as error:
                    problems.add_error(error)

    def _items_of(self, name: str) -> list[tuple[At, ItemPlace]]:
        """The items of a file, one behind the other."""
        if not self._by_file:
            by_file: dict[str, list[tuple[At, ItemPlace]]] = {name: [] for name in self.sizes}
            for at, place in sorted(self.metadata.places.items(), key=lambda item: item[1].offset):
                by_file[place.file].append((at, place))
            self._by_file = by_file
        return self._by_file[name]

    def _records_of(self, at: At, place: ItemPlace) -> Iterator[StoredRecord]:
        key, is_tensor = item_key(*at), at[1] is not None
        for name, start, nbytes, crc in self._ends(at, place).records:
            yield key if is_tensor else f"{key}:{name}", place.offset + start, nbytes, crc

    def _ends(self, at: At, place: ItemPlace) -> Ends:
        """What the ends of an item say; of a tensor it is remembered."""
        found = self._found.get(at)
        if found is None:
            is_tensor = at[1] is not None
            found = self._kinds.ends(
                self._file(place.file), item_key(*at), place.offset, place.length, is_tensor=is_tensor
            )
            if is_tensor:
                self._found[at] = found
        return found

    def chunk(self, tensor: DcpTensor, box: Box) -> Chunk:
        """Where one part of a tensor lies.

        Raises:
            CheckpointError: The item is damaged, or is not what ``.metadata`` says.
        """
        at = (tensor.fqn, box.offset)
        key, place = item_key(*at), self.metadata.places[at]
        ends = self._ends(at, place)
        stored = ends.stored
        assert stored is not None  # it has an offset, and so is a tensor
        if stored.shape != box.shape or stored.record.dtype != tensor.dtype:
            raise Corrupt(
                f"{self.folder / place.file}: {key} is a {stored.record.dtype} tensor {stored.shape}; {METADATA_FILE} says {tensor.dtype} "
                f"{box.shape}.\nThe files are not those of this .metadata: copy the folder again, or use an older step."
            )
        record = Record(self.path(place.file), key, stored.record.dtype, stored.record.numel, place.offset + ends.data)
        return Chunk(box, record, stored.start, stored.strides)

    def checksum(self, tensor: DcpTensor, box: Box) -> int:
        """The CRC-32 of a part's bytes, as its zip says.

        Raises:
            CheckpointError: The item is damaged.
        """
        at = (tensor.fqn, box.offset)
        return next((crc for *_, crc in self._ends(at, self.metadata.places[at]).records), 0)

    def _item(self, key: str, place: ItemPlace) -> tuple[ByteSource, Directory]:
        file = self._file(place.file)
        return file, item_directory(file, key, place.offset, place.length)

    def _file(self, name: str) -> ByteSource:
        with self._lock:
            file = self._open.pop(name, None) or opened(self.folder / name)
            self._open[name] = file  # at the end: used last
            if len(self._open) > _OPEN_FILES:
                del self._open[next(iter(self._open))]
            return file

    def item(self, fqn: str) -> tuple[ByteSource, Directory]:
        """The file that an object lies in, and the members of its zip.

        Raises:
            CheckpointError: It is damaged.
        """
        return self._item(fqn, self.objects[fqn].place)

    def load(self, item: DcpObject) -> Any:
        """See :meth:`DcpObject.load`. A parameter has a learning rate of its own in some folders: equal ones are read once."""
        file, directory = self._item(item.fqn, item.place)
        member = directory.members["data.pkl"]
        pickled = file.read(member.byte_offset, member.nbytes) if member.nbytes <= _SHORT else b""
        if pickled and pickled in self._values:
            return self._values[pickled]
        opened = load_tree(file, directory, self.stubs)
        value = opened.materialize(opened.tree)
        if pickled and type(value) in (bool, int, float, str, type(None)):
            self._values[pickled] = value
        return value

    def data(self, place: ItemPlace) -> bytes:
        """See :meth:`DcpObject.data`."""
        return self._file(place.file).read(place.offset, place.length)


_MOST_ELEMENTS = 16 << 20
"""What is larger is a model's tensor, and is not loaded whole."""


def load_tensor(tensor: DcpTensor) -> SmallTensor:
    """A small tensor, whole.

    Args:
        tensor: It.

    Raises:
        Unsupported: It is not small.
        CheckpointError: It is damaged.
    """
    numel = prod(tensor.global_shape)
    if numel > _MOST_ELEMENTS:
        raise Unsupported(
            f"{tensor.folder.folder}: {tensor.fqn} has {numel:,} elements, but is neither a weight nor a state of the "
            "optimizer\nIf the folder holds several models, convert them one by one: save each into a folder of its own."
        )
    import numpy as np  # looking at a folder needs it not

    from mcore_rlhf.core.execute import WORDS

    result: Words = np.zeros(tensor.global_shape, WORDS[tensor.dtype.itemsize])
    for chunk in tensor.chunks():
        box = chunk.box
        where = tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))
        result[where] = _loaded(tensor, chunk)
    return SmallTensor(result.tobytes(), tensor.dtype, tensor.global_shape, row_major(tensor.global_shape))


def _loaded(tensor: DcpTensor, chunk: Chunk) -> Words:
    import numpy as np

    from mcore_rlhf.core.execute import WORDS, strided

    record, expected = chunk.record, tensor.folder.checksum(tensor, chunk.box)
    file = opened(tensor.folder.root / record.file)
    data = bytearray(file.read(record.byte_offset, record.nbytes))
    if expected and (found := crc32(data)) != expected:
        raise Corrupt(
            f"{file.path}: {tensor.fqn} ({record.nbytes} bytes) has CRC-32 {found:08x}, but the file says {expected:08x}: its bytes are "
            f"damaged.\n{RESTORE}"
        )
    return strided(np.frombuffer(data, WORDS[record.dtype.itemsize]), chunk.start, chunk.box.shape, chunk.strides)


def unwrap(folder: DcpFolder, fqn: str) -> Any:
    """The object that an older version of ours stored under a name: its zip, inside the zip of a byte tensor.

    Raises:
        CheckpointError: It is damaged, or something else.
    """
    file, directory = folder.item(fqn)
    outer = load_tree(file, directory, ()).tree
    inside = getattr(outer, "record", None)
    if inside is None or outer.strides != row_major(outer.shape):
        raise Unsupported(f"{file.path}: {fqn} is not what it says: a stored object was expected")
    data = directory.members[inside.key]
    inner = item_directory(file, fqn, data.byte_offset, data.nbytes)
    found = load_tree(file, inner, folder.stubs)
    return found.materialize(found.tree)


def object_in(folder: ReadablePath, fqn: str) -> object:
    """What lies under a name that is no tensor's, with stubs in place of tensors; of the folder nothing else is looked at.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    place = read_metadata(folder).places.get((fqn, None))
    if place is None:
        raise Incomplete(f"{folder / METADATA_FILE}: lists no object {fqn}\n{RESTORE}")
    file = opened(folder / place.file)
    return load_tree(file, item_directory(file, fqn, place.offset, place.length), ()).tree
