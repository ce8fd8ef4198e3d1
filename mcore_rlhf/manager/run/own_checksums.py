"""Checksums that files carry themselves, verified where no manifest says what a file should be: another trainer's step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcore_rlhf.errors import Corrupt
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.dcp import DcpFolder
from mcore_rlhf.storage.mapped import MappedFiles
from mcore_rlhf.storage.torchzip import read_directory

_WINDOW = 1 << 20
_ITEMS = ".distcp"


def check_itself(path: Path) -> None:
    """Verify a file's own checksums, where its kind has any.

    Raises:
        CheckpointError: It is damaged; what is wrong is named.
    """
    if path.suffix == ".pt":
        check_records(path)
    elif path.suffix == _ITEMS:
        check_items(path)


def check_records(path: Path) -> None:
    """Verify the checksums in a ``.pt`` file.

    Raises:
        Corrupt: A record is damaged; it is named.
    """
    directory = read_directory(path)
    if not directory.checksummed:
        return
    with MappedFiles(path.parent) as files:
        for member in directory.members.values():
            directory.check(member, _crc(files, path.name, member.byte_offset, member.nbytes))


def check_items(path: Path) -> None:
    """Verify the checksums of the items in a ``.distcp`` file, which torch itself never looks at.

    Raises:
        Corrupt: An item is damaged; all that are, are named.
        CheckpointError: The folder's ``.metadata`` is missing, or is not of this file.
    """
    folder = DcpFolder.open(path.parent, path.parent, tiled=False)
    records: Iterable[tuple[str, int, int, int]] = next(
        (file.records for file in folder.files() if file.path == path.name), ()
    )
    with MappedFiles(path.parent) as files:
        damaged = [key for key, at, nbytes, crc in records if _crc(files, path.name, at, nbytes) != crc]
    if damaged:
        raise Corrupt(
            f"{path}: is damaged: {', '.join(damaged[:3])}{' …' * (len(damaged) > 3)}: their CRC-32 is not the stored one\n"
            "Copy the file again from where it was written, or use an older step."
        )


def _crc(files: MappedFiles, name: str, at: int, nbytes: int) -> int:
    crc = 0
    for start in range(at, at + nbytes, _WINDOW):
        count = min(_WINDOW, at + nbytes - start)
        crc = crc32(files.view(name, start, count), crc)
        files.release(name, start, count)
    return crc
