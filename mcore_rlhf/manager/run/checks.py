"""Checks of a step's files: by the manifest; where none vouches for them, by the checksums that they carry and by reading them.

Checksums say that a file is what was written; they do not say that it can be read, nor that reading it is safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mcore_rlhf.errors import CheckpointError, Corrupt, LayoutMismatch, Problems, Untrusted
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.dcp.folder import DcpFolder
from mcore_rlhf.storage.manifest import Manifest, crc_of_file
from mcore_rlhf.storage.nested import calls_of_file
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.torchzip import read_directory
from mcore_rlhf.storage.urls import open_files
from mcore_rlhf.trainers.torchdata import astray
from mcore_rlhf.verify.audit import Ledger, read_checksums
from mcore_rlhf.verify.itself import ITEMS, itself

_WINDOW = 1 << 20
_SHOWN = 5

FOLDERS = ("data", "rlhf", "rng")
"""Folders of a step that hold values, not models."""


def check_file(path: ReadablePath, folder: ReadablePath, manifest: Manifest | None) -> None:
    """Verify a file's bytes by the manifest of its step, or without one by the checksums that the file itself carries.

    Args:
        path: The file; one that the manifest does not list is passed over.
        folder: The step's folder.
        manifest: Of the step; None where another trainer wrote it.

    Raises:
        CheckpointError: It is damaged.
    """
    if manifest is None:
        return check_itself(path)
    entry = manifest.files.get(path.relative_to(folder).as_posix())
    if entry is not None and (found := crc_of_file(path)) != entry.crc32:
        raise Corrupt(f"{path}: is damaged: CRC-32 {found:08x}, the manifest says {entry.crc32:08x}")
    return None


def check_itself(path: ReadablePath) -> None:
    """Verify a file's own checksums, where its kind has any.

    Raises:
        CheckpointError: It is damaged; what is wrong is named.
    """
    if path.suffix == ".pt":
        check_records(path)
    elif path.suffix == ITEMS:
        check_items(path)


def check_records(path: ReadablePath) -> None:
    """Verify the checksums in a ``.pt`` file.

    Raises:
        Corrupt: A record is damaged; it is named.
    """
    directory = read_directory(path)
    if not directory.checksummed:
        return
    with open_files(path.parent) as files:
        for member in directory.members.values():
            directory.check(member, _crc(files, path.name, member.byte_offset, member.nbytes))


def check_items(path: ReadablePath) -> None:
    """Verify the checksums of the items in a ``.distcp`` file, which torch itself never looks at.

    Raises:
        Corrupt: An item is damaged; all that are, are named.
        CheckpointError: The folder's ``.metadata`` is missing, or is not of this file.
    """
    folder = DcpFolder.open(path.parent, path.parent, tiled=False)
    records: Iterable[tuple[str, int, int, int]] = next(
        (file.records for file in folder.files() if file.path == path.name), ()
    )
    with open_files(path.parent) as files:
        damaged = [key for key, at, nbytes, crc in records if _crc(files, path.name, at, nbytes) != crc]
    if damaged:
        raise Corrupt(
            f"{path}: is damaged: {', '.join(damaged[:3])}{' …' * (len(damaged) > 3)}: their CRC-32 is not the stored one\n"
            "Copy the file again from where it was written, or use an older step."
        )


def _crc(files: OpenFiles, name: str, at: int, nbytes: int) -> int:
    crc = 0
    for start in range(at, at + nbytes, _WINDOW):
        count = min(_WINDOW, at + nbytes - start)
        crc = crc32(files.view(name, start, count), crc)
        files.release(name, start, count)
    return crc


def holds_values(name: str) -> bool:
    """Whether a file, by its path relative to the step's folder, lies in one of :data:`FOLDERS`."""
    return name.partition("/")[0] in FOLDERS


def check_values(
    folder: ReadablePath, files: Collection[str], stubs: Collection[str] = (), *, records: bool = True
) -> Problems:
    """Open every ``.pt`` file, and look into any other as far as it says something of itself.

    No code of a pickle is run, and no tensor is made.

    Args:
        folder: The step's folder.
        files: Those of its files, relative to the folder, that no model's reader opened.
        stubs: Pickled classes that may become inert stubs, besides those of the known frameworks.
        records: Whether the checksums that files carry are verified too: where no manifest vouches for them.

    Returns:
        Every file that is torn or damaged, is not JSON, or would run code; nothing where all can be read.
    """
    problems = Problems()
    for name in sorted(filter(_is_value, files)):
        try:
            wrong = astray(read_pt(folder, name, stubs=stubs).tree)
            if records:
                check_records(folder / name)
            if wrong:
                text = f"{folder / name}: the loader's state contradicts itself: {wrong}"
                problems.add(
                    LayoutMismatch,
                    text,
                    "Take the file of another copy, or of another step: data would go on at either place.",
                )
        except CheckpointError as error:
            problems.add_error(error)
    others = list(itself(folder, [name for name in files if not _is_value(name)], stubs, problems))
    if records:
        _check_checksums(folder, others, problems)
    return problems


def _is_value(name: str) -> bool:
    return name.endswith(".pt")


def _check_checksums(folder: ReadablePath, files: Collection[StoredFile], problems: Problems) -> None:
    try:
        read_checksums(files)
    except CheckpointError as error:
        return problems.add_error(error)
    with open_files(folder) as mapped:
        for task in Ledger(files).tasks(mapped, problems, lambda nbytes: None):
            task()
    return None


def check_calls(folder: ReadablePath, files: Collection[str], stubs: Collection[str] = ()) -> Problems:
    """Look for what files would call that go along byte for byte. Reading runs nothing, but whoever loads them does.

    Args:
        folder, files, stubs: See :func:`check_values`.

    Returns:
        Every file that calls what is not on the closed list of what we write.
    """
    problems = Problems()
    for name in sorted(files):
        if calls := calls_of_file(folder / name, stubs):
            some = ", ".join(map(repr, calls[:_SHOWN]))
            problems.add(
                Untrusted,
                f"{folder / name}: whoever loads it would call {some}, and that is on no list of harmless names",
                "--stub NAME carries it all the same: only for a class that you know, since loaders run it.",
            )
    return problems
