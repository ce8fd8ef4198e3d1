"""What a run has saved so far, seen from outside: the folder of its steps, those that are whole, and one being written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.step_names import step_folder, step_of, step_of_aside


def roots(output: Path) -> list[Path]:
    """All folders at or below ``output`` that hold steps; steps themselves and hidden folders are not looked into."""
    found = []
    for parent, folders, _ in os.walk(output):
        if any(_is_step(name) for name in folders):
            found.append(Path(parent))
        folders[:] = sorted(name for name in folders if not _is_step(name) and not name.startswith("."))
    return found


def _is_step(name: str) -> bool:
    return step_of(Path(name)) is not None or step_of_aside(Path(name)) is not None


def root_of(output: Path) -> Path:
    """The one folder of steps of a run.

    Raises:
        NotACheckpoint: There is none.
        UsageError: There are several.
    """
    found = roots(output)
    if not found:
        raise NotACheckpoint(
            f"{output}: no folder global_step_N is in it, at any depth\n"
            "The command must save with CheckpointManager below {dir}, at step N and at its last step."
        )
    if len(found) > 1:
        raise UsageError(
            f"{output}: {len(found)} folders hold steps: {', '.join(str(root.relative_to(output)) for root in found)}\n"
            "The check is of one run: let the command save into one root."
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class Partial:
    """A step that is being written.

    Args:
        step: Its number.
        files: Files of it that are there, relative to its hidden folder.
        nbytes: Their bytes.
    """

    step: int
    files: tuple[str, ...]
    nbytes: int


class Watch:
    """Looks at a run's steps, again and again.

    Args:
        output: The run's output folder.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._root: Path | None = None
        self._committed: dict[Path, int] = {}

    def committed(self) -> list[int]:
        """Numbers of the steps that are whole, oldest first.

        A step that was seen whole is not opened again as long as its folder is there.
        """
        found = []
        for path in self._folders():
            number = step_of(path)
            if number is not None and (path in self._committed or steps.is_committed(path)):
                self._committed[path] = number
                found.append(number)
        return sorted(found)

    def partial(self, after: int = -1) -> Partial | None:
        """A step beyond ``after`` of which files of a role, of the data or of random states are being written."""
        for path in self._folders():
            number = step_of_aside(path) if ".partial-" in path.name else None
            if number is not None and number > after:
                files = dict(_files_in_folders(path))
                if files:
                    return Partial(number, tuple(sorted(files)), sum(files.values()))
        return None

    def _folders(self) -> list[Path]:
        root = self._find()
        if root is None:
            return []
        try:
            names = os.listdir(root)
        except OSError:
            return []
        return [root / name for name in names if _is_step(name)]

    def _find(self) -> Path | None:
        if self._root is None:
            self._root = next(iter(roots(self._output)), None)
        return self._root


def _files_in_folders(folder: Path) -> Iterator[tuple[str, int]]:
    """Files below a folder with their sizes, except those directly in it: these are messages between ranks."""
    for parent, _, names in os.walk(folder):
        for name in names if Path(parent) != folder else ():
            path = Path(parent, name)
            try:
                yield path.relative_to(folder).as_posix(), path.stat().st_size
            except OSError:
                continue


def require_committed(root: Path, step: int, run: str) -> Path:
    """The folder of a step that must be whole.

    Raises:
        NotACheckpoint: It is not; those that are, are named.
    """
    folder = step_folder(root, step)
    if not steps.is_committed(folder):
        there = ", ".join(str(found.step) for found in steps.committed(root)) or "none"
        raise NotACheckpoint(
            f"{root}: {run} has not committed step {step}; committed: {there}\n"
            "Let it save at its last step, and count {steps} from the start of training, as the step numbers do."
        )
    return folder
