"""Tensors on disk and parameters in memory, where transformers 5 has other names and shapes for them: experts are packed.

Source: transformers 5.23.0, ``conversion_mapping.py`` and ``core_model_loading.py``: loading packs, ``save_pretrained``
unpacks, while FSDP, DCP and DeepSpeed see the parameters in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.catalog import Box, Shape
from mcore_rlhf.core.views import Share
from mcore_rlhf.errors import LayoutMismatch, Problems

from .relation import Link, shares_of_huggingface, shares_of_others
from .table import EXPERT, LAYER, Packed


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
    return re.compile(re.escape(name).replace(re.escape(LAYER), r"(\d+)").replace(re.escape(EXPERT), r"(\d+)"))


def _check(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    problems = Problems()
    for name, shape in expected.items():
        if name not in found:
            problems.add(LayoutMismatch, f"{name}: is missing, and there are experts with higher numbers")
        elif found[name] != shape:
            problems.add(LayoutMismatch, f"{name}: has shape {found[name]}, but other experts of the layer {shape}")
    problems.raise_if_any()
