"""The optimizer of a checkpoint: what kind wrote it, its groups, the names of its states, and where ``dp_reshardable`` ones lie.

These are the flat buffers of each rank, bucket by bucket. The buckets of a buffer, one behind the other, are what
``distrib_optim.pt`` holds of it: so a parameter lies where :func:`mcore_rlhf.families.megatron.layout.buffers` says, as it does in
the legacy format.

Source: megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_dp_reshardable``),
``optimizer/__init__.py`` (``data_parallel_group_idx``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mcore_rlhf.core.catalog import (
    EXP_AVG,
    EXP_AVG_SQ,
    FLOAT32,
    MASTER,
    PARAM,
    Box,
    Chunk,
    Shape,
    dot,
    flat_boxes,
    row_major,
)
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, LAYER_WISE, PLAIN, Arguments
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.groups import ChainedOptimizer, inner_state, is_matrix, merged_groups
from mcore_rlhf.families.megatron.layout import Blueprint, LocalBuffer, LocalItem, RankLayout
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.dcp.folder import DcpTensor

from .folders import DistFolder, FlatKey
from .objects import model_ranks

DP_RESHARDABLE = "dp_reshardable"
FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
SHARDING = "param_state_sharding_type"
CONTENT = "content_metadata"
CONTENT_SHARDING = "distrib_optim_sharding_type"
_COMMON_STEP = "common_step"


@dataclass(slots=True)
class OptimizerValues:
    """What a checkpoint keeps of an optimizer besides where its tensors lie.

    Args:
        kind: ``distributed``, ``plain``, ``layer_wise``, or None.
        sharding: How the distributed optimizer's states are stored.
        groups: Its param groups.
        scaler: The loss scaler's state.
        states: Names of its tensor states.
        flat: Those of them that lie in flat buffers.
        odd: Names of tensors that are a state, but not shaped like their parameter, by state.
        scalars: Values that a plain optimizer keeps per parameter, equal for all.
    """

    kind: str | None = None
    sharding: str | None = None
    groups: tuple[ParamGroup, ...] = ()
    scaler: object | None = None
    states: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    odd: dict[str, list[str]] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)


def read_optimizer(folder: DistFolder, args: Arguments) -> OptimizerValues:
    """What a checkpoint has of an optimizer.

    Args:
        folder: The checkpoint.
        args: The run's arguments.

    Raises:
        Unsupported: It is stored in a way of which only Megatron itself can make something.
        CheckpointError: Parts of it are missing.
    """
    odd = _odd_states(folder)
    flat, found = states_in(list(folder.flat)), folder.tensors.keys() - {PARAM, *odd}
    found |= flat
    members = list(_members(folder))
    sharding = _sharding(folder, members)
    if not found:
        if any(inner_state(member).get("param_groups") for member in members):
            raise Unsupported(
                f"{folder.common_file} has param groups, but no tensor of the folder is a state of the optimizer\n"
                "Convert the weights alone with --no-optimizer."
            )
        return OptimizerValues()
    usual = [state for state in (MASTER, EXP_AVG, EXP_AVG_SQ) if state in found]
    listed = [_tree(folder, objects) for objects in folder.groups.values()] or members
    groups = merged_groups([_groups(folder, member) for member in listed])
    if not groups:
        raise Unsupported(
            f"{folder.common_file}: the optimizer's states are there, its param groups are not\n"
            "Convert the weights alone with --no-optimizer."
        )
    kind = LAYER_WISE if args.layer_wise else PLAIN if sharding is None else DISTRIBUTED
    states = (*usual, *sorted(found - set(usual)))
    return OptimizerValues(
        kind, sharding, groups, next((member["grad_scaler"] for member in listed if "grad_scaler" in member), None),
        states, tuple(state for state in states if state in flat), odd, _scalars(folder, members),
    )  # fmt: skip


def _odd_states(folder: DistFolder) -> dict[str, list[str]]:
    """States of an optimizer for matrices that do not move with the elements of a weight: factors, rows of it, numbers."""
    found: dict[str, list[str]] = {}
    for state in folder.tensors.keys() - {PARAM, MASTER, EXP_AVG, EXP_AVG_SQ}:
        for key, tensor in folder.tensors[state].items():
            param = folder.model.get(key)
            if param is None or not _alike(tensor.global_shape, param.global_shape):
                found.setdefault(state, []).append(tensor.fqn)
    return found


def _alike(state: Shape, param: Shape) -> bool:
    """Whether a state moves with the elements of a parameter: of its shape, or in flattened ranges (see ``reader._cells``)."""
    return state == param or len(state) == len(param) + 1


def _members(folder: DistFolder) -> Iterable[Mapping[str, object]]:
    """The chained optimizers as ``common.pt`` has them: one dictionary, or one for each number."""
    stored = folder.top.get("optimizer")
    if stored is None:
        return
    if not isinstance(stored, dict):
        raise Unsupported(f"{folder.common_file}: 'optimizer' should be a dictionary, found {type(stored).__name__}")
    numbered = all(isinstance(key, int) for key in stored)
    for member in [stored[key] for key in sorted(stored)] if numbered else [stored]:
        if not isinstance(member, dict):
            raise Unsupported(
                f"{folder.common_file}: 'optimizer' should hold dictionaries, found {type(member).__name__}"
            )
        yield member


def _tree(folder: DistFolder, objects: Mapping[str, object]) -> Mapping[str, object]:
    """What one data-parallel group stores under keys of its own, as one dictionary."""
    wanted = ("optimizer", "grad_scaler")
    return {key: folder.value(item) for key, item in objects.items() if key in wanted}  # type: ignore[arg-type]


def _groups(folder: DistFolder, member: Mapping[str, object]) -> list[ParamGroup]:
    stored = inner_state(member).get("param_groups", [])
    if not isinstance(stored, list) or not all(isinstance(group, dict) for group in stored):
        raise Unsupported(f"{folder.common_file}: the optimizer's param_groups should be a list of dictionaries")
    return [
        ParamGroup({k: v for k, v in group.items() if k != "params"}, bool(group.get("is_expert_parallel")))
        for group in stored
    ]


def _sharding(folder: DistFolder, members: list[Mapping[str, object]]) -> str | None:
    """How the distributed optimizer's states are stored; None for the plain optimizer.

    Raises:
        Unsupported: As one pickle per rank, or as another framework's tensors.
    """
    content = folder.top.get(CONTENT)
    kinds = {member[SHARDING] for member in members if SHARDING in member}
    if isinstance(content, dict) and content.get(CONTENT_SHARDING) is not None:
        kinds.add(content[CONTENT_SHARDING])
    if len(kinds) > 1:
        raise LayoutMismatch(
            f"{folder.common_file}: says two kinds of sharding of one optimizer: {', '.join(map(str, kinds))}"
        )
    kind = next(iter(kinds), None)
    if kind in (None, DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE):
        return None if kind is None else str(kind)
    raise Unsupported(
        f"{folder.common_file}: the optimizer is stored as {kind!r}; known: {FULLY_RESHARDABLE}, {DP_RESHARDABLE}, {MODEL_SPACE}\n"
        "Save it once with --dist-ckpt-optim-fully-reshardable, or convert the weights alone with --no-optimizer."
    )


def _scalars(folder: DistFolder, members: list[Mapping[str, object]]) -> dict[str, object]:
    """The step that torch's own Adam counts per parameter, and Megatron stores once."""
    for member in members:
        state = inner_state(member).get("state")
        if isinstance(state, dict) and _COMMON_STEP in state:
            return {"step": state[_COMMON_STEP]}
    return {}


def trained_states(
    folder: DistFolder,
    values: OptimizerValues,
    specs: Sequence[ParamSpec],
    keys: Mapping[str, frozenset[str]],
    matrices: bool,
) -> dict[str, tuple[str, ...]]:
    """The states of every parameter that has some, in tensors like its own.

    Args:
        folder: The checkpoint.
        values: What was read of the optimizer.
        specs: The model's parameters.
        keys: For each parameter, the keys of the tensors that hold it.
        matrices: Whether matrices are trained by an optimizer of their own.

    Raises:
        Unsupported: Some have a part of the states that others of their kind have.
        LayoutMismatch: A state is not shaped like its parameter.
    """
    problems = Problems()
    tensors = {state: folder.tensors.get(state, {}) for state in values.states}
    for key, param in folder.model.items():
        for state in values.states:
            shape = tensors[state][key].global_shape if key in tensors[state] else param.global_shape
            if not _alike(shape, param.global_shape):
                problems.add(LayoutMismatch, f"{key}: has shape {param.global_shape}, but its {state} has {shape}")
    found = {s.name: tuple(state for state in values.states if keys[s.name] <= tensors[state].keys()) for s in specs}
    usual: dict[bool, dict[str, None]] = {}
    kinds = {s.name: matrices and is_matrix(s.name, len(s.global_shape)) for s in specs}
    for name, states in found.items():
        usual.setdefault(kinds[name], {}).update(dict.fromkeys(states))
    for spec in specs:
        there = found[spec.name]
        lacking = [state for state in usual[kinds[spec.name]] if state not in there]
        if there and [state for state in lacking if (state, spec.dtype) != (MASTER, FLOAT32)]:
            text = f"{spec.name}: has {', '.join(there)}, but no {', '.join(lacking)}"
            problems.add(Unsupported, text, "It may be another optimizer's. --no-optimizer converts the weights alone.")
    problems.raise_if_any()
    return {name: states for name, states in found.items() if states}


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
        problems, parallel, members = Problems(), blueprint.choices.parallel, {key.member for key in self.folder.flat}
        for at in model_ranks(parallel):
            rank = RankLayout(blueprint, at, "")
            items = {(item.vpp_rank, item.item.name): item for item in rank.items}
            for number, member in enumerate(rank.chained):
                if number not in members:
                    continue
                if _first_of_experts(at, parallel) if member.expert else at.holds_dense_optimizer:
                    group = _group(at, member, parallel)
                    for index, buffer in enumerate(rank.local_buffers[number]):
                        self._add(buffer, (number, group, index), items, problems)
        problems.raise_if_any()

    @property
    def own(self) -> dict[str, tuple[str, ...]]:
        """The states of the parameters that have some."""
        return dict.fromkeys(self._places, self.states)

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


def _group(at: FileRank, member: ChainedOptimizer, parallel: ParallelConfig) -> int:
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
