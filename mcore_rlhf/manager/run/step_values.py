"""What lies beside the models of a step, opened as a resume would open it: data, RLHF state, random states.

Checksums say that a file is what was written; they do not say that it can be read, nor that reading it is safe.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, Corrupt, Problems
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.paths import cannot_open
from mcore_rlhf.storage.ptfile import read_pt

from .own_checksums import check_records

FOLDERS = ("data", "rlhf", "rng")
"""Folders of a step that hold values, not models."""


def holds_values(name: str) -> bool:
    """Whether a file, by its path relative to the step's folder, lies in one of :data:`FOLDERS`."""
    return name.partition("/")[0] in FOLDERS


def check_values(
    folder: Path, files: Collection[str], stubs: Collection[str] = (), *, records: bool = True
) -> Problems:
    """Open every ``.pt`` file, and every ``.json`` file in :data:`FOLDERS`. No code of a pickle is run, and no tensor is made.

    Args:
        folder: The step's folder.
        files: Those of its files, relative to the folder, that belong to no model; others than the above are passed over.
        stubs: Pickled classes that may become inert stubs, besides those of the known frameworks.
        records: Whether the checksums that a ``.pt`` file carries are verified too: where no manifest vouches for it.

    Returns:
        Every file that is torn or damaged, is not JSON, or would run code; nothing where all can be read.
    """
    problems = Problems()
    for name in sorted(filter(_is_opened, files)):
        try:
            _check_value(folder, name, stubs, records)
        except CheckpointError as error:
            problems.add_error(error)
    return problems


def _is_opened(name: str) -> bool:
    return name.endswith(".pt") or (name.endswith(".json") and holds_values(name))


def _check_value(folder: Path, name: str, stubs: Collection[str], records: bool) -> None:
    if name.endswith(".json"):
        return _check_json(folder / name)
    read_pt(folder, name, stubs=stubs)
    if records:
        check_records(folder / name)
    return None


def _check_json(path: Path) -> None:
    try:
        regular.read_json(path)
    except OSError as error:
        raise cannot_open(error, path) from error
    except ValueError as error:
        raise Corrupt(f"{path}: is not valid JSON: {error}") from error
