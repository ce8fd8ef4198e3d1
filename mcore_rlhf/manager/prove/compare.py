"""Comparing a step of one run with the same step of another: every file, every value, bit by bit."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rlhf.core.cast import as_floats
from mcore_rlhf.core.catalog import FLOATING, dtype_of
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.reading import ByteSource, MappedFile, opened
from mcore_rlhf.storage.safetensors import read_safetensors
from mcore_rlhf.storage.stored import NAMESPACES, StoredArray, StoredTensor, Stub
from mcore_rlhf.storage.torch_values import SmallTensor

from .ignored import Ignored
from .places import checked_files
from .profiles import EXACT, MeasuredDifference, Profile, between, decimal

_MOST = 1000

_ABSENT = object()

TensorComparer = Callable[[StoredTensor, StoredTensor], "str | None"]
"""Compares the bytes of two stored tensors of one shape and type: None where they are equal, otherwise what differs."""

TensorDistance = Callable[[StoredTensor, StoredTensor], tuple[float, float]]
"""Of two stored tensors of one shape and type: the largest difference, and the largest magnitude in the first."""

_WINDOW_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One value that is not the same.

    Args:
        where: The file.
        key: Place of the value in it: ``optimizer/state/0/exp_avg``.
        first: What the uninterrupted run has.
        second: What the other one has.
        detail: More about it: the first element that differs, and how many do.
    """

    where: str
    key: str
    first: str
    second: str
    detail: str = ""


@dataclass(slots=True)
class ComparisonTally:
    """Counts what was compared, and keeps what differs.

    Args:
        compared: Values that were compared.
        ignored: Values that may differ, and were not compared.
        findings: The first 1000 differences.
        differing: How many there are.
        within: Values that are not the same, and that the profile lets pass.
        worst: The one of them that takes most of what is allowed; None where there is none.
    """

    compared: int = 0
    ignored: int = 0
    findings: list[Finding] = field(default_factory=list)
    differing: int = 0
    within: int = 0
    worst: MeasuredDifference | None = None

    @property
    def equal(self) -> bool:
        """Whether something was compared, and nothing differs by more than the profile allows."""
        return self.compared > 0 and not self.differing

    def same(self) -> None:
        """Count a value that is equal."""
        self.compared += 1

    def passes(self, off: MeasuredDifference) -> None:
        """Count a value that is not equal, and near enough."""
        self.compared += 1
        self.within += 1
        if self.worst is None or off.share > self.worst.share:
            self.worst = off

    def differs(self, finding: Finding) -> None:
        """Count a value that is not."""
        self.compared += 1
        self.differing += 1
        if len(self.findings) < _MOST:
            self.findings.append(finding)


def shown(value: object, width: int = 60) -> str:
    """A value in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def children(value: object) -> dict[str, object] | None:
    """The values inside a value, by the name of their place; None where it is a leaf."""
    if isinstance(value, dict):
        return {_name(key): item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    if isinstance(value, NAMESPACES):
        return dict(vars(value))
    if isinstance(value, Stub):
        parts = {"args": value.stub_args, "state": value.stub_state, "items": value.stub_items}
        return {name: part for name, part in parts.items() if part not in (None, ())}
    return None


def _name(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


@dataclass(frozen=True, slots=True)
class LeafComparer:
    """Compares the two trees of one file.

    Args:
        file: Its path in the step.
        tensors: Compares stored tensors.
        ignored: What is not compared.
        outputs: Of either run: its own folder, which is taken out of texts.
        tally: Counts.
        profile: How far values may be off.
        distance: Measures how far two tensors are apart, and the largest magnitude in the first.
    """

    file: str
    tensors: TensorComparer
    ignored: Ignored
    outputs: tuple[Path, Path]
    tally: ComparisonTally
    profile: Profile = EXACT
    distance: TensorDistance | None = None

    def compare(self, a: Any, b: Any) -> None:
        """Compare, and count what is found."""
        for key, first, second in _pairs(a, b, ""):
            if self.ignored.value(self.file, key):
                self.tally.ignored += 1
                continue
            finding = self._difference(key, first, second)
            off = None if finding is None else self._off(key, first, second)
            if finding is None:
                self.tally.same()
            elif off is not None and off.within:
                self.tally.passes(off)
            else:
                self.tally.differs(finding if off is None else measured(finding, off))

    def _off(self, key: str, a: object, b: object) -> MeasuredDifference | None:
        """How far two values that differ are apart, where the profile leaves room; a tensor without dimensions is a counter."""
        row = self.profile.row(f"{self.file}:{key}")
        if row is None:
            return None
        if isinstance(a, _Number) and isinstance(b, _Number):
            return between(self.file, key, decimal(a), decimal(b), row)
        if self.distance is None or not isinstance(a, StoredTensor) or not isinstance(b, StoredTensor):
            return None
        if _kind(a) != _kind(b) or a.record.dtype not in FLOATING or not a.shape:
            return None
        off, largest = self.distance(a, b)
        return MeasuredDifference(self.file, key, off, row.absolute + row.relative * largest)

    def _difference(self, key: str, a: object, b: object) -> Finding | None:
        if isinstance(a, StoredTensor) and isinstance(b, StoredTensor) and _kind(a) == _kind(b):
            detail = self.tensors(a, b)
            return Finding(self.file, key, _kind(a), _kind(b), detail) if detail is not None else None
        if type(a) is str and type(b) is str:
            a, b = (text.replace(str(own), "{dir}") for text, own in zip((a, b), self.outputs, strict=True))
        return None if same_leaf(a, b) else Finding(self.file, key, _text(a), _text(b))


def measured(finding: Finding, off: MeasuredDifference) -> Finding:
    """The finding, with how far it is off and what the profile would have allowed."""
    said = f"off by {off.off:.3g}, allowed {off.allowed:.3g}"
    return replace(finding, detail=f"{finding.detail}; {said}" if finding.detail else said)


def _pairs(a: object, b: object, at: str) -> Iterator[tuple[str, object, object]]:
    """Leaves that stand at the same place; where the two trees have other shapes, the place itself."""
    inside_a, inside_b = children(a), children(b)
    if inside_a is None or inside_b is None or type(a) is not type(b) or not (inside_a or inside_b):
        yield at, a, b
        return
    for name in dict.fromkeys([*inside_a, *inside_b]):
        place = f"{at}/{name}" if at else name
        yield from _pairs(inside_a.get(name, _ABSENT), inside_b.get(name, _ABSENT), place)


def same_leaf(a: object, b: object) -> bool:
    """Whether two values are the same: of one type, and to the last bit. NaN is NaN, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b) or (isinstance(a, complex) and repr(a) == repr(b))


def _kind(tensor: StoredTensor) -> str:
    return f"{tensor.record.dtype} {list(tensor.shape)}"


def _text(value: object) -> str:
    if value is _ABSENT:
        return "not there"
    if isinstance(value, StoredTensor):
        return _kind(value)
    if isinstance(value, StoredArray):
        return shown(value.array())
    inside = children(value)
    return f"{type(value).__name__} of {len(inside)}" if inside else shown(value)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of one file's tensors.

    Args:
        pt: The file, opened; None where every tensor lies in one piece.
        mapped: Its bytes.
    """

    pt: PtFile | None
    mapped: ByteSource

    def windows(self, tensor: StoredTensor) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's elements in logical order, as flat arrays of bytes; a window is valid until the next one."""
        nbytes = prod(tensor.shape) * tensor.record.dtype.itemsize
        if self.pt is not None and not is_contiguous(tensor):
            whole = _bytes_of(self.pt, tensor)
            yield from (whole[at : at + _WINDOW_NBYTES] for at in range(0, nbytes, _WINDOW_NBYTES))
            return
        start = tensor.record.byte_offset + tensor.start * tensor.record.dtype.itemsize
        for at in range(0, nbytes, _WINDOW_NBYTES):
            count = min(_WINDOW_NBYTES, nbytes - at)
            yield np.frombuffer(self.mapped.view(start + at, count), np.uint8)
            self.mapped.release(start + at, count)


def is_contiguous(tensor: StoredTensor) -> bool:
    """Whether the elements lie one after another."""
    expected = 1
    for length, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _bytes_of(pt: PtFile, tensor: StoredTensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(pt.load(tensor).contiguous(), np.uint8)


@dataclass(frozen=True, slots=True)
class TensorDiffer:
    """Compares tensors of two files.

    Args:
        a: The uninterrupted run's.
        b: The other one's.
    """

    a: StoredBytes
    b: StoredBytes

    def __call__(self, a: StoredTensor, b: StoredTensor) -> str | None:
        """What differs between two tensors of one shape and type; None where nothing does."""
        itemsize, differing, first, at = a.record.dtype.itemsize, 0, "", 0
        for left, right in zip(self.a.windows(a), self.b.windows(b), strict=True):
            if not np.array_equal(left, right):
                wrong = np.flatnonzero((left != right).reshape(-1, itemsize).any(axis=1))
                differing += len(wrong)
                first = first or _first(a, at, int(wrong[0]), left, right)
            at += len(left) // itemsize
        return f"{differing} of {at} elements; first: {first}" if differing else None

    def distance(self, a: StoredTensor, b: StoredTensor) -> tuple[float, float]:
        """The largest difference of two elements, infinite where one is no number, and the largest magnitude in ``a``."""
        dtype, off, largest = a.record.dtype, 0.0, 0.0
        for left, right in zip(self.a.windows(a), self.b.windows(b), strict=True):
            word = np.dtype(f"u{dtype.itemsize}")
            first, second = (as_floats(np.array(side).view(word), dtype) for side in (left, right))
            apart = np.where(left.view(word) == right.view(word), 0.0, np.abs(first - second))
            off = max(off, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)))
            largest = max(largest, float(np.abs(first[np.isfinite(first)]).max(initial=0.0)))
        return off, largest


def _first(
    tensor: StoredTensor, before: int, index: int, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]
) -> str:
    place = [int(number) for number in np.unravel_index(before + index, tensor.shape)] if tensor.shape else []
    values = [_value(tensor.record.dtype.name, window, index) for window in (left, right)]
    return f"{place} is {values[0]} and {values[1]}"


def _value(dtype: str, window: np.ndarray[Any, Any], index: int) -> str:
    kind = dtype_of(dtype)
    raw = window[index * kind.itemsize : (index + 1) * kind.itemsize].tobytes()
    return repr(SmallTensor(raw, kind, (), ()).item())


@dataclass(slots=True)
class StateComparison:
    """What comparing two steps found.

    Args:
        files: Files that were compared.
        tally: Their values.
    """

    files: int = 0
    tally: ComparisonTally = field(default_factory=ComparisonTally)


@dataclass(frozen=True, slots=True)
class StepComparer:
    """Compares steps of two runs.

    Args:
        outputs: Output folders of the two runs, whose names may stand in the values.
        ignored: What is not compared.
        stubs: Pickled classes to load as inert stubs.
        profile: How far values may be off.
    """

    outputs: tuple[Path, Path]
    ignored: Ignored = field(default_factory=Ignored)
    stubs: tuple[str, ...] = ()
    profile: Profile = EXACT

    def compare(self, a: Path, b: Path) -> StateComparison:
        """Compare two steps.

        Args:
            a: Folder of the uninterrupted run's step.
            b: Folder of the other one's.

        Raises:
            CheckpointError: One of the two is damaged, or holds what may not be loaded.
        """
        result = StateComparison()
        files = [checked_files(folder) for folder in (a, b)]
        for file in sorted(files[0] | files[1]):
            if file in files[0] and file in files[1]:
                result.files += 1
                self._compare_file(file, a, b, result.tally)
            else:
                there = ["there" if file in names else "not there" for names in files]
                result.tally.differs(Finding(file, "", there[0], there[1]))
        return result

    def _compare_file(self, file: str, a: Path, b: Path, tally: ComparisonTally) -> None:
        if file.endswith((".pt", ".pth")):
            self._compare_pt(file, a, b, tally)
        elif file.endswith(".json"):
            replace(self._leaves(file, _no_tensors, tally), profile=self.profile).compare(
                _json(a / file), _json(b / file)
            )
        elif file.endswith(".safetensors"):
            self._compare_safetensors(file, a, b, tally)
        elif self.ignored.value(file, ""):
            tally.ignored += 1
        else:
            _compare_bytes(file, a, b, tally)

    def _compare_pt(self, file: str, a: Path, b: Path, tally: ComparisonTally) -> None:
        first, second = (read_pt(folder, file, stubs=self.stubs) for folder in (a, b))
        with opened(a / file, MappedFile) as bytes_a, opened(b / file, MappedFile) as bytes_b:
            differ = TensorDiffer(StoredBytes(first, bytes_a), StoredBytes(second, bytes_b))
            leaves = self._leaves(file, differ, tally)
            replace(leaves, profile=self.profile, distance=differ.distance).compare(first.tree, second.tree)

    def _compare_safetensors(self, file: str, a: Path, b: Path, tally: ComparisonTally) -> None:
        first, second = (read_safetensors(folder, file) for folder in (a, b))
        with opened(a / file, MappedFile) as bytes_a, opened(b / file, MappedFile) as bytes_b:
            differ = TensorDiffer(StoredBytes(None, bytes_a), StoredBytes(None, bytes_b))
            leaves = replace(self._leaves(file, differ, tally), profile=self.profile, distance=differ.distance)
            leaves.compare(dict(first.tensors), dict(second.tensors))

    def _leaves(self, file: str, tensors: TensorComparer, tally: ComparisonTally) -> LeafComparer:
        return LeafComparer(file, tensors, self.ignored, self.outputs, tally)


def _no_tensors(a: object, b: object) -> str | None:
    raise TypeError("JSON holds no tensors")


def _json(path: Path) -> object:
    """Numbers as they are written: two different texts are two different values."""
    try:
        value: object = reading.parse_json(reading.read_bytes(path), parse_float=_Number, parse_constant=_Number)
    except ValueError as error:
        raise Corrupt(f"{path}: is not JSON: {error}") from None
    return value


class _Number(str):
    """A number as it was written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _compare_bytes(file: str, a: Path, b: Path, tally: ComparisonTally) -> None:
    """A file of another kind, as one value."""
    if filecmp.cmp(a / file, b / file, shallow=False):
        tally.same()
    else:
        first, second = (f"{(folder / file).stat().st_size} bytes" for folder in (a, b))
        tally.differs(Finding(file, "", first, second, "compared as bytes: its format is not looked into"))
