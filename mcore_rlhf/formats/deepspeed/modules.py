"""The module's own tensors of every model-parallel rank, and how tensor parallelism cuts them.

Weights, buffers, frozen parameters and their aliases come from the model's files; ``universal_checkpoint_info`` says, as boxes,
which part of the whole each has.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_get_shared_params``,
``_get_zero_frozen_param_attributes``), ``runtime/pipe/module.py`` (``save_state_dict``), ``checkpoint/affine.py``
(``AffinePiece``), ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``), ``checkpoint/constants.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.core.dtype import DType
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported
from mcore_rlhf.layouts.tensor import LocalLayout, Piece, Shard, global_shape_of, local_layout
from mcore_rlhf.layouts.zero import SlicedGroup
from mcore_rlhf.models.rules import Rules
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition
from mcore_rlhf.storage.ptfile import StoredTensor

from .catalog import Partitioned
from .tag import OpenedTag


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
    """

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    opaque: dict[str, object] = field(default_factory=dict)
    layers: dict[int, dict[str, str]] = field(default_factory=dict)

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
    return int(head) if head.isdigit() else None


def _global_name(layer: int, key: str, value: object, shapes: Mapping[str, Shape]) -> str:
    """``{layer}.{key}``, or the name of the tied module that the layer is."""
    plain = f"{layer}.{key}"
    shape = getattr(value, "shape", None)
    tied = [
        name for name in shapes
        if name.startswith("tied_modules.") and name.split(".", 2)[2] == key and shapes[name] == shape
    ]  # fmt: skip
    return tied[0] if plain not in shapes and len(tied) == 1 else plain


def _stored_aliases(opened: OpenedTag, module: Mapping[str, object]) -> dict[str, str]:
    """What ``shared_params`` says; only global rank 0 fills it."""
    shared = opened.first.get("shared_params") or {}
    return {alias: owner for alias, owner in shared.items() if alias in module}


def _seen_aliases(module: Mapping[str, object]) -> dict[str, str]:
    """Tensors that are the same elements: the only sign of a tie in stage 0."""
    owners: dict[tuple[str, str, int, Shape], str] = {}
    found: dict[str, str] = {}
    for name, value in module.items():
        if isinstance(value, StoredTensor) and 0 not in value.shape:
            at = (value.record.file, value.record.key, value.start, value.shape)
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
        else:
            del reading.tensors[name]  # a frozen parameter that exclude_frozen_parameters left out


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


_PATTERNS = (
    ("tp_replicated_parameter_patterns", REPLICATED),
    ("parameter_to_average_patterns", REPLICATED),
    ("vocabulary_parameter_patterns", VOCABULARY),
    ("parameter_with_row_parallelism_patterns", ROW),
    ("parameter_with_2_sub_params_cat_dim_0", GATED),
)
_REFUSED = "autotp_unsupported_parameter_patterns"


@dataclass(frozen=True, slots=True)
class CutTensor:
    """How one tensor is cut.

    Args:
        partition: In words that every format knows.
        global_shape: Shape of the whole.
        layouts: The part of every tensor-parallel rank.
    """

    partition: Partition
    global_shape: Shape
    layouts: tuple[LocalLayout, ...]


class TensorCuts:
    """Says how tensors are cut over tensor-parallel ranks.

    Args:
        info: ``universal_checkpoint_info``, or nothing.
        tp: Tensor-parallel degree.
        rules: The user's own, which come first.
    """

    def __init__(self, info: Mapping[str, Any] | None, tp: int, rules: Rules) -> None:
        self.info, self.tp, self.rules = info or {}, tp, rules
        self.affine: Mapping[str, Any] = (self.info.get("affine_map") or {}).get("params", {})

    def of(self, name: str, shapes: Sequence[Shape], *, buffer: bool = False) -> CutTensor:
        """How a tensor is cut.

        Args:
            name: Its name.
            shapes: Its local shape on every tensor-parallel rank.
            buffer: Whether it is a buffer: every rank has those whole.

        Raises:
            LayoutMismatch: Nothing says it.
            Unsupported: It is cut in a way that boxes cannot describe.
        """
        if self.tp == 1 or buffer:
            return _cut_by(REPLICATED, shapes, self.tp)
        refused = self._first(self.info.get(_REFUSED) or (), name)
        if refused is not None:
            raise Unsupported(f"{name}: AutoTP itself says that it cannot be converted ({_REFUSED}: {refused!r})")
        pattern = self._first(self.affine, name)
        if pattern is not None:
            return _affine(name, self.affine[pattern], shapes)
        return _cut_by(self._partition(name), shapes, self.tp)

    def _partition(self, name: str) -> Partition:
        rule = self.rules.partition(name)
        if rule is not None:
            return rule
        if self.info.get("parameter_with_sub_params") and self._sub_params(name):
            raise Unsupported(f"{name}: parameter_with_sub_params without an affine map is not supported yet")
        found = [partition for key, partition in _PATTERNS if self._first(self.info.get(key) or (), name) is not None]
        if len(set(found)) > 1:
            raise LayoutMismatch(
                f"{name}: universal_checkpoint_info says both {found[0]} and {found[1]}\nSay it with --rules."
            )
        if found:
            return found[0]
        if not self.info:
            raise LayoutMismatch(
                f"{name}: TP {self.tp}, and no universal_checkpoint_info says how it is cut\n"
                "Say it with --rules rules.yaml (pattern → replicated, column, row, …)."
            )
        return COLUMN

    def _sub_params(self, name: str) -> bool:
        listed = self.info["parameter_with_sub_params"]
        return any(re.match(p, name) for item in listed for p in dict(item).get("patterns", ()))

    @staticmethod
    def _first(patterns: Any, name: str) -> str | None:
        return next((str(pattern) for pattern in patterns if re.match(str(pattern), name)), None)


def _cut_by(partition: Partition, shapes: Sequence[Shape], tp: int) -> CutTensor:
    if len(set(shapes)) > 1:
        raise LayoutMismatch(f"tensor-parallel ranks have different shapes: {', '.join(map(str, shapes))}")
    if partition.dim is not None and len(shapes[0]) <= partition.dim:
        partition = REPLICATED
    whole = global_shape_of(partition, shapes[0], tp, 1, 0)
    return CutTensor(partition, whole, tuple(local_layout(partition, whole, Shard(rank, tp)) for rank in range(tp)))


def _affine(name: str, stored: Mapping[str, Any], shapes: Sequence[Shape]) -> CutTensor:
    whole = tuple(map(int, stored["logical_shape"]))
    layouts = []
    for rank, shape in enumerate(shapes):
        at = stored["ranks"].get(rank, stored["ranks"].get(str(rank)))
        if at is None or tuple(at["shard_shape"]) != shape:
            found = None if at is None else tuple(at["shard_shape"])
            raise LayoutMismatch(f"{name}: affine_map says shape {found} on TP rank {rank}, the module has {shape}")
        layouts.append(LocalLayout(shape, shape, tuple(_pieces(name, at["pieces"], whole, shape))))
    return CutTensor(_partition_of(whole, shapes), whole, tuple(layouts))


def _pieces(name: str, pieces: Sequence[Mapping[str, Any]], whole: Shape, local: Shape) -> Iterator[Piece]:
    for piece in pieces:
        shape = tuple(map(int, piece["shape"]))
        source, dest = piece["source"], piece["dest"]
        plain = tuple(source[1]) == row_major(whole) and tuple(dest[1]) == row_major(local)
        if not plain or piece.get("scale", 1.0) != 1.0:
            raise Unsupported(f"{name}: its affine_map is no set of plain boxes ({dict(piece)})")
        yield Piece(Box(_unravel(int(source[0]), whole), shape), _unravel(int(dest[0]), local))


def _unravel(offset: int, shape: Shape) -> Shape:
    index = []
    for stride in row_major(shape):
        index.append(offset // stride)
        offset %= stride
    return tuple(index)


def _partition_of(whole: Shape, shapes: Sequence[Shape]) -> Partition:
    """The partition in plain words: the dimension in which the parts are smaller."""
    cut = [dim for dim, count in enumerate(whole) if any(shape[dim] != count for shape in shapes)]
    return Partition(cut[0]) if cut else REPLICATED
