"""Adopting a step of another trainer: everything in it is checked, then it gets a manifest, and with that it is committed.

Source of the layout that is met most: RLinf ``rlinf/runners/reasoning_runner.py``, ``_save_checkpoint``: folders ``actor`` and
``critic`` as Megatron writes them, with the global step as iteration, and ``data/data.pt``, a ``StatefulDataLoader``'s state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Problems,
    UsageError,
    headline,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.beneath import remove_beneath
from mcore_rlhf.storage.links import require_inside
from mcore_rlhf.storage.manifest import PREFIX, FileEntry, Manifest, crc_of_file, provenance
from mcore_rlhf.storage.paths import ReadablePath, beneath, cannot_open
from mcore_rlhf.storage.publish import MANIFEST_NAME, replace_text, sync_tree
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.transactions import new_transaction
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import Depth, verify

from ..runs import goes_without, run_at, step_at
from . import steps
from .checks import FOLDERS, check_values, holds_values
from .steps import NOTE

if TYPE_CHECKING:
    from mcore_rlhf.storage.objects import ObjectStore

_OURS = (MANIFEST_NAME, steps.MANIFEST, NOTE)
MISSING = "missing"
"""The key of a manifest's report for what :func:`less_than_whole` found."""
Progress = Callable[[int], None]
_Signature = dict[str, tuple[int, object]]
"""Length and time of change of every file (in a store, its tag), to notice a step that is still being written."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """How a step is adopted.

    Args:
        options: How the models are read: rules for parameters, pickled classes that may become stubs.
        depth: How deep the models are verified: at least every record's checksum.
        workers: Threads that verify.
        progress: Called with the number of bytes just read; every file is read twice.
        written_over: Whether the step was written just now, so that a manifest in it is of what was there before, and is removed first.
    """

    options: ReadOptions = field(default_factory=ReadOptions)
    depth: Depth = Depth.FULL
    workers: int = 2
    progress: Progress = lambda nbytes: None
    written_over: bool = False


def adopt(folder: ReadablePath, how: Adoption | None = None) -> Manifest:
    """Verify a step that has no manifest, and write one. Nothing else in the folder is touched.

    Args:
        folder: The step's folder: ``global_step_N``, or what its trainer calls it.
        how: Options; None for the defaults.

    Returns:
        The manifest: the one that is there where the step was committed already.

    Raises:
        NotACheckpoint: There is no such step, or no model in it whose format is known.
        UsageError: The folder is not named as a step.
        CheckpointError: Something in it is damaged; everything that is gets named, and nothing is written.
        StorageError: It cannot be read or written.
    """
    how, folder = how or Adoption(), checkpoint_path(folder)
    step, name = _step_of(folder)
    if how.written_over and isinstance(folder, Path):
        remove_beneath(folder, name)
    if steps.described(step, folder, name).state == "committed":
        return steps.read_manifest(folder, name)
    if (folder / name).is_file() or (folder / name).is_symlink():
        raise Corrupt(f"{folder}: has a manifest already, but {_why(folder)}\nOnly a step without one can be adopted.")
    before = _signature(folder)
    parts, looked_at, ranks = _verified_models(folder, step, how)
    check_values(folder, before.keys() - looked_at, how.options.stubs).raise_if_any()
    files = {name: FileEntry(nbytes, crc_of_file(folder / name, how.progress)) for name, (nbytes, _) in before.items()}
    if _signature(folder) != before:
        raise Incomplete(
            f"{folder}: was changed while it was read; is it still being written?\nTry again when it is not."
        )
    manifest = Manifest(
        files,
        step=step,
        transaction=new_transaction(),
        parts=tuple(parts),
        provenance=provenance(adopted=True),
        report={"metrics": {}, "verified": how.depth.value, MISSING: less_than_whole(folder, ranks)},
    )
    _commit(folder, name, manifest)
    return manifest


def less_than_whole(folder: ReadablePath, ranks: Sequence[ParallelConfig]) -> list[str]:
    """Files that a step's trainer writes and goes on without, and that are not there: a sentence for each.

    Args:
        folder: The step's.
        ranks: Of its models.

    Raises:
        LayoutMismatch: It has files of two trainers.
    """
    dp, world = max((of.dp for of in ranks), default=1), max((of.world_size for of in ranks), default=1)
    return goes_without(folder, dp=dp, world=world)


def _commit(folder: ReadablePath, name: str, manifest: Manifest) -> None:
    if isinstance(folder, StorePath):
        store = _store(folder)
        if store.put_if(f"{folder.path}/{name}", manifest.to_json().encode(), None) is None:
            raise Incomplete(f"{folder}: got a manifest while it was read\nLook at it: mcore-rlhf inspect {folder}")
        store.forget()
        return
    assert isinstance(folder, Path)
    try:
        sync_tree(folder)  # whoever wrote it need not have waited for the disk
    except OSError as error:
        raise cannot_open(error, folder) from error
    replace_text(folder / name, manifest.to_json())


def _store(folder: StorePath) -> ObjectStore:
    from mcore_rlhf.storage.upload import object_store  # a store is seldom meant

    return object_store(folder)


def why_not(folder: ReadablePath, options: ReadOptions | None = None) -> str:
    """Why a step cannot be adopted, as far as that can be told without reading its tensors; empty where it can be.

    Args:
        folder: The step's folder.
        options: How its models are read; None for the defaults.
    """
    how = options or ReadOptions()
    try:
        step, _ = _step_of(folder)
        models = dict(_models(folder))
        for role, place in models.items():
            source = open_checkpoint(place, replace(how, role=role), partial=True)
            _of_step(source, place, step).raise_if_any()
        beside = [
            name for name in _signature(folder) if holds_values(name) or not _is_in(folder / name, models.values())
        ]
        check_values(folder, beside, how.stubs, records=False).raise_if_any()
    except CheckpointError as error:
        return headline(str(error))
    return ""


def _is_in(file: ReadablePath, folders: Iterable[ReadablePath]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)


def _step_of(folder: ReadablePath) -> tuple[int, str]:
    """A step's number, and what its manifest is called."""
    if not folder.is_dir():
        raise NotACheckpoint(f"{folder}: there is no such folder")
    step = steps.step_of(folder)
    if step is not None:
        return step, steps.MANIFEST
    other = step_at(folder)
    run = run_at(folder) if other is None or other.trainer.in_place else None
    if run is not None:
        raise UsageError(
            f"{folder}: a step's folder is called global_step_N, or as its trainer calls it; this is a root of {run.trainer.title}'s"
            + (
                "\nThis trainer's steps have no folder of their own for a manifest; verify checks them as they are."
                if run.trainer.unfolded
                else f"\nGive one of them: {', '.join(one.folder.name for one in run.found.values())}."
            )
        )
    if other is None:
        raise UsageError(
            f"{folder}: a step's folder is called global_step_N, or as its trainer calls it, with that trainer's files in it\n"
            "Give the folder that holds actor/ and data/; rename it first if need be."
        )
    return other.step, other.manifest


def _why(folder: ReadablePath) -> str:
    return steps.why_not_committed(folder) or "it does not fit the files"


def _signature(folder: ReadablePath) -> _Signature:
    """Every file below, but for our own notes.

    Raises:
        Untrusted: A symbolic link leads out of the folder: then the files are not the step's own.
        StorageError: A folder cannot be read.
    """
    found: _Signature = {}
    if isinstance(folder, StorePath):
        for item in sorted(_store(folder).objects(str(folder.path)), key=itemgetter("path")):
            found[PurePosixPath(item["path"]).relative_to(folder.path).as_posix()] = item["size"], item["e_tag"]
        return {name: seen for name, seen in found.items() if name not in _OURS and not name.startswith(PREFIX)}
    assert isinstance(folder, Path)
    try:
        for parent, folders, names in os.walk(folder, onerror=_raise):
            for name in (*folders, *names):
                path = Path(parent, name)
                relative = path.relative_to(folder).as_posix()
                require_inside(beneath(folder, relative))
                stat = path.stat()
                if name in names and relative not in _OURS and ".tmp-" not in name:
                    found[relative] = (stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise cannot_open(error, Path(error.filename or folder)) from error
    return dict(sorted(found.items()))


def _raise(error: OSError) -> None:
    raise error


def _verified_models(
    folder: ReadablePath, step: int, how: Adoption
) -> tuple[list[dict[str, object]], set[str], list[ParallelConfig]]:
    """The parts of a step, each of which was verified, the files of the step that were looked at with them, and their ranks.

    Raises:
        NotACheckpoint: It has none.
        CheckpointError: One of them is damaged.
    """
    problems, parts, looked_at, ranks = Problems(), list[dict[str, object]](), set[str](), list[ParallelConfig]()
    for role, place in _models(folder):
        try:
            verdict = verify(place, replace(how.options, role=role), how.depth, how.workers, how.progress)
            problems.extend(verdict.problems.found)
            source = verdict.source
            if source is None:
                continue
            problems.extend(_of_step(source, place, step).found)
            ranks.append(source.parallel)
            unread = {"unread": headline(source.unread)} if source.unread else {}
            parts.append({"role": role, "format": source.format, "parallel": str(source.parallel), **unread})
            looked_at |= {(source.root / file.path).relative_to(folder).as_posix() for file in source.files}
        except CheckpointError as error:
            problems.add_error(error)
    problems.raise_if_any()
    return parts, looked_at, ranks


def _models(folder: ReadablePath) -> list[tuple[str, ReadablePath]]:
    """Roles and the folders of their models; a step that is itself a model is the actor's.

    Raises:
        NotACheckpoint: There is none, or one in a format that is not known.
    """
    if _is_known(folder):
        return [("actor", folder)]
    other = step_at(folder)
    found = {} if other is None else other.models()
    if found and steps.step_of(folder) is None:
        return [*found.items()]
    roles = {place.name: role for role, place in found.items()}
    deeper = {place.parent: (role, place) for role, place in found.items() if place.parent != folder}
    children = [child for child in sorted(folder.iterdir()) if child.is_dir() and child.name not in FOLDERS]
    unknown = [
        child for child in children if steps.looks_foreign(child) and not _is_known(child) and child not in deeper
    ]
    if unknown:
        detect(unknown[0])  # raises, and says which formats are known
    models = [(roles.get(child.name, child.name), child) for child in children if _is_known(child)] + [*deeper.values()]
    if not models:
        raise NotACheckpoint(
            f"{folder}: no model in a format that is known; expected folders such as actor/ and critic/"
        )
    return models


def _is_known(folder: ReadablePath) -> bool:
    try:
        detect(folder)
    except NotACheckpoint:
        return False
    return True


def _of_step(source: Source, place: ReadablePath, step: int) -> Problems:
    problems = Problems()
    if not source.state.release and source.state.iteration != step:  # a Hugging Face folder is of no iteration
        problems.add(
            LayoutMismatch,
            f"{place}: is of iteration {source.state.iteration}, but the step is {step}",
            "The two must agree, or training would go on at the wrong step; rename the folder if its name is wrong.",
        )
    return problems
