"""Files of a checkpoint's folder that no reader opens: which go along byte for byte, and why the others may not.

There is no list of names that are carried: a tokenizer has other files every year. There is a list of what is *not* carried
instead, and each file that stays behind has one of its reasons.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mcore_rlhf.core.facts import Reason

from ..errors import Problems, StorageError, Unreadable, Untrusted
from .links import enclose, require_inside
from .nested import calls_of_file
from .paths import ReadablePath, storage_error
from .publish import MANIFEST_NAME

MAX_CARRIED = 64 << 20
"""Bytes of the largest file that is carried: tokenizers have up to 35 MB, weights seldom less than this."""
MAX_FILES = 10_000
"""Files that are carried at most: a folder with more is no checkpoint's, but somebody's home."""

_DEEP = 64
"""Folders in one another, from which on none is entered."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no reader opened.

    Args:
        path: Relative to the folder, with ``/``.
        nbytes: Its length; 0 where it is no regular file.
        reason: Why it stays behind; None where it is carried.
    """

    path: str
    nbytes: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class CarriedFiles:
    """The files of one folder that belong to a checkpoint and are none of its tensors.

    Args:
        folder: The folder.
        found: All of them, and those that stay behind.
        texts: What takes the place of some, by path.
        of_model: Whether the folder is a model's own, so that these are all files which no reader opened.
        inner: A folder in it whose files go along as if they lay in the folder itself; empty for none.
    """

    folder: ReadablePath
    found: tuple[Leftover, ...]
    texts: Mapping[str, str] = field(default_factory=dict)
    of_model: bool = False
    inner: str = ""

    @property
    def files(self) -> dict[str, ReadablePath]:
        """Those that go along byte for byte, by path relative to the folder."""
        there = (item.path for item in self.found if item.reason is None)
        named = {path.removeprefix(f"{self.inner}/") if self.inner else path: self.folder / path for path in there}
        return {path: file for path, file in named.items() if path not in self.texts}


_WEIGHTS = frozenset(
    {
        ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data",
        ".npz", ".npy", ".tflite", ".pdparams", ".nemo", ".ot", ".mlpackage", ".engine", ".metadata",
    }
)  # fmt: skip
"""Endings of files with tensors in them."""
_NO_WEIGHTS = re.compile(r"(training_args|tokenizer.*|vocab.*)\.bin")
"""Names with such an ending that hold none. Source: transformers 5.23.0, ``trainer.py`` (``TRAINING_ARGS_NAME``)."""
_INDEX = re.compile(r".*\.(safetensors|bin|h5|msgpack)\.index(\..+)?\.json")
OPTIMIZER, COUNTERS = "the optimizer", "trainer_state.json"
WITH_OPTIMIZER = (OPTIMIZER, "the learning-rate scheduler", "the loss scaler")
"""What goes with the optimizer where that is left out."""
_OF_TRAINERS = {
    r"(optimizer|optim)([_.-].*)?\.(pt|pth|bin|pkl|safetensors)|.*_optim_states\.pt": OPTIMIZER,
    r"scheduler([_.-].*)?\.(pt|pth|bin|pkl|safetensors)": WITH_OPTIMIZER[1],
    r"scaler([_.-].*)?\.(pt|pth|bin|pkl|safetensors)": WITH_OPTIMIZER[2],
    r"(rng_state|random_states)([_.-].*)?\.(pt|pth|bin|pkl|safetensors)": "random states of a rank",
    r"(sampler|dl_state_dict)(_\d+)?\.bin|data(_\d+)?\.pt": "the data loader's position",
    re.escape(COUNTERS): "the trainer's counters",
}
"""Source: transformers 5.23.0, ``trainer.py`` (``OPTIMIZER_NAME``, …), ``trainer_callback.py``; accelerate 1.15.0, ``utils/constants.py``,
``checkpointing.py``; DeepSpeed 0.19.8, ``runtime/engine.py`` (``_get_zero_ckpt_name``); verl 0.9.1,
``utils/checkpoint/checkpoint_handler.py``."""
_TRAINER_FOLDER = re.compile(r"(optimizer|optim)(_\d+)?")
_FOREIGN_FOLDERS = frozenset(
    {".git", ".hg", ".svn", ".dvc", ".cache", ".huggingface", ".locks", "__pycache__", ".ipynb_checkpoints"}
)
_FOREIGN_FILES = frozenset({".gitattributes", ".gitignore", ".gitmodules", ".lfsconfig", ".dvcignore", ".DS_Store"})


def leftovers(folder: ReadablePath, opened: Collection[str], stubs: Collection[str] = ()) -> tuple[Leftover, ...]:
    """Every file of a folder that no reader opened, in order of path. Those that would go along, and might be pickles, are looked into.

    Our own manifest counts as opened: it is about the folder, and is written anew.

    Args:
        folder: The checkpoint's folder, with all that lies below it. Links to files are followed where :mod:`.links` lets them lead,
            those to folders are not.
        opened: Paths of the files that were opened, relative to the folder, with ``/``.
        stubs: Full names of classes that pickles among them may make, besides those on the closed list.

    Raises:
        Untrusted: Files that would go along are links that lead out of the folder; all of them.
        StorageError: The folder cannot be listed.
    """
    known, found, carried = {*opened, MANIFEST_NAME}, list[Leftover](), 0
    enclose(folder)
    problems = Problems()
    for path in sorted(_paths(folder)):
        if path in known:
            continue
        reason, nbytes = _judged(folder / path, path)
        if reason is None and carried == MAX_FILES:
            reason = Reason.TOO_MANY
        if reason is None:
            carried += 1
            reason = look_into(folder / path, stubs, problems)
        found.append(Leftover(path, nbytes, reason))
    problems.raise_if_any()
    return tuple(found)


def look_into(
    file: ReadablePath, stubs: Collection[str], problems: Problems, *, beside: Path | None = None
) -> Reason | None:
    """Why a file stays behind: where it leads, and whether whoever unpickles it would run what we do not know.

    Args:
        file: It.
        stubs: Full names of classes that it may make, besides those on the closed list.
        problems: Told of a link that leads elsewhere.
        beside: See :func:`.links.require_inside`.
    """
    try:
        require_inside(file, beside=beside)
        return Reason.CALLS if calls_of_file(file, stubs) else None
    except Untrusted as error:
        problems.add_error(error)
        return None
    except (StorageError, Unreadable):
        return Reason.UNREADABLE


def reason_of_name(path: str) -> Reason | None:
    """Why a file of that name stays behind, whatever is in it; None where nothing is to be said against the name.

    Args:
        path: Relative to the checkpoint's folder, with ``/``.
    """
    *folders, name = PurePosixPath(path).parts
    if not _is_plain(path):
        return Reason.ODD_NAME
    if name in _FOREIGN_FILES or not _FOREIGN_FOLDERS.isdisjoint((*folders, name)):
        return Reason.VERSION_CONTROL
    if name != COUNTERS and of_trainer(path):  # which is text, and goes along
        return Reason.TRAINER
    ending = PurePosixPath(name).suffix or name  # ``.metadata`` is all ending
    if _INDEX.fullmatch(name) or (ending in _WEIGHTS and not _NO_WEIGHTS.fullmatch(name)):
        return Reason.WEIGHTS
    return None


def of_trainer(path: str) -> str:
    """What of a trainer's state a file holds, by its name; empty where it holds none.

    Args:
        path: Relative to the checkpoint's folder, with ``/``.
    """
    *folders, name = PurePosixPath(path).parts
    if any(map(_TRAINER_FOLDER.fullmatch, folders)):
        return OPTIMIZER
    return next((what for pattern, what in _OF_TRAINERS.items() if re.fullmatch(pattern, name)), "")


def _paths(folder: ReadablePath) -> Iterator[str]:
    """All files below, and folders that are not entered: links, version control, those that cannot be listed, those deep down."""
    waiting = [PurePosixPath()]
    while waiting:
        inner = waiting.pop()
        try:
            listed = list((folder / inner).iterdir()) if len(inner.parts) < _DEEP else None
        except OSError as error:
            if not inner.parts:  # then nobody knows what does not go along
                raise storage_error(error, folder, "list") from error
            listed = None
        if listed is None:
            yield str(inner)
        for child in listed or ():
            path = inner / child.name
            if child.name not in _FOREIGN_FOLDERS and child.is_dir() and not child.is_symlink():
                waiting.append(path)
            else:
                yield str(path)


def _judged(file: ReadablePath, path: str) -> tuple[Reason | None, int]:
    try:
        nbytes = file.stat().st_size
    except FileNotFoundError:
        return Reason.DANGLING, 0
    except OSError:
        return Reason.UNREADABLE, 0
    if file.is_dir():
        return _of_folder(file, path), 0
    if not file.is_file():
        return Reason.NOT_REGULAR, 0
    reason = reason_of_name(path) or (Reason.TOO_LARGE if nbytes > MAX_CARRIED else None)
    if reason is None and isinstance(file, Path) and not os.access(file, os.R_OK):
        reason = Reason.UNREADABLE
    return reason, nbytes


def _of_folder(path: ReadablePath, inner: str) -> Reason:
    """Why a folder was not entered."""
    if path.name in _FOREIGN_FOLDERS:
        return Reason.VERSION_CONTROL
    if path.is_symlink():
        return Reason.LINKED_FOLDER
    return Reason.TOO_DEEP if inner.count("/") + 1 >= _DEEP else Reason.UNREADABLE


def _is_plain(path: str) -> bool:
    """Whether it can be written anywhere, and stand in a manifest and a message."""
    return path.isprintable() and "\\" not in path  # bytes that are no UTF-8 are not printable, either
