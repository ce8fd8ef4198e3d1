"""The relation between Megatron's global tensors and Hugging Face's, as boxes: computed once, read both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.views import Share
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported

from . import ARCHITECTURES
from .correspondence import Link, shares_of_huggingface, shares_of_others
from .expand import Filled, filled, in_order
from .kinds import GROUPED, LOCAL, MTP_LAYER, MTP_MODEL_LAYER, SEQUENTIAL, STACKED, TRANSFORMER_ENGINE
from .sizes import Sizes
from .table import Architecture, Row, Spelling

_SHOWN = 4
"""Architectures whose differences are spelled out where none fits."""
HOW_TO_ADD = "How to add an architecture: docs/how-to/add-an-architecture.md"


@dataclass(frozen=True, slots=True)
class Relation:
    """All tensors of a model under both families' names.

    Args:
        architecture: Which it is.
        spelling: Whose names Megatron's side has.
        links: What they have in common.
        huggingface: Shapes of the tensors on disk, in the order of ``model.parameters()``.
        megatron: Shapes without padding, in the order of registration.
    """

    architecture: Architecture
    spelling: Spelling
    links: tuple[Link, ...]
    huggingface: Mapping[str, Shape]
    megatron: Mapping[str, Shape]

    def of_huggingface(self) -> dict[str, tuple[Share, ...]]:
        """For every Hugging Face tensor, in order, the parts of Megatron's that it is made of."""
        return shares_of_huggingface(self.huggingface, self.links)

    def of_megatron(self) -> dict[str, tuple[Share, ...]]:
        """For every Megatron parameter, in order, the parts of Hugging Face's that it is made of."""
        return shares_of_others(self.megatron, self.links)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An architecture's rows, as far as a model has them, and what speaks against it."""

    architecture: Architecture
    rows: tuple[Filled, ...]
    strange: tuple[str, ...]
    missing: tuple[str, ...]

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
    spelling = spelling_of(shapes)
    candidates = (_of_megatron(known, shapes, sizes, spelling) for known in among)
    relation = _relation(_best(candidates), sizes, spelling)
    _check_shapes(shapes, relation.megatron, _padded(relation))
    return relation


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
    return _Candidate(known, has, tuple(name for name in shapes if name not in names), tuple(missing))


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
    """The first that has a place for every tensor, and all of whose required rows are there."""
    others: list[_Candidate] = []
    for candidate in candidates:
        if not candidate.strange and not candidate.missing:
            return candidate
        others.append(candidate)
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
    links = tuple(link for row in found.rows for link in row.links(sizes.groups))
    tensors = {name: shape for row in found.rows for name, shape in row.tensors.items()}
    ordered = {name: tensors[name] for name in in_order(found.architecture.order, sizes) if name in tensors}
    return Relation(found.architecture, spelling, links, ordered, {row.name: row.shape for row in found.rows})


def _padded(relation: Relation) -> frozenset[str]:
    """Megatron's parameters whose rows are words."""
    rows = (row for row in relation.architecture.rows if row.huggingface[0].shape[0] == "vocabulary")
    return frozenset(row.megatron for row in rows)


def _check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], padded: frozenset[str]) -> None:
    problems = Problems()
    for name, shape in expected.items():
        have = found[name]
        enough = name in padded and have[1:] == shape[1:] and have[0] >= shape[0]
        if have != shape and not enough:
            problems.add(
                LayoutMismatch,
                f"{name}: has shape {have}, but the sizes of the model make {shape}",
                "The model's description (args, or --reference-config) is not that of these weights.",
            )
    problems.raise_if_any()
