"""Where a universal checkpoint is, a ``<tag>_uni`` folder or a root whose ``latest_universal`` names one; its files and their keys.

Source: DeepSpeed 0.19.8, ``checkpoint/{constants,ds_to_universal,universal_checkpoint}.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.errors import Incomplete, NotACheckpoint, UsageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, absolute, beneath

LATEST = "latest_universal"
SUFFIX = "_uni"
ZERO = "zero"
OPTIMIZER_FILE = "optimizer_state.pt"
MODEL_FILES = "mp_rank_*_model_states.pt"
"""What stages 1 and 2 look for."""
STAGE3_MODEL_FILES = "zero_pp_rank_*_mp_rank_*_model_states.pt"
"""What stage 3 looks for; it loads those of ``zero_pp_rank_0``."""

FP32 = "fp32"
STEP = "step"
PARAM_KEY = "param"
WRITTEN_AGAIN = "Convert the checkpoint again, or copy the folder again from where it came from."

_NUMBERS = re.compile(r"(\d+)")


def state_key(state: str) -> str:
    """The file name's stem for a state: the master copy is ``fp32``, all others keep their names."""
    return FP32 if state == MASTER else state


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key by which ``rank_10`` comes after ``rank_9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(text)]


def model_file(mp_rank: int) -> str:
    """The file of a model-parallel rank for stages 1 and 2."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def stage3_model_file(mp_rank: int) -> str:
    """The one file of a model-parallel rank that stage 3 reads."""
    return f"zero_pp_rank_0_mp_rank_{mp_rank:02d}_model_states.pt"


@dataclass(frozen=True, slots=True)
class UniversalFolder:
    """A checkpoint that was found.

    Args:
        root: The folder that has ``latest_universal``.
        name: The checkpoint's folder in it.
    """

    root: ReadablePath
    name: str

    @property
    def folder(self) -> ReadablePath:
        """The checkpoint's folder."""
        return self.root / self.name

    @property
    def tag(self) -> str:
        """The tag of the training run: the folder's name without ``_uni``."""
        return self.name.removesuffix(SUFFIX)


def is_universal_folder(path: ReadablePath) -> bool:
    """Whether a folder is one checkpoint, whole or damaged."""
    if not (path / ZERO).is_dir():
        return False
    beside = (next(path.glob(pattern), None) for pattern in (MODEL_FILES, STAGE3_MODEL_FILES))
    return (path / ZERO / OPTIMIZER_FILE).is_file() or any(beside)


def is_universal_root(path: ReadablePath) -> bool:
    """Whether a folder has ``latest_universal``, and no ``latest`` that names a checkpoint of the training run itself."""
    return (path / LATEST).is_file() and not (path / "latest").is_file()


def locate(path: ReadablePath, step: int | None) -> UniversalFolder:
    """Find the checkpoint that a path means.

    Args:
        path: A ``<tag>_uni`` folder, or a root.
        step: Which one of a root, by the number at the end of its tag; None for that in ``latest_universal``.

    Raises:
        NotACheckpoint: There is none.
        Incomplete: ``latest_universal`` names a folder that is not there.
        UsageError: No checkpoint of the root, or more than one, has that step.
    """
    path = absolute(path)
    if is_universal_folder(path):
        return UniversalFolder(path.parent, path.name)
    if step is not None:
        return _of_step(path, step)
    tracker = path / LATEST
    if not tracker.is_file():
        raise NotACheckpoint(f"{path}: expected a folder with zero/ in it, or {LATEST}, found neither")
    name = reading.read_line(tracker)
    if not name or not is_universal_folder(beneath(path, name)):
        raise Incomplete(
            f"{tracker}: names {name!r}, but {path / name if name else path} is not a universal checkpoint{_others(path)}\n"
            "A conversion was interrupted, or the folder was deleted: convert again, or give the folder of another one."
        )
    return UniversalFolder(path, name)


def _of_step(path: ReadablePath, step: int) -> UniversalFolder:
    ending = re.compile(rf"(.*\D)?0*{step}{SUFFIX}")
    found = [name for name in _checkpoints(path) if ending.fullmatch(name)]
    if len(found) == 1:
        return UniversalFolder(path, found[0])
    what = f"{len(found)} checkpoints have" if found else "no universal checkpoint has"
    raise UsageError(f"{path}: {what} step {step}{_others(path)}\nGive the folder itself.")


def _checkpoints(path: ReadablePath) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(child.name for child in path.iterdir() if child.is_dir() and is_universal_folder(child))


def _others(path: ReadablePath) -> str:
    names = _checkpoints(path)
    return f" (there are: {', '.join(names[:8])})" if names else ""
