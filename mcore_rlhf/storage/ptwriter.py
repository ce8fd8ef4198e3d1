"""Writing a ``.pt`` file as a stream: laid out first, its records filled in any order, its checksums put in
at the end.

The layout is torch's own (see :mod:`.zipheaders`), so that torch's shortcuts hold for it: ``torch.load`` with
``mmap=True``, and the calculation of record offsets that ``.format_version`` promises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checksum import combine, crc32
from .pickling import PickledTree, pickle_tree
from .reserved_file import ReservedFile, WrittenFile
from .zipheaders import ALIGNMENT, Placed, central_entry, descriptor, end_records, local_header, place

if TYPE_CHECKING:
    from typing_extensions import Buffer

SERIALIZATION_ID = ".data/serialization_id"
ID_DIGITS = 40


@dataclass(slots=True)
class PtWriter(ReservedFile):
    """A ``.pt`` file being written. Use it in a ``with`` block: left without :meth:`finish`, the file is
    removed.

    ``write`` may be called from several threads.
    """

    members: Mapping[str, Placed]
    _small: dict[str, bytes]
    _crcs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def create(cls, path: Path, tree: Any, *, file: str) -> PtWriter:
        """Lay the file out and reserve it (sparse: it takes space as records are written).

        Args:
            path: Where to write; must not exist. Its stem becomes the archive's root folder, as torch has it.
            tree: See :func:`.pickling.pickle_tree`. Records keep their keys.
            file: The records' ``file``.

        Raises:
            StorageError: The file cannot be created.
            Unsupported: The tree holds something that cannot be saved.
        """
        pickled = pickle_tree(tree, file)
        small = small_members(pickled)
        members = layout(path.stem or "archive", small, pickled)
        directory = b"".join(central_entry(member, 0) for member in members.values())
        cursor = _end(members)
        nbytes = cursor + len(directory) + len(end_records(len(members), len(directory), cursor))
        writer = cls(path, nbytes, members, small)
        writer.reserve()
        try:
            writer._begin(pickled)
        except BaseException:
            writer.abort()
            raise
        return writer

    @property
    def open_records(self) -> list[str]:
        """Keys of the records that have yet to be written, and whose checksums :meth:`finish` wants."""
        return [name for name in self.members if name not in self._crcs and name != SERIALIZATION_ID]

    def offset(self, key: str) -> int:
        """Where a record starts in the file, in bytes."""
        return self.members[key].data_offset

    def record_nbytes(self, key: str) -> int:
        """Length of a record, in bytes."""
        return self.members[key].nbytes

    def write(self, key: str, byte_offset: int, data: Buffer) -> None:
        """Put bytes into a record. What is never written reads as zeros.

        Args:
            key: The record's key, ``data/0``.
            byte_offset: Where, from the record's own start.
            data: The bytes.

        Raises:
            StorageError: They cannot be written; says how much is needed and free.
            ValueError: They would lie outside the record.
        """
        member = self.members[key]
        view = memoryview(data).cast("B")
        if byte_offset < 0 or byte_offset + len(view) > member.nbytes:
            raise ValueError(
                f"{self.path}: {len(view)} bytes at {byte_offset} do not fit into record {key} of {member.nbytes} bytes"
            )
        self.pwrite(view, member.data_offset + byte_offset)

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> WrittenFile:
        """Put the checksums and the directory in place, and close the file.

        Args:
            crcs: CRC-32 of every record of stored tensors, by key; over all its bytes, zeros that were never
                written included.
            fsync: Whether to wait until the file is on the disk.

        Raises:
            StorageError: The file cannot be completed.
            ValueError: A CRC is missing.
        """
        known = {**crcs, **self._crcs}
        missing = [name for name in self.members if name not in known and name != SERIALIZATION_ID]
        if missing:
            raise ValueError(f"{self.path}: no CRC was given for {', '.join(missing)}")
        known[SERIALIZATION_ID] = self._write_id(known)
        crc = self._write_ends(known)
        return self.complete(crc, fsync=fsync)

    def _begin(self, pickled: PickledTree) -> None:
        for name, member in self.members.items():
            head = local_header(member)
            self.pwrite(head + self._small.get(name, b""), member.header_offset)
        self._crcs = {name: crc32(data) for name, data in self._small.items()}
        for key, tensor in pickled.contents.items():
            data = tensor.numpy().data
            self.write(key, 0, data)
            self._crcs[key] = crc32(data)

    def _write_id(self, crcs: Mapping[str, int]) -> int:
        """Torch stores a hash of names and CRCs (``PyTorchStreamWriter::writeSerializationId``); ours is one
        too.
        """
        text = ";".join(f"{name}:{crcs[name]:08x}" for name in self.members if name != SERIALIZATION_ID)
        number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % 10**ID_DIGITS
        digits = f"{number:0{ID_DIGITS}d}".encode()
        self.write(SERIALIZATION_ID, 0, digits)
        return crc32(digits)

    def _write_ends(self, crcs: Mapping[str, int]) -> int:
        """Write every descriptor and the directory; returns the CRC of the whole file."""
        total, directory = 0, []
        for name, member in self.members.items():
            tail = descriptor(member, crcs[name])
            self.pwrite(tail, member.data_end)
            directory.append(central_entry(member, crcs[name]))
            total = combine(crc32(local_header(member), total), crcs[name], member.nbytes)
            total = crc32(tail, total)
        entries, cursor = b"".join(directory), _end(self.members)
        end = entries + end_records(len(directory), len(entries), cursor)
        self.pwrite(end, cursor)
        return crc32(end, total)


def small_members(pickled: PickledTree) -> dict[str, bytes]:
    """Everything but records and the id, in torch's order; see ``torch/serialization.py`` 2.13, ``_save``."""
    small = {"data.pkl": pickled.data, ".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode()}
    in_torch_order = [f"data/{number}" for number in range(len(pickled.records))]
    if list(pickled.records) != in_torch_order:
        # It promises records numbered in the order of first use, and torch computes offsets from that.
        del small[".format_version"]
    return small | {"byteorder": b"little", "version": b"3\n"}


def layout(stem: str, small: Mapping[str, bytes], pickled: PickledTree) -> dict[str, Placed]:
    """Where everything will lie in a zip of that name, records and id included."""

    def sizes() -> Iterable[tuple[str, int]]:
        for name, data in small.items():
            if name == "version":
                yield from pickled.records.items()
            yield name, len(data)
        yield SERIALIZATION_ID, ID_DIGITS

    members: dict[str, Placed] = {}
    cursor = 0
    for name, nbytes in sizes():
        members[name] = place(f"{stem}/{name}", nbytes, cursor)
        cursor = members[name].end
    return members


def _end(members: Mapping[str, Placed]) -> int:
    return members[SERIALIZATION_ID].end
