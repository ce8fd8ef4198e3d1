"""A whole step as it lies on the disk: its models by role, and everything else that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import Corrupt, UsageError
from mcore_rlhf.formats.registry import FORMATS
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import local_path

from .run import steps
from .run.chosen_step import ChosenStep, choose
from .run.step_names import RESERVED


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step with its parts.

    Args:
        folder: The step's folder.
        step: Its number.
        manifest: Its manifest, or None for another trainer's step.
        models: Role → folder, for models in a format that is known.
        others: Files of everything else, relative to the step's folder: data, RLHF state, random states, and roles in formats
            that cannot be converted.
        chosen: How it was found in a root; None where the path is the step's own.
    """

    folder: Path
    step: int
    manifest: Manifest | None
    models: Mapping[str, Path]
    others: tuple[str, ...]
    chosen: ChosenStep | None = None


def whole_step(path: Path) -> WholeStep | None:
    """The step that a folder is, whatever it holds; None where it is something else, such as a single model.

    Raises:
        Corrupt: The step is damaged; what is wrong is said.
    """
    path = local_path(path)
    return _opened(path) if _is_step(path) and path.is_dir() and not _is_model(path) else None


def chosen_step(
    path: Path, step: int | None = None, *, newest_intact: bool = False, progress: Callable[[int], None] | None = None
) -> ChosenStep | None:
    """The step that the root of a run means; None where the path is no root.

    Args:
        path: Any path.
        step, newest_intact, progress: See :func:`~.chosen_step.choose`.

    Raises:
        UsageError: ``newest_intact``, and the path is no root.
        CheckpointError: See :func:`~.chosen_step.choose`.
    """
    path = local_path(path)
    if _is_root(path):
        return choose(path, step, newest_intact=newest_intact, progress=progress)
    if newest_intact:
        raise UsageError(f"--newest-intact chooses one of several steps, and {path} is not the root of a run")
    return None


def _is_root(path: Path) -> bool:
    if not path.is_dir() or _is_step(path) or _is_model(path):
        return False
    return any(steps.step_of(child) is not None for child in path.iterdir())


def _is_step(path: Path) -> bool:
    return steps.step_of(path) is not None or (path / steps.MANIFEST).is_file()


def _is_model(path: Path) -> bool:
    return any(known.detect(path) for known in FORMATS)


def _opened(folder: Path) -> WholeStep | None:
    has_manifest = (folder / steps.MANIFEST).is_file()
    manifest = steps.read_manifest(folder) if has_manifest else None
    if manifest is not None and steps.step_of(folder) is not None and not steps.is_committed(folder):
        raise Corrupt(
            f"{folder}: is damaged: {steps.why_not_committed(folder)}\nUse another step: mcore-rlhf steps {folder.parent}"
        )
    models = {
        child.name: child
        for child in sorted(folder.iterdir())
        if child.is_dir() and child.name not in RESERVED and _is_model(child)
    }
    number = steps.step_of(folder)
    if number is None and manifest is not None:
        number = manifest.step
    if not models and manifest is None:
        return None
    return WholeStep(folder, number or 0, manifest, models, _others(folder, manifest, models))


def _others(folder: Path, manifest: Manifest | None, models: Mapping[str, Path]) -> tuple[str, ...]:
    """Everything that no model has; of a step of ours, what its manifest lists."""
    if manifest is not None:
        names = sorted(manifest.files)
    else:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(name for name in names if name.partition("/")[0] not in models)
