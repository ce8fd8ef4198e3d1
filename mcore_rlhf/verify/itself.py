"""Files that no reader opened, held against what they say of themselves: a zip's directory and CRC-32, a pickle's structure, JSON.

A trainer's run has its optimizer, scheduler, random states and counters in files of their own, and a folder has more besides. Nobody
here knows what they mean; but whoever calls a folder intact says that they are sound, too. What a file calls when somebody loads it
is no damage, and another check's subject: :mod:`mcore_rlhf.storage.nested`.

Sources: transformers 5.23.0, ``trainer.py`` (``OPTIMIZER_NAME``, ``SCHEDULER_NAME``, ``_save_rng_state``); accelerate 1.15.0,
``checkpointing.py`` (``save_accelerator_state``): every one of them by ``torch.save``, whatever its ending.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath

from mcore_rlhf.core.facts import Reason
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    NotACheckpoint,
    Problems,
    Unsupported,
    Untrusted,
    headline,
)
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.run_folders import gone_beside
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_files import ROWS, of_ranks
from mcore_rlhf.formats.carried import step_of, unopened
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.folder import DcpFolder
from mcore_rlhf.storage.leftovers import Leftover, leftovers, of_trainer
from mcore_rlhf.storage.paths import ReadablePath, cannot_open
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.reading import MAX_TEXT, opened
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.safetensors import read_safetensors
from mcore_rlhf.storage.torchzip import read_directory
from mcore_rlhf.storage.unpickle import unpickle

ITEMS = ".distcp"
_BY_TORCH = (".pt", ".pth")
"""Endings that nothing but ``torch.save`` gives."""
_OFTEN_BY_TORCH = (".bin", ".pkl", ".ckpt")
_PICKLED = (*_BY_TORCH, ".pkl")
_ZIP, _PICKLE, _BEFORE_ZIPS = b"PK\3\4", b"\x80", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin; the last one is torch's magic number before 1.6. Source: torch 2.13.0, ``serialization.py`` (``MAGIC_NUMBER``)."""
_PIECE_NBYTES = 4 << 20
_MOST_PICKLED = 64 << 20
_OF_FILES = frozenset(
    {*_PICKLED, *_OFTEN_BY_TORCH, ITEMS, ".json", ".safetensors", ".txt", ".model", ".jinja", ".yaml"}
)
_NOT_LOOKED_AT = (
    Reason.NOT_REGULAR, Reason.DANGLING, Reason.LINKED_FOLDER, Reason.UNREADABLE, Reason.TOO_DEEP, Reason.VERSION_CONTROL,
    Reason.ODD_NAME,
)  # fmt: skip


def beside(
    source: Source, stubs: Collection[str], problems: Problems, *, listed: bool = False
) -> tuple[StoredFile, ...]:
    """The files of an opened checkpoint that its reader did not open, with the checksums that they carry.

    Args:
        source: As it was opened.
        stubs: Further classes that may become inert stubs.
        problems: Told of every file that is damaged, or missing.
        listed: Whether a manifest says which files there are.
    """
    _look_for_ranks(source, problems)
    if not listed:
        _look_for_gone(source, problems)
    left = [*_left(source)]
    for item in left:
        if item.reason is Reason.NOT_REGULAR and PurePosixPath(item.path).suffix in _OF_FILES:
            problems.add(
                Incomplete, f"{source.root / item.path}: {item.reason.value}, but a pipe, a socket or a device"
            )
    names = [item.path for item in left if item.reason not in _NOT_LOOKED_AT]
    return tuple(itself(source.root, names, stubs, problems))


def _look_for_ranks(source: Source, problems: Problems) -> None:
    """See that beside the tag of a run of DeepSpeed's there are the random states of all its ranks, where there are some's."""
    world = source.parallel.world_size
    for row in ROWS if ModuleState.of(source) is not None and source.optimizer is not None else ():
        try:
            there = row.rng_files(source.root)
        except Incomplete as error:
            problems.add_error(error)
            continue
        if 0 < len(there) < world:
            gone = source.root / row.rng_name(len(there), world)
            text = f"{gone}: missing; there are random states of {of_ranks(len(there))}, and the run had {world}"
            problems.add(
                Incomplete, text, "Each node writes the files of its own ranks: bring those of all nodes together."
            )


def _look_for_gone(source: Source, problems: Problems) -> None:
    """See that beside the files of a run that its trainer writes together there are the others."""
    for row in ROWS if ModuleState.of(source) is not None else ():
        for name in row.gone(source.root):
            text = f"{source.root}: {name} is missing, and files are there that its trainer writes together with it"
            advice = "Copy it from where it was written, or use an older step; --to hf takes the weights alone."
            problems.add(Incomplete, text, advice)
    megatron = MegatronState.of(source)
    if megatron is not None and megatron.located is not None:
        for text in gone_beside(megatron.located.root, megatron.located.folder):
            advice = "Copy it from where it was written, or use an older step; what is there can be converted, without what that says."
            problems.add(Incomplete, text, advice)


def _left(source: Source) -> Iterator[Leftover]:
    """Paths are relative to the source's root here; files that go along from a folder above it are another checkpoint's to verify."""
    known, found = {file.path for file in source.files}, [(step_of(source), unopened(source))]
    if source.carried is not None and source.carried.folder.is_relative_to(source.root):
        found.append((PurePosixPath(source.carried.folder.relative_to(source.root)), source.carried.found))
    module = ModuleState.of(source)
    if module is not None and module.laid_out:  # an FSDP run's folder in which the DCP folder is one of several
        found.append((PurePosixPath(), leftovers(source.root, known)))
    every = {(place / item.path).as_posix(): item for place, items in found for item in items}
    return (replace(item, path=path) for path, item in every.items() if path not in known)


def itself(
    root: ReadablePath, names: Iterable[str], stubs: Collection[str], problems: Problems
) -> Iterator[StoredFile]:
    """Look into files as far as they say something of themselves; the bytes of their records are not read.

    Args:
        root: A folder.
        names: Paths of files, relative to it, with ``/``.
        stubs: Further classes that may become inert stubs.
        problems: Told of every file that is damaged.

    Yields:
        The files, each with the checksums that it carries.
    """
    in_folders: dict[PurePosixPath, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.name == METADATA_FILE or path.suffix == ITEMS:
            in_folders.setdefault(path.parent, []).append(name)
            continue
        try:
            yield _looked_into(root, name, stubs)
        except CheckpointError as error:
            problems.add_error(error)
    for folder, own in in_folders.items():
        try:
            yield from _of_dcp(root, folder, own, stubs)
        except CheckpointError as error:
            problems.add_error(error)


def _of_dcp(
    root: ReadablePath, folder: PurePosixPath, names: list[str], stubs: Collection[str]
) -> Iterator[StoredFile]:
    """A folder of torch's or Megatron's: it says itself which files it has, and what is in them."""
    known: dict[str, StoredFile] = {}
    try:
        files = DcpFolder.open(root / folder, root, stubs, tiled=False).files()
        known = {file.path: StoredFile(file.path, file.nbytes, file.records, rank=file.rank) for file in files}
    except (Unsupported, Untrusted):
        pass
    for name in names:
        yield known.get(name) or StoredFile(name, _beginning(root / name)[0], ())


def wrong_with(root: ReadablePath, name: str, sound: list[StoredFile] | None = None) -> str:
    """What is wrong with a file by itself, in words that follow its name; nothing where it is sound, or nobody can tell.

    Args:
        root: A folder.
        name: The file's path in it.
        sound: Gets the file, where nothing is wrong.
    """
    try:
        found = _looked_into(root, name)
    except CheckpointError as error:
        return f"is damaged ({headline(str(error)).removeprefix(f'{root / name}: ').rstrip('.')})"
    if sound is not None:
        sound.append(found)
    return "" if found.nbytes else "is empty"


def _looked_into(root: ReadablePath, name: str, stubs: Collection[str] = ()) -> StoredFile:
    """Look into one file; see :func:`itself`.

    Raises:
        Corrupt: It is damaged, or nothing but zeros.
        Incomplete: It is empty, or cut off.
        Unreadable: A disk or file system failed.
    """
    path, ending = root / name, PurePosixPath(name).suffix.lower()
    nbytes, head = _beginning(path)
    whole = StoredFile(name, nbytes, ())
    try:
        if ending == ".json" and nbytes <= MAX_TEXT:
            _check_json(path)
        elif ending == ".safetensors":
            read_safetensors(root, name)
        elif _is_by_torch(PurePosixPath(name).name, head):
            return _by_torch(root, whole, head, stubs)
        else:
            _refuse_zeros(path)
    except (Unsupported, Untrusted):
        pass  # whole, as far as can be told
    return whole


def _beginning(path: ReadablePath) -> tuple[int, bytes]:
    with opened(path) as file:
        return file.nbytes, file.read(0, min(file.nbytes, len(_BEFORE_ZIPS))) if file.nbytes else b""


def _is_by_torch(name: str, head: bytes) -> bool:
    """Whether a file should be a zip of torch's, or a pickle: by its name, or because it begins as one."""
    often = PurePosixPath(name).suffix.lower() in _OFTEN_BY_TORCH and head.startswith(_ZIP)
    return name.lower().endswith(_BY_TORCH) or bool(of_trainer(name)) or often or _is_pickle(name, head)


def _is_pickle(name: str, head: bytes) -> bool:
    return head.startswith(_PICKLE) and name.lower().endswith(_PICKLED)


def _by_torch(root: ReadablePath, file: StoredFile, head: bytes, stubs: Collection[str]) -> StoredFile:
    path = root / file.path
    if head.startswith(_PICKLE):
        _check_pickle(path, head, stubs)
        return file
    _refuse_zeros(path)
    found = StoredFile.of_zip(file.path, read_directory(path))
    with suppress(
        Unsupported, Untrusted, NotACheckpoint
    ):  # then nobody understands what it holds, and it has checksums
        read_pt(root, file.path, stubs=stubs)
    return found


def _check_pickle(path: ReadablePath, head: bytes, stubs: Collection[str]) -> None:
    """One without a zip around it. Torch's from before 1.6 is several in a row, with raw tensors behind them."""
    with opened(path) as file:
        if file.nbytes <= _MOST_PICKLED and head != _BEFORE_ZIPS:
            unpickle(file.read(0, file.nbytes), str(path), stubs)


def _refuse_zeros(path: ReadablePath) -> None:
    """Refuse a file of nothing but zeros: what is left where a machine went down before its disk had the bytes.

    Raises:
        Corrupt: It is one.
    """
    with opened(path) as file:
        if file.nbytes and not any(bytes(piece).strip(b"\0") for piece in file.pieces(_PIECE_NBYTES)):
            raise Corrupt(
                f"{path}: all of its {file.nbytes:,} bytes are zero: they never reached the disk\n"
                "Copy the file again from where it was written, or use an older step."
            )


def _check_json(path: ReadablePath) -> None:
    """Parse a JSON file.

    Raises:
        Corrupt: It is not JSON.
        StorageError: It cannot be read.
    """
    try:
        reading.read_json(path)
    except OSError as error:
        raise cannot_open(error, path) from error
    except ValueError as error:
        raise Corrupt(f"{path}: is not valid JSON: {error}") from error
