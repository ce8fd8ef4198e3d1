"""What a native target is to be: stage, degrees, and which of DeepSpeed's optimizer wrappers will read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.dtype import BFLOAT16, DType, dtype_of
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source, WriteOptions

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
