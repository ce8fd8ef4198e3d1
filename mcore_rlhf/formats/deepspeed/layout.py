"""What a new native checkpoint is: stage and degrees, every rank's local tensors and flat groups, and the records they lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT32,
    MASTER,
    PARAM,
    DType,
    TensorEntry,
    TensorName,
    dtype_of,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.families.universal_info import INFO
from mcore_rlhf.formats.base import PtLayout
from mcore_rlhf.layouts.tensor import LocalLayout, whole_layout
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup, Group, SlicedGroup, alignment_gaps, dealt, sub_groups
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.stored import StoredTensor

from .catalog import Partitioned, StoredModule, chunks_of
from .files import momentum_is_flat, section
from .reader import DeepSpeedState, other_values

_SUB_GROUP_SIZE = 1_000_000_000
"""Source: deepspeed 0.19.8, ``runtime/zero/config.py`` (``sub_group_size``)."""
_FUSED_ADAM = ("adam", "adamw")


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """What ZeRO is in a native target, and which of DeepSpeed's optimizer wrappers reads it.

    Args:
        stage: ZeRO stage.
        dp, pp, tp: Degrees.
        optimizer: Whether the optimizer is written.
        dtype: What parameters become, or None to leave them.
        bf16: Whether the run has bf16 enabled: its optimizer files have a prefix.
        half: Whether there are masters beside 16-bit parameters.
        bf16_optimizer: Whether the files are those of ``BF16_Optimizer``: padded masters, no loss scaler.
        fused: Whether stage 0 keeps flat groups, as with ``FusedAdam``.
        round_robin: Whether groups are in round-robin order.
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
    round_robin: bool = False
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


def zero_config(source: Source, family: ModuleState, options: WriteOptions) -> ZeroConfig:
    """Decide what the target is to be.

    Raises:
        Unsupported: DeepSpeed has no such checkpoint.
        Incomplete: The source lacks what it needs.
    """
    _refuse_degrees(source, options)
    optimizer = source.optimizer is not None and not options.no_optimizer
    stage = _stage(source, options, optimizer)
    tp = options.tp or source.parallel.tp
    _refuse_stage(source, family, stage, tp, optimizer)
    dtype = dtype_of(options.dtype) if options.dtype is not None else None
    trained = [spec.dtype for spec in source.model.params if spec.trainable] or [s.dtype for s in source.model.params]
    dtypes = [dtype or one for one in trained]
    half = any(one.itemsize == 2 for one in dtypes)
    bf16 = BFLOAT16 in dtypes
    zero = section(source.state.args, "zero_optimization")
    own = _is_bf16_optimizer(source, family) and stage == 1 and bf16
    flat = stage in (1, 2) and not own
    if optimizer:
        _check_groups(source)
    return ZeroConfig(
        stage=stage,
        dp=options.dp or source.parallel.dp,
        pp=source.parallel.pp,
        tp=tp,
        optimizer=optimizer,
        dtype=dtype,
        bf16=bf16,
        half=half,
        bf16_optimizer=own,
        fused=stage == 0 and half and _is_fused(source, family),
        round_robin=flat and bool(zero.get("round_robin_gradients")),
        aligned=flat and bool(zero.get("parameter_alignment")),
        flat_momentum=not flat or momentum_is_flat(source.state.args, bf16_optimizer=own),
        sub_group_size=_sub_group_size(zero),
        tag=options.run_of.tag.format(step=source.state.iteration)
        or family.tag
        or f"global_step{source.state.iteration}",
    )


def _refuse_degrees(source: Source, options: WriteOptions) -> None:
    for name in ("tp", "pp"):
        wanted, have = getattr(options, name), getattr(source.parallel, name)
        if wanted not in (None, have, 1 if name == "tp" else have):
            raise Unsupported(
                f"--{name} {wanted}: a native DeepSpeed checkpoint keeps the {name.upper()} of its source, which is {have}, "
                "or is put together with --tp 1\n"
                "Convert --to universal: DeepSpeed itself cuts that for any model-parallel layout."
            )


def _stage(source: Source, options: WriteOptions, optimizer: bool) -> int:
    if options.zero_stage is not None:
        return options.zero_stage
    kind = source.optimizer or ""
    if not optimizer:
        return 0
    if kind.startswith("zero"):
        return int(kind.removeprefix("zero"))
    stage = section(source.state.args, "zero_optimization").get("stage")
    return stage if isinstance(stage, int) and 0 <= stage <= 3 else 2


def _refuse_stage(source: Source, family: ModuleState, stage: int, tp: int, optimizer: bool) -> None:
    pp = source.parallel.pp
    if stage == 3 and not optimizer:
        why = "the source has none" if source.optimizer is None else "--no-optimizer leaves it out"
        raise Unsupported(
            f"stage 3 keeps the weights themselves in the optimizer's files, and {why}\nWrite --zero-stage 0, or --to universal."
        )
    if family.pipeline and stage != 1 and optimizer:
        raise Unsupported(
            f"stage {stage}: DeepSpeed's PipelineModule trains with ZeRO stage 1 only\nGive --zero-stage 1."
        )
    if pp > 1 and stage == 0 and optimizer:
        raise Unsupported("stage 0 with pipeline parallelism is not supported\nGive --zero-stage 1.")
    native = DeepSpeedState.of(source) is not None
    if family.pipeline and not native:
        raise Unsupported(
            f"from {source.format}: the model is a PipelineModule, whose native files can only be made of native ones\n"
            "Convert it --to universal, which DeepSpeed itself loads into a PipelineModule."
        )
    if tp * pp > 1 and not native:
        raise Unsupported(
            f"from {source.format} with {source.parallel}: native files of a model-parallel run can only be made of native ones\n"
            "DeepSpeed itself loads a universal checkpoint into any model-parallel layout; --tp 1 puts tensors together."
        )
    if family.pipeline and tp != source.parallel.tp:
        raise Unsupported(
            f"--tp {tp}: the layer files of a PipelineModule keep their TP, which is {source.parallel.tp}"
        )


def _is_bf16_optimizer(source: Source, family: ModuleState) -> bool:
    """Whether the run accumulates gradients in fp32, which is what makes DeepSpeed take ``BF16_Optimizer`` in stage 1."""
    if source.optimizer == "zero1":
        return "dynamic_loss_scale" not in family.optimizer
    accumulates = section(source.state.args, "data_types").get("grad_accum_dtype")
    return accumulates in ("fp32", "float32")


def _is_fused(source: Source, family: ModuleState) -> bool:
    """Whether the run's own optimizer is ``FusedAdam``: one that DeepSpeed made of ``ds_config``."""
    if source.optimizer == "zero0":
        return "clip_grad" in family.optimizer
    config = section(source.state.args, "optimizer")
    name, params = str(config.get("type", "")).lower(), section(config, "params")
    return name in _FUSED_ADAM and not params.get("torch_adam")


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


@dataclass(frozen=True, slots=True)
class ModelRankParam:
    """A parameter, and the part of it that a model-parallel rank has."""

    spec: ParamSpec
    layout: LocalLayout

    @property
    def numel(self) -> int:
        """Elements of the local parameter."""
        return prod(self.layout.shape)


@dataclass(frozen=True, slots=True)
class NewFlatGroup:
    """A flat group of a model-parallel rank.

    Args:
        number: The optimizer's param group.
        params: Its parameters, in the order in which they lie.
        geometry: Where they lie.
        muon: Whether Muon trains them and keeps its momentum in whole parameters.
    """

    number: int
    params: tuple[ModelRankParam, ...]
    geometry: Group
    muon: bool = False

    def geometry_of(self, state: str) -> Group | BorderGroup:
        """Where the parameters lie in a state."""
        flat = self.geometry
        return BorderGroup(flat) if self.muon and state == MOMENTUM and isinstance(flat, FlatGroup) else flat


@dataclass(slots=True)
class TagLayout:
    """Everything about a new tag that its files have in common.

    Args:
        source: What is converted.
        family: What the source has of a module besides tensors.
        zero: Stage and degrees.
        model: What the model is, with the target's dtypes.
        states: Names of the optimizer's tensor states, masters first; empty without an optimizer.
        catalog: Where tensors come from.
    """

    source: Source
    family: ModuleState
    zero: ZeroConfig
    model: ModelSpec
    states: tuple[str, ...]
    catalog: Chunks
    _available: frozenset[TensorName] = frozenset()
    _dtypes: dict[str, DType] = field(default_factory=dict)
    _flat: dict[int, list[NewFlatGroup]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._available = frozenset(self.catalog)

    @property
    def groups(self) -> Sequence[ParamGroup]:
        """The optimizer's param groups."""
        return self.source.state.groups

    @property
    def modules(self) -> Sequence[StoredModule]:
        """The modules of a native source, by model-parallel rank; none of any other."""
        own = DeepSpeedState.of(self.source)
        return own.modules if own else ()

    @property
    def same_ranks(self) -> bool:
        """Whether source and target have a model file of each data-parallel rank, of as many."""
        return self.source.optimizer == "zero3" and self.zero.stage == 3 and self.zero.dp == self.source.parallel.dp

    def other_values(self, dp_rank: int, mp_rank: int) -> Mapping[str, object]:
        """Counters and client state: a rank's own, where the same rank wrote them, and what a trainer asks for that no rank had."""
        family, own, other = self.family, DeepSpeedState.of(self.source), self.source.state.other
        if self.same_ranks and own is not None and own.opened is not None:
            asked = {key: value for key, value in other.items() if key not in own.opened.first}
            return {**asked, **other_values(own.opened, dp_rank, mp_rank)}
        if self.zero.tp != self.source.parallel.tp:
            return {key: value for key, value in other.items() if key != INFO}
        if family.per_rank:
            asked = {key: value for key, value in other.items() if key not in family.per_rank[0]}
            return {**asked, **family.per_rank[mp_rank]}
        return other

    def local(self, mp_rank: int) -> list[ModelRankParam]:
        """The tensors of a rank's module, in order."""
        if self.zero.mp == 1:
            return [ModelRankParam(spec, whole_layout(spec.global_shape)) for spec in self.model.params]
        assert isinstance(self.family, DeepSpeedState)
        held = ((spec, self.family.shards[spec.name].get(mp_rank)) for spec in self.model.params)
        return [ModelRankParam(spec, shard.layout) for spec, shard in held if shard is not None]

    def params_of(self, mp_rank: int) -> list[list[ModelRankParam]]:
        """The parameters of every param group that a rank has, in the optimizer's order; none of them empty."""
        local = {param.spec.name: param for param in self.local(mp_rank)}
        return [[local[n] for n in group.params if n in local and local[n].numel] for group in self.groups]

    def flat_groups(self, mp_rank: int) -> list[NewFlatGroup]:
        """The flat groups of a rank; worked out once, since every data-parallel rank's file asks."""
        if mp_rank not in self._flat:
            cut = (self._cut(number, params) for number, params in enumerate(self.params_of(mp_rank)))
            self._flat[mp_rank] = [group for groups in cut for group in groups]
        return self._flat[mp_rank]

    def _cut(self, number: int, params: list[ModelRankParam]) -> list[NewFlatGroup]:
        zero = self.zero
        muon = self.groups[number].fields.get(USE_MUON) is True and not zero.flat_momentum
        if zero.stage == 3:
            parts = sub_groups([param.numel for param in params], zero.dp, zero.sub_group_size)
            chosen = [tuple(params[index] for index in part) for part in parts]
            return [
                NewFlatGroup(number, part, SlicedGroup(tuple(param.numel for param in part), zero.dp))
                for part in chosen
            ]
        ordered = tuple(dealt(params, zero.dp) if zero.round_robin else params)
        numels = tuple(param.numel for param in ordered)
        if zero.stage == 0:
            return [NewFlatGroup(number, ordered, FlatGroup(numels, 1, alignment=1), muon)]
        multiple = 16 // gcd(16, params[0].spec.dtype.itemsize) if zero.aligned and params else 1
        return [NewFlatGroup(number, ordered, FlatGroup(numels, zero.dp, alignment_gaps(numels, multiple)), muon)]

    def has(self, spec: ParamSpec, state: str) -> bool:
        """Whether the source has a state of a parameter; its masters can always be made."""
        return state == MASTER or TensorName(self.source.role, spec.name, state) in self._available

    def state_dtype(self, state: str) -> DType:
        """The element type of a state, as the source stores it."""
        if state == MASTER:
            return FLOAT32
        if state not in self._dtypes:
            name = next(name for name in self.catalog if name.state == state)
            self._dtypes[state] = self.catalog.dtype(name) or FLOAT32
        return self._dtypes[state]


@dataclass(slots=True)
class NewFile(PtLayout):
    """One file of a new tag.

    Args:
        tag: The tag.
    """

    tag: TagLayout = field(kw_only=True)

    def whole(self, param: ModelRankParam, state: str, dtype: DType) -> StoredTensor:
        """A local tensor in one piece."""
        stored = StoredTensor.whole(self.record(dtype, param.numel), param.layout.shape)
        self._hold(param, state, stored)
        return stored

    def partition(self, group: NewFlatGroup, state: str, rank: int, *, lean: bool) -> StoredTensor:
        """One rank's part of a flat group in one state, with everything that lies in it.

        Args:
            group: The group.
            state: The state.
            rank: The data-parallel rank.
            lean: Whether the padding at its end is left out.
        """
        geometry = group.geometry_of(state)
        if isinstance(geometry, BorderGroup):
            length, indices = geometry.length_of(rank), geometry.held(rank)
        else:
            length, indices = geometry.length() - (geometry.padding(rank) if lean else 0), geometry.indices(rank)
        stored = self._flat(self.tag.state_dtype(state), length)
        for index in indices:
            param = group.params[index]
            if self.tag.has(param.spec, state):
                self._hold(param, state, Partitioned(geometry, index, {rank: stored}))
        return stored

    def frozen_slice(self, param: ModelRankParam, rank: int) -> StoredTensor:
        """A rank's slice of a frozen parameter in stage 3, padded with zeros."""
        geometry = SlicedGroup((param.numel,), self.tag.zero.dp)
        stored = self._flat(param.spec.dtype, geometry.length())
        self._hold(param, PARAM, Partitioned(geometry, 0, {rank: stored}))
        return stored

    def _flat(self, dtype: DType, numel: int) -> StoredTensor:
        """A flat tensor in a further record of its own."""
        return StoredTensor.whole(self.record(dtype, numel), (numel,))

    def _hold(self, param: ModelRankParam, state: str, stored: StoredTensor | Partitioned) -> None:
        """Say that a part of a tensor lies in this file."""
        chunks = tuple(chunks_of(stored, param.layout))
        if chunks:
            name = TensorName(self.tag.source.role, param.spec.name, state)
            self.entries.append(TensorEntry(name, param.spec.global_shape, chunks[0].record.dtype, chunks))
