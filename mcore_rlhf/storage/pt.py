"""The container ``.pt``: a zip laid out as ``torch.save`` does it; opened as its structure at once, and its tensors as places in it.

Written so that torch's shortcuts hold for it: ``torch.load`` with ``mmap=True``, and the calculation of record offsets that
``.format_version`` promises. Headers: :mod:`.torchzip`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from ..core.catalog import Record
from ..errors import Unsupported
from .checksum import crc32
from .paths import ReadablePath, beneath
from .pickling import PickledTree, pickle_tree
from .reading import opened
from .record_file import Container, Layout, OpenedFile, Piece, bytes_of, joined, naturals, text_of
from .resolve import read_tree
from .stored import StoredTensor as StoredTensor
from .stored import map_tensors
from .torch_values import SmallTensor
from .torchzip import (
    ALIGNMENT,
    Directory,
    Placed,
    central_entry,
    descriptor,
    end_records,
    local_header,
    place,
    read_directory,
)

_CHECKED_NBYTES = 16 << 20
"""Records up to this size are read whole when one of their tensors is loaded, so that the CRC can be checked.
"""


@dataclass(frozen=True, slots=True)
class PtFile:
    """A ``.pt`` file that was opened.

    Args:
        root: The checkpoint's folder.
        file: Path relative to it.
        tree: The saved object. Every tensor in it (parameters and subclasses too) is a :class:`StoredTensor`;
            classes of training frameworks are :class:`~.stored.Stub`; numpy arrays are real.
        directory: The records, with their CRCs.
    """

    root: ReadablePath
    file: str
    tree: Any
    directory: Directory

    def load(self, stored: StoredTensor) -> SmallTensor:
        """Read one tensor: just its bytes, or its whole record where that is small, whose CRC is then
        checked.

        Returns:
            A tensor on the CPU of the same shape and strides, which shares memory with no other.

        Raises:
            Corrupt: The record does not have its CRC.
            StorageError: The file cannot be read.
        """
        data = b"" if 0 in stored.shape else bytes(self._span(stored))
        return SmallTensor(data, stored.record.dtype, stored.shape, stored.strides)

    def _span(self, stored: StoredTensor) -> bytearray:
        """The bytes from the tensor's first element to its last."""
        itemsize, record = stored.record.dtype.itemsize, stored.record
        start, stop = stored.start * itemsize, stored.stop * itemsize
        if (start, stop) != (0, record.nbytes) and record.nbytes > _CHECKED_NBYTES:
            return self._read(record.byte_offset + start, stop - start)
        member = self.directory.members[record.key]
        whole = self._read(member.byte_offset, member.nbytes)
        self.directory.check(member, crc32(whole))
        return whole[start:stop]

    def _read(self, byte_offset: int, nbytes: int) -> bytearray:
        """A range of the file, in memory of our own."""
        with opened(self.directory.path) as file:
            return bytearray(file.read(byte_offset, nbytes))

    def materialize(self, subtree: Any) -> Any:
        """A copy of a part of the tree with real tensors in place of stored ones: for RNG states and other
        small things.

        Raises:
            Corrupt: See :meth:`load`.
            StorageError: See :meth:`load`.
        """
        return map_tensors(subtree, self.load)


def read_pt(root: ReadablePath, file: str, *, stubs: Collection[str] = ()) -> PtFile:
    """Open a file that ``torch.save`` wrote. No byte of a tensor is read and no code of the file is run.

    Args:
        root: The checkpoint's folder.
        file: Path relative to it, with ``/``.
        stubs: Full names of classes to load as inert stubs, besides those of the known frameworks.

    Raises:
        NotACheckpoint: There is no such file.
        Untrusted: It asks for classes or functions that are not allowed, or ``file`` leads out of ``root``.
        Incomplete: It is cut off.
        Corrupt: It is damaged.
        Unsupported: It holds something that is not supported: sparse or quantized tensors, big-endian
            numbers.
        StorageError: It cannot be read.
    """
    path = beneath(root, file)
    directory = read_directory(path)
    return PtFile(root, file, read_tree(directory.read("data.pkl"), file, directory, stubs), directory)


SERIALIZATION_ID = ".data/serialization_id"
_ID_DIGITS = 40
_STREAM = "archive"
"""torch's name for what is saved to a stream and not to a file."""


@dataclass(frozen=True, slots=True)
class Pt(Container):
    """A ``.pt`` file.

    Args:
        make: Gives what it holds, when the file is laid out: see :func:`.pickling.pickle_tree`. Records keep their keys. The file's
            stem becomes the archive's root folder, as torch has it.
    """

    name: ClassVar[str] = ".pt"
    suffixes: ClassVar[tuple[str, ...]] = (".pt", ".pth", ".bin")
    make: Callable[[], Any]

    @classmethod
    def of(cls, tree: Any) -> Pt:
        """A file that holds this; nothing in it may change before the file is laid out."""
        return cls(lambda: tree)

    @classmethod
    def open(cls, root: ReadablePath, file: str, stubs: Collection[str] = ()) -> OpenedFile:
        """See :meth:`.record_file.Container.open`: a state dict, and nothing else.

        Raises:
            Unsupported: It holds something else than names and tensors.
        """
        pt = read_pt(root, file, stubs=stubs)
        tree, path = pt.tree, pt.directory.path
        if type(tree) not in (dict, OrderedDict) or not tree or not all(isinstance(name, str) for name in tree):
            raise Unsupported(f"{path}: expected a state dict of names and tensors, found {type(tree).__name__}")
        others = [name for name, value in tree.items() if not isinstance(value, StoredTensor)]
        if others:
            some = ", ".join(others[:3])
            raise Unsupported(f"{path}: holds what are no tensors: {some}; expected a model's state dict alone")
        return OpenedFile(file, pt.directory.nbytes, tree, pt.directory.checksums)

    def layout(self, file: str) -> Layout:
        """Everything but the records' bytes and what follows from them; real tensors are written at once.

        Raises:
            Unsupported: The tree holds something that cannot be saved.
        """
        return self._pickled(file).layout(file)

    def told(self, file: str, numbers: Mapping[str, int]) -> list[Any]:
        """See :meth:`.record_file.Container.told`."""
        return self._pickled(file).told(file, numbers)

    @classmethod
    def of_told(cls, told: Sequence[Any], records: Sequence[Record]) -> PickledFile:
        """See :meth:`.record_file.Container.of_told`."""
        return PickledFile.of_told(told, records)

    def _pickled(self, file: str) -> PickledFile:
        return PickledFile(pickle_tree(self.make(), file))


@dataclass(frozen=True, slots=True)
class PickledFile(Container):
    """A ``.pt`` file whose content is pickled already.

    Args:
        tree: The pickle, and its records.
    """

    name: ClassVar[str] = ".pt"
    tree: PickledTree

    def told(self, file: str, numbers: Mapping[str, int]) -> list[Any]:
        """See :meth:`.record_file.Container.told`."""
        tree = self.tree
        return [text_of(tree.data), [*tree.records.items()], [(key, text_of(of)) for key, of in tree.contents.items()]]

    @classmethod
    def of_told(cls, told: Sequence[Any], records: Sequence[Record]) -> PickledFile:
        """See :meth:`.record_file.Container.of_told`."""
        data, sizes, contents = told
        lengths = {str(key): naturals([nbytes])[0] for key, nbytes in sizes}
        small = {str(key): memoryview(bytes_of(of)) for key, of in contents}
        if any(lengths[key] != len(of) for key, of in small.items()):
            raise ValueError("a record has not its length")
        return cls(PickledTree(bytes_of(data), lengths, small))

    def layout(self, file: str) -> Layout:
        """See :meth:`Pt.layout`."""
        return zip_layout(PurePosixPath(file).stem or _STREAM, self.tree)


def stream_layout(pickled: PickledTree) -> Layout:
    """The zip that ``torch.save`` writes to a stream."""
    return zip_layout(_STREAM, pickled, sorted)


def zip_layout(stem: str, pickled: PickledTree, id_order: Callable[[Iterable[str]], list[str]] = list[str]) -> Layout:
    """Lay a zip out.

    Args:
        stem: Its root folder.
        pickled: Its pickle, and the lengths of its records.
        id_order: Puts the names of the members in the order in which the serialization id is made of them.
    """
    small = _small_members(pickled)
    members = _placed(stem, small, pickled)
    small_crcs = {name: crc32(data) for name, data in small.items()}
    names = list(members)
    first = next(number for number, name in enumerate(names) if name not in small)

    def head() -> Iterator[Piece]:
        for name in names[:first]:
            yield from _pieces(members[name], small[name], small_crcs[name])
        yield Piece(members[names[first]].header_offset, local_header(members[names[first]]))

    def ending(given: Mapping[str, int]) -> Iterator[Piece]:
        crcs, content = dict(small_crcs), dict(small)
        for name in names[first:]:
            if name != names[first]:  # its header is in the head
                yield Piece(members[name].header_offset, local_header(members[name]))
            if name == SERIALIZATION_ID:
                content[name] = _identity(crcs, id_order(known for known in names if known in crcs))
                crcs[name] = crc32(content[name])
            elif name in pickled.records:
                crcs[name] = given[name]
            _, *rest = _pieces(members[name], content.get(name), crcs[name])
            yield from rest
        yield Piece(start, _directory(members, crcs))

    start = members[SERIALIZATION_ID].end
    filled = [name for name in pickled.records if name not in pickled.contents]
    contents = (Piece(members[name].data_offset, data, name) for name, data in pickled.contents.items())
    return Layout(
        start + len(_directory(members, {})),
        {name: (members[name].data_offset, members[name].nbytes) for name in filled},
        [*joined(head()), *contents],
        ending,
    )


def _pieces(member: Placed, content: bytes | None, crc: int) -> list[Piece]:
    """A member: its header, its bytes where they are no record's, and what follows them."""
    between = [] if content is None else [Piece(member.data_offset, content)]
    header = Piece(member.header_offset, local_header(member))
    return [header, *between, Piece(member.data_end, descriptor(member, crc))]


def _directory(members: Mapping[str, Placed], crcs: Mapping[str, int]) -> bytes:
    entries = b"".join(central_entry(member, crcs.get(name, 0)) for name, member in members.items())
    return entries + end_records(len(members), len(entries), members[SERIALIZATION_ID].end)


def _identity(crcs: Mapping[str, int], names: Iterable[str]) -> bytes:
    """Torch stores a hash of names and CRCs (``PyTorchStreamWriter::writeSerializationId``); ours is one too."""
    import hashlib  # only who writes asks

    text = ";".join(f"{name}:{crcs[name]:08x}" for name in names)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % 10**_ID_DIGITS
    return f"{number:0{_ID_DIGITS}d}".encode()


def _small_members(pickled: PickledTree) -> dict[str, bytes]:
    """Everything but records and the id, in torch's order; see ``torch/serialization.py`` 2.13, ``_save``."""
    small = {"data.pkl": pickled.data, ".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode()}
    in_torch_order = [f"data/{number}" for number in range(len(pickled.records))]
    if list(pickled.records) != in_torch_order:
        # It promises records numbered in the order of first use, and torch computes offsets from that.
        del small[".format_version"]
    return small | {"byteorder": b"little", "version": b"3\n"}


def _placed(stem: str, small: Mapping[str, bytes], pickled: PickledTree) -> dict[str, Placed]:
    """Where everything lies, records and id included."""
    sizes: dict[str, int] = {}
    for name, data in small.items():
        if name == "version":
            sizes |= pickled.records
        sizes[name] = len(data)
    members: dict[str, Placed] = {}
    cursor = 0
    for name, nbytes in (sizes | {SERIALIZATION_ID: _ID_DIGITS}).items():
        members[name] = place(f"{stem}/{name}", nbytes, cursor)
        cursor = members[name].end
    return members
