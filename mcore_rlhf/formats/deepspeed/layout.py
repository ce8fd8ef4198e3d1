"""What a new native checkpoint is: stage and degrees, every rank's local tensors and flat groups, and the records they lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.core.catalog import Catalog, Record, TensorEntry
from mcore_rlhf.core.dtype import BFLOAT16, FLOAT32, DType, dtype_of
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState
from mcore_rlhf.families.source import ParamGroup, Source, WriteOptions
from mcore_rlhf.layouts.tensor import LocalLayout, Piece
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup, Group, SlicedGroup, alignment_gaps, dealt, sub_groups
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.ptfile import StoredTensor

from .catalog import Cut, Holder, Place, place_chunks
from .groups import momentum_is_flat

_SUB_GROUP_SIZE = 1_000_000_000
"""Source: deepspeed 0.19.8, ``runtime/zero/config.py`` (``sub_group_size``)."""
_FUSED_ADAM = ("adam", "adamw")


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions about a native target.

    Args:
        stage: ZeRO stage.
        dp, pp, tp: Degrees.
        optimizer: Whether the optimizer is written.
        dtype: What parameters become, or None to leave them.
        bf16: Whether the run has bf16 enabled: its optimizer files have a prefix.
        half: Whether there are masters beside 16-bit parameters.
        bf16_optimizer: Whether the files are those of ``BF16_Optimizer``: padded masters, no loss scaler.
        fused: Whether stage 0 keeps flat groups, as with ``FusedAdam``.
        dealt: Whether groups are in round-robin order.
        aligned: Whether every parameter starts at a multiple of 16 bytes of its flat group.
        flat_momentum: Whether Muon's momentum is cut as all other states, and not kept in whole parameters.
        sub_group_size: Elements after which stage 3 begins another sub-group.
        tag: Name of the target's folder.
    """

    stage: int
    dp: int
    pp: int = 1
    tp: int = 1
    optimizer: bool = True
    dtype: DType | None = None
    bf16: bool = False
    half: bool = False
    bf16_optimizer: bool = False
    fused: bool = False
    dealt: bool = False
    aligned: bool = False
    flat_momentum: bool = True
    sub_group_size: int = _SUB_GROUP_SIZE
    tag: str = ""

    @property
    def prefix(self) -> str:
        """What the names of optimizer files begin with."""
        return "bf16_" if self.bf16 else ""

    @property
    def mp(self) -> int:
        """Model-parallel ranks."""
        return self.pp * self.tp


def choose(source: Source, native: ModuleState, options: WriteOptions, report: Report) -> Choices:
    """Decide what the target is to be.

    Raises:
        Unsupported: DeepSpeed has no such checkpoint.
        Incomplete: The source lacks what it needs.
    """
    _refuse_degrees(source, options)
    optimizer = source.optimizer is not None and not options.no_optimizer
    stage = _stage(source, native, options, optimizer)
    tp = options.tp or source.parallel.tp
    _refuse_stage(source, native, stage, tp, optimizer)
    dtype = dtype_of(options.dtype) if options.dtype is not None else None
    trained = [spec.dtype for spec in source.model.params if spec.trainable] or [s.dtype for s in source.model.params]
    dtypes = [dtype or one for one in trained]
    half = any(one.itemsize == 2 for one in dtypes)
    bf16 = BFLOAT16 in dtypes
    zero = section(source.state.args, "zero_optimization")
    own = _is_bf16_optimizer(source, native) and stage == 1 and bf16
    flat = stage in (1, 2) and not own
    if optimizer:
        _check_groups(source)
    return Choices(
        stage, options.dp or source.parallel.dp, source.parallel.pp, tp, optimizer, dtype, bf16, half, own,
        stage == 0 and half and _is_fused(source, native, report),
        flat and bool(zero.get("round_robin_gradients")), flat and bool(zero.get("parameter_alignment")),
        not flat or momentum_is_flat(source.state.args, bf16_optimizer=own),
        _sub_group_size(zero), native.tag or f"global_step{source.state.iteration}",
    )  # fmt: skip


def section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A section of ``ds_config``; empty where there is none."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _refuse_degrees(source: Source, options: WriteOptions) -> None:
    for name in ("tp", "pp"):
        wanted, have = getattr(options, name), getattr(source.parallel, name)
        if wanted not in (None, have, 1 if name == "tp" else have):
            raise Unsupported(
                f"--{name} {wanted}: a native DeepSpeed checkpoint keeps the {name.upper()} of its source, which is {have}, "
                "or is put together with --tp 1\n"
                "Convert --to universal: DeepSpeed itself cuts that for any model-parallel layout."
            )


def _stage(source: Source, native: ModuleState, options: WriteOptions, optimizer: bool) -> int:
    if options.zero_stage is not None:
        return options.zero_stage
    kind = source.optimizer or ""
    if not optimizer:
        return 0
    if kind.startswith("zero"):
        return int(kind.removeprefix("zero"))
    stage = section(source.state.args, "zero_optimization").get("stage")
    return stage if isinstance(stage, int) and 0 <= stage <= 3 else 2


def _refuse_stage(source: Source, native: ModuleState, stage: int, tp: int, optimizer: bool) -> None:
    pp = source.parallel.pp
    if stage == 3 and not optimizer:
        why = "the source has none" if source.optimizer is None else "--no-optimizer leaves it out"
        raise Unsupported(
            f"stage 3 keeps the weights themselves in the optimizer's files, and {why}\nWrite --zero-stage 0, or --to universal."
        )
    if native.pipeline and stage != 1 and optimizer:
        raise Unsupported(
            f"stage {stage}: DeepSpeed's PipelineModule trains with ZeRO stage 1 only\nGive --zero-stage 1."
        )
    if pp > 1 and stage == 0 and optimizer:
        raise Unsupported("stage 0 with pipeline parallelism is not supported\nGive --zero-stage 1.")
    if tp * pp > 1 and not hasattr(native, "holders"):
        raise Unsupported(
            f"from {source.format} with {source.parallel}: native files of a model-parallel run can only be made of native ones\n"
            "DeepSpeed itself loads a universal checkpoint into any model-parallel layout; --tp 1 puts tensors together."
        )
    if native.pipeline and tp != source.parallel.tp:
        raise Unsupported(
            f"--tp {tp}: the layer files of a PipelineModule keep their TP, which is {source.parallel.tp}"
        )


def _is_bf16_optimizer(source: Source, native: ModuleState) -> bool:
    """Whether the run accumulates gradients in fp32, which is what makes DeepSpeed take ``BF16_Optimizer`` in stage 1."""
    if source.optimizer == "zero1":
        return "dynamic_loss_scale" not in native.optimizer
    accumulates = section(source.state.args, "data_types").get("grad_accum_dtype")
    return accumulates in ("fp32", "float32")


def _is_fused(source: Source, native: ModuleState, report: Report) -> bool:
    """Whether the run's own optimizer is ``FusedAdam``: one that DeepSpeed made of ``ds_config``."""
    if source.optimizer == "zero0":
        return "clip_grad" in native.optimizer
    config = section(source.state.args, "optimizer")
    name, params = str(config.get("type", "")).lower(), section(config, "params")
    fused = name in _FUSED_ADAM and not params.get("torch_adam")
    if fused:
        report.add(
            Fate.NOTE, "stage 0: ds_config asks for Adam, which is FusedAdam on a GPU: written as its flat groups"
        )
    return fused


def _sub_group_size(zero: Mapping[str, object]) -> int:
    size = zero.get("sub_group_size")
    return int(size) if isinstance(size, int | float) and size >= 1 else _SUB_GROUP_SIZE


def _check_groups(source: Source) -> None:
    """Every trained parameter is in one group, and every group says how it is trained."""
    problems = Problems()
    listed = [name for group in source.state.groups for name in group.params]
    trained = [spec.name for spec in source.model.params if spec.trainable]
    if not listed and trained:
        problems.add(Incomplete, f"{source.root}: does not say which parameters are in which param group")
    elif sorted(listed) != sorted(trained):
        some = ", ".join(sorted(set(listed) ^ set(trained))[:5]) or "some twice"
        problems.add(
            LayoutMismatch, f"{source.root}: the param groups do not hold the trained parameters exactly: {some}"
        )
    for number, group in enumerate(source.state.groups):
        if not set(group.fields) - set(group.scalars):
            problems.add(
                Incomplete,
                f"{source.root}: param group {number} has no settings (lr, weight_decay, …)",
                "An elastic checkpoint does not store them: convert it --to universal, which DeepSpeed loads with the run's own.",
            )
    problems.raise_if_any()


def whole_layout(shape: Shape) -> LocalLayout:
    """The layout of a rank that has a whole tensor."""
    return LocalLayout(shape, shape, (Piece(Box.whole(shape), (0,) * len(shape)),))


@dataclass(slots=True)
class Records:
    """The records of one file, and the entries that lie in them.

    Args:
        file: Path relative to the root.
        role: Role of the tensors.
    """

    file: str
    role: str
    records: list[Record] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    def tensor(self, dtype: DType, shape: Shape) -> StoredTensor:
        """A tensor in a further record of its own."""
        record = Record(self.file, f"data/{len(self.records)}", dtype, prod(shape), 0)
        self.records.append(record)
        return StoredTensor(record, 0, shape, row_major(shape))

    def hold(self, spec: ParamSpec, state: str, place: Place, layout: LocalLayout) -> None:
        """Say that a place of this file holds a part of a tensor."""
        chunks = tuple(place_chunks(place, layout))
        if chunks:
            name = TensorName(self.role, spec.name, state)
            self.entries.append(TensorEntry(name, spec.global_shape, chunks[0].record.dtype, chunks))


@dataclass(frozen=True, slots=True)
class Member:
    """A trained parameter of a flat group."""

    spec: ParamSpec
    layout: LocalLayout

    @property
    def numel(self) -> int:
        """Elements of the local parameter."""
        return prod(self.layout.shape)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A flat group of a model-parallel rank.

    Args:
        number: The optimizer's param group.
        members: Its parameters, in the order in which they lie.
        geometry: Where they lie.
    """

    number: int
    members: tuple[Member, ...]
    geometry: Group


@dataclass(slots=True)
class Blueprint:
    """A whole new checkpoint, before its files.

    Args:
        role: Role of its tensors.
        model: What the model is, with the target's dtypes.
        choices: Stage and degrees.
        groups: The optimizer's param groups.
        states: Names of its tensor states, masters first.
        source: Where tensors come from; says which states there are, and their dtypes.
        holders: How model-parallel ranks cut the parameters; None where there is one.
    """

    role: str
    model: ModelSpec
    choices: Choices
    groups: Sequence[ParamGroup]
    states: tuple[str, ...]
    source: Catalog
    holders: Mapping[str, Mapping[int, Holder]] | None = None
    _available: frozenset[TensorName] = frozenset()
    _dtypes: dict[str, DType] = field(default_factory=dict)
    _flat: dict[int, list[NewGroup]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._available = frozenset(self.source)

    def layout_of(self, spec: ParamSpec, mp_rank: int) -> LocalLayout | None:
        """The part of a tensor that a model-parallel rank has, or None."""
        if self.holders is None:
            return whole_layout(spec.global_shape)
        holder = self.holders[spec.name].get(mp_rank)
        return holder.layout if holder is not None else None

    def local(self, mp_rank: int) -> list[Member]:
        """The tensors of a rank's module, in order."""
        found = ((spec, self.layout_of(spec, mp_rank)) for spec in self.model.params)
        return [Member(spec, layout) for spec, layout in found if layout is not None]

    def params_of(self, mp_rank: int) -> list[list[Member]]:
        """The parameters of every param group that a rank has, in the optimizer's order; none of them empty."""
        local = {member.spec.name: member for member in self.local(mp_rank)}
        return [[local[n] for n in group.params if n in local and local[n].numel] for group in self.groups]

    def flat_groups(self, mp_rank: int) -> list[NewGroup]:
        """The flat groups of a rank; worked out once, since every data-parallel rank's file asks."""
        if mp_rank not in self._flat:
            cut = (self._cut(number, members) for number, members in enumerate(self.params_of(mp_rank)))
            self._flat[mp_rank] = [group for groups in cut for group in groups]
        return self._flat[mp_rank]

    def _cut(self, number: int, members: list[Member]) -> list[NewGroup]:
        choices = self.choices
        if choices.stage == 3:
            parts = sub_groups([member.numel for member in members], choices.dp, choices.sub_group_size)
            chosen = [tuple(members[index] for index in part) for part in parts]
            return [
                NewGroup(number, part, SlicedGroup(tuple(member.numel for member in part), choices.dp))
                for part in chosen
            ]
        ordered = dealt(members, choices.dp) if choices.dealt else members
        numels = tuple(member.numel for member in ordered)
        if choices.stage == 0:
            return [NewGroup(number, tuple(ordered), FlatGroup(numels, 1, alignment=1))]
        multiple = 16 // gcd(16, members[0].spec.dtype.itemsize) if choices.aligned and members else 1
        return [NewGroup(number, tuple(ordered), FlatGroup(numels, choices.dp, alignment_gaps(numels, multiple)))]

    def geometry_of(self, group: NewGroup, state: str) -> Group | BorderGroup:
        """Where a group's parameters lie in a state."""
        flat, muon = group.geometry, self.groups[group.number].fields.get(USE_MUON) is True
        whole = muon and state == MOMENTUM and not self.choices.flat_momentum
        return BorderGroup(flat) if whole and isinstance(flat, FlatGroup) else flat

    def has(self, spec: ParamSpec, state: str) -> bool:
        """Whether the source has a state of a parameter; its masters can always be made."""
        return state == MASTER or TensorName(self.role, spec.name, state) in self._available

    def state_dtype(self, state: str) -> DType:
        """The element type of a state, as the source stores it."""
        if state == MASTER:
            return FLOAT32
        if state not in self._dtypes:
            name = next(name for name in self.source if name.state == state)
            entry = self.source.get(name)
            self._dtypes[state] = entry.dtype if entry is not None else FLOAT32
        return self._dtypes[state]


def flat_part(
    blueprint: Blueprint, records: Records, group: NewGroup, state: str, rank: int, *, lean: bool
) -> StoredTensor:
    """One rank's part of a flat group in one state, with everything that lies in it.

    Args:
        blueprint: The checkpoint.
        records: The file.
        group: The group.
        state: The state.
        rank: The data-parallel rank.
        lean: Whether the padding at its end is left out.
    """
    geometry = blueprint.geometry_of(group, state)
    if isinstance(geometry, BorderGroup):
        length, indices = geometry.length_of(rank), geometry.held(rank)
    else:
        length, indices = geometry.length() - (geometry.padding(rank) if lean else 0), geometry.indices(rank)
    stored = records.tensor(blueprint.state_dtype(state), (length,))
    for index in indices:
        member = group.members[index]
        if blueprint.has(member.spec, state):
            records.hold(member.spec, state, Cut(geometry, index, {rank: stored}), member.layout)
    return stored


def whole_tensor(records: Records, member: Member, state: str, dtype: DType) -> StoredTensor:
    """A local tensor in one piece."""
    stored = records.tensor(dtype, member.layout.shape)
    records.hold(member.spec, state, stored, member.layout)
    return stored


def frozen_slice(records: Records, member: Member, rank: int, dp: int) -> StoredTensor:
    """A rank's slice of a frozen parameter in stage 3, padded with zeros."""
    geometry = SlicedGroup((member.numel,), dp)
    stored = records.tensor(member.spec.dtype, (geometry.length(),))
    records.hold(member.spec, PARAM, Cut(geometry, 0, {rank: stored}), member.layout)
    return stored
