"""Comparing a step of one run with the same step of another: every file, every value."""

from __future__ import annotations

import filecmp
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.errors import Corrupt
from mcore_rlhf.manager.run.steps import MANIFEST, read_manifest
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.manifest import check
from mcore_rlhf.storage.mapped import MappedFile
from mcore_rlhf.storage.ptfile import read_pt

from .findings import Finding, Tally
from .leaves import LeafComparer, TensorComparer
from .tensors import StoredBytes, TensorDiffer
from .volatile import Ignored, Neutral


@dataclass(slots=True)
class StateComparison:
    """What comparing two steps found.

    Args:
        files: Files that were compared.
        tally: Their values.
    """

    files: int = 0
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class StepComparer:
    """Compares steps of two runs.

    Args:
        outputs: Output folders of the two runs, whose names may stand in the values.
        ignored: What is not compared.
        stubs: Pickled classes to load as inert stubs.
    """

    outputs: tuple[Path, Path]
    ignored: Ignored = field(default_factory=Ignored)
    stubs: tuple[str, ...] = ()

    def compare(self, a: Path, b: Path) -> StateComparison:
        """Compare two steps.

        Args:
            a: Folder of the uninterrupted run's step.
            b: Folder of the other one's.

        Raises:
            CheckpointError: One of the two is damaged, or holds what may not be loaded.
        """
        for folder in (a, b):
            check(folder, read_manifest(folder)).raise_if_any()
        result = StateComparison()
        files = [{*read_manifest(folder).files, MANIFEST} for folder in (a, b)]
        for file in sorted(files[0] | files[1]):
            if file in files[0] and file in files[1]:
                result.files += 1
                self._compare_file(file, a, b, result.tally)
            else:
                there = ["there" if file in names else "not there" for names in files]
                result.tally.differs(Finding(file, "", there[0], there[1]))
        return result

    def _compare_file(self, file: str, a: Path, b: Path, tally: Tally) -> None:
        if file.endswith(".pt"):
            self._compare_pt(file, a, b, tally)
        elif file.endswith(".json"):
            self._leaves(file, _no_tensors, tally).compare(_json(a / file), _json(b / file))
        else:
            _compare_bytes(file, a, b, tally)

    def _compare_pt(self, file: str, a: Path, b: Path, tally: Tally) -> None:
        first, second = (read_pt(folder, file, stubs=self.stubs) for folder in (a, b))
        with closing(MappedFile(a / file)) as bytes_a, closing(MappedFile(b / file)) as bytes_b:
            differ = TensorDiffer(StoredBytes(first, bytes_a), StoredBytes(second, bytes_b))
            self._leaves(file, differ, tally).compare(first.tree, second.tree)

    def _leaves(self, file: str, tensors: TensorComparer, tally: Tally) -> LeafComparer:
        return LeafComparer(file, tensors, self.ignored, (Neutral(self.outputs[0]), Neutral(self.outputs[1])), tally)


def _no_tensors(a: object, b: object) -> str | None:
    raise TypeError("JSON holds no tensors")


def _json(path: Path) -> object:
    """Numbers as they are written: two different texts are two different values."""
    try:
        value: object = regular.parse_json(regular.read_bytes(path), parse_float=_Number, parse_constant=_Number)
    except ValueError as error:
        raise Corrupt(f"{path}: is not JSON: {error}") from None
    return value


class _Number(str):
    """A number as it was written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _compare_bytes(file: str, a: Path, b: Path, tally: Tally) -> None:
    """A file of another kind, as one value."""
    if filecmp.cmp(a / file, b / file, shallow=False):
        tally.same()
    else:
        first, second = (f"{(folder / file).stat().st_size} bytes" for folder in (a, b))
        tally.differs(Finding(file, "", first, second, "compared as bytes: its format is not looked into"))
