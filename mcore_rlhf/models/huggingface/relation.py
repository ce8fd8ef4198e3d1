"""The relation between Megatron's global tensors and Hugging Face's, as boxes: computed once, read both ways.

A table's rows are filled in with their numbers, which gives every parameter of a model in the order of registration; each
row links boxes of both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from mcore_rlhf.core.catalog import Box, Shape
from mcore_rlhf.core.shares import ABSENT, Share
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported

from . import ARCHITECTURES
from .table import (
    EXPERT,
    GROUPED,
    LAYER,
    LOCAL,
    MTP_LAYER,
    MTP_MODEL_LAYER,
    NEXT,
    SEQUENTIAL,
    STACKED,
    TRANSFORMER_ENGINE,
    Architecture,
    Arrangement,
    Row,
    Sizes,
    Spelling,
)

_OF_ALL = (Arrangement.SLICE, Arrangement.IN_TURN)
_MIXED = (Arrangement.FUSED, Arrangement.GATED, Arrangement.DELTA)


@dataclass(frozen=True, slots=True)
class Link:
    """A part that two tensors have in common.

    Args:
        huggingface: A tensor as it lies on disk, under Hugging Face's names.
        huggingface_box: A box in it.
        other: A tensor under other names.
        other_box: A box in that, with the same elements.
        axes: For every dimension of the first box, the dimension of the second that it is; None where all are the same.
    """

    huggingface: str
    huggingface_box: Box
    other: str
    other_box: Box
    axes: tuple[int, ...] | None = None

    @property
    def share(self) -> Share:
        """Hugging Face's part of it."""
        return Share(self.huggingface_box, self.other, self.other_box, self.axes)


def shares_of_huggingface(names: Iterable[str], links: Iterable[Link]) -> dict[str, tuple[Share, ...]]:
    """For every Hugging Face tensor, in order, the parts of the others that it is made of."""
    return _by_name(names, ((link.huggingface, link.share) for link in links))


def shares_of_others(names: Iterable[str], links: Iterable[Link]) -> dict[str, tuple[Share, ...]]:
    """For every other tensor, in order, the parts of Hugging Face's that it is made of."""
    shares = ((link.other, link.share.inverse(link.huggingface)) for link in links)
    return _by_name(names, shares)


def _by_name(names: Iterable[str], shares: Iterable[tuple[str, Share]]) -> dict[str, tuple[Share, ...]]:
    found: dict[str, list[Share]] = {name: [] for name in names}
    for name, share in shares:
        found[name].append(share)
    return {name: tuple(listed) for name, listed in found.items()}


@dataclass(frozen=True, slots=True)
class Filled:
    """A row of one layer and one expert.

    Args:
        row: Of the table.
        name: Megatron's parameter.
        tensors: Hugging Face's tensors that it is made of, in order, with their shapes.
        expert: Whose it is.
    """

    row: Row
    name: str
    tensors: Mapping[str, Shape]
    expert: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of Megatron's parameter, without padding."""
        rows, first = sum(shape[0] for shape in self.tensors.values()), next(iter(self.tensors.values()))
        if self.row.arrangement in _OF_ALL:
            return tuple(reversed(first[1:]))
        if self.row.arrangement is not Arrangement.EXPERTS:
            return (rows, *first[1:])
        experts = len(self.tensors) // len(self.row.huggingface)
        return (experts, first[1], rows // experts)

    def links(self, sizes: Sizes) -> Iterator[Link]:
        """Which part of the parameter is which part of which tensor, in the order of its rows.

        Args:
            sizes: Of the model.
        """
        if self.row.arrangement in _MIXED:
            at = 0
            for tensor, first, rows in self._mixed(sizes):
                rest = self.tensors[tensor][1:]
                zero = (0,) * len(rest)
                yield Link(tensor, Box((first, *zero), (rows, *rest)), self.name, Box((at, *zero), (rows, *rest)))
                at += rows
            return
        if self.row.arrangement is Arrangement.EXPERTS:
            yield from self._transposed()
            return
        if self.row.arrangement in _OF_ALL:
            yield from self._of_all()
            return
        blocks = sizes.groups if self.row.arrangement is Arrangement.GROUPED else 1
        at = 0
        for block in range(blocks):
            for tensor, shape in self.tensors.items():
                rows = shape[0] // blocks
                part, rest = (rows, *shape[1:]), (0,) * len(shape[1:])
                yield Link(tensor, Box((block * rows, *rest), part), self.name, Box((at, *rest), part))
                at += rows

    def _mixed(self, sizes: Sizes) -> Iterator[tuple[str, int, int]]:
        """Tensor, first row and number of rows of each part of the parameter, from its first row on."""
        if self.row.arrangement is Arrangement.FUSED:
            return self._fused(sizes)
        return self._gated(sizes) if self.row.arrangement is Arrangement.GATED else self._delta(sizes)

    def _fused(self, sizes: Sizes) -> Iterator[tuple[str, int, int]]:
        """The same for a tensor of queries, keys and values."""
        (tensor,), queries = self.tensors, sizes.q_rows // sizes.groups
        for group in range(sizes.groups):
            yield tensor, group * queries, queries
            for part in range(2):
                yield tensor, sizes.q_rows + part * sizes.k_rows + group * sizes.head, sizes.head

    def _gated(self, sizes: Sizes) -> Iterator[tuple[str, int, int]]:
        """The same for queries with gates."""
        query, key, value = self.tensors
        heads, width = sizes.heads // sizes.groups, sizes.head
        for group in range(sizes.groups):
            for part in range(2):
                for head in range(group * heads, (group + 1) * heads):
                    yield query, (2 * head + part) * width, width
            yield key, group * width, width
            yield value, group * width, width

    def _delta(self, sizes: Sizes) -> Iterator[tuple[str, int, int]]:
        """The same for a gated delta net's input."""
        each = sizes.delta_values // sizes.delta_keys
        rows = {"key": sizes.delta_key, "value": each * sizes.delta_value, "one": each}
        for tensor, parts in zip(self.tensors, self.row.parts, strict=True):
            counts = [rows[part] for part in parts]
            for number, count in enumerate(counts):
                for head in range(sizes.delta_keys):
                    yield tensor, head * sum(counts) + sum(counts[:number]), count

    def _of_all(self) -> Iterator[Link]:
        """Rows of the parameter are the last dimension of a tensor that has all experts."""
        ((tensor, shape),) = self.tensors.items()
        parts = 2 if self.row.arrangement is Arrangement.IN_TURN else 1
        inner, rows = shape[1:-1], shape[-1] // parts
        axes = (ABSENT, *reversed(range(len(shape) - 1)))
        for part in range(parts):
            box = Box((self.expert, *(0,) * len(inner), part), (1, *inner, rows), (1,) * (len(shape) - 1) + (parts,))
            own = Box((part * rows, *(0,) * len(inner)), (rows, *inner))
            yield Link(tensor, box if parts > 1 else replace(box, step=None), self.name, own, axes)

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
            traits = has | sizes.kinds(layer)
            yield from _experts([row for row in listed if traits.issuperset(row.needs)], sizes, layer)


def in_order(order: Sequence[str], sizes: Sizes) -> Iterator[str]:
    """The names of ``model.parameters()``, layer after layer and expert after expert; those that a model lacks included.

    Args:
        order: With ``{i}``, ``{k}`` and ``{e}``.
        sizes: Of the model.
    """
    for counted, names in groupby(order, _counted):
        listed = list(names)
        for number in range(sizes.layers + sizes.mtp) if counted == LAYER else range(sizes.mtp if counted else 1):
            for expert, parts in groupby(listed, lambda name: EXPERT in name):
                here = [name.replace(counted or LAYER, str(number)) for name in parts]
                for e in range(sizes.experts) if expert else range(1):
                    yield from (name.replace(EXPERT, str(e)) for name in here)


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
    for module, group in groupby(rows, lambda row: _module_of_experts(row.megatron)):
        listed = list(group)
        for expert in range(1) if module is None else range(sizes.experts):
            for row in listed:
                yield _fill(row, sizes, layer, expert)


def _module_of_experts(name: str) -> str | None:
    """The module that has a parameter for every expert, or a module with parameters; None where a name counts none."""
    return name.partition(EXPERT)[0].rpartition(".")[0] if EXPERT in name else None


def _fill(row: Row, sizes: Sizes, layer: int, expert: int) -> Filled:
    def named(name: str, number: int) -> str:
        name = name.replace(LAYER, str(layer)).replace(NEXT, str(layer - sizes.layers))
        return name.replace(EXPERT, str(number))

    experts = range(sizes.experts) if row.arrangement is Arrangement.EXPERTS else (expert,)
    tensors = {named(t.name, number): sizes.shape(t.shape) for number in experts for t in row.huggingface}
    return Filled(row, named(row.megatron, expert), tensors, expert)


_SHOWN = 4
"""Architectures whose differences are spelled out where none fits."""
HOW_TO_ADD = "How to add an architecture: docs/how-to/add-an-architecture.md"


@dataclass(frozen=True, slots=True)
class Relation:
    """All tensors of a model under both families' names.

    Args:
        architecture: Which it is.
        sizes: Its sizes, as the tensors have them.
        spelling: Whose names Megatron's side has.
        links: What they have in common.
        huggingface: Shapes of the tensors on disk, in the order of ``model.parameters()``.
        megatron: Shapes without padding, in the order of registration.
        shifts: What is added to every element of a tensor of Hugging Face's for Megatron's parameter: both names, and the number.
    """

    architecture: Architecture
    sizes: Sizes
    spelling: Spelling
    links: tuple[Link, ...]
    huggingface: Mapping[str, Shape]
    megatron: Mapping[str, Shape]
    shifts: tuple[tuple[str, str, float], ...] = ()

    def of_huggingface(self) -> dict[str, tuple[Share, ...]]:
        """For every Hugging Face tensor, in order, the parts of Megatron's that it is made of."""
        return shares_of_huggingface(self.huggingface, self.links)

    def of_megatron(self) -> dict[str, tuple[Share, ...]]:
        """For every Megatron parameter, in order, the parts of Hugging Face's that it is made of."""
        return shares_of_others(self.megatron, self.links)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An architecture's rows, as far as a model has them, what speaks against it, and whether the shapes are its own as well."""

    architecture: Architecture
    rows: tuple[Filled, ...]
    strange: tuple[str, ...]
    missing: tuple[str, ...]
    fits: bool = True

    @property
    def complaint(self) -> str:
        parts = (("has no place for", self.strange), ("lacks", self.missing))
        found = (
            f"{what} {', '.join(names[:3])}{f', … ({len(names)})' if len(names) > 3 else ''}"
            for what, names in parts
            if names
        )
        return f"{self.architecture.class_name} {'; '.join(found)}"


def from_megatron(shapes: Mapping[str, Shape], sizes: Sizes, among: Sequence[Architecture] = ARCHITECTURES) -> Relation:
    """The relation of a model that Megatron stored.

    Args:
        shapes: Its parameters and buffers; those of the vocabulary may have padding rows.
        sizes: What it is.
        among: The architectures that it may be.

    Raises:
        Unsupported: None of them has these parameters.
        LayoutMismatch: Shapes are not those of the architecture; all of them.
    """
    _check_counts(shapes, sizes)
    spelling = spelling_of(shapes)
    candidates = (_of_megatron(known, shapes, sizes, spelling) for known in among)
    relation = _relation(_best(candidates), sizes, spelling)
    _check_shapes(shapes, relation.megatron, _padded(relation))
    return relation


_FEW, _LEAST_ELEMENTS = 4096, 64


def _check_counts(shapes: Mapping[str, Shape], sizes: Sizes) -> None:
    """A description may say no more layers and experts than its tensors have elements for, before a name is made for each.

    Raises:
        LayoutMismatch: It does. Few are always believed.
    """
    layers, elements = sizes.layers + sizes.mtp, sum(map(prod, shapes.values()))
    if layers * max(1, sizes.experts) > _FEW + elements // _LEAST_ELEMENTS:
        raise LayoutMismatch(
            f"the model's description says {layers:,} layers and {sizes.experts:,} experts in each, and all its tensors together have "
            f"{elements:,} elements\nTake the description that belongs to these weights: the run's own args, or the model's config.json."
        )


def from_huggingface(
    shapes: Mapping[str, Shape],
    sizes: Sizes,
    spelling: Spelling,
    among: Sequence[Architecture] = ARCHITECTURES,
    beside: frozenset[str] = frozenset(),
) -> Relation:
    """The relation of a model under Hugging Face's names.

    Args:
        shapes: Its tensors as they are on disk, tied ones once.
        sizes: What it is.
        spelling: Whose names Megatron's side is to have.
        among: The architectures that it may be.
        beside: Names among them that may be in no table: buffers.

    Raises:
        Unsupported: None of them has these tensors.
        LayoutMismatch: Shapes are not those of the architecture; all of them.
    """
    _check_counts(shapes, sizes)
    candidates = (_of_huggingface(known, shapes, sizes, spelling, beside) for known in among)
    relation = _relation(_best(candidates), sizes, spelling)
    _check_shapes(shapes, relation.huggingface, frozenset())
    return relation


def spelling_of(names: Iterable[str]) -> Spelling:
    """Whose names a model of Megatron's has."""
    engine, experts, inner = LOCAL, SEQUENTIAL, MTP_LAYER
    for name in names:
        if name.endswith(".layer_norm_weight"):
            engine = TRANSFORMER_ENGINE
        elif name.endswith(".experts.weight1"):
            experts = STACKED
        elif ".experts.linear_fc1.weight" in name:
            experts = GROUPED
        if f".{MTP_MODEL_LAYER}." in name:
            inner = MTP_MODEL_LAYER
    return Spelling(engine, experts, inner)


def _of_megatron(known: Architecture, shapes: Mapping[str, Shape], sizes: Sizes, spelling: Spelling) -> _Candidate:
    rows = list(filled(known, sizes, spelling))
    has = tuple(row for row in rows if _is_of(row.row, shapes.get(row.name)))
    names = {row.name for row in has}
    missing = [need for need in known.needs if need not in sizes.traits]
    missing += [row.name for row in rows if not row.row.optional and row.name not in names]
    fits = all(_same_shape(shapes[row.name], row.shape, padded=_counts_words(row.row)) for row in has)
    return _Candidate(known, has, tuple(name for name in shapes if name not in names), tuple(missing), fits)


def _of_huggingface(
    known: Architecture, shapes: Mapping[str, Shape], sizes: Sizes, spelling: Spelling, beside: frozenset[str]
) -> _Candidate:
    rows = list(filled(known, sizes, spelling))
    has = tuple(row for row in rows if all(tensor in shapes for tensor in row.tensors))
    names = {tensor for row in has for tensor in row.tensors}
    missing = [need for need in known.needs if need not in sizes.traits]
    missing += [t for row in rows if not row.row.optional for t in row.tensors if t not in shapes]
    strange = (name for name in shapes if name not in names and name not in beside)
    return _Candidate(known, has, tuple(strange), tuple(dict.fromkeys(missing)))


def _is_of(row: Row, found: Shape | None) -> bool:
    """Whether a parameter is that of a row: an output layer of one row is a value head."""
    if found is None:
        return False
    wants_one = row.huggingface[0].shape[0] == "one"
    return (found[0] == 1) == wants_one if row.megatron.startswith("output_layer.") else True


def _best(candidates: Iterable[_Candidate]) -> _Candidate:
    """The first that has a place for every tensor, and all of whose required rows are there; of several, one whose shapes fit."""
    others: list[_Candidate] = []
    named: _Candidate | None = None
    for candidate in candidates:
        if candidate.strange or candidate.missing:
            others.append(candidate)
        elif candidate.fits:
            return candidate
        else:
            named = named or candidate
    if named is not None:
        return named
    others.sort(key=lambda other: len(other.strange) + len(other.missing))
    if len(others) == 1:
        raise Unsupported(f"these tensors are not those of the architecture: {others[0].complaint}\n{HOW_TO_ADD}")
    listed = "\n".join(f"  - {other.complaint}" for other in others[:_SHOWN])
    known = ", ".join(known.model_type for known in ARCHITECTURES)
    raise Unsupported(
        f"these are the tensors of no architecture whose names are known in both families ({known}); the nearest are\n"
        f"{listed}\n{HOW_TO_ADD}"
    )


def _relation(found: _Candidate, sizes: Sizes, spelling: Spelling) -> Relation:
    links = tuple(link for row in found.rows for link in row.links(sizes))
    tensors = {name: shape for row in found.rows for name, shape in row.tensors.items()}
    ordered = {name: tensors[name] for name in in_order(found.architecture.order, sizes) if name in tensors}
    shifts = tuple((next(iter(row.tensors)), row.name, row.row.shift) for row in found.rows if row.row.shift)
    megatron = {row.name: row.shape for row in found.rows}
    return Relation(found.architecture, sizes, spelling, links, ordered, megatron, shifts)


def _padded(relation: Relation) -> frozenset[str]:
    """Megatron's parameters whose rows are words."""
    return frozenset(row.megatron for row in relation.architecture.rows if _counts_words(row))


def _counts_words(row: Row) -> bool:
    return row.huggingface[0].shape[0] == "vocabulary"


def _same_shape(found: Shape, expected: Shape, *, padded: bool) -> bool:
    return found == expected or (padded and found[1:] == expected[1:] and found[0] >= expected[0])


def _check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], padded: frozenset[str]) -> None:
    problems = Problems()
    for name, shape in expected.items():
        have = found[name]
        if not _same_shape(have, shape, padded=name in padded):
            problems.add(
                LayoutMismatch,
                f"{name}: has shape {have}, but the sizes of the model make {shape}",
                "The model's description (args, or --reference-config) is not that of these weights.",
            )
    problems.raise_if_any()
