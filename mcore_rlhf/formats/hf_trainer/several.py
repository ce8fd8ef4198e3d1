"""Several models in one folder, as an Accelerator saves what it prepared: each has its number in the names of its files.

No file says what a model is for, nor which optimizer trains which: each are counted in the order in which a script prepared them, and what
is not trained, as a reference or a reward model, has no optimizer.
Source: accelerate 1.15.0, ``checkpointing.py`` (``save_accelerator_state``), ``accelerator.py`` (``save_state``, ``prepare_model``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice

from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, Incomplete, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.sidecar import sidecar_files
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_files import ACCELERATE, RunFiles, numbered, place_of_model
from mcore_rlhf.formats.base import Format
from mcore_rlhf.formats.checksums import listed_at
from mcore_rlhf.storage.paths import ReadablePath, absolute, files_below
from mcore_rlhf.storage.record_file import StoredFile

from .reader import read_run

_MODEL = re.compile(r"(?:model|pytorch_model)_([1-9]\d?)\.(?:safetensors|bin)")
_OPTIMIZER = re.compile(r"optimizer_([1-9]\d?)\.bin")
_WEIGHTS = (("model", "safetensors"), ("pytorch_model", "bin"))
_TOLD = ("st_size", "st_mtime_ns", "version")
_HEADS = ("score.weight", "v_head.weight", "v_head.summary.weight")
_MOST_WAYS, _SHOWN = 64, 8
ACTOR, CRITIC = "actor", "critic"
Numbered = Callable[[int], Format]
"""The format of the weights of the model of a number."""


def _count(path: ReadablePath, names: re.Pattern[str]) -> int:
    found = (names.fullmatch(child.name) for child in path.iterdir())
    return max((int(match[1]) for match in found if match), default=0) + 1


def roles_of_models(path: ReadablePath, weights: Numbered) -> list[str]:
    """Whose models a folder has, in the order of their numbers; none where it has one.

    Our manifest says whose, where it is there. Else a critic has a value head, and where two would be called alike, the second and all
    further ones are called by their numbers.

    Args:
        path: The folder.
        weights: Gives the format of the weights of a number.
    """
    count = _count(path, _MODEL)
    if count == 1:
        return []
    if len(said := _written_as(path)) == count:
        return said
    roles = list[str]()
    for number in range(count):
        role = CRITIC if _has_value_head(path, number, weights) else ACTOR
        roles.append(role if role not in roles else f"model_{number}")
    return roles


def _written_as(path: ReadablePath) -> list[str]:
    """The roles that our manifest gives the models of a folder, in the order of their numbers; none where it says none."""
    try:
        listed = listed_at(path)
    except CheckpointError:  # who opens it hears why
        return []
    parts = listed.manifest.parts if listed is not None and listed.file.parent == absolute(path) else ()
    said = [
        role for part in parts if isinstance(role := part.get("role"), str) and part.get("format") == ACCELERATE.format
    ]
    return said if len({*said}) == len(said) else []


def _has_value_head(path: ReadablePath, number: int, weights: Numbered) -> bool:
    """Whether one of them has a value head; its file is looked into once, however often somebody asks."""
    files = [path / f"{stem}{numbered(number)}.{end}" for stem, end in _WEIGHTS]
    told = [repr([getattr(file.stat(), name, 0) for name in _TOLD]) for file in files if file.is_file()]
    try:
        return _is_headed(path, number, weights, tuple(told))
    except CheckpointError:  # who opens it hears why
        return False


@lru_cache(maxsize=128)
def _is_headed(path: ReadablePath, number: int, weights: Numbered, told: tuple[str, ...]) -> bool:
    """The same of files of which so much is known: they are others where it changes."""
    specs = weights(number).read(path, ReadOptions(optimizer=False)).model.params
    return any(spec.name.endswith(_HEADS) for spec in specs)


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
    ways = ways_to_train(path, options, files, roles, weights) if options.optimizer else []
    own = optimizer_files(files, number, ways)
    source = read_run(path, replace(options, role=role), own, weights(number), several=True)
    opened = {file.path for file in source.files}
    others = [StoredFile.at(path, name) for name in _of_others(path, files, number, len(roles)) if name not in opened]
    trained = f"its optimizer is {own.optimizer}" if source.optimizer is not None else "it has no optimizer"
    text = f"model{numbered(number)} of {len(roles)}, and {trained}, if a script prepared both in one order"
    source.notes.add(Fate.NOTE, f"{role}: {text}; no file says what a model is for")
    if len(ways) == _MOST_WAYS or len({way.index(number) if number in way else None for way in ways}) > 1:
        source.notes.add(Fate.DERIVED, f"{role}: {_AMBIGUOUS.format(_listed(ways))}")
    return replace(source, files=(*source.files, *others))


_AMBIGUOUS = (
    "there are fewer optimizers than models, and by the shapes of their states they are those of {}: the first is taken. Where that is "
    "wrong, give each optimizer and schedule the number of its model, in a copy of the step: optimizer_1.bin, scheduler_1.bin"
)


def _listed(ways: Sequence[Sequence[int]]) -> str:
    shown = [" and ".join(f"model{numbered(number)}" for number in way) for way in ways[:_SHOWN]]
    return " or ".join([*shown, *(["others"] if len(ways) > _SHOWN else [])])


def optimizer_files(files: RunFiles, number: int, ways: Sequence[Sequence[int]]) -> RunFiles:
    """What the optimizer and the schedule of a model are called, nothing where it has none.

    Args:
        files: What the first ones are called.
        number: The model's.
        ways: See :func:`ways_to_train`; the first is taken, and without one they have the models' numbers.
    """
    if not ways:
        return files.of_model(number)
    return files.of_model(ways[0].index(number)) if number in ways[0] else replace(files, optimizer="", scheduler="")


def ways_to_train(
    path: ReadablePath, options: ReadOptions, files: RunFiles, roles: Sequence[str], weights: Numbered
) -> list[tuple[int, ...]]:
    """Of which models, in their order, the optimizers of a folder may be that has fewer, as the shapes of their states are.

    None where they have the models' numbers: where there is one for each, or some numbers between are free. Nor where no way is right: who
    opens the model hears what is wrong with it. The first way has those that come first; of very many, so many are enough.

    Args:
        path: The folder.
        options: How it is opened.
        files: What the first model's files are called.
        roles: Whose models it has.
        weights: Gives the format of the weights of a number.
    """
    count = _count(path, _OPTIMIZER)
    if count >= len(roles) or not all((path / files.of_model(at).optimizer).is_file() for at in range(count)):
        return []

    @cache
    def fits(at: int, number: int) -> bool:
        own = replace(options, role=roles[number])
        try:
            return read_run(path, own, files.of_model(at), weights(number), several=True).optimizer is not None
        except CheckpointError:
            return False

    @cache  # a stranger's folder may have more ways to go astray than anybody can walk
    def leads(at: int, first: int) -> bool:
        return next(ways(at, first), None) is not None

    def ways(at: int, first: int) -> Iterator[tuple[int, ...]]:
        if at == count:
            yield ()
        for number in range(first, len(roles) - count + at + 1) if at < count else ():
            if fits(at, number) and leads(at + 1, number + 1):
                yield from ((number, *rest) for rest in ways(at + 1, number + 1))

    return list(islice(ways(0, 0), _MOST_WAYS))


def _of_others(path: ReadablePath, files: RunFiles, number: int, count: int) -> list[str]:
    """Files of the other models, and all optimizers and schedules."""
    found = []
    for other in range(count):
        named = files.of_model(other)
        weights = [f"{stem}{numbered(other)}.{end}" for stem, end in _WEIGHTS if other != number]
        found += [name for name in (*weights, named.optimizer, named.scheduler) if (path / name).is_file()]
        if other == number:
            continue
        if place := place_of_model(other):
            found += [place + name for name in files_below(path / place)] if (path / place).is_dir() else []
        else:
            found += [file.path for file in sidecar_files(path)]
    return found
