"""``dp_reshardable`` optimizer states: the flat buffers of each rank, bucket by bucket.

The buckets of a buffer, one behind the other, are what ``distrib_optim.pt`` holds of it: so a parameter lies where
:mod:`..megatron.buffers` says, as it does in the legacy format.

Source: megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_dp_reshardable``),
``optimizer/__init__.py`` (``data_parallel_group_idx``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mcore_rlhf.core.box import Box, dot, flat_boxes, row_major
from mcore_rlhf.core.catalog import Chunk
from mcore_rlhf.core.names import MASTER
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.layout import Blueprint, LocalBuffer, LocalItem, Member, RankLayout
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.storage.dcp import DcpTensor

from .opened import DistFolder, FlatKey
from .ranks import model_ranks

_Where = tuple[int, int, int]
"""Chained optimizer, data-parallel group, buffer."""

_Part = tuple[int, int, DcpTensor, Box]
"""First element of a buffer, one past the last, and the tensor and box that store them."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A whole buffer of one state.

    Args:
        numel: Its elements, padding between buckets not counted.
        parts: As they were stored, in order.
        lows: Where each begins; a parameter always begins a part.
    """

    numel: int
    parts: tuple[_Part, ...]
    lows: tuple[int, ...]

    @classmethod
    def of(cls, buckets: Sequence[DcpTensor]) -> _Buffer:
        """The buffer that is made of buckets."""
        starts = accumulate((bucket.global_shape[0] for bucket in buckets), initial=0)
        first = list(starts)
        parts = sorted(
            (
                (start + box.offset[0], start + box.stop[0], bucket, box)
                for start, bucket in zip(first, buckets, strict=False)
                for box in bucket.boxes
            ),
            key=lambda part: part[0],
        )
        return cls(first[-1], tuple(parts), tuple(part[0] for part in parts))

    def within(self, start: int, stop: int) -> Iterator[_Part]:
        """The parts that hold elements ``[start, stop)``."""
        for at in range(max(bisect_right(self.lows, start) - 1, 0), bisect_left(self.lows, stop)):
            yield self.parts[at]

    def begins(self, start: int) -> bool:
        """Whether a part begins there."""
        at = bisect_left(self.lows, start)
        return at < len(self.lows) and self.lows[at] == start


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one rank's part of a parameter lies."""

    layout: LocalLayout
    buffer: _Where
    start: int
    numel: int


@dataclass(slots=True)
class FlatStates:
    """Finds the states of parameters in flat buffers.

    Args:
        folder: The checkpoint.
        states: Names of the states.
    """

    folder: DistFolder
    states: tuple[str, ...]
    _places: dict[str, list[_Place]] = field(default_factory=dict)
    _buffers: dict[tuple[_Where, str], _Buffer] = field(default_factory=dict)

    def add(self, blueprint: Blueprint) -> None:
        """Lay out the buffers of all ranks as the run had them.

        Args:
            blueprint: The model and its layout.

        Raises:
            LayoutMismatch: The buckets that are stored are not of those sizes; all problems together.
        """
        self._collect()
        problems, parallel = Problems(), blueprint.choices.parallel
        for at in model_ranks(parallel):
            rank = RankLayout(blueprint, at, "")
            items = {(item.vpp_rank, item.item.name): item for item in rank.items}
            for number, member in enumerate(rank.chained):
                if _first_of_experts(at, parallel) if member.expert else at.holds_dense_optimizer:
                    group = _group(at, member, parallel)
                    for index, buffer in enumerate(rank.local_buffers[number]):
                        self._add(buffer, (number, group, index), items, problems)
        problems.raise_if_any()

    @property
    def names(self) -> set[str]:
        """Parameters that have states."""
        return set(self._places)

    def chunks(self, param: str, state: str) -> Iterator[Chunk]:
        """Where a state of a parameter lies; see :data:`.catalog.FlatChunks`."""
        for place in self._places.get(param, ()):
            buffer = self._buffers[place.buffer, state]
            for low, high, tensor, box in buffer.within(place.start, place.start + place.numel):
                chunk = self.folder.dcp.chunk(tensor, box)
                start, stop = max(low, place.start), min(high, place.start + place.numel)
                yield from _local_chunks(chunk, low, place, start, stop)

    def _collect(self) -> None:
        """The buckets of every buffer, in order."""
        buckets: dict[tuple[_Where, str], dict[int, DcpTensor]] = {}
        for key, tensor in self.folder.flat.items():
            state = MASTER if key.state == "param" else key.state
            buckets.setdefault(((key.member, key.group, key.buffer), state), {})[key.bucket] = tensor
        for where, found in buckets.items():
            self._buffers[where] = _Buffer.of([found[bucket] for bucket in sorted(found)])

    def _add(
        self,
        buffer: LocalBuffer,
        where: _Where,
        items: Mapping[tuple[int, str], LocalItem],
        problems: Problems,
    ) -> None:
        member, group, index = where
        text = (
            f"{self.folder.located.folder}: buffer {index} of data-parallel group {group}, chained optimizer {member}"
        )
        for state in self.states:
            stored = self._buffers.get((where, state))
            if stored is None:
                problems.add(
                    Unsupported,
                    f"{text}: its {state} is missing",
                    "It may be another optimizer's. --no-optimizer converts the weights alone.",
                )
                return
            if stored.numel != buffer.flat.numel_unpadded:
                problems.add(
                    LayoutMismatch,
                    f"{text}: should have {buffer.flat.numel_unpadded} elements, has {stored.numel}",
                    _ADVICE,
                )
                return
        first = self._buffers[where, self.states[0]]
        for place in buffer.flat.places:
            if not first.begins(place.file_start):
                problems.add(
                    LayoutMismatch,
                    f"{text}: {place.name} should begin at element {place.file_start}, nothing does",
                    _ADVICE,
                )
                return
            item = items[buffer.vpp_rank, place.name]
            assert item.layout is not None
            found = _Place(item.layout, where, place.file_start, place.numel)
            self._places.setdefault(item.item.stored_as, []).append(found)


_ADVICE = (
    "The bucket or padding options in args may not be those of the run, or some parameters were frozen: mark those with "
    "'trainable: false' in --rules."
)


def _group(at: FileRank, member: Member, parallel: ParallelConfig) -> int:
    """The number of the data-parallel group: the rank in the group of all that differ in nothing but data parallelism."""
    if member.expert:
        return (at.pp_rank * parallel.ep + at.ep_rank) * parallel.etp + at.etp_rank
    return at.pp_rank * parallel.tp + at.tp_rank


def _first_of_experts(at: FileRank, parallel: ParallelConfig) -> bool:
    """Whether a rank is the first that has its part of the experts."""
    return at.rank % parallel.stage_size < parallel.etp * parallel.ep


def _local_chunks(chunk: Chunk, low: int, place: _Place, start: int, stop: int) -> Iterator[Chunk]:
    """The boxes of the whole tensor that elements ``[start, stop)`` of a buffer are.

    Args:
        chunk: The stored part; its first element is element ``low`` of the buffer.
        low: See above.
        place: Where the parameter lies.
        start, stop: Elements of the buffer, inside both.
    """
    strides = row_major(place.layout.view)
    for local in flat_boxes(place.layout.view, start - place.start, stop - place.start):
        for piece in place.layout.pieces:
            part = local.intersect(Box(piece.offset, piece.box.shape))
            if part is None:
                continue
            at = chunk.start + dot(part.offset, strides) + place.start - low
            origin = tuple(a - b for a, b in zip(piece.offset, piece.box.offset, strict=True))
            yield Chunk(part.shift(origin), chunk.record, at, strides)


def states_in(keys: Sequence[FlatKey]) -> set[str]:
    """Names of the states that are stored in buckets."""
    return {MASTER if key.state == "param" else key.state for key in keys}
