"""What a DCP target is to be: how many chunks, which keys, which types, with or without the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.dtype import FLOATING, DType, dtype_of
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source, WriteOptions

from .folders import RLINF_FOLDER
from .keys import RLINF, KeyLayout
from .native import DcpState


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions about a DCP target.

    Args:
        dp: Parts that every tensor is cut into along its first dimension, and files.
        layout: How keys are made.
        inner: The DCP folder below the target's: ``dcp_checkpoint``, or empty.
        weights: Whether RLinf's plain weights are written beside it.
        optimizer: Whether the optimizer is written.
        masters: Whether the model's tensors are the fp32 masters, as FSDP trains them.
        dtype: What trained parameters become, or None to leave them.
        rng: ``keep``, ``derive``, ``drop``, or None for what the keys ask for.
    """

    dp: int
    layout: KeyLayout
    inner: str
    weights: bool
    optimizer: bool
    masters: bool
    dtype: DType | None = None
    rng: str | None = None


def choose(source: Source, options: WriteOptions, report: Report) -> Choices:
    """Decide what the target is to be.

    Args:
        source: Any source of module names.
        options: What the user asked for.
        report: Told what changes.

    Raises:
        Unsupported: The source is of another family.
        Incomplete: Nobody knows the members of the param groups.
    """
    native = ModuleState.needed(source, "dcp")
    optimizer = source.optimizer is not None and not options.no_optimizer
    if optimizer:
        _check_groups(source)
    layout = native.layout if isinstance(native, DcpState) else RLINF
    if not optimizer:
        layout = replace(layout, optimizer=None)
    elif layout.optimizer is None:
        layout = replace(layout, optimizer=RLINF.optimizer)
    dtype = None if options.dtype is None else dtype_of(options.dtype)
    dp = options.dp or source.parallel.dp
    if dp != source.parallel.dp:
        parts = "one part" if dp == 1 else f"{dp} parts"
        report.add(
            Fate.CHANGED,
            f"every tensor is cut in {parts}, which any number of ranks loads; {source.parallel.world_size} ranks wrote the source",
        )
    return Choices(
        dp, layout, native.inner if isinstance(native, DcpState) else RLINF_FOLDER,
        native.weights if isinstance(native, DcpState) else True, optimizer, optimizer, dtype,
        options.rng,
    )  # fmt: skip


def _check_groups(source: Source) -> None:
    """Every trained parameter is in one group."""
    problems = Problems()
    listed = [name for group in source.state.groups for name in group.params]
    trained = [spec.name for spec in source.model.params if spec.trainable]
    if not listed and trained:
        problems.add(
            Incomplete,
            f"{source.root}: does not say which parameters are in which param group",
            "--no-optimizer converts the weights alone.",
        )
    elif sorted(listed) != sorted(trained):
        some = ", ".join(sorted(set(listed) ^ set(trained))[:5]) or "some twice"
        problems.add(
            LayoutMismatch, f"{source.root}: the param groups do not hold the trained parameters exactly: {some}"
        )
    problems.raise_if_any()


def model_dtype(source: Source, choices: Choices, name: str, entry: TensorEntry) -> DType:
    """The type that a tensor of the model is written in.

    Args:
        source: The source.
        choices: What the target is to be.
        name: The parameter, not an alias of it.
        entry: Where its elements come from.
    """
    spec = source.model.get(name)
    if spec is None or spec.dtype not in FLOATING:
        return entry.dtype
    if choices.dtype is not None and spec.trainable:
        return choices.dtype
    return entry.dtype if choices.masters else spec.dtype
