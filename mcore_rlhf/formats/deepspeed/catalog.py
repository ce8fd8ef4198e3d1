"""The catalogue of a native DeepSpeed checkpoint: chunks are computed from flat groups and cuts when asked for; and the module's own
tensors of one model-parallel rank: weights, buffers, frozen parameters and their aliases.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_get_shared_params``,
``_get_zero_frozen_param_attributes``), ``runtime/pipe/module.py`` (``save_state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcore_rlhf.core.catalog import (
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Record,
    Shape,
    TensorName,
    dot,
    flat_boxes,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.rows import Rows, Strip, Tensor
from mcore_rlhf.errors import Corrupt, Incomplete
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.layouts.zero import BorderGroup, Group, SlicedGroup
from mcore_rlhf.models.meaning.bounds import is_number
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.stored import StoredTensor

from .tag import OpenedTag


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A local tensor whose flattened elements lie in the parts of data-parallel ranks.

    Args:
        group: Where they lie.
        index: The tensor's number in the group.
        parts: Each rank's part.
    """

    group: Group | BorderGroup
    index: int
    parts: Mapping[int, StoredTensor]


@dataclass(slots=True)
class MpShard:
    """A model-parallel rank's tensor, or its part of one.

    Args:
        layout: Which boxes of the whole tensor the local one has.
        stored: For every state, where it lies: in one piece, or in partitions.
    """

    layout: LocalLayout
    stored: dict[str, StoredTensor | Partitioned] = field(default_factory=dict)


@dataclass(slots=True)
class ZeroTensors:
    """Where the elements of every tensor lie.

    Args:
        role: Role of all of them.
        model: Shapes.
        shards: For each parameter, those of the ranks that have a part of it.
        states: Names of the optimizer's tensor states.
        param_from_master: Whether a parameter that is not stored is given as its master: where the optimizer was not asked
            for, but stage 3 keeps its weights there.
    """

    role: str
    model: ModelSpec
    shards: Mapping[str, Sequence[MpShard]]
    states: tuple[str, ...]
    param_from_master: bool = False

    def table(self) -> Chunks:
        """All of them."""
        found = Chunks()
        for spec in self.model.params:
            shards = self.shards[spec.name]
            there = {state for shard in shards for state in shard.stored}
            from_master = self.param_from_master and MASTER in there and PARAM not in there
            states = {state: state for state in (PARAM, *self.states) if state in there}
            for state, stored in ({PARAM: MASTER, **states} if from_master else states).items():
                having = [shard for shard in shards if stored in shard.stored]
                dtype, lay = _dtype_of(having[0].stored[stored]), partial(_runs, having, stored)
                found.add(TensorName(self.role, spec.name, state), Tensor(spec.global_shape, dtype, lay))
        return found


def _runs(having: Sequence[MpShard], state: str, rows: Rows) -> Iterator[Strip]:
    by_region: dict[tuple[Box, ...], list[list[Chunk]]] = {}
    for shard in having:
        region = tuple(piece.box for piece in shard.layout.pieces)
        by_region.setdefault(region, []).append(list(chunks_of(shard.stored[state], shard.layout)))
    return rows.strips([chunk for found in by_region.values() for part in agreed(found) for chunk in part])


def _dtype_of(stored: StoredTensor | Partitioned) -> DType:
    """The element type as stored."""
    first = stored if isinstance(stored, StoredTensor) else next(iter(stored.parts.values()))
    return first.record.dtype


def chunks_of(stored: StoredTensor | Partitioned, layout: LocalLayout) -> Iterator[Chunk]:
    """The chunks of the whole tensor that a local tensor contributes: the relation, for reading and for writing."""
    if isinstance(stored, Partitioned):
        yield from _partition_chunks(stored, layout)
        return
    for piece in layout.pieces:
        start = stored.start + dot(piece.offset, stored.strides)
        yield Chunk(piece.box, stored.record, start, stored.strides)


def _partition_chunks(stored: Partitioned, layout: LocalLayout) -> Iterator[Chunk]:
    strides = row_major(layout.shape)
    for rank, part in stored.parts.items():
        run = stored.group.run(stored.index, rank)
        if run is None:
            continue
        origin = part.start + run.at - run.start
        for local in flat_boxes(layout.shape, run.start, run.start + run.numel):
            for box, offset in _in_pieces(layout, local):
                yield Chunk(box, part.record, origin + dot(offset, strides), strides)


def _in_pieces(layout: LocalLayout, local: Box) -> Iterator[tuple[Box, Shape]]:
    """What a local box covers of the whole tensor, each with its offset in the local one."""
    if len(layout.pieces) == 1 and layout.pieces[0].box.shape == layout.shape and not any(layout.pieces[0].box.offset):
        yield local, local.offset  # the whole tensor
        return
    for piece in layout.pieces:
        common = local.intersect(Box(piece.offset, piece.box.shape)) if local.shape else local
        if common is not None:
            origin = tuple(a + c - b for a, b, c in zip(piece.box.offset, piece.offset, common.offset, strict=True))
            yield Box(origin, common.shape), common.offset


def agreed(copies: list[list[Chunk]]) -> list[list[Chunk]]:
    """Chunks of ranks that have the same elements, cut so that copies have equal boxes.

    A tied parameter lies elsewhere in the flat group of another pipeline stage, and is cut elsewhere.
    """
    if len({frozenset(chunk.box for chunk in found) for found in copies}) <= 1:
        return copies
    boxes = [chunk.box for chunk in copies[0]]
    for found in copies[1:]:
        boxes = [both for box in boxes for chunk in found if (both := box.intersect(chunk.box)) is not None]
    return [[chunk.narrow(box) for box in boxes for chunk in found if chunk.box.contains(box)] for found in copies]


@dataclass(slots=True)
class LocalTensor:
    """A tensor of a rank's module.

    Args:
        shape: Its local shape.
        dtype: What the model computes with.
        stored: Where it lies; several where every data-parallel rank stores it; none where stage 3 keeps only its master.
        trained: Whether the optimizer has it.
    """

    shape: Shape
    dtype: DType
    stored: list[StoredTensor | Partitioned] = field(default_factory=list)
    trained: bool = False


@dataclass(slots=True)
class StoredModule:
    """The module of one model-parallel rank.

    Args:
        tensors: By global name, owners only, in the order of the state dict.
        order: All keys of the state dict under their global names.
        shared: ``{alias: owner}``.
        buffers: Names of persistent buffers.
        opaque: Values that are no tensors (``_extra_state``).
        layers: Keys of a ``PipelineModule``'s layer files, with their global names.
        apart: Buffers of which data-parallel ranks have each their own.
    """

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    opaque: dict[str, object] = field(default_factory=dict)
    layers: dict[int, dict[str, str]] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that the optimizer does not have."""
        return [name for name, tensor in self.tensors.items() if not tensor.trained and name not in self.buffers]


def read_module(opened: OpenedTag, mp_rank: int) -> StoredModule:
    """Read the module of one model-parallel rank.

    Raises:
        CheckpointError: Its parameters and ``param_shapes`` contradict each other.
    """
    top = opened.top(0, mp_rank)
    reading = StoredModule(buffers=tuple(top.get("buffer_names") or ()))
    shapes = {name: tuple(map(int, shape)) for group in top.get("param_shapes") or () for name, shape in group.items()}
    module = dict(_keys(opened, mp_rank, shapes, reading))
    reading.order = list(module)
    reading.shared = {**_stored_aliases(opened, module), **_seen_aliases(module)}
    for name, value in module.items():
        if not isinstance(value, StoredTensor):
            reading.opaque[name] = opened.model[0, mp_rank].materialize(value)
        elif name not in reading.shared:
            reading.tensors[name] = LocalTensor(value.shape, value.record.dtype, [value], name in shapes)
    _take_experts(opened, reading, shapes)
    if opened.sliced:
        _take_slices(opened, mp_rank, reading, shapes)
    _check_trained(opened, mp_rank, reading, shapes)
    return reading


def _keys(
    opened: OpenedTag, mp_rank: int, shapes: Mapping[str, Shape], reading: StoredModule
) -> Iterator[tuple[str, Any]]:
    """The state dict under global names."""
    module = opened.top(0, mp_rank)["module"]
    if module is not None:
        yield from module.items()
        return
    if not opened.layers:
        where = opened.model[0, mp_rank].directory.path
        raise Incomplete(
            f"{where}: 'module' is None, as in a PipelineModule, but there are no layer_XX-model_states.pt files"
        )
    for layer, key, name, value in _layer_keys(opened, mp_rank, shapes):
        reading.layers.setdefault(layer, {})[key] = name
        yield name, value


def _layer_keys(opened: OpenedTag, mp_rank: int, shapes: Mapping[str, Shape]) -> Iterator[tuple[int, str, str, Any]]:
    """The layers of a pipeline stage: those that it trains something of, and, on the first stage that could, all others."""
    tp_rank = mp_rank % opened.tp
    stages = [_names_of(opened, stage * opened.tp + tp_rank) for stage in range(opened.pp)]
    mine = stages[mp_rank // opened.tp]
    claimed = {layer for names in stages for layer in map(_layer_of, names) if layer is not None}
    for (layer, of_tp), pt in sorted(opened.layers.items()):
        if of_tp == tp_rank and isinstance(pt.tree, Mapping):
            for key, value in pt.tree.items():
                name = _global_name(layer, key, value, shapes)
                first = mp_rank < opened.tp
                if name in mine or (
                    name not in shapes and (layer in _layers(mine) or (first and layer not in claimed))
                ):
                    yield layer, key, name, value if isinstance(value, StoredTensor) else pt.materialize(value)


def _names_of(opened: OpenedTag, mp_rank: int) -> set[str]:
    return {name for group in opened.top(0, mp_rank).get("param_shapes") or () for name in group}


def _layers(names: set[str]) -> set[int]:
    return {layer for layer in map(_layer_of, names) if layer is not None}


def _layer_of(name: str) -> int | None:
    head = name.partition(".")[0]
    return int(head) if is_number(head) else None


def _global_name(layer: int, key: str, value: object, shapes: Mapping[str, Shape]) -> str:
    """``{layer}.{key}``, or the name of the tied module that the layer is."""
    plain = f"{layer}.{key}"
    shape = getattr(value, "shape", None)
    modules = (name for name in shapes if name.startswith("tied_modules.") and shapes[name] == shape)
    tied = [name for name in modules if name.split(".", 2)[2] == key]
    return tied[0] if plain not in shapes and len(tied) == 1 else plain


def _stored_aliases(opened: OpenedTag, module: Mapping[str, object]) -> dict[str, str]:
    """What ``shared_params`` says; only global rank 0 fills it."""
    shared = opened.first.get("shared_params") or {}
    return {alias: owner for alias, owner in shared.items() if alias in module}


def _seen_aliases(module: Mapping[str, object]) -> dict[str, str]:
    """Tensors that are the same elements in the same order: the only sign of a tie in stage 0. A transposed view is none, nor is the same
    storage seen as another type.
    """
    owners: dict[tuple[Record, int, Shape, Shape], str] = {}
    found: dict[str, str] = {}
    for name, value in module.items():
        if isinstance(value, StoredTensor) and 0 not in value.shape:
            steps = (stride for count, stride in zip(value.shape, value.strides, strict=True) if count > 1)
            at = (value.record, value.start, value.shape, tuple(steps))
            if owners.setdefault(at, name) != name:
                found[name] = owners[at]
    return found


def _take_experts(opened: OpenedTag, reading: StoredModule, shapes: Mapping[str, Shape]) -> None:
    """The experts' weights, which the module's own state dict leaves out, under their global names."""
    for pt in opened.expert_files.values():
        for name, value in pt.tree.items():
            reading.order.append(name)
            trained = opened.experts.local_name(name) in shapes
            reading.tensors[name] = LocalTensor(value.shape, value.record.dtype, [value], trained)


def _take_slices(opened: OpenedTag, mp_rank: int, reading: StoredModule, shapes: Mapping[str, Shape]) -> None:
    """Stage 3: parameters are empty in the module; frozen ones lie as slices beside it, buffers on every rank."""
    tops = [opened.top(dp_rank, mp_rank) for dp_rank in range(opened.dp)]
    frozen = {name: tuple(map(int, shape)) for name, shape in (tops[0].get("frozen_param_shapes") or {}).items()}
    fragments = [top.get("frozen_param_fragments") or {} for top in tops]
    for name, tensor in list(reading.tensors.items()):
        if name in shapes:
            tensor.shape, tensor.stored = shapes[name], []
        elif name in frozen:
            tensor.shape = frozen[name]
            tensor.stored = [_slices(opened, name, frozen[name], mp_rank, fragments)]
        elif name in reading.buffers or 0 not in tensor.shape:
            tensor.stored = [top["module"][name] for top in tops if name in top["module"]]
            if name in reading.buffers and not _agree(opened, mp_rank, tensor.stored):
                tensor.stored = tensor.stored[:1]
                reading.apart.append(name)
        else:
            del reading.tensors[name]  # a frozen parameter that exclude_frozen_parameters left out


def _agree(opened: OpenedTag, mp_rank: int, copies: Sequence[Any]) -> bool:
    """Whether all ranks have the same in a buffer: nobody keeps them alike, and each rank loads its own. Equal CRCs are enough."""
    files = {pt.file: pt for (_, rank), pt in opened.model.items() if rank == mp_rank}
    found = []
    for stored in copies:
        pt = files[stored.record.file]
        crc = pt.directory.members[stored.record.key].crc32 if pt.directory.checksummed else None
        found.append((crc, stored.start, stored.shape, stored.strides, stored.record.dtype))
    if len(set(found)) == 1 and found[0][0] is not None:
        return True
    return len({(s.shape, s.record.dtype, files[s.record.file].load(s).contiguous()) for s in copies}) <= 1


def _slices(opened: OpenedTag, name: str, shape: Shape, mp_rank: int, fragments: list[Any]) -> Partitioned:
    numel = 1
    for count in shape:
        numel *= count
    group = SlicedGroup((numel,), opened.dp)
    for rank, found in enumerate(fragments):
        length = found[name].shape[0] if name in found else None
        if length != group.length():
            raise Incomplete(
                f"{opened.model[rank, mp_rank].directory.path}: the slice of the frozen parameter {name} should have "
                f"{group.length()} elements, found {'none' if length is None else length}"
            )
    return Partitioned(group, 0, {rank: found[name] for rank, found in enumerate(fragments)})


def _check_trained(opened: OpenedTag, mp_rank: int, reading: StoredModule, shapes: Mapping[str, Shape]) -> None:
    where = opened.model[0, mp_rank].directory.path
    named = {name: shapes[local] for name in reading.tensors if (local := opened.experts.local_name(name)) in shapes}
    for name, shape in {**shapes, **named}.items():
        tensor = reading.tensors.get(name)
        if tensor is None:
            raise Incomplete(f"{where}: 'param_shapes' has {name}, but the module does not")
        if tensor.shape != shape:
            raise Corrupt(f"{where}: {name} has shape {tensor.shape} in the module, and {shape} in 'param_shapes'")
