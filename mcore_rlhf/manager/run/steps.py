"""Which steps lie in a run's root, and what each of them is worth: the one place where that question is answered.

Resume, retention, ``inspect`` and ``prune`` all ask here, and everything is read off the disk: a tracker
(``latest_checkpointed_iteration.txt``) may be stale or name half a step, so it is not looked at. A step may be in quarantine:
a note beside the manifest, not listed in it, tells resume to leave it alone.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import filter as filter_names
from math import isnan
from pathlib import Path, PurePath
from typing import Literal, TypeVar

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, Unreadable, headline
from mcore_rlhf.families.megatron.folders import TRACKER
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.manifest import STEP_MANIFEST, Manifest, check, is_newer, utc_time
from mcore_rlhf.storage.paths import ReadablePath, lies_in, says_nothing, storage_error, walk
from mcore_rlhf.storage.patience import is_there, may_be_folder, names_in, settled
from mcore_rlhf.storage.transactions import PAUSES
from mcore_rlhf.storage.unfinished import replaced
from mcore_rlhf.storage.urls import checkpoint_path, remove_file, write_text
from mcore_rlhf.trainers.known import called_so, left_by_trainers, roles_by_folder

MANIFEST = STEP_MANIFEST
"""The last file of a step that is written."""

RNG_FILE = "rng/rng_state.pt"
"""The states of every rank's generators, in a step."""

RESERVED = ("data", "rlhf", "rng", "exports", MANIFEST)
"""Names in a step, or beside steps, that no role may have."""

_STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")
_ASIDE = re.compile(r"\.global_step_(0|[1-9][0-9]{0,17})\.(?:partial|old)-.+")

NOTE = "quarantined.json"
_LOOKS = 10
_A_STEP = "global_step_0"

_NO_REASON = "no reason given"

_Path = TypeVar("_Path", bound=ReadablePath)

State = Literal["committed", "damaged", "partial", "foreign", "unreadable"]
"""``committed``: the manifest parses, names this step, and every listed file has its listed size. ``damaged``: there is
a manifest, but that is not so. ``foreign``: no manifest, but files as other trainers write them. ``partial``: being written or
deleted, or left behind, or nothing that is known. ``unreadable``: an I/O error, or another user's folder: any of these."""

_NOT_ROLES = frozenset({"data", "rlhf", "rng", "exports"})


def tracker_text(root: ReadablePath) -> str:
    """What the tracker in a root says, whoever wrote it.

    Raises:
        OSError: It is missing, is no file, or cannot be read.
    """
    return reading.read_line(root / TRACKER)


def step_folder(root: _Path, step: int) -> _Path:
    """The folder of a step: ``<root>/global_step_50``."""
    return root / f"global_step_{step}"


def step_of(path: ReadablePath | PurePath) -> int | None:
    """The step whose folder this is, by its name; None where it is not a step's folder."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_of_aside(path: ReadablePath) -> int | None:
    """The step that this hidden folder belongs to: one being written, replaced or deleted."""
    match = _ASIDE.fullmatch(path.name)
    return int(match.group(1)) if match else None


def is_hidden(path: ReadablePath) -> bool:
    """Whether this is not a step yet, or no longer."""
    return path.name.startswith(".")


def quarantine(folder: ReadablePath, reason: str = "") -> None:
    """Tell resume to leave a step alone; the step itself stays as it is.

    Args:
        folder: The step's folder, by whatever name.
        reason: For whoever reads the list.

    Raises:
        NotACheckpoint: There is no such step.
        StorageError: The note cannot be written.
    """
    _require_step(folder)
    said = {"reason": reason.strip() or _NO_REASON, "time": utc_time()}
    write_text(folder / NOTE, json.dumps(said, indent=1, ensure_ascii=False) + "\n")


def release(folder: ReadablePath) -> bool:
    """Take a step out of quarantine.

    Returns:
        Whether it was in it.

    Raises:
        NotACheckpoint: There is no such step.
        StorageError: The note cannot be removed.
    """
    _require_step(folder)
    try:
        remove_file(folder / NOTE)
    except FileNotFoundError:
        return False
    return True


def reason_of(folder: ReadablePath) -> str:
    """Why a step is in quarantine; empty where it is not. A note that cannot be read still counts."""
    path = folder / NOTE
    if not is_there(path):
        return ""
    try:
        return str(reading.read_json(path)["reason"]) or _NO_REASON
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{NOTE} cannot be read: {type(error).__name__}"


def _require_step(folder: ReadablePath) -> None:
    if (step_of(folder) is None and not any(called_so(folder.name))) or not folder.is_dir():
        raise NotACheckpoint(f"{folder}: there is no such step\nList them: mcore-rlhf steps {folder.parent}")


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it lies on the disk.

    Args:
        step: Its number, from the folder's name.
        path: The folder; hidden (``.global_step_N.partial-…``) while it is written or deleted.
        state: What it is worth, see :data:`State`.
        nbytes: Bytes of everything in the folder, whether the manifest lists it or not.
        roles: Whose models it holds: ``actor``, ``critic``, …
        time: When it was written, UTC, ISO 8601; empty where that is not known.
        why: What is wrong with it, one line; empty for a committed step.
        metrics: What was measured at it, as the manifest's report says.
        quarantined: Why resume leaves it alone; empty where it does not.
        transaction: Identity of its commit; empty where that is not known.
    """

    step: int
    path: ReadablePath
    state: State
    nbytes: int = 0
    roles: tuple[str, ...] = ()
    time: str = ""
    why: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    quarantined: str = ""
    transaction: str = ""

    @property
    def local(self) -> Path:
        """Its folder, in the root of a file system."""
        assert isinstance(self.path, Path)
        return self.path

    @property
    def resumable(self) -> bool:
        """Whether it is committed and nobody said to leave it alone."""
        return self.state == "committed" and not self.quarantined

    @property
    def undecided(self) -> bool:
        """Whether it cannot be read, and nobody said to leave it alone: it may be the one to resume from."""
        return self.state == "unreadable" and not self.quarantined

    def require_read(self) -> None:
        """Stop where nobody can say what it is worth.

        Raises:
            Unreadable: So it is.
        """
        if self.undecided:
            raise Unreadable(
                f"{self.path}: cannot be read, and may be sound: {self.why}\n"
                "Try again when it can be; or name another step, or put this one in quarantine: "
                f"mcore-rlhf steps {self.path.parent} --quarantine {self.step}"
            )

    def describe(self) -> str:
        """``global_step_50 is damaged (manifest.json is missing)``."""
        why = f"in quarantine: {self.quarantined}" if self.quarantined else self.why
        return f"{self.path.name} is {self.state}" + (f" ({why})" if why else "")


def listed(root: ReadablePath) -> list[Step]:
    """Every step in a root, oldest first, hidden ones after the visible one of the same number.

    One bad folder never hides the others: what is wrong with it stands in its :attr:`Step.why`. A step that vanishes meanwhile is
    none; the others are looked for again then, as a newer one may have taken its place.

    Args:
        root: The run's root. Where there is none, there are no steps.

    Raises:
        NotACheckpoint: It is a file.
        StorageError: It cannot be listed.
    """
    for _ in range(_LOOKS):
        found = [_describe(number, path) for number, path in _folders(root)]
        if None not in found:
            break
    return sorted((step for step in found if step is not None), key=_age)


def found_at(folder: ReadablePath) -> Step | None:
    """What one folder is, without a look at the others; None where there is none, or not by a step's name."""
    number = step_of(folder)
    return _describe(number, folder) if number is not None and folder.is_dir() else None


def why_not_committed(folder: ReadablePath) -> str:
    """What is wrong with a step, one line; empty where there is none, or nothing is."""
    found = found_at(folder)
    return found.why if found is not None else ""


def committed(root: ReadablePath, *, quarantined: bool = False) -> list[Step]:
    """The steps that are all there, oldest first.

    Args:
        root: The run's root.
        quarantined: Whether steps in quarantine are among them.

    Raises:
        CheckpointError: See :func:`listed`.
    """
    return [step for step in listed(root) if step.resumable or (quarantined and step.state == "committed")]


def newest(root: ReadablePath) -> Step | None:
    """The newest step that is committed and not in quarantine; None where there is none.

    Raises:
        Unreadable: A newer one cannot be read.
        CheckpointError: See :func:`listed`.
    """
    return newest_of(newest_first(root))


def newest_of(newest_first: Iterable[Step]) -> Step | None:
    """See :func:`newest`; of steps that somebody listed."""
    for step in newest_first:
        step.require_read()
        if step.resumable:
            return step
    return None


def newest_first(root: ReadablePath) -> Iterator[Step]:
    """The visible steps of a root, newest first, each looked at when it is asked for.

    Raises:
        Unreadable: The next one lies aside: an older one is not taken for it.
        CheckpointError: See :func:`listed`.
    """
    seen = set[int]()
    for _ in range(_LOOKS):
        folders = _folders(root)
        aside = lying_aside(folders)
        whole = [one for one in folders if one[0] not in seen and (one[0] in aside or not is_hidden(one[1]))]
        for number, path in sorted(whole, key=_number, reverse=True):
            if number in aside:
                raise replaced(step_folder(root, number))
            step = _describe(number, path)
            if step is None:  # deleted meanwhile, as there are newer ones
                break
            seen.add(number)
            yield step
        else:
            return


def is_committed(folder: ReadablePath) -> bool:
    """Whether a step is all there: its manifest parses, names this step, and every listed file has its listed size.

    Raises:
        Unreadable: Nobody can say.
    """
    number = step_of(folder)
    if number is None:
        return False
    try:
        return not _problem(folder, read_manifest(folder), number)
    except Exception as error:
        if says_nothing(error):
            raise Unreadable(_one_line(folder, error)) from error
        return False  # whatever is wrong with it, it is not committed


def is_replaceable(folder: ReadablePath) -> bool:
    """Whether a step of ours lies there, which may be saved again; what has no manifest of ours is never replaced.

    Raises:
        Unreadable: Nobody can say.
    """
    found = found_at(folder)
    if found is not None:
        found.require_read()
    return found is not None and found.state in ("committed", "damaged")


def is_of_newer_release(folder: ReadablePath) -> bool:
    """Whether a step has a manifest that this release is too old for: whatever it holds, it is not damaged."""
    return is_newer(folder / MANIFEST)


def read_manifest(folder: ReadablePath, name: str = MANIFEST) -> Manifest:
    """The manifest of a step, which another trainer's may have under another name.

    Raises:
        NotACheckpoint: The step has none.
        CheckpointError: It is damaged, or of a newer version.
    """
    return Manifest.read(folder / name)


def size_of(folder: ReadablePath) -> int:
    """Bytes of all files below a folder; what vanishes or cannot be read meanwhile counts as nothing."""
    total = 0
    for parent, names in walk(folder):
        for name in names:
            try:
                file = parent / name
                total += (os.lstat(file) if isinstance(file, Path) else file.stat()).st_size
            except OSError:
                continue
    return total


def looks_foreign(folder: ReadablePath) -> bool:
    """Whether a folder directly holds what trainers write: a tracker, iterations, shards."""
    likely = left_by_trainers()
    with suppress(OSError):  # where nobody may look, all are asked for
        names = names_in(folder)
        likely = tuple(mark for mark in likely if filter_names(names, mark.partition("/")[0]))
    return any(lies_in(folder, mark) for mark in likely)


def _age(step: Step) -> tuple[int, bool, str]:
    return step.step, is_hidden(step.path), step.path.name


def _number(found: tuple[int, ReadablePath]) -> int:
    return found[0]


def lying_aside(found: Iterable[tuple[int, ReadablePath]]) -> set[int]:
    """Of numbers and folders of steps, those that are being replaced: they lie aside, and nothing in their place."""
    known = list(found)
    there = {number for number, path in known if not is_hidden(path)}
    return {number for number, path in known if ".old-" in path.name} - there


def _folders(root: ReadablePath) -> list[tuple[int, ReadablePath]]:
    """Numbers and folders of all steps, in no order; where one is being replaced, after that, unless it was cut short."""
    for pause in PAUSES:
        found = list(_listing(root))
        if not lying_aside(found):
            return found
        time.sleep(pause)
    return list(_listing(root))


def _listing(root: ReadablePath) -> Iterator[tuple[int, ReadablePath]]:
    root = checkpoint_path(root)
    try:
        for name in names_in(root):
            path = root / name
            number = step_of_aside(path) if is_hidden(path) else step_of(path)
            if number is not None and may_be_folder(path):
                yield number, path
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise NotACheckpoint(f"{root}: is a file; expected the root of a run, with global_step_N folders") from None
    except OSError as error:
        raise Unreadable(str(storage_error(error, root, "list"))) from error


def _describe(number: int, path: ReadablePath) -> Step | None:
    """What a folder is; None where it has vanished meanwhile."""
    return settled(path, lambda: described(number, path), lambda step: step.state != "committed")


def described(number: int, path: ReadablePath, manifest: str = MANIFEST) -> Step:
    """What a folder is, by whatever name: see :class:`Step`; whatever is wrong with it stands in its ``why``."""
    try:
        return _hidden(number, path) if is_hidden(path) else _visible(number, path, manifest)
    except Exception as error:  # whatever is wrong with one folder may not hide the others
        state: State = "unreadable" if says_nothing(error) else "damaged"
        nbytes = size_of(path) if isinstance(path, Path) else 0
        return Step(number, path, state, nbytes, why=_one_line(path, error), quarantined=_noted(path))


def _noted(path: ReadablePath) -> str:
    """See :func:`reason_of`; of a folder that may be closed to us."""
    with suppress(OSError, CheckpointError):
        return reason_of(path)
    return ""


def _hidden(number: int, path: ReadablePath) -> Step:
    doing = "written or deleted" if ".partial-" in path.name else "replaced"
    why = f"being {doing}, or left behind by a process that died; the next start of the run cleans up what is dead"
    return Step(number, path, "partial", size_of(path), _role_folders(path), changed(path), why)


def _visible(number: int, path: ReadablePath, name: str) -> Step:
    if not is_there(path / name):
        return _without_manifest(number, path)
    nbytes, quarantined = size_of(path), reason_of(path)
    try:
        manifest = read_manifest(path, name)
    except CheckpointError as error:
        if says_nothing(error):
            raise
        why, roles = _one_line(path, error), _role_folders(path)
        return Step(number, path, "damaged", nbytes, roles, changed(path), why, quarantined=quarantined)
    why = _problem(path, manifest, number, name)
    roles = tuple(dict.fromkeys(str(part["role"]) for part in manifest.parts if "role" in part))
    written = str(manifest.provenance.get("time") or changed(path))
    state: State = "damaged" if why else "committed"
    metrics = {
        key: value for key, value in manifest.metrics.items() if not isnan(value)
    }  # of which one is better than another
    transaction = manifest.transaction
    return Step(number, path, state, nbytes, roles, written, why, metrics, quarantined, transaction)


def _without_manifest(number: int, path: ReadablePath) -> Step:
    roles, nbytes, written, quarantined = _role_folders(path), size_of(path), changed(path), reason_of(path)
    if any(looks_foreign(folder) for folder in (path, *(path / name for name in names_in(path) if _may_be_role(name)))):
        why = f"has no {MANIFEST}: another trainer's step"
        return Step(number, path, "foreign", nbytes, roles, written, why, quarantined=quarantined)
    what = "holds nothing that is known" if names_in(path) else "is empty"
    why = f"has no {MANIFEST} and {what}"
    return Step(number, path, "partial", nbytes, roles, written, why, quarantined=quarantined)


def _problem(folder: ReadablePath, manifest: Manifest, number: int, name: str = MANIFEST) -> str:
    """What keeps a step with a manifest from being committed, one line; empty where nothing does.

    A manifest of another name than ours may be one of a folder that was no step to who wrote it, and say none.

    Raises:
        Unreadable: Nothing is known to, and something cannot be looked at.
    """
    if manifest.step != number and (manifest.step is not None or name == MANIFEST):
        return f"{folder / name}: is of step {manifest.step}, but the folder is {folder.name}"
    found = check(folder, manifest, sizes_only=True)
    found.raise_if_unread()
    problems = found.found
    if not problems:
        return ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].message.splitlines()[0] + more


def _role_folders(path: ReadablePath) -> tuple[str, ...]:
    found = (name for name in names_in(path) if _may_be_role(name) and may_be_folder(path / name))
    return tuple(sorted(roles_by_folder(_A_STEP).get(name, name) for name in found))


def _may_be_role(name: str) -> bool:
    return name not in _NOT_ROLES and not name.startswith((".", "iter_", "mp_rank_")) and name not in left_by_trainers()


def changed(path: ReadablePath) -> str:
    """When a folder was changed last, UTC, ISO 8601; empty where that is not known."""
    try:
        return utc_time(path.stat().st_mtime) if isinstance(path, Path) else ""
    except OSError:
        return ""


def _one_line(path: ReadablePath, error: Exception) -> str:
    told = storage_error(error, path, "read") if isinstance(error, OSError) else error
    return headline(str(told)) or type(told).__name__
