"""What a new checkpoint's ``.distcp`` files hold: every state of every parameter, cut as the new layout's ranks would store it.

Any cut loads on any layout; this one lets a rank of the new layout read whole pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.core.catalog import Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, DType
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.errors import CheckpointError, Problems
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.layouts.tensor import Shard, local_layout
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.dcp import TensorItem

from .names import Home, Spelling, extents, home_of
from .opened import MASTERS
from .optimizer import FULLY_RESHARDABLE

_MOST_BYTES = 2 << 30
_LEAST_BYTES = 64 << 10
_ZIP_BYTES = 1300
"""Every chunk is a zip of its own."""
_FILES = 8
"""So many files at least, where there is anything to divide: as many workers can write at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the boxes of one state of one parameter.

    Args:
        spec: The parameter, with the target's shape and dtype.
        state: ``param``, ``master``, …
        boxes: In the parameter's own coordinates.
    """

    spec: ParamSpec
    state: str
    boxes: tuple[Box, ...]


@dataclass(slots=True)
class Contents:
    """All tensors of a new checkpoint, dealt to files.

    Args:
        run: The checkpoint that is to be written.
        spelling: Which keys its parameters have.
        num_layers: Decoder layers.
    """

    run: NewRun
    spelling: Spelling
    num_layers: int
    files: list[list[Part]] = field(default_factory=list)
    _boxes: dict[object, tuple[Box, ...]] = field(default_factory=dict)
    _fqns: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._deal(list(self._parts()))

    def specs(self) -> Iterator[ParamSpec]:
        """The parameters that are stored, with the target's shape and dtype; ties are stored once."""
        model, choices = self.run.source.model, self.run.choices
        for spec in model.params:
            if spec.name in model.unused:
                continue
            if spec.partition.vocabulary and choices.padded_vocab_size is not None:
                spec = replace(spec, global_shape=(choices.padded_vocab_size, *spec.global_shape[1:]))
            yield replace(spec, dtype=choices.dtype) if choices.dtype is not None and spec.trainable else spec

    def states(self, spec: ParamSpec) -> Iterator[str]:
        """The states of a parameter that the target has."""
        yield PARAM
        optimizer = self.run.choices.optimizer
        if optimizer is None or not spec.trainable:
            return
        if optimizer == DISTRIBUTED or spec.dtype != FLOAT32:
            yield MASTER
        yield from self.run.moments

    def dtype(self, part: Part) -> DType:
        """Element type of a state."""
        return part.spec.dtype if part.state == PARAM else self.run.state_dtypes.get(part.state, FLOAT32)

    def shapes(self) -> dict[str, Shape]:
        """Whole shapes of all tensors, by their key in the checkpoint."""
        found: dict[str, Shape] = {}
        for parts in self.files:
            for part in parts:
                home = home_of(part.spec.name, self.spelling)
                found.setdefault(self.fqn(home, part.state), self._stacked(home, part.spec))
        return found

    def fqn(self, home: Home, state: str) -> str:
        """The key of a tensor."""
        if (home.key, state) not in self._fqns:  # one string for hundreds of chunks
            sharding = FULLY_RESHARDABLE if self.run.choices.optimizer == DISTRIBUTED else None
            stored = MASTERS[sharding] if state == MASTER else state
            self._fqns[home.key, state] = home.key if state == PARAM else f"optimizer.state.{stored}.{home.key}"
        return self._fqns[home.key, state]

    def items(self, number: int) -> list[TensorItem]:
        """What one file holds, in its order."""
        return [item for part in self.files[number] for item in self._items(part)]

    def entries(self, number: int, records: Sequence[Record]) -> list[TensorEntry]:
        """Which parts of which parameters lie in one file.

        Args:
            number: The file.
            records: Its records.
        """
        by_key = {record.key: record for record in records}
        return [
            TensorEntry(
                TensorName(self.run.source.role, part.spec.name, part.state), part.spec.global_shape, self.dtype(part),
                tuple(self._chunks(part, by_key)),
            )
            for part in self.files[number]
        ]  # fmt: skip

    def _items(self, part: Part) -> Iterator[TensorItem]:
        home = home_of(part.spec.name, self.spelling)
        fqn, dtype, ones = self.fqn(home, part.state), self.dtype(part), (1,) * len(home.index)
        for box in part.boxes:
            offset, shape = (*home.index, *home.turned(box.offset)), (*ones, *home.turned(box.shape))
            yield TensorItem(fqn, dtype, offset, shape)

    def _chunks(self, part: Part, records: Mapping[str, Record]) -> Iterator[Chunk]:
        home = home_of(part.spec.name, self.spelling)
        for item, box in zip(self._items(part), part.boxes, strict=True):
            if box.numel:
                yield Chunk(box, records[item.key], 0, home.turned(row_major(item.shape)[len(home.index) :]))

    def _stacked(self, home: Home, spec: ParamSpec) -> Shape:
        stack = extents(home, self.spelling, self.num_layers, self.run.source.model.num_experts)
        return (*stack, *home.turned(spec.global_shape))

    def _parts(self) -> Iterator[Part]:
        problems = Problems()
        for spec in self.specs():
            try:
                boxes = self._boxes_of(spec)
            except CheckpointError as error:
                problems.add(type(error), f"{spec.name}: {error}")
                continue
            for state in self.states(spec):
                yield Part(spec, state, boxes)
        problems.raise_if_any()

    def _boxes_of(self, spec: ParamSpec) -> tuple[Box, ...]:
        """The distinct parts that the ranks of the new layout have of a parameter."""
        parallel, routed = self.run.choices.parallel, is_routed_expert(spec.name)
        key = (spec.partition, spec.global_shape, routed)
        if key not in self._boxes:
            degree = parallel.etp if routed else parallel.tp
            ranks = range(degree if spec.partition.dim is not None else 1)
            stacks = range(parallel.ep if spec.partition.stacked is not None else 1)
            layouts = (
                local_layout(spec.partition, spec.global_shape, Shard(rank, degree), Shard(stack, parallel.ep))
                for stack in stacks
                for rank in ranks
            )
            self._boxes[key] = tuple(piece.box for layout in layouts for piece in layout.pieces)
        return self._boxes[key]

    def _deal(self, parts: Sequence[Part]) -> None:
        """Fill one file after another, up to an even share of all bytes."""
        total = sum(self._nbytes(part.boxes, part) for part in parts)
        limit = min(_MOST_BYTES, max(_LEAST_BYTES, -(-total // _FILES)))
        filled = limit
        for part in parts:
            for boxes in self._portions(part, limit):
                nbytes = self._nbytes(boxes, part)
                if filled + nbytes > limit and filled:
                    self.files.append([])
                    filled = 0
                self.files[-1].append(Part(part.spec, part.state, boxes))
                filled += nbytes

    def _portions(self, part: Part, limit: int) -> Iterator[tuple[Box, ...]]:
        """The boxes of a part, all at once where they fit into one file."""
        if self._nbytes(part.boxes, part) <= limit:
            yield part.boxes
        else:
            yield from ((box,) for box in part.boxes)

    def _nbytes(self, boxes: Sequence[Box], part: Part) -> int:
        return sum(box.numel for box in boxes) * self.dtype(part).itemsize + _ZIP_BYTES * len(boxes)
