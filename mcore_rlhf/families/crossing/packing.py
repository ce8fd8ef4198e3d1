"""Within the family of Hugging Face's names: experts packed, as transformers 5 has them in memory, or one by one, as on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_rlhf.core.account import Fate, Item, Kind
from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.views import Recut, Shares
from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.models.huggingface.config import known_architecture
from mcore_rlhf.models.huggingface.packing import from_files, from_modules
from mcore_rlhf.models.huggingface.table import Packed
from mcore_rlhf.models.spec import REPLICATED, ParamSpec


def on_disk(source: Source, config: Mapping[str, object]) -> Source:
    """The source with every expert a tensor of its own; itself where there is nothing to unpack.

    Args:
        source: Under Hugging Face's names.
        config: The model's description, which says what its packed tensors are.

    Raises:
        LayoutMismatch: A tensor that should be packed experts has another shape.
    """
    table = _table(config)
    packing = from_modules(source.model.shapes, table) if table else None
    if packing is None or packing.same:
        return source
    return _seen(source, packing.of_files(), packing.files, "one by one, as on disk", packs_experts=False)


def in_memory(source: Source, config: Mapping[str, object]) -> Source:
    """The source with the experts of a layer packed; itself where there is nothing to pack.

    Args:
        source: Under Hugging Face's names, as on disk.
        config: The model's description.

    Raises:
        CheckpointError: Experts are missing, are not all alike, or are trained differently.
    """
    table = _table(config)
    packing = from_files(source.model.shapes, table) if table else None
    if packing is None or packing.same:
        return source
    text = "packed, as transformers 5 has them in memory"
    return _seen(source, packing.of_modules(), packing.modules, text, packs_experts=True)


def _table(config: Mapping[str, object]) -> tuple[Packed, ...]:
    """The rows of the model's architecture; none where nobody says which it is, since others pack differently."""
    known = known_architecture(config)
    return () if known is None else known.packed


def _seen(source: Source, shares: Shares, shapes: Mapping[str, Shape], text: str, *, packs_experts: bool) -> Source:
    """The source under the names of one side."""
    family, notes = ModuleState.needed(source, "hf"), source.notes.copy()
    notes.add(Fate.CHANGED, f"experts: {text} ({len(source.model.params)} → {len(shapes)} tensors)", Item(Kind.MODEL))
    names: dict[str, list[str]] = {}
    for new, parts in shares.items():
        for part in parts:
            names.setdefault(part.name, []).append(new)
    renamed = {old: tuple(dict.fromkeys(new)) for old, new in names.items()}
    seen = replace(
        family.base(), order=_each(family.order, renamed), buffers=_each(family.buffers, renamed),
        keys={name: said for name, said in family.keys.items() if renamed.get(name) == (name,)}, packs_experts=packs_experts,
    )  # fmt: skip
    return replace(
        source, catalog=Recut(source.catalog, source.role, shares, shapes), notes=notes, family=seen,
        model=source.model.having(_specs(source, shares, shapes)),
        state=replace(source.state, groups=_groups(source.state.groups, renamed)),
    )  # fmt: skip


def _specs(source: Source, shares: Shares, shapes: Mapping[str, Shape]) -> tuple[ParamSpec, ...]:
    problems, specs = Problems(), []
    for name, shape in shapes.items():
        parts = [spec for share in shares[name] if (spec := source.model.get(share.name)) is not None]
        if len({(spec.dtype, spec.trainable) for spec in parts}) > 1:
            problems.add(LayoutMismatch, f"{name}: its experts are of several types, or some are frozen and others not")
        specs.append(ParamSpec(name, shape, parts[0].dtype, REPLICATED, parts[0].trainable))
    problems.raise_if_any()
    return tuple(specs)


def _each(names: tuple[str, ...], renamed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The new names of all, each once, in the old order."""
    return tuple(dict.fromkeys(new for old in names for new in renamed.get(old, (old,))))


def _groups(groups: tuple[ParamGroup, ...], renamed: Mapping[str, tuple[str, ...]]) -> tuple[ParamGroup, ...]:
    """The same groups with new members.

    Raises:
        Lossy: Experts that are packed in one tensor are in several groups.
    """
    made = tuple(replace(group, params=_each(group.params, renamed)) for group in groups)
    where: dict[str, int] = {}
    problems = Problems()
    for number, group in enumerate(made):
        for name in group.params:
            if where.setdefault(name, number) != number:
                problems.add(Lossy, f"{name}: its experts are in param groups {where[name]} and {number}")
    problems.raise_if_any()
    return made
