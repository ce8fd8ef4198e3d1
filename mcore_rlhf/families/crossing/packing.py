"""Within the family of Hugging Face's names: experts packed, as transformers 5 has them in memory, or one by one, as on disk.

Source: transformers 5.23.0, ``conversion_mapping.py`` and ``core_model_loading.py``: loading packs, ``save_pretrained``
unpacks, while FSDP, DCP and DeepSpeed see the parameters in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rlhf.core.catalog import Box, Shape
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values
from mcore_rlhf.core.shares import Share, Shares
from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.selection import renamed
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.models.huggingface.config import packed_in
from mcore_rlhf.models.huggingface.relation import Link, shares_of_huggingface, shares_of_others
from mcore_rlhf.models.huggingface.table import EXPERT, LAYER, Packed
from mcore_rlhf.models.huggingface.texts import is_moved, name_in_memory, name_on_disk
from mcore_rlhf.models.spec import REPLICATED, ParamSpec


@dataclass(frozen=True, slots=True)
class Packing:
    """All tensors of a model as they are on disk, and as they are in memory.

    Args:
        links: What they have in common.
        files: Shapes on disk.
        modules: Shapes in memory.
    """

    links: tuple[Link, ...]
    files: Mapping[str, Shape]
    modules: Mapping[str, Shape]

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return list(self.files) == list(self.modules)

    def of_files(self) -> dict[str, tuple[Share, ...]]:
        """For every tensor on disk, the parts of parameters that it is made of."""
        return shares_of_huggingface(self.files, self.links)

    def of_modules(self) -> dict[str, tuple[Share, ...]]:
        """For every parameter in memory, the tensors on disk that it is made of."""
        return shares_of_others(self.modules, self.links)


def from_modules(shapes: Mapping[str, Shape], table: Sequence[Packed]) -> Packing:
    """The packing of a model whose parameters in memory are known.

    Args:
        shapes: Of all its tensors; those that no row speaks of are the same on disk.
        table: The architecture's rows.

    Raises:
        LayoutMismatch: A parameter's shape is not that of packed experts; all of them.
    """
    patterns = [(_pattern(row.module), row) for row in table]
    links: list[Link] = []
    problems = Problems()
    for name, shape in shapes.items():
        found = next(((match, row) for pattern, row in patterns if (match := pattern.fullmatch(name))), None)
        if found is None:
            links.append(Link(name, Box.whole(shape), name, Box.whole(shape)))
            continue
        files = [file.replace(LAYER, found[0].group(1)) for file in found[1].files]
        if EXPERT in files[0] and (len(shape) != 3 or shape[1] % len(files)):
            problems.add(LayoutMismatch, f"{name}: has shape {shape}, expected (experts, {len(files)} × width, width)")
            continue
        links.extend(_links(name, shape, files))
    problems.raise_if_any()
    return Packing(tuple(links), {link.huggingface: link.huggingface_box.shape for link in links}, dict(shapes))


def from_files(shapes: Mapping[str, Shape], table: Sequence[Packed]) -> Packing:
    """The packing of a model whose tensors on disk are known.

    Args:
        shapes: Of all its tensors; those that no row speaks of are the same in memory.
        table: The architecture's rows.

    Raises:
        LayoutMismatch: Experts are missing, or are not all alike; all problems together.
    """
    modules: dict[str, Shape] = {}
    patterns = [(_pattern(file), row) for row in table for file in row.files]
    for name, shape in shapes.items():
        found = next(((match, row) for pattern, row in patterns if (match := pattern.fullmatch(name))), None)
        if found is None:
            modules[name] = shape
            continue
        match, row = found
        module = row.module.replace(LAYER, match.group(1))
        if len(match.groups()) == 1:
            modules[module] = shape
        else:
            experts = max(int(match.group(2)) + 1, modules.get(module, (0,))[0])
            modules[module] = (experts, len(row.files) * shape[0], *shape[1:])
    packing = from_modules(modules, table)
    _check(shapes, packing.files)
    return packing


def _links(name: str, shape: Shape, files: Sequence[str]) -> Iterator[Link]:
    if EXPERT not in files[0]:
        yield Link(files[0], Box.whole(shape), name, Box.whole(shape))
        return
    part = (shape[1] // len(files), shape[2])
    for expert in range(shape[0]):
        for number, file in enumerate(files):
            box = Box((expert, number * part[0], 0), (1, *part))
            yield Link(file.replace(EXPERT, str(expert)), Box.whole(part), name, box, axes=(1, 2))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        re.escape(name).replace(re.escape(LAYER), r"(\d{1,18})").replace(re.escape(EXPERT), r"(\d{1,18})")
    )


def _check(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    problems = Problems()
    for name, shape in expected.items():
        if name not in found:
            problems.add(LayoutMismatch, f"{name}: is missing, and there are experts with higher numbers")
        elif found[name] != shape:
            problems.add(LayoutMismatch, f"{name}: has shape {found[name]}, but other experts of the layer {shape}")
    problems.raise_if_any()


_PLACED: Rule[Values] = Rule(
    Fate.CHANGED, "names: those that transformers 5 has {where}, of text and images", dict, [Item(Kind.MODEL)]
)
_REPACKED: Rule[Values] = Rule(Fate.CHANGED, "experts: {how} ({old} → {new} tensors)", dict, [Item(Kind.MODEL)])


def repacked(source: Source, config: Mapping[str, object], *, packs_experts: bool) -> Source:
    """The source with the experts of a layer packed, or with every expert a tensor of its own; itself where it has them so.

    Args:
        source: Under Hugging Face's names.
        config: The model's description, which says what its packed tensors are.
        packs_experts: Whether they are to be packed.

    Raises:
        CheckpointError: A tensor has another shape than packed experts; or some are missing, are not all alike, or are trained
            differently.
    """
    table = packed_in(config)
    source = _moved(source, config, in_memory=packs_experts)
    if not table:
        return source
    packing = (from_files if packs_experts else from_modules)(source.model.shapes, table)
    if packing.same:
        return source
    if packs_experts:
        shapes, shares, text = packing.modules, packing.of_modules(), "packed, as transformers 5 has them in memory"
    else:
        shapes, shares, text = packing.files, packing.of_files(), "one by one, as on disk"
    notes = source.notes.copy()
    notes.through([_REPACKED], {"how": text, "old": len(source.model.params), "new": len(shapes)})
    seen = recast(replace(source, notes=notes), shares, shapes)
    return replace(seen, family=replace(ModuleState.needed(seen), packs_experts=packs_experts))


def is_in_memory(shapes: Mapping[str, Shape], config: Mapping[str, object]) -> bool:
    """Whether tensors are called as in memory, of those that have other names on disk.

    Args:
        shapes: Of the tensors.
        config: The model's description.
    """
    moved = is_moved(config) and any(name_on_disk(name) != name for name in shapes)
    return moved or not from_modules(shapes, packed_in(config)).same


def _moved(source: Source, config: Mapping[str, object], *, in_memory: bool) -> Source:
    """The source under names in memory, or on disk, of a model of images whose folders have others than its modules."""
    rename = name_in_memory if in_memory else name_on_disk
    if not is_moved(config) or all(rename(spec.name) == spec.name for spec in source.model.params):
        return source
    seen = renamed(source, rename)
    source = replace(seen, family=replace(ModuleState.needed(seen), packs_experts=in_memory))
    source.notes.through([_PLACED], {"where": "in memory" if in_memory else "on disk"})
    return source


def recast(source: Source, shares: Shares, shapes: Mapping[str, Shape]) -> Source:
    """A source under a module's names with tensors that are made of parts of its own, with its states, groups and order.

    Args:
        source: The source.
        shares: For every new tensor, which parts of those of the source it is made of.
        shapes: Its shape.

    Raises:
        LayoutMismatch: Parts of one are of several types, or some are frozen and others not.
        Lossy: Parts of one are in several param groups.
    """
    family, names = ModuleState.needed(source), dict[str, list[str]]()
    for new, parts in shares.items():
        for part in parts:
            names.setdefault(part.name, []).append(new)
    renamed = {old: tuple(dict.fromkeys(new)) for old, new in names.items()}
    seen = replace(
        family.base(), order=_each(family.order, renamed), buffers=_each(family.buffers, renamed),
        keys={name: said for name, said in family.keys.items() if renamed.get(name) == (name,)},
    )  # fmt: skip
    return replace(
        source, catalog=source.catalog.recut(source.role, shares, shapes), family=seen,
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
