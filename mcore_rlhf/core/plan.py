"""Planning: what must be copied so that a target holds what a source has. Converting is intersecting two catalogues."""

from __future__ import annotations

import gc
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from mcore_rlhf.errors import CoverageError, Incomplete, Problems

from .catalog import Box, Catalog, Chunk, DType, Record, Shape, TensorEntry, TensorName


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between two records.

    Args:
        shape: Elements to copy in every dimension; dimensions that are contiguous on both sides are merged.
        source: Record to read.
        source_start: First element in the source record.
        source_strides: Elements, one per dimension; 0 repeats an element.
        target: Record to write.
        target_start: First element in the target record.
        target_strides: Elements, one per dimension.
    """

    shape: Shape
    source: Record
    source_start: int
    source_strides: Shape
    target: Record
    target_start: int
    target_strides: Shape

    @property
    def cast(self) -> DType | None:
        """The element type that values are converted to, or None where bytes are copied as they are."""
        return None if self.source.dtype == self.target.dtype else self.target.dtype

    @property
    def contiguous(self) -> bool:
        """Whether this is one unbroken run of elements on both sides."""
        return self.source_strides == (1,) and self.target_strides == (1,)

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        count = 1
        for n in self.shape:
            count *= n
        return count


@dataclass(slots=True)
class FilePlan:
    """Everything that fills one target file: independent of all other files, and picklable."""

    file: str
    copies: list[Copy] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    casts: dict[TensorName, tuple[DType, DType]] = field(default_factory=dict)
    """What of the target is converted on the way, from which type to which; what is computed is not told here."""

    @property
    def lossless(self) -> bool:
        """Whether no value is converted or computed on the way."""
        return all(copy.cast is None and not copy.source.computed for copy in self.copies)


_COLLECTING, _SELDOM = threading.Lock(), (50_000, 50, 1000)
_planning: list[tuple[int, int, int]] = []


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python look for garbage in cycles seldom meanwhile: catalogues and plans are millions of objects without any.

    It costs a seventh of the time otherwise. In several threads at once, the last one puts back what was.
    """
    with _COLLECTING:
        _planning.append(gc.get_threshold() if not _planning else _planning[0])
        gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _COLLECTING:
            before = _planning.pop()
            if not _planning:
                gc.set_threshold(*before)


def plan_file(file: str, holds: Iterable[TensorEntry], source: Catalog) -> FilePlan:
    """Plan one target file.

    Args:
        file: The target file, relative to the target's root.
        holds: The logical tensors of which the file holds parts, with those parts as chunks.
        source: Where the elements come from.

    Returns:
        The copies, and every problem found on the way: nothing is raised here, so that all files can be looked at.
    """
    plan, known = FilePlan(file), dict[Hashable, _Met]()
    for want in holds:
        have = source.get(want.name)
        if have is None:
            plan.problems.add(
                Incomplete, f"{want.name}: the target needs it in {file}, and the source does not have it"
            )
        else:
            plan.copies.extend(_plan_entry(have, want, known, plan.problems))
            if have.dtype != want.dtype and not any(chunk.record.computed for chunk in have.chunks[:1]):
                plan.casts[want.name] = have.dtype, want.dtype
    _check_disjoint(plan)
    return plan


_MOST_KNOWN = 4096
"""Of a file with tens of thousands of tensors that are cut each in its own way, nothing is found again: let them not fill the memory."""


class _Met(NamedTuple):
    """What a wanted chunk takes of a tensor's sources. Layers and experts are cut alike: only records and starts are their own.

    Args:
        copies: For each source that it meets: its number, and the copy as it would be if both chunks began at element 0.
        missing: How many of its elements no source has; less than none where sources overlap.
        alive: The chunks by whose boxes' identities this is found again.
    """

    copies: list[tuple[int, Copy]]
    missing: int
    alive: tuple[tuple[Chunk, ...], Chunk]


def _plan_entry(
    have: TensorEntry, want: TensorEntry, known: dict[Hashable, _Met], problems: Problems
) -> Iterator[Copy]:
    sources = have.primary()
    cut = tuple([(id(chunk.box), chunk.strides) for chunk in sources])
    for chunk in want.chunks:
        key = cut, id(chunk.box), chunk.strides
        met = known.get(key)
        if met is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            met = known[key] = _meet(sources, chunk)
        for number, copy in met.copies:
            source = sources[number]
            yield Copy(
                copy.shape,
                source.record,
                source.start + copy.source_start,
                copy.source_strides,
                chunk.record,
                chunk.start + copy.target_start,
                copy.target_strides,
            )
        if met.missing:
            problems.add(CoverageError, f"{want.name}: {_incomplete(sources, chunk, met.missing)}")


def _meet(sources: tuple[Chunk, ...], chunk: Chunk) -> _Met:
    copies, missing = list[tuple[int, Copy]](), chunk.box.numel
    low, high = _rows(chunk.box)
    wanted = replace(chunk, start=0)
    for number, candidate in enumerate(sources):
        start, stop = _rows(candidate.box)
        if start >= high or stop <= low:  # one of hundreds of slices, as a rule: not worth a box
            continue
        part = candidate.box.intersect(chunk.box)
        if part is not None:
            missing -= part.numel
            copy = coalesced(part.shape, replace(candidate, start=0).narrow(part), wanted.narrow(part))
            copies.append((number, copy))
    return _Met(copies, missing, (sources, chunk))


def _incomplete(sources: tuple[Chunk, ...], chunk: Chunk, missing: int) -> str:
    if missing > 0:
        return (
            f"{missing} of the {chunk.box.numel} elements of {chunk.box}, wanted in {chunk.record.file}, have no source"
        )
    some = ", ".join(f"{c.box} in {c.record.file}" for c in sources[:4])
    return f"{chunk.box}, wanted in {chunk.record.file}, has overlapping sources: {some}"


def _rows(box: Box) -> tuple[int, int]:
    """The first row of a box, and one past its last."""
    if not box.shape:
        return 0, 1
    step = 1 if box.step is None else box.step[0]
    return box.offset[0], box.offset[0] + (box.shape[0] - 1) * step + 1


def coalesced(shape: Shape, source: Chunk, target: Chunk) -> Copy:
    """The copy of a whole chunk onto another of the same shape, with as few dimensions as possible.

    Dimensions are put in the order in which they lie in the target (which may be transposed), outermost first.
    """
    dims: list[tuple[int, int, int]] = []  # (count, source stride, target stride)
    given = [dim for dim in zip(shape, source.strides, target.strides, strict=True) if dim[0] != 1]
    for count, s, t in sorted(given, key=itemgetter(2), reverse=True):
        if dims and dims[-1][1] == s * count and dims[-1][2] == t * count:
            dims[-1] = (dims[-1][0] * count, s, t)
        else:
            dims.append((count, s, t))
    dims = dims or [(1, 1, 1)]
    counts, s_strides, t_strides = zip(*dims, strict=True)
    return Copy(counts, source.record, source.start, s_strides, target.record, target.start, t_strides)


def _check_disjoint(plan: FilePlan) -> None:
    """No element of a target record may be written twice (cheaply: only unbroken runs are compared)."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for copy in plan.copies:
        if copy.target_strides == (1,):
            runs.setdefault(copy.target.key, []).append((copy.target_start, copy.target_start + copy.shape[0]))
    for key, spans in runs.items():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            if start < end:
                plan.problems.add(CoverageError, f"{plan.file}: elements {start}:{end} of {key} would be written twice")


def check_tiles(entry: TensorEntry) -> str | None:
    """Whether the chunks of an entry cover its whole tensor exactly once; says what is wrong, or None."""
    whole = Box.whole(entry.global_shape)
    boxes = [chunk.box for chunk in entry.primary() if chunk.box.numel]
    outside = next((box for box in boxes if not whole.contains(box)), None)
    if outside is not None:
        return f"{outside} lies outside the tensor, whose shape is {entry.global_shape}"
    covered = sum(box.numel for box in boxes)
    if covered < whole.numel:
        return f"{whole.numel - covered} of {whole.numel} elements are stored nowhere"
    if covered > whole.numel:
        return f"{covered - whole.numel} elements are stored in overlapping pieces"
    return None
