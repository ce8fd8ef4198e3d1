"""Where ``dp_reshardable`` states lie: in the flat buffers of each data-parallel group, bucket by bucket, for reading and for writing.

The buckets of a buffer, one behind the other, are what ``distrib_optim.pt`` holds of it: so a parameter lies where
:func:`mcore_rlhf.families.megatron.layout.buffers` says, as it does in the legacy format. A bucket is one tensor, without the padding at
its end; its chunks are what single ranks have of single parameters, and the gaps between them.

Sources: megatron-core 0.16.1 and 0.19.2, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_dp_reshardable``,
``get_parameter_state_dp_reshardable``, ``load_parameter_state_from_dp_reshardable``), ``optimizer/__init__.py``
(``data_parallel_group_idx``), ``optimizer/optimizer.py`` (``ChainedOptimizer.sharded_state_dict``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mcore_rlhf.core.catalog import (
    FLOAT32,
    MASTER,
    Box,
    Chunk,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
    dot,
    flat_boxes,
    row_major,
)
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.groups import ChainedOptimizer
from mcore_rlhf.families.megatron.layout import Blueprint, grad_dtype, sharing_ranks
from mcore_rlhf.families.megatron.ranks import LocalItem, RankLayout
from mcore_rlhf.layouts.flat import FlatBuffer
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.dcp.folder import DcpTensor
from mcore_rlhf.storage.dcp.writer import ObjectItem, TensorItem, saved
from mcore_rlhf.storage.torch_values import torch_dtype

from .folders import DistFolder
from .objects import model_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

Where = tuple[int, int, int]
"""Chained optimizer, data-parallel group, buffer."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where one rank's part of a parameter lies in a buffer."""

    item: LocalItem
    buffer: Where
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.numel

    def chunks(self, record: Record, at: int, low: int, start: int, stop: int) -> Iterator[Chunk]:
        """The boxes of the whole tensor that elements ``[start, stop)`` of the buffer are.

        Args:
            record: What stores them.
            at: Element of the record that is element ``low`` of the buffer.
            low: See above.
            start, stop: Elements of the buffer, inside the place.
        """
        assert self.item.layout is not None
        view, pieces = self.item.layout.view, self.item.layout.pieces
        strides = row_major(view)
        for local in flat_boxes(view, start - self.start, stop - self.start):
            for piece in pieces:
                part = local.intersect(Box(piece.offset, piece.box.shape))
                if part is None:
                    continue
                origin = tuple(a - b for a, b in zip(piece.offset, piece.box.offset, strict=True))
                yield Chunk(part.shift(origin), record, at + dot(part.offset, strides) + self.start - low, strides)


@dataclass(frozen=True, slots=True)
class _GroupBuffer:
    """A buffer of a data-parallel group."""

    where: Where
    dtype: DType
    flat: FlatBuffer
    places: tuple[BufferPlace, ...]

    def buckets(self) -> list[tuple[int, int, int]]:
        """Of every bucket: its first element, its elements, and how many they are with the padding behind them in memory."""
        firsts = {place.bucket: (place.file_start, place.buffer_start) for place in reversed(self.flat.places)}
        ends = [*sorted(firsts.values()), (self.flat.numel_unpadded, self.flat.numel)]
        return [(start, stop - start, padded_stop - padded) for (start, padded), (stop, padded_stop) in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class BufferGroup:
    """What the ranks of a data-parallel group share: the buffers of one of their chained optimizers.

    Args:
        member: Number of the chained optimizer.
        group: Number of the data-parallel group.
        ranks: How many they are.
        buffers: In order.
    """

    member: int
    group: int
    ranks: int
    buffers: tuple[_GroupBuffer, ...]


def buffer_groups(blueprint: Blueprint) -> Iterator[BufferGroup]:
    """The buffers of all ranks of a checkpoint, those that several ranks share once."""
    parallel = blueprint.choices.parallel
    for at in model_ranks(parallel):
        rank = RankLayout(blueprint, at, "")
        items = {(item.vpp_rank, item.item.name): item for item in rank.items}
        for number, member in enumerate(rank.chained):
            if not holds_first(at, member, parallel):
                continue
            group, found = group_of(at, member, parallel), list[_GroupBuffer]()
            for index, buffer in enumerate(rank.local_buffers[number]):
                where, vpp_rank = (number, group, index), buffer.vpp_rank
                places = (
                    BufferPlace(items[vpp_rank, p.name], where, p.file_start, p.numel) for p in buffer.flat.places
                )
                found.append(_GroupBuffer(where, buffer.dtype, buffer.flat, tuple(places)))
            sharing = sharing_ranks(blueprint.args, parallel, bool(member.expert))
            yield BufferGroup(number, group, sharing, tuple(found))


def group_of(at: FileRank, member: ChainedOptimizer, parallel: ParallelConfig) -> int:
    """The number of the data-parallel group: the rank in the group of all that differ in nothing but data parallelism."""
    if member.expert:
        return (at.pp_rank * parallel.ep + at.ep_rank) * parallel.etp + at.etp_rank
    return at.pp_rank * parallel.tp + at.tp_rank


def holds_first(at: FileRank, member: ChainedOptimizer, parallel: ParallelConfig) -> bool:
    """Whether a rank is the first that has its part of what a chained optimizer trains."""
    return at.rank % parallel.stage_size < parallel.etp * parallel.ep if member.expert else at.holds_dense_optimizer


_Part = tuple[int, int, DcpTensor, Box]
"""First element of a buffer, one past the last, and the tensor and box that store them."""


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A whole buffer of one state, as it was stored.

    Args:
        numel: Its elements, padding between buckets not counted.
        parts: As they were stored, in order.
        lows: Where each begins; a parameter always begins a part.
    """

    numel: int
    parts: tuple[_Part, ...]
    lows: tuple[int, ...]

    @classmethod
    def of(cls, buckets: Sequence[DcpTensor]) -> StoredBuffer:
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

    def ends(self, stop: int) -> bool:
        """Whether a part ends there."""
        at = bisect_left(self.lows, stop) - 1
        return at >= 0 and self.parts[at][1] == stop


@dataclass(slots=True)
class FlatStates:
    """Finds the states of parameters in flat buffers.

    Args:
        folder: The checkpoint.
        states: Names of the states.
        buffers: As they are stored, once they are collected.
    """

    folder: DistFolder
    states: tuple[str, ...]
    _places: dict[str, list[BufferPlace]] = field(default_factory=dict)
    buffers: dict[tuple[Where, str], StoredBuffer] = field(default_factory=dict)

    def add(self, blueprint: Blueprint) -> None:
        """Lay out the buffers of all ranks as the run had them.

        Args:
            blueprint: The model and its layout.

        Raises:
            LayoutMismatch: The buckets that are stored are not of those sizes; all problems together.
        """
        self.collect()
        problems, members = Problems(), {key.member for key in self.folder.flat}
        for group in buffer_groups(blueprint):
            for buffer in group.buffers if group.member in members else ():
                self._add(buffer, problems)
        problems.raise_if_any()

    @property
    def own(self) -> dict[str, tuple[str, ...]]:
        """The states of the parameters that have some."""
        return dict.fromkeys(self._places, self.states)

    def dtype(self, param: str, state: str) -> DType | None:
        """The type of a state of a parameter, or None where it lies in no bucket."""
        if param not in self._places or state not in self.states:
            return None
        return self.buffers[self._places[param][0].buffer, state].parts[0][2].dtype

    def chunks(self, param: str, state: str) -> Iterator[Chunk]:
        """Where a state of a parameter lies."""
        for place in self._places.get(param, ()) if state in self.states else ():  # another optimizer's has none here
            yield from self.chunks_at(place, state)

    def chunks_at(self, place: BufferPlace, state: str) -> Iterator[Chunk]:
        """Where a state lies whose place is known."""
        for low, high, tensor, box in self.buffers[place.buffer, state].within(place.start, place.stop):
            chunk = tensor.folder.chunk(tensor, box)
            start, stop = max(low, place.start), min(high, place.stop)
            yield from place.chunks(chunk.record, chunk.start, low, start, stop)

    def collect(self) -> None:
        """The buckets of every buffer, in order."""
        buckets: dict[tuple[Where, str], dict[int, DcpTensor]] = {}
        for key, tensor in self.folder.flat.items():
            state = MASTER if key.state == "param" else key.state
            buckets.setdefault(((key.member, key.group, key.buffer), state), {})[key.bucket] = tensor
        for where, found in buckets.items():
            self.buffers[where] = StoredBuffer.of([found[bucket] for bucket in sorted(found)])

    def _add(self, buffer: _GroupBuffer, problems: Problems) -> None:
        member, group, index = buffer.where
        text = (
            f"{self.folder.located.folder}: buffer {index} of data-parallel group {group}, chained optimizer {member}"
        )
        for state in self.states:
            stored = self.buffers.get((buffer.where, state))
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
        first = self.buffers[buffer.where, self.states[0]]
        for place in buffer.places:
            if not first.begins(place.start):
                problems.add(
                    LayoutMismatch,
                    f"{text}: {place.item.item.name} should begin at element {place.start}, nothing does",
                    _ADVICE,
                )
                return
            self._places.setdefault(place.item.item.stored_as, []).append(place)


_ADVICE = (
    "The bucket or padding options in args may not be those of the run, or some parameters were frozen: mark those with "
    "'trainable: false' in --rules."
)


_MOST_BYTES = 2 << 30
_LEAST_BYTES = 64 << 10
_ZIP_BYTES = 1300
"""Every chunk is a zip of its own."""
_FILES = 8
"""So many files at least, where there is anything to divide: as many workers can write at once."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements ``[start, stop)`` of a bucket: a rank's part of a parameter, or a gap, which has none."""

    start: int
    stop: int
    place: BufferPlace | None

    @property
    def numel(self) -> int:
        """How many they are."""
        return self.stop - self.start


E = TypeVar("E", Box, _Range)


@dataclass(frozen=True, slots=True)
class FilePart(Generic[E]):
    """One state of a tensor on its way into files, or some chunks of it.

    Args:
        state: ``param``, ``master``, ``exp_avg``, …
        dtype: Element type of the state.
        chunks: Which elements.
    """

    state: str
    dtype: DType
    chunks: tuple[E, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(chunk.numel for chunk in self.chunks) * self.dtype.itemsize

    def divided(self) -> Iterator[Self]:
        """Chunk by chunk."""
        return (replace(self, chunks=(chunk,)) for chunk in self.chunks)


P = TypeVar("P", bound=FilePart[Any])


def dealt(parts: Sequence[P]) -> list[list[P]]:
    """Fill one file after another, up to an even share of all bytes."""
    sizes = [part.nbytes + _ZIP_BYTES * len(part.chunks) for part in parts]
    limit = min(_MOST_BYTES, max(_LEAST_BYTES, -(-sum(sizes) // _FILES)))
    files, filled = list[list[P]](), limit
    for part, size in zip(parts, sizes, strict=True):
        for portion in [part] if size <= limit else part.divided():
            size = portion.nbytes + _ZIP_BYTES * len(portion.chunks)
            if filled + size > limit and filled:
                files.append([])
                filled = 0
            files[-1].append(portion)
            filled += size
    return files


@dataclass(frozen=True, slots=True)
class BucketPart(FilePart[_Range]):
    """One state of a bucket to be written, or some ranges of it.

    Args:
        fqn: The tensor's key.
        first: First element of the bucket in its buffer.
    """

    fqn: str
    first: int

    def items(self) -> Iterator[TensorItem]:
        """The chunks; gaps are zeros."""
        for part in self.chunks:
            gap = bytes(part.numel * self.dtype.itemsize) if part.place is None else None
            yield TensorItem(self.fqn, self.dtype, (part.start,), (part.numel,), gap)

    def entries(self, role: str, records: Mapping[str, Record]) -> Iterator[TensorEntry]:
        """The parts of parameters that lie in them."""
        for item, part in zip(self.items(), self.chunks, strict=True):
            if part.place is not None:
                inside = part.place.item
                assert inside.spec is not None
                low, high = self.first + part.start, self.first + part.stop
                chunks = tuple(part.place.chunks(records[item.key], 0, low, low, high))
                name = TensorName(role, inside.item.stored_as, self.state)
                yield TensorEntry(name, inside.spec.global_shape, self.dtype, chunks)


@dataclass(slots=True)
class BucketContents:
    """The buckets of a new checkpoint, dealt to files.

    Args:
        blueprint: The whole checkpoint, without states, which lie here.
        moments: The states besides the masters.
        values: What each chained optimizer keeps besides tensors, by key.
        master: The type of the masters of parameters of a type.
    """

    blueprint: Blueprint
    moments: Sequence[str]
    values: Sequence[Mapping[object, object]]
    master: Callable[[DType], DType]
    files: list[list[BucketPart]] = field(init=False)
    objects: list[ObjectItem] = field(default_factory=list)
    _shapes: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        parts = [part for group in buffer_groups(self.blueprint) for part in self._parts(group, problems)]
        problems.raise_if_any()
        self.files = dealt(parts)

    def shapes(self) -> dict[str, Shape]:
        """Whole shapes of all tensors, by their key in the checkpoint."""
        return self._shapes

    def items(self, number: int) -> list[TensorItem]:
        """What one file holds, in its order."""
        return [item for part in self.files[number] for item in part.items()]

    def entries(self, number: int, records: Sequence[Record]) -> list[TensorEntry]:
        """Which parts of which parameters lie in one file; see :meth:`.writer.Contents.entries`."""
        by_key = {record.key: record for record in records}
        return [entry for part in self.files[number] for entry in part.entries(self.blueprint.role, by_key)]

    def _parts(self, group: BufferGroup, problems: Problems) -> Iterator[BucketPart]:
        """The buckets of a group; what it has besides becomes objects."""
        chained = f"chained_{group.member}." if len(self.values) > 1 else ""
        prefix = f"{chained}optimizer.distributed.dp_group_idx_{group.group}."
        padded, unpadded = list[object](), list[object]()
        for buffer in group.buffers:
            dtypes = torch_dtype(buffer.dtype), torch_dtype(grad_dtype(self.blueprint.args, buffer.dtype))
            names = f"dtype_(torch.{buffer.dtype}, torch.{grad_dtype(self.blueprint.args, buffer.dtype)})"
            buckets = buffer.buckets()
            padded.append({dtypes: [numel for _, _, numel in buckets]})
            unpadded.append({dtypes: [numel for _, numel, _ in buckets]})
            for number, (first, numel, whole) in enumerate(buckets):
                ranges = _ranges(buffer.places, first, numel, whole // group.ranks)
                _check_ranks(ranges, whole, group, f"{prefix}bucket_idx_{number}", problems)
                for state in (MASTER, *self.moments):
                    stored_as = "param" if state == MASTER else state
                    fqn = f"{prefix}gbuf_idx_{buffer.where[2]}.{names}.bucket_idx_{number}.{stored_as}"
                    self._shapes[fqn] = (numel,)
                    own = (
                        self.master(buffer.dtype)
                        if state == MASTER
                        else self.blueprint.state_dtypes.get(state, FLOAT32)
                    )
                    yield BucketPart(state, own, ranges, fqn, first)
        values = {**self.values[group.member], "per_bucket_numel": padded, "per_bucket_numel_unpadded": unpadded}
        named = {f"{prefix}{key}/shard_0_1": value for key, value in values.items()}
        self.objects += (ObjectItem(fqn, saved([value], fqn)) for fqn, value in named.items())


def _ranges(places: Sequence[BufferPlace], first: int, numel: int, share: int) -> tuple[_Range, ...]:
    """A bucket cut where parameters begin and end, and where a rank's share does.

    Args:
        places: All of the buffer.
        first: First element of the bucket in the buffer.
        numel: Its elements.
        share: Elements of each rank, the padding of the last ones included.
    """
    inside = [place for place in places if first <= place.start < first + numel]
    edges = (edge - first for place in inside for edge in (place.start, place.stop))
    cuts = sorted({0, numel, *edges, *range(share, numel, share)})
    starts, found = [place.start - first for place in inside], list[_Range]()
    for start, stop in pairwise(cuts):
        place = inside[bisect_right(starts, start) - 1]
        found.append(_Range(start, stop, place if start < place.stop - first else None))
    return tuple(found)


def _check_ranks(ranges: Sequence[_Range], whole: int, group: BufferGroup, text: str, problems: Problems) -> None:
    """Megatron neither saves nor loads a bucket of which a rank has no parameter ("empty bucket encountered")."""
    share = whole // group.ranks
    having = {part.start // share for part in ranges if part.place is not None}
    if len(having) < group.ranks:
        problems.add(
            LayoutMismatch,
            f"{text}: {group.ranks} ranks share it, and {group.ranks - len(having)} of them would hold no parameter, at which Megatron "
            "stops, saving and loading",
            "Choose a smaller --dp, or leave out --optimizer-sharding dp_reshardable: what is fully_reshardable loads anywhere.",
        )
