"""The files of a role's folder, one of each kind for every rank, and ``fsdp_config.json``, which says of how many ranks they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mcore_rlhf.errors import Incomplete, LayoutMismatch, NotACheckpoint, Problems
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
CONFIG, VERSION, WORLD = "fsdp_config.json", "FSDP_version", "world_size"
_NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,18})_rank_(\d{1,18})\.pt")


def is_rank_files(folder: ReadablePath) -> bool:
    """Whether a folder holds the model's files of some ranks."""
    return folder.is_dir() and any(folder.glob("model_world_size_*_rank_*.pt"))


def lone_optimizer(folder: ReadablePath) -> str:
    """A file of the optimizer of some rank, where the model's lie nowhere beside it; empty where there is none.

    verl's ``save_contents`` may have ``optimizer`` and no ``model``; its loader stops at such a step.
    """
    if is_rank_files(folder) or not folder.is_dir():
        return ""
    return next((path.name for path in sorted(folder.glob(f"{OPTIMIZER}_world_size_*_rank_*.pt"))), "")


def rank_files(root: ReadablePath, *, optimizer: bool) -> dict[str, list[str]]:
    """The files of each kind, by rank; those of the optimizer may all be left out, and those of the RNG states: a run saves a kind of
    every rank or of none, and goes on from nothing less.

    Args:
        root: The folder.
        optimizer: Whether the optimizer's are needed.

    Raises:
        LayoutMismatch: Several runs' files are mixed.
        Incomplete: A rank's file is missing.
    """
    world = _world(root)
    files = {kind: _names(root, kind, world) for kind in (MODEL, OPTIMIZER, EXTRA)}
    _check_complete(root, files, world, optimizer=optimizer)
    return files


def said_of_run(root: ReadablePath) -> Mapping[str, object]:
    """What ``fsdp_config.json`` says; nothing where it cannot be read."""
    try:
        said = reading.read_json(root / CONFIG)
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, Mapping) else {}


def _world(root: ReadablePath) -> int:
    """Ranks that wrote: as ``fsdp_config.json`` says, or as all names do."""
    worlds = {int(m[2]) for path in root.iterdir() if (m := _NAME.fullmatch(path.name))}
    said = said_of_run(root).get(WORLD)
    worlds = {said} if isinstance(said, int) and said in worlds else worlds
    if not worlds:
        raise NotACheckpoint(f"{root}: holds no rank files ({file_of(MODEL, 2, 0)}, …)")
    if len(worlds) != 1:
        raise LayoutMismatch(
            f"{root}: holds rank files of the world sizes {sorted(worlds)}, and fsdp_config.json does not say which is meant\n"
            "Move those of the other run away."
        )
    (world,) = worlds
    if world > MOST_RANKS:
        raise LayoutMismatch(
            f"{root}: holds rank files of a world of {world:,}; no run has more than {MOST_RANKS:,} ranks"
        )
    return world


def file_of(kind: str, world: int, rank: int) -> str:
    """What a rank's file is called."""
    return f"{kind}_world_size_{world}_rank_{rank}.pt"


def _names(root: ReadablePath, kind: str, world: int) -> list[str]:
    """The files of one kind that are there, by rank."""
    names = (file_of(kind, world, rank) for rank in range(world))
    return [name for name in names if (root / name).is_file()]


def _check_complete(root: ReadablePath, files: Mapping[str, Sequence[str]], world: int, *, optimizer: bool) -> None:
    problems = Problems()
    for kind in (MODEL, EXTRA, OPTIMIZER) if optimizer else (MODEL, EXTRA):
        there = set(files[kind])
        for rank in range(world) if there or kind == MODEL else ():
            name = file_of(kind, world, rank)
            if name not in there:
                problems.add(
                    Incomplete, f"{root / name}: missing; {world} ranks wrote this checkpoint",
                    "Each node writes the files of its own ranks: bring those of all nodes together.",
                )  # fmt: skip
    problems.raise_if_any()
