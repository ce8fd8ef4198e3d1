"""A DCP folder that was opened: what its tensors and objects are, and where each byte of them lies."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rlhf.core.box import Box, Shape
from mcore_rlhf.core.catalog import Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import DType
from mcore_rlhf.core.names import TensorName
from mcore_rlhf.errors import CheckpointError, Corrupt, Problems

from ..checksum import crc32
from ..stored import StoredTensor
from ..torchzip import Directory, Member
from .checks import boxes, check, item_key
from .items import OpenFile, item_directory, load_tree, stored_tensor
from .metadata import FILE, DcpMetadata, Path_, Place, TensorMeta, read_metadata

_DATA = "data/0"
"""The one record of a tensor's zip."""

_OPEN_FILES = 64
"""A run on 512 GPUs writes as many files or more; a process may have 1024 open."""

_SHORT = 256
"""Bytes of the pickle of a number."""


@dataclass(frozen=True, slots=True)
class DcpFile:
    """A file of the folder, with the checksums that it carries: those of the zips in it.

    Args:
        path: Relative to the checkpoint's root.
        nbytes: Its length.
        records: ``(key, byte offset, bytes, crc32)`` of every tensor's data, and of every object's pickle.
    """

    path: str
    nbytes: int
    records: tuple[tuple[str, int, int, int], ...] = ()


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

    def entry(self, name: TensorName) -> TensorEntry:
        """The tensor as an entry of a catalogue; see :meth:`chunks`."""
        return TensorEntry(name, self.global_shape, self.dtype, self.chunks())


@dataclass(frozen=True, slots=True)
class DcpObject:
    """Something of the folder that is not a tensor.

    Args:
        fqn: Its name.
        place: Where its zip lies.
        folder: The folder.
    """

    fqn: str
    place: Place
    folder: DcpFolder = field(repr=False)

    def load(self) -> Any:
        """The object, with real tensors in it and stubs for classes of frameworks. Nothing of the pickle is run.

        Raises:
            Untrusted: It names a class or function that is not known to be harmless.
            CheckpointError: It is damaged.
        """
        return self.folder.load(self)

    def data(self) -> bytes:
        """Its zip as it is, to be carried along.

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

    folder: Path
    root: Path
    metadata: DcpMetadata
    sizes: Mapping[str, int]
    stubs: tuple[str, ...] = ()
    tensors: Mapping[str, DcpTensor] = field(init=False)
    objects: Mapping[str, DcpObject] = field(init=False)
    _open: dict[str, OpenFile] = field(default_factory=dict, init=False)
    _layouts: dict[tuple[bytes, int], StoredTensor] = field(default_factory=dict, init=False)
    _found: dict[tuple[str, Shape | None], tuple[int, StoredTensor]] = field(default_factory=dict, init=False)
    _paths: dict[str, str] = field(default_factory=dict, init=False)
    _values: dict[bytes, Any] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.tensors = {fqn: DcpTensor(fqn, meta, self) for fqn, meta in self.metadata.tensors.items()}
        places = self.metadata.places
        self.objects = {fqn: DcpObject(fqn, places[fqn, None], self) for fqn in self.metadata.objects}

    @classmethod
    def open(cls, folder: Path, root: Path, stubs: Collection[str] = (), *, tiled: bool = True) -> DcpFolder:
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

    def files(self) -> tuple[DcpFile, ...]:
        """All files with the CRC-32 of what is in them. Reads the two ends of every item; checks the small records there.

        Raises:
            CheckpointError: Items are damaged; all of them are listed.
        """
        problems = Problems()
        records: dict[str, list[tuple[str, int, int, int]]] = {name: [] for name in self.sizes}
        for at, place in sorted(self.metadata.places.items(), key=lambda item: item[1].offset):
            try:
                records[place.file] += self._records(at, place)
            except CheckpointError as error:
                problems.add_error(error)
        problems.raise_if_any()
        metadata = DcpFile(self.path(FILE), (self.folder / FILE).stat().st_size)
        return metadata, *(DcpFile(self.path(name), self.sizes[name], tuple(found)) for name, found in records.items())

    def _records(self, at: tuple[str, Shape | None], place: Place) -> Iterator[tuple[str, int, int, int]]:
        key, is_tensor = item_key(*at), at[1] is not None
        file, directory = self._item(key, place)
        for member in directory.members.values():
            if member.name == _DATA if is_tensor else member.name.startswith("data"):
                if is_tensor and member.nbytes:  # so that chunk() need not read it again
                    self._found[at] = member.byte_offset, self._stored(file, key, directory)
                if directory.checksummed and member.nbytes:
                    name = key if is_tensor else f"{key}:{member.name}"
                    yield name, member.byte_offset, member.nbytes, member.crc32
            else:
                directory.check(member, crc32(file.read(member.byte_offset, member.nbytes)))

    def chunk(self, tensor: DcpTensor, box: Box) -> Chunk:
        """Where one part of a tensor lies.

        Raises:
            CheckpointError: The item is damaged, or is not what ``.metadata`` says.
        """
        at = (tensor.fqn, box.offset)
        key, place = item_key(*at), self.metadata.places[at]
        byte_offset, stored = self._found.get(at) or self._find(key, place)
        if stored.shape != box.shape or stored.record.dtype != tensor.dtype:
            raise Corrupt(
                f"{self.folder / place.file}: {key} is a {stored.record.dtype} tensor {stored.shape}; {FILE} says {tensor.dtype} "
                f"{box.shape}.\nThe files are not those of this .metadata: copy the folder again, or use an older step."
            )
        record = Record(self.path(place.file), key, stored.record.dtype, stored.record.numel, byte_offset)
        return Chunk(box, record, stored.start, stored.strides)

    def _find(self, key: str, place: Place) -> tuple[int, StoredTensor]:
        """Where the data of a tensor's item lie, and how."""
        file, directory = self._item(key, place)
        stored = self._stored(file, key, directory)
        return directory.members[stored.record.key].byte_offset, stored

    def checksum(self, tensor: DcpTensor, box: Box) -> int:
        """The CRC-32 of a part's bytes, as its zip says.

        Raises:
            CheckpointError: The item is damaged.
        """
        _, directory = self._item(tensor.fqn, self.metadata.places[tensor.fqn, box.offset])
        return directory.members[_DATA].crc32

    def _stored(self, file: OpenFile, key: str, directory: Directory) -> StoredTensor:
        """How an item stores its tensor. Chunks of one shape have equal pickles: each is taken apart once."""
        member = directory.members["data.pkl"]
        pickled = file.read(member.byte_offset, member.nbytes)
        directory.check(member, crc32(pickled))
        data = directory.members.get(_DATA, Member(_DATA, 0, 0, 0))
        known = self._layouts.get((pickled, data.nbytes))
        if known is None:
            known = self._layouts[pickled, data.nbytes] = stored_tensor(file, key, directory)
        return known

    def _item(self, key: str, place: Place) -> tuple[OpenFile, Directory]:
        file = self._file(place.file)
        return file, item_directory(file, key, place.offset, place.length)

    def _file(self, name: str) -> OpenFile:
        with self._lock:
            file = self._open.pop(name, None) or OpenFile(self.folder / name)
            self._open[name] = file  # at the end: used last
            if len(self._open) > _OPEN_FILES:
                del self._open[next(iter(self._open))]
            return file

    def item(self, fqn: str) -> tuple[OpenFile, Directory]:
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

    def data(self, place: Place) -> bytes:
        """See :meth:`DcpObject.data`."""
        return self._file(place.file).read(place.offset, place.length)
