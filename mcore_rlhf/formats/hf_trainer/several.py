"""Several models in one folder, as an Accelerator saves what it prepared: each has its number in the names of its files.

No file says what a model is for, nor which optimizer trains which: those have one number that a script prepared in one order.
Source: accelerate 1.15.0, ``checkpointing.py`` (``save_accelerator_state``), ``accelerator.py`` (``save_state``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, Incomplete, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_files import RunFiles, numbered
from mcore_rlhf.formats.base import Format
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import StoredFile

from .reader import read_run

_MODEL = re.compile(r"(?:model|pytorch_model)_([1-9]\d?)\.(?:safetensors|bin)")
_OPTIMIZER = re.compile(r"optimizer_([1-9]\d?)\.bin")
_HEADS = ("score.weight", "v_head.weight", "v_head.summary.weight")
ACTOR, CRITIC = "actor", "critic"
Numbered = Callable[[int], Format]
"""The format of the weights of the model of a number."""


def _count(path: ReadablePath, names: re.Pattern[str]) -> int:
    found = (names.fullmatch(child.name) for child in path.iterdir())
    return max((int(match[1]) for match in found if match), default=0) + 1


def roles_of_models(path: ReadablePath, weights: Numbered) -> list[str]:
    """Whose models a folder has, in the order of their numbers; none where it has one.

    A critic has a value head. Where two would be called alike, the second and all further ones are called by their numbers.

    Args:
        path: The folder.
        weights: Gives the format of the weights of a number.
    """
    count, roles = _count(path, _MODEL), list[str]()
    for number in range(count if count > 1 else 0):
        role = CRITIC if _has_value_head(path, weights(number)) else ACTOR
        roles.append(role if role not in roles else f"model_{number}")
    return roles


def _has_value_head(path: ReadablePath, weights: Format) -> bool:
    try:
        source = weights.read(path, ReadOptions(optimizer=False))
    except CheckpointError:  # who opens it hears why
        return False
    return any(spec.name.endswith(_HEADS) for spec in source.model.params)


def read_one(
    path: ReadablePath, options: ReadOptions, files: RunFiles, roles: Sequence[str], weights: Numbered
) -> Source:
    """Open one of several models, with the optimizer and the schedule of its number.

    Args:
        path: The folder.
        options: Which role.
        files: What the first one's files are called.
        roles: Those of all, in the order of their numbers.
        weights: Gives the format of the weights of a number.

    Raises:
        Incomplete: A model is missing.
        Unsupported: Nobody knows which optimizer trains what.
        CheckpointError: See :func:`read_run`.
    """
    role = options.role or roles[0]
    number, optimizers = roles.index(role), _count(path, _OPTIMIZER)
    if not weights(number).detect(path):
        raise Incomplete(
            f"{path / f'model{numbered(number)}.safetensors'}: is missing, and there are models of higher numbers"
        )
    if options.optimizer and optimizers > len(roles):
        raise Unsupported(
            f"{path}: has {len(roles)} models and {optimizers} optimizers; no file says which trains what\n"
            "--no-optimizer takes the weights alone."
        )
    own = files.of_model(number)
    source = read_run(path, replace(options, role=role), own, weights(number), several=True)
    others = [StoredFile.at(path, name) for name in _of_others(path, files, number, len(roles))]
    text = f"model{numbered(number)} of {len(roles)}, and its optimizer is {own.optimizer}, if a script prepared both in one order"
    source.notes.add(Fate.NOTE, f"{role}: {text}; no file says what a model is for")
    return replace(source, files=(*source.files, *others))


def _of_others(path: ReadablePath, files: RunFiles, number: int, count: int) -> list[str]:
    """Files of the other models."""
    found = []
    for other in (one for one in range(count) if one != number):
        named = files.of_model(other)
        weights = (f"model{numbered(other)}.safetensors", f"pytorch_model{numbered(other)}.bin")
        found += [name for name in (*weights, named.optimizer, named.scheduler) if (path / name).is_file()]
    return found
