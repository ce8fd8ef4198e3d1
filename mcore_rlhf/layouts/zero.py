"""How ZeRO cuts the parameters of one optimizer group over data-parallel ranks: one relation, for reading and for writing.

Stages 1 and 2 put a group's parameters one after the other and cut the whole into equal partitions; stage 3 cuts every
parameter by itself. Both say where the elements of a parameter lie with the same :class:`PartitionRun`.

Source: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` (``__init__``, ``_round_robin_reorder``),
``runtime/bf16_optimizer.py`` (``_flatten_dense_tensors_aligned``), ``runtime/zero/partition_parameters.py``
(``partition_numel``), ``runtime/zero/stage3.py`` (``_create_fp16_sub_groups``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

ALIGNMENT = 2
"""Stages 1 and 2 pad a group to a multiple of that many elements per rank (``nccl_start_alignment_factor``)."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PartitionRun:
    """Consecutive elements of one flattened parameter that one rank holds.

    Args:
        rank: The data-parallel rank.
        start: First element, counted in the flattened parameter.
        at: Where it lies, counted in the rank's part of the group.
        numel: How many.
    """

    rank: int
    start: int
    at: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A group of stages 1 and 2 (and, with one rank and no alignment, of DeepSpeed's fused fp16 optimizer).

    Args:
        numels: Elements of every parameter, in the order in which they lie.
        dp: Data-parallel ranks that share the group.
        gaps: Elements left free behind every parameter (``parameter_alignment``); empty for none.
        alignment: The group is padded to a multiple of ``alignment · dp``.
    """

    numels: tuple[int, ...]
    dp: int
    gaps: tuple[int, ...] = ()
    alignment: int = ALIGNMENT
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        gaps = self.gaps or (0,) * len(self.numels)
        ends = accumulate((n + gap for n, gap in zip(self.numels, gaps, strict=True)), initial=0)
        object.__setattr__(self, "offsets", tuple(ends))

    @property
    def numel(self) -> int:
        """Elements of the group without the padding at its end."""
        return self.offsets[-1]

    def length(self) -> int:
        """Elements of one rank's partition, padding included."""
        unit = self.alignment * self.dp
        return -(-self.numel // unit) * self.alignment

    def padding(self, rank: int) -> int:
        """How many elements at the end of a rank's partition are padding."""
        return min(self.length(), max(0, (rank + 1) * self.length() - self.numel))

    def run(self, index: int, rank: int) -> PartitionRun | None:
        """What one rank holds of one parameter, or None.

        Args:
            index: The parameter's number in the group.
            rank: The rank.
        """
        first, low = self.offsets[index], rank * self.length()
        start = max(first, low)
        stop = min(first + self.numels[index], low + self.length())
        return PartitionRun(rank, start - first, start - low, stop - start) if start < stop else None

    def runs(self, index: int) -> Iterator[PartitionRun]:
        """Where one parameter lies, in order.

        Args:
            index: Its number in the group.
        """
        first, numel = self.offsets[index], self.numels[index]
        for rank in range(first // self.length(), -(-(first + numel) // self.length())) if numel else ():
            run = self.run(index, rank)
            if run is not None:
                yield run

    def indices(self, rank: int) -> range:
        """The parameters of which a rank holds elements."""
        low, high = rank * self.length(), min(self.numel, (rank + 1) * self.length())
        if low >= high:
            return range(0)
        return range(bisect_right(self.offsets, low) - 1, bisect_right(self.offsets, high - 1))


@dataclass(frozen=True, slots=True)
class BorderGroup:
    """The same group in a state that is kept in whole parameters: by every rank, of all those of which it has any element.

    So a parameter at a border of partitions is on two ranks or more, and there is no padding. DeepSpeed's Muon keeps its
    ``momentum_buffer`` like that in stages 1 and 2, since it orthogonalizes whole matrices.

    Source: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` (``get_flat_partition``, ``_muon_momentum_buffer``,
    ``get_partition_info``).

    Args:
        flat: The group as all other states have it.
        own: Whether of what a rank keeps only the elements count that its partition has: the others are not the parameter's.
    """

    flat: FlatGroup
    own: bool = False
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", tuple(accumulate(self.flat.numels, initial=0)))

    def held(self, rank: int) -> range:
        """The parameters that a rank keeps, in the order in which they lie."""
        found = self.flat.indices(rank)
        gap_only = bool(found) and self.flat.run(found.start, rank) is None
        return found[1:] if gap_only else found

    def length_of(self, rank: int) -> int:
        """Elements that one rank keeps."""
        held = self.held(rank)
        return self.offsets[held.stop] - self.offsets[held.start] if held else 0

    def run(self, index: int, rank: int) -> PartitionRun | None:
        """What one rank keeps of one parameter: all of it, or what is its own, or nothing; see :meth:`FlatGroup.run`."""
        held, part = self.held(rank), self.flat.run(index, rank)
        if part is None:
            return None
        at = self.offsets[index] - self.offsets[held.start]
        return (
            PartitionRun(rank, part.start, at + part.start, part.numel)
            if self.own
            else PartitionRun(rank, 0, at, self.flat.numels[index])
        )


@dataclass(frozen=True, slots=True)
class SlicedGroup:
    """A sub-group of stage 3: of every parameter, each rank holds one slice of ``ceil(numel / dp)`` elements.

    Args:
        numels: Elements of every parameter, in the order in which their slices lie.
        dp: Data-parallel ranks.
    """

    numels: tuple[int, ...]
    dp: int
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        slices = (slice_numel(numel, self.dp) for numel in self.numels)
        object.__setattr__(self, "offsets", tuple(accumulate(slices, initial=0)))

    def length(self) -> int:
        """Elements of one rank's part, the padding of every slice included."""
        return self.offsets[-1]

    def padding(self, rank: int) -> int:
        """Always 0: the padding of slices is between them, and is stored."""
        return 0

    def run(self, index: int, rank: int) -> PartitionRun | None:
        """What one rank holds of one parameter, or None; see :meth:`FlatGroup.run`."""
        numel = self.numels[index]
        start = rank * slice_numel(numel, self.dp)
        held = min(slice_numel(numel, self.dp), numel - start)
        return PartitionRun(rank, start, self.offsets[index], held) if held > 0 else None

    def runs(self, index: int) -> Iterator[PartitionRun]:
        """Where one parameter lies, in order; see :meth:`FlatGroup.runs`."""
        for rank in range(self.dp):
            run = self.run(index, rank)
            if run is None:
                return
            yield run

    def indices(self, rank: int) -> range:
        """The parameters of which a rank has a slice, be it padding only."""
        return range(len(self.numels))


Group = FlatGroup | SlicedGroup


def slice_numel(numel: int, dp: int) -> int:
    """Elements of a stage-3 slice, padding included."""
    return -(-numel // dp)


def sub_groups(numels: Sequence[int], dp: int, limit: int) -> list[range]:
    """How stage 3 cuts a param group into sub-groups.

    Args:
        numels: Elements of every parameter, in order.
        dp: Data-parallel ranks.
        limit: ``sub_group_size``: a sub-group is closed once a rank's slices of it hold that many elements.

    Returns:
        The parameters of each sub-group; together they are the whole group. A group without parameters, as where all of its own are
        frozen, has none.
    """
    if not numels:
        return []
    slices = [slice_numel(numel, dp) for numel in numels]
    if limit >= sum(slices):
        return [range(len(slices))]
    found, start, held = [], 0, 0
    for index, count in enumerate(slices):
        held += count
        if held >= limit or index == len(slices) - 1:
            found.append(range(start, index + 1))
            start, held = index + 1, 0
    return found


def alignment_gaps(numels: Sequence[int], multiple: int) -> tuple[int, ...]:
    """The free elements behind each parameter where every parameter starts at a multiple; none behind the last.

    Args:
        numels: Elements of every parameter, in order.
        multiple: In elements; 16 bytes' worth with ``parameter_alignment``, 1 without.
    """
    gaps, offset = [], 0
    for index, numel in enumerate(numels):
        offset += numel
        gaps.append(0 if index == len(numels) - 1 else -offset % multiple)
        offset += gaps[-1]
    return tuple(gaps)


def round_robin(count: int, dp: int) -> list[int]:
    """The order in which ``round_robin_gradients`` puts a group: dealt to the ranks like cards, rank by rank.

    Args:
        count: Parameters in the group.
        dp: Data-parallel ranks.

    Returns:
        For every place, the parameter's number in the optimizer's own order.
    """
    return [index for rank in range(dp) for index in range(rank, count, dp)]


def dealt(items: Sequence[Item], dp: int) -> list[Item]:
    """Items in round-robin order."""
    return [items[index] for index in round_robin(len(items), dp)]


def undealt(items: Sequence[Item], dp: int) -> list[Item]:
    """Items that are in round-robin order, in the optimizer's own order again."""
    order = round_robin(len(items), dp)
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]
