"""What Megatron-LM's ``--load`` means: a run's root, a step of it, a model in Megatron's folders, or nothing yet.

Only names are looked at; what is found is opened and checked by the manager.

Source of Megatron's own layout: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``read_metadata``,
``get_checkpoint_name``, ``_get_checkpoint_format``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import NotACheckpoint, StorageError
from mcore_rlhf.manager import steps
from mcore_rlhf.manager.step_names import is_hidden, tracker_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"

Kind = Literal["nothing", "root", "step", "model", "megatron"]
"""``root``: its newest committed step. ``step``: that one. ``model``: a single model, in any format that is read.
``megatron``: a format that is Megatron's own function's to load (``torch_dist``, ``torch_dcp``)."""


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Where a script loads from.

    Args:
        kind: See :data:`Kind`.
        path: The root, the step or the model's folder.
        release: Whether it is a release: weights without an iteration.
        format: What Megatron-LM calls the format, where it is its own function's to load.
    """

    kind: Kind
    path: Path = Path()
    release: bool = False
    format: str = ""

    @property
    def root(self) -> Path:
        """The folder of all steps."""
        return self.path if self.kind == "root" else self.path.parent

    @property
    def which(self) -> str | Path:
        """What the manager is asked to load."""
        return "auto" if self.kind == "root" else self.path

    def model_folder(self, role: str) -> Path:
        """A folder that Megatron's own functions read: with a tracker and ``iter_…`` folders."""
        if self.kind == "root":
            newest = steps.newest(self.path)
            return self.path if newest is None else newest.path / role
        return self.path / role if self.kind == "step" else self.path


def find(folder: str | None, step: int | None = None) -> LoadSource:
    """Understand a folder.

    Args:
        folder: ``--load`` or ``--pretrained-checkpoint``; None where it was not given.
        step: ``--ckpt-step``.

    Raises:
        NotACheckpoint: There are steps, and none of them can be resumed from; or the one that is wanted is not there.
        StorageError: It cannot be read.
    """
    if folder is None:
        return LoadSource("nothing")
    path = Path(folder).absolute()
    if steps.step_of(path) is not None and path.is_dir():
        return LoadSource("step", path)
    return _wanted(path, step) if step else _newest(path)


def has_steps(folder: str | None) -> bool:
    """Whether a folder is the root of a run, or one step of it."""
    if folder is None:
        return False
    path = Path(folder).absolute()
    return bool(_visible(path)) or (steps.step_of(path) is not None and path.is_dir())


def _wanted(path: Path, step: int) -> LoadSource:
    ours, theirs = steps.step_folder(path, step), path / f"iter_{step:07d}"
    if ours.is_dir():
        return LoadSource("step", ours)
    if theirs.is_dir():
        return _model(theirs, theirs, release=False)
    raise NotACheckpoint(f"{path}: --ckpt-step asks for {step}, and there is neither {ours.name} nor {theirs.name}")


def _newest(path: Path) -> LoadSource:
    found = _visible(path)
    if any(step.resumable for step in found):
        return LoadSource("root", path)
    tracked = _tracked(path)
    if tracked is not None and tracked.is_dir():
        return _model(path, tracked, tracked.name == RELEASE)
    if found:
        listed = "; ".join(f"{step.path.name} ({step.state}: {step.quarantined or step.why})" for step in found[-5:])
        raise NotACheckpoint(
            f"{path}: there are steps, and none of them can be resumed from: {listed}\n"
            "A step that another trainer wrote is loaded when --load names it, or once `mcore-rlhf adopt STEP` has verified it. "
            "To begin anew, give another folder."
        )
    if steps.looks_foreign(path):
        return _model(path, path, path.name == RELEASE)
    return LoadSource("nothing", path)


def _visible(path: Path) -> list[steps.Step]:
    """Steps that are not being written: leftovers of a killed save mean that there is nothing yet."""
    return [step for step in steps.listed(path) if not is_hidden(step.path)] if path.is_dir() else []


def _tracked(path: Path) -> Path | None:
    """The folder that Megatron's tracker names."""
    tracker = path / TRACKER
    try:
        text = tracker_text(tracker)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{tracker}: cannot be read: {error}") from error
    if text == RELEASE:
        return path / RELEASE
    return path / f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 19 else None


def _model(path: Path, iteration: Path, release: bool) -> LoadSource:
    if (iteration / "metadata.json").is_file():
        return LoadSource("megatron", path, release, "torch_dist")
    if (iteration / ".metadata").is_file():
        return LoadSource("megatron", path, release, "torch_dcp")
    return LoadSource("model", path, release)
