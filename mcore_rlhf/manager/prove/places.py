"""Where a run's steps lie and which of them are whole, seen from outside: ours, and those that other trainers write.

A step with a manifest is whole if the manifest says so. One without, which a trainer wrote by itself, is taken for whole once the run's
tracker names it or a later one; where the trainer has no tracker, once the files without which it passes over a step are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, UsageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.retention import LEFTOVER
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.paths import walk
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.trainers.known import TRAINERS, called_so, writer_of

MANIFESTS = (steps.MANIFEST, MANIFEST_NAME)
"""What our manifest is called in a step of ours, and in a model's own folder."""

_TRACKERS = tuple(dict.fromkeys(one.tracker for one in TRAINERS if one.tracker))


def number_of(path: Path) -> int | None:
    """The step whose folder is called so, by whatever trainer; None where none is."""
    own = steps.step_of(path)
    return own if own is not None else next((number for _, number in called_so(path.name)), None)


def number_aside(path: Path) -> int | None:
    """The step that a hidden folder is of, which is being written, replaced or deleted."""
    match = LEFTOVER.fullmatch(path.name)
    return number_of(path.with_name(match["name"])) if match and match["what"] != "lock" else None


def is_step(path: Path) -> bool:
    """Whether a folder is called as a step is, or what is to become one."""
    return number_of(path) is not None or number_aside(path) is not None


def _is_ours(path: Path) -> bool:
    return steps.step_of(path) is not None or steps.step_of_aside(path) is not None


def holds_ours(root: Path) -> bool:
    """Whether a folder has steps that are called as ours."""
    try:
        return any(_is_ours(root / name) for name in os.listdir(root))
    except OSError:
        return False


def roots(output: Path) -> list[Path]:
    """All folders at or below ``output`` that hold steps: ours, or where none is ours, other trainers'. Steps are not looked into."""
    ours, others = [], []
    for parent, folders, _ in os.walk(output):
        paths = [Path(parent, name) for name in folders]
        if any(map(_is_ours, paths)):
            ours.append(Path(parent))
        elif any(map(is_step, paths)):
            others.append(Path(parent))
        folders[:] = sorted(path.name for path in paths if not is_step(path) and not path.name.startswith("."))
    return ours or others


def root_of(output: Path) -> Path:
    """The one folder of steps of a run.

    Raises:
        NotACheckpoint: There is none.
        UsageError: There are several.
    """
    found = roots(output)
    if not found:
        raise NotACheckpoint(
            f"{output}: no folder global_step_N is in it, at any depth, nor one that another trainer's steps are called like\n"
            "The command must save with CheckpointManager below {dir}, or as its trainer does, at step N and at its last step."
        )
    if len(found) > 1:
        raise UsageError(
            f"{output}: {len(found)} folders hold steps: {', '.join(str(root.relative_to(output)) for root in found)}\n"
            "The check is of one run: let the command save into one root."
        )
    return found[0]


def step_in(root: Path, step: int) -> Path:
    """The folder of a step, as the one that writes there calls it; ours where it is not there."""
    own = steps.step_folder(root, step)
    if not own.is_dir():
        with suppress(OSError):
            for name in sorted(os.listdir(root)):
                if number_of(root / name) == step:
                    return root / name
    return own


def manifest_in(folder: Path) -> str | None:
    """What the manifest of a step is called; None where it has none."""
    return next((name for name in MANIFESTS if (folder / name).is_file()), None)


def read(folder: Path) -> Manifest | None:
    """The manifest of a step; None where it has none.

    Raises:
        CheckpointError: It is damaged, or of a newer version.
    """
    name = manifest_in(folder)
    return None if name is None else steps.read_manifest(folder, name)


def checked_files(folder: Path) -> set[str]:
    """The files of a step, relative to it; where it has a manifest, every one was held against it.

    Raises:
        CheckpointError: The step is damaged.
    """
    manifest = read(folder)
    if manifest is None:
        return {(parent / name).relative_to(folder).as_posix() for parent, names in walk(folder) for name in names}
    check(folder, manifest).raise_if_any()
    return {*manifest.files, manifest_in(folder) or steps.MANIFEST}


def is_committed(folder: Path) -> bool:
    """Whether a step is whole.

    Raises:
        Unreadable: Nobody can say.
    """
    number = number_of(folder)
    if number is None:
        return False
    name = manifest_in(folder)
    if name is None:
        return _is_whole(folder, number)
    if steps.step_of(folder) is not None and name == steps.MANIFEST:
        return steps.is_committed(folder)
    return steps.described(number, folder, name).state == "committed"


def _is_whole(folder: Path, number: int) -> bool:
    """Whether a trainer that writes no manifest seems to have come to the end of a step."""
    try:
        written = writer_of(folder)
    except (OSError, CheckpointError):  # in the middle of a save nobody can say
        return False
    if written is None:
        return False
    trainer, tracked = written[0], _tracked(folder.parent)
    if trainer.tracker:
        return bool(tracked) and number <= max(tracked)
    return bool(trainer.needs) and not trainer.missing(folder)


def _tracked(root: Path) -> list[int]:
    """What the trackers of a root name."""
    found = []
    for name in _TRACKERS:
        with suppress(OSError, ValueError):
            text = reading.read_line(root / name).strip()
            number = int(text) if text.isascii() and text.isdecimal() else number_of(Path(text))
            found += [] if number is None else [number]
    return found


def committed(root: Path) -> list[int]:
    """Numbers of the steps of a root that are whole, oldest first."""
    found = []
    with suppress(OSError):
        for name in os.listdir(root):
            number = number_of(root / name)
            if number is not None and is_committed(root / name):
                found.append(number)
    return sorted(found)


def require_committed(root: Path, step: int, run: str) -> Path:
    """The folder of a step that must be whole.

    Raises:
        NotACheckpoint: It is not; those that are, are named.
    """
    folder = step_in(root, step)
    if not is_committed(folder):
        there = ", ".join(map(str, committed(root))) or "none"
        raise NotACheckpoint(
            f"{root}: {run} has not committed step {step}; committed: {there}\n"
            "Let it save at its last step, and count {steps} from the start of training, as the step numbers do."
        )
    return folder


def written_at(folder: Path) -> Mapping[str, tuple[int, int]]:
    """When every file of a step was last written, and which file it is: what tells one that was saved again."""
    found = {}
    for parent, names in walk(folder):
        for name in names:
            with suppress(OSError):
                about = (parent / name).stat()
                found[(parent / name).relative_to(folder).as_posix()] = (about.st_mtime_ns, about.st_ino)
    return found
