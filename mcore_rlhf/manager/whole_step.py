"""A whole step as it lies on the disk: its models by role, and everything else that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import Corrupt, NotACheckpoint
from mcore_rlhf.formats.registry import FORMATS
from mcore_rlhf.storage.manifest import Manifest

from . import steps
from .step_names import RESERVED


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
    """

    folder: Path
    step: int
    manifest: Manifest | None
    models: Mapping[str, Path]
    others: tuple[str, ...]


def whole_step(path: Path, step: int | None = None) -> WholeStep | None:
    """The step that a path means: the folder of a step, or the root of a run.

    Args:
        path: Any path.
        step: Which step of a root; without it, the newest that is committed.

    Returns:
        The step; None where the path is something else, such as a single model.

    Raises:
        NotACheckpoint: The root has no such step, or no committed one.
        Corrupt: The step is damaged; what is wrong is said.
    """
    if any(known.detect(path) for known in FORMATS) or not path.is_dir():
        return None
    if steps.step_of(path) is not None or (path / steps.MANIFEST).is_file():
        return _opened(path)
    if not any(steps.step_of(child) is not None for child in path.iterdir()):
        return None
    return _opened(_chosen(path, step))


def _chosen(root: Path, step: int | None) -> Path:
    if step is not None:
        folder = steps.step_folder(root, step)
        if not folder.is_dir():
            raise NotACheckpoint(f"{folder}: does not exist\nmcore-rlhf steps {root} lists the steps.")
        return folder
    newest = steps.newest(root)
    if newest is None:
        raise NotACheckpoint(
            f"{root}: no committed step in it\nmcore-rlhf steps {root} says what is there; name one with --step N."
        )
    return newest.path


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
        if child.is_dir() and child.name not in RESERVED and any(known.detect(child) for known in FORMATS)
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
