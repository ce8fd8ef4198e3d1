"""A table's rows with their numbers filled in: every parameter of a model, in the order of registration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mcore_rlhf.core.box import Box, Shape

from .correspondence import Link
from .kinds import EXPERT, LAYER, NEXT
from .sizes import Sizes
from .table import Architecture, Arrangement, Row, Spelling


@dataclass(frozen=True, slots=True)
class Filled:
    """A row of one layer and one expert.

    Args:
        row: Of the table.
        name: Megatron's parameter.
        tensors: Hugging Face's tensors that it is made of, in order, with their shapes.
    """

    row: Row
    name: str
    tensors: Mapping[str, Shape]

    @property
    def shape(self) -> Shape:
        """Shape of Megatron's parameter, without padding."""
        rows, first = sum(shape[0] for shape in self.tensors.values()), next(iter(self.tensors.values()))
        if self.row.arrangement is not Arrangement.EXPERTS:
            return (rows, *first[1:])
        experts = len(self.tensors) // len(self.row.huggingface)
        return (experts, first[1], rows // experts)

    def links(self, groups: int) -> Iterator[Link]:
        """Which part of the parameter is which part of which tensor, in the order of its rows.

        Args:
            groups: Query groups of the model.
        """
        if self.row.arrangement is Arrangement.EXPERTS:
            yield from self._transposed()
            return
        blocks = groups if self.row.arrangement is Arrangement.GROUPED else 1
        at = 0
        for block in range(blocks):
            for tensor, shape in self.tensors.items():
                rows = shape[0] // blocks
                part, rest = (rows, *shape[1:]), (0,) * len(shape[1:])
                yield Link(tensor, Box((block * rows, *rest), part), self.name, Box((at, *rest), part))
                at += rows

    def _transposed(self) -> Iterator[Link]:
        each, at = len(self.row.huggingface), 0
        for number, (tensor, shape) in enumerate(self.tensors.items()):
            at = at if number % each else 0
            box = Box((number // each, 0, at), (1, shape[1], shape[0]))
            yield Link(tensor, Box.whole(shape), self.name, box, axes=(2, 1))
            at += shape[0]


def filled(known: Architecture, sizes: Sizes, spelling: Spelling) -> Iterator[Filled]:
    """Every row that a model has, layer after layer and expert after expert; optional ones included.

    Args:
        known: Whose rows.
        sizes: Of the model.
        spelling: Whose names Megatron's side has.
    """
    has = spelling.traits | sizes.traits
    for section, rows in groupby(known.rows, lambda row: _counted(row.megatron)):
        listed = list(rows)
        for layer in _layers(section, sizes):
            traits = has | {sizes.kind(layer)}
            yield from _experts([row for row in listed if traits.issuperset(row.needs)], sizes, layer)


def in_order(order: Sequence[str], sizes: Sizes) -> Iterator[str]:
    """The names of ``model.parameters()``, layer after layer and expert after expert; those that a model lacks included.

    Args:
        order: With ``{i}`` and ``{e}``.
        sizes: Of the model.
    """
    for inside, names in groupby(order, lambda name: LAYER in name):
        listed = list(names)
        for layer in range(sizes.layers + sizes.mtp) if inside else range(1):
            for expert, parts in groupby(listed, lambda name: EXPERT in name):
                here = list(parts)
                for number in range(sizes.experts) if expert else range(1):
                    yield from (name.replace(LAYER, str(layer)).replace(EXPERT, str(number)) for name in here)


def _counted(name: str) -> str | None:
    """What is counted in a name first."""
    return next((number for number in (NEXT, LAYER) if number in name), None)


def _layers(section: str | None, sizes: Sizes) -> range:
    """Hugging Face's numbers of the layers in a section of the table."""
    if section is None:
        return range(1)
    return range(sizes.layers) if section == LAYER else range(sizes.layers, sizes.layers + sizes.mtp)


def _experts(rows: Sequence[Row], sizes: Sizes, layer: int) -> Iterator[Filled]:
    """The rows of a layer; experts that are modules of their own go one after the other."""
    for module, group in groupby(
        rows, lambda row: row.megatron.partition(EXPERT)[0] if EXPERT in row.megatron else None
    ):
        listed = list(group)
        for expert in range(1) if module is None else range(sizes.experts):
            for row in listed:
                yield _fill(row, sizes, layer, expert)


def _fill(row: Row, sizes: Sizes, layer: int, expert: int) -> Filled:
    def named(name: str, number: int) -> str:
        name = name.replace(LAYER, str(layer)).replace(NEXT, str(layer - sizes.layers))
        return name.replace(EXPERT, str(number))

    experts = range(sizes.experts) if row.arrangement is Arrangement.EXPERTS else (expert,)
    tensors = {named(t.name, number): sizes.shape(t.shape) for number in experts for t in row.huggingface}
    return Filled(row, named(row.megatron, expert), tensors)
