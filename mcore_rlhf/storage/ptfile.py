"""Reading a ``.pt`` file: its structure at once, its tensors as places in the file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .checksum import crc32
from .paths import ReadablePath, inside
from .reading import opened
from .resolve import read_tree
from .stored import StoredTensor as StoredTensor
from .stored import map_tensors
from .torch_values import SmallTensor
from .torchzip import Directory, read_directory

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
            classes of training frameworks are :class:`~.stubs.Stub`; numpy arrays are real.
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
    path = inside(root, file)
    directory = read_directory(path)
    return PtFile(root, file, read_tree(directory.read("data.pkl"), file, directory, stubs), directory)
