"""What our own manifest says of a checkpoint's files: checksums for those that carry none themselves.

A conversion leaves ``mcore_rlhf.json`` in the root of what it writes, or of a trainer's in the folder of the iteration, as ``adopt``
does, and a step has ``manifest.json`` beside its roles. Either vouches for every file that it lists, so a damaged one is no reason to
go without: it is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from mcore_rlhf.errors import CheckpointError, Corrupt, NotACheckpoint, Problem, Problems
from mcore_rlhf.families.megatron.folders import folder_meant
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.leftovers import MAX_CARRIED, reason_of_name
from mcore_rlhf.storage.manifest import FORMAT, STEP_MANIFEST, FileEntry, Manifest, check
from mcore_rlhf.storage.paths import ReadablePath, absolute
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.record_file import StoredFile

_WHOLE = "whole file"
"""What a checksum of a manifest is of."""
_LEVELS = 3
"""A manifest stands in the checkpoint's folder, or above it: ``<step>/actor/iter_0000050``."""
_RUN_ID = "latest_wandb_run_id.txt"
"""Megatron's; like a tracker, it is written anew with every step."""


@dataclass(frozen=True, slots=True)
class Listed:
    """What a manifest lists.

    Args:
        manifest: The manifest.
        file: Where it stands.
        trackers: Names of files that frameworks write anew with every step: a run that goes on in the folder damages nothing.
    """

    manifest: Manifest
    file: ReadablePath
    trackers: Collection[str] = ()

    @property
    def advice(self) -> str:
        """What to do where a file is not as listed."""
        return _advice(self.file)

    def below(self, folder: ReadablePath) -> dict[str, FileEntry]:
        """The files in a folder, by path relative to it: one above the manifest, or below."""
        here, there, files = absolute(folder), self.file.parent, self.manifest.files
        if there.is_relative_to(here):
            return {(there / name).relative_to(here).as_posix(): entry for name, entry in files.items()}
        if not here.is_relative_to(there):
            return {}
        prefix = f"{here.relative_to(there).as_posix()}/"
        return {name.removeprefix(prefix): entry for name, entry in files.items() if name.startswith(prefix)}

    def texts(self, folder: ReadablePath) -> dict[str, FileEntry]:
        """Those of them that are neither weights nor optimizer nor trackers: they carry no checksum."""
        found = self.below(folder).items()
        return {n: e for n, e in found if e.nbytes <= MAX_CARRIED and not reason_of_name(n) and not self.is_tracker(n)}

    def is_tracker(self, path: str) -> bool:
        """Whether a file is written anew with every step."""
        return path.rpartition("/")[2] in {*self.trackers, _RUN_ID}

    def problems(self, folder: ReadablePath, files: dict[str, FileEntry], *, sizes_only: bool) -> Problems:
        """Which files of a folder are not as listed."""
        found = check(folder, replace(self.manifest, files=files), sizes_only=sizes_only)
        return Problems([Problem(problem.kind, problem.message, self.advice) for problem in found.found])


def listed_at(folder: ReadablePath, trackers: Collection[str] = (), step: int | None = None) -> Listed | None:
    """What lists the files of a folder, or None where nothing does: a manifest in it or above, or in the iteration that it means.

    Args:
        folder: A checkpoint's.
        trackers: What trackers are called.
        step: Which iteration is meant; None for what the tracker names.

    Raises:
        Corrupt: There is a manifest, but it is damaged.
        Unsupported: A newer version wrote it.
    """
    here = absolute(folder)
    for place in (here, *here.parents[: _LEVELS - 1]):
        for name in (MANIFEST_NAME, STEP_MANIFEST):
            manifest = _read(place / name)
            found = None if manifest is None else Listed(manifest, place / name, trackers)
            if found is not None and found.below(here):
                return found
    meant = folder_meant(here, step)
    manifest = None if meant is None else _read(meant / MANIFEST_NAME)
    return None if meant is None or manifest is None else Listed(manifest, meant / MANIFEST_NAME, trackers)


def with_checksums(source: Source, listed: Listed | None) -> Source:
    """A source whose files have the checksums that a manifest lists, besides their own.

    Texts that no reader has opened are files of it as well, so that whoever checks the source checks them.

    Args:
        source: As its reader opened it.
        listed: What lists its files.

    Raises:
        Corrupt: A file is longer than listed.
        Incomplete: A file is shorter, or is not there.
    """
    if listed is None:
        return source
    entries = {name: entry for name, entry in listed.below(source.root).items() if not listed.is_tracker(name)}
    bare = {file.path for file in source.files if isinstance(file.records, tuple) and not file.records}
    opened = {file.path for file in source.files}
    more = [name for name in listed.texts(source.root) if name not in opened]
    loose = bare.union(more)
    wanted = {name: entries[name] for name in (*opened, *more) if name in entries}
    listed.problems(source.root, wanted, sizes_only=True).raise_if_any()
    vouched = {n: StoredFile(n, e.nbytes, ((_WHOLE, 0, e.nbytes, e.crc32),)) for n, e in wanted.items() if n in loose}
    files = [
        vouched.pop(file.path)
        if file.path in vouched
        else replace(file, whole=entries[file.path].crc32 if file.path in entries else None)
        for file in source.files
    ]
    return replace(source, files=(*files, *vouched.values()))


def refuse_damaged_texts(folder: ReadablePath, listed: Listed | None) -> None:
    """Say of a folder that could not be opened that its texts are damaged, if they are: that is why.

    Args:
        folder: The checkpoint's.
        listed: What lists its files.

    Raises:
        Corrupt: They are not as listed.
    """
    if listed is not None:
        listed.problems(folder, listed.texts(folder), sizes_only=False).raise_if_any()


def contradictions(folder: ReadablePath, trackers: Collection[str], step: int | None = None) -> list[str]:
    """In what a folder is not as its manifest says, as far as that is seen without reading weights.

    Args:
        folder: The checkpoint's.
        trackers: What trackers are called.
        step: Which iteration is meant; None for what the tracker names.
    """
    try:
        listed = listed_at(folder, trackers, step)
    except CheckpointError as error:
        return [str(error).splitlines()[0]]
    if listed is None:
        return []
    texts = listed.texts(folder)
    weights = {
        name: entry for name, entry in listed.below(folder).items() if name not in texts and not listed.is_tracker(name)
    }
    problems = listed.problems(folder, texts, sizes_only=False)
    problems.extend(listed.problems(folder, weights, sizes_only=True).found)
    return [problem.message for problem in problems.found]


def _read(file: ReadablePath) -> Manifest | None:
    """A manifest; None where there is none, or where it is another program's."""
    if not file.is_file():
        return None
    try:
        return Manifest.read(file)
    except (NotACheckpoint, Corrupt) as error:
        if file.name == STEP_MANIFEST and not _looks_ours(file):
            return None
        raise Corrupt(f"{str(error).splitlines()[0]}\n{_advice(file)}") from error


def _looks_ours(file: ReadablePath) -> bool:
    """Many programs have a ``manifest.json``; a damaged one of ours still has our name in it."""
    try:
        return FORMAT.encode() in reading.read_bytes(file)
    except OSError:
        return False


def _advice(file: ReadablePath) -> str:
    return (
        "Copy the folder again from where it was written. If another program wrote in it since, and you trust that, remove "
        f"{file}: the folder is then read without these checksums."
    )
