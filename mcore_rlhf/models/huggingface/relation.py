"""The relation between Megatron's global tensors and Hugging Face's, as boxes: computed once, read both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.box import Box, Shape
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported

from . import ARCHITECTURES
from .sizes import Sizes
from .table import LAYER, LOCAL, TRANSFORMER_ENGINE, Architecture, Arrangement, Row


@dataclass(frozen=True, slots=True)
class Link:
    """A part that two tensors have in common; both boxes have one shape."""

    huggingface: str
    huggingface_box: Box
    megatron: str
    megatron_box: Box


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor of one family: which box of which tensor of the other family holds it.

    Args:
        box: In the tensor itself.
        name: The other family's tensor.
        other: In that tensor; of the same shape.
    """

    box: Box
    name: str
    other: Box


@dataclass(frozen=True, slots=True)
class Relation:
    """All tensors of a model under both families' names.

    Args:
        architecture: Which it is.
        spelling: Whose names Megatron's side has: ``local`` or ``transformer_engine``.
        links: What they have in common.
        huggingface: Shapes, in the order of ``model.parameters()``.
        megatron: Shapes without padding, in the order of registration.
    """

    architecture: Architecture
    spelling: str
    links: tuple[Link, ...]
    huggingface: Mapping[str, Shape]
    megatron: Mapping[str, Shape]

    def of_huggingface(self) -> dict[str, tuple[Share, ...]]:
        """For every Hugging Face tensor, in order, the parts of Megatron's that it is made of."""
        shares = (
            (link.huggingface, Share(link.huggingface_box, link.megatron, link.megatron_box)) for link in self.links
        )
        return _by_name(self.huggingface, shares)

    def of_megatron(self) -> dict[str, tuple[Share, ...]]:
        """For every Megatron parameter, in order, the parts of Hugging Face's that it is made of."""
        shares = (
            (link.megatron, Share(link.megatron_box, link.huggingface, link.huggingface_box)) for link in self.links
        )
        return _by_name(self.megatron, shares)


def _by_name(names: Iterable[str], shares: Iterable[tuple[str, Share]]) -> dict[str, tuple[Share, ...]]:
    found: dict[str, list[Share]] = {name: [] for name in names}
    for name, share in shares:
        found[name].append(share)
    return {name: tuple(listed) for name, listed in found.items()}


def from_megatron(shapes: Mapping[str, Shape], sizes: Sizes) -> Relation:
    """The relation of a model that Megatron stored.

    Args:
        shapes: Its parameters; those of the vocabulary may have padding rows.
        sizes: What it is.

    Raises:
        Unsupported: No architecture that is known has these parameters.
        LayoutMismatch: Shapes are not those of the architecture; all of them.
    """
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in shapes)
    spelling = TRANSFORMER_ENGINE if fused else LOCAL
    candidates = [_relation(known, sizes, spelling, megatron=shapes) for known in ARCHITECTURES]
    relation = _best([(found, found.megatron) for found in candidates], shapes, sizes.layers)
    _check_shapes(shapes, relation.megatron, _padded(relation))
    return relation


def from_huggingface(shapes: Mapping[str, Shape], sizes: Sizes, spelling: str) -> Relation:
    """The relation of a model under Hugging Face's names.

    Args:
        shapes: Its tensors, tied ones once.
        sizes: What it is.
        spelling: Whose names Megatron's side is to have: ``local`` or ``transformer_engine``.

    Raises:
        Unsupported: No architecture that is known has these tensors.
        LayoutMismatch: Shapes are not those of the architecture; all of them.
    """
    candidates = [_relation(known, sizes, spelling, huggingface=shapes) for known in ARCHITECTURES]
    relation = _best([(found, found.huggingface) for found in candidates], shapes, sizes.layers)
    _check_shapes(shapes, relation.huggingface, frozenset())
    return relation


def _relation(
    known: Architecture, sizes: Sizes, spelling: str, *,
    megatron: Mapping[str, Shape] | None = None, huggingface: Mapping[str, Shape] | None = None,
) -> Relation:  # fmt: skip
    """The relation of those rows that the given side has."""
    links: list[Link] = []
    hf_shapes: dict[str, Shape] = {}
    shapes: dict[str, Shape] = {}
    for row, name, tensors in _rows(known, sizes, spelling):
        if megatron is not None and not _is_of(row, megatron.get(name)):
            continue
        if huggingface is not None and not all(tensor in huggingface for tensor in tensors):
            continue
        rows = sum(shape[0] for shape in tensors.values())
        shapes[name] = (rows, *next(iter(tensors.values()))[1:])
        hf_shapes.update(tensors)
        links.extend(_links(row, name, tensors, sizes))
    ordered = {name: hf_shapes[name] for name in _in_order(known.order, sizes.layers) if name in hf_shapes}
    return Relation(known, spelling, tuple(links), ordered, shapes)


def _is_of(row: Row, found: Shape | None) -> bool:
    """Whether a parameter is that of a row: an output layer of one row is a value head."""
    if found is None:
        return False
    wants_one = row.huggingface[0].shape[0] == "one"
    return (found[0] == 1) == wants_one if row.megatron.startswith("output_layer.") else True


def _rows(known: Architecture, sizes: Sizes, spelling: str) -> Iterator[tuple[Row, str, dict[str, Shape]]]:
    """Every row with its names filled in, layer after layer, and the shapes of Hugging Face's tensors."""
    own = [row for row in known.rows if row.spelling in (None, spelling)]
    inside = [row for row in own if LAYER in row.megatron]
    before = own[: own.index(inside[0])]
    after = [row for row in own if row not in before and row not in inside]
    for rows, layers in ((before, range(1)), (inside, range(sizes.layers)), (after, range(1))):
        for layer in layers:
            for row in rows:
                tensors = {_named(t.name, layer): sizes.shape(t.shape) for t in row.huggingface}
                yield row, _named(row.megatron, layer), tensors


def _named(name: str, layer: int) -> str:
    return name.replace(LAYER, str(layer))


def _in_order(order: tuple[str, ...], layers: int) -> Iterator[str]:
    inside = [name for name in order if LAYER in name]
    yield from order[: order.index(inside[0])]
    for layer in range(layers):
        yield from (_named(name, layer) for name in inside)
    yield from order[order.index(inside[-1]) + 1 :]


def _links(row: Row, name: str, tensors: Mapping[str, Shape], sizes: Sizes) -> Iterator[Link]:
    """The parts of one Megatron parameter, in the order of its rows."""
    blocks = sizes.groups if row.arrangement is Arrangement.GROUPED else 1
    at = 0
    for block in range(blocks):
        for tensor, shape in tensors.items():
            rows = shape[0] // blocks
            part = (rows, *shape[1:])
            rest = (0,) * len(shape[1:])
            yield Link(tensor, Box((block * rows, *rest), part), name, Box((at, *rest), part))
            at += rows


def _best(
    candidates: Sequence[tuple[Relation, Mapping[str, Shape]]], shapes: Mapping[str, Shape], layers: int
) -> Relation:
    """The relation that has a place for every tensor, and all of whose required rows are there.

    Args:
        candidates: Each with the side of it that ``shapes`` is to be.
        shapes: The tensors of the model.
        layers: Their decoder layers.
    """
    reasons: list[tuple[int, str]] = []
    for relation, side in candidates:
        strange, missing = [name for name in shapes if name not in side], _missing(relation, layers)
        if not strange and not missing:
            return relation
        text = "; ".join(
            f"{what} {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for what, names in (("has no place for", strange), ("lacks", missing)) if names
        )  # fmt: skip
        reasons.append((len(strange) + len(missing), f"{relation.architecture.class_name} {text}"))
    listed = "\n".join(f"  - {text}" for _, text in sorted(reasons))
    raise Unsupported(f"these are the tensors of no architecture whose names are known in both families:\n{listed}")


def _missing(relation: Relation, layers: int) -> list[str]:
    required = [r for r in relation.architecture.rows if not r.optional and r.spelling in (None, relation.spelling)]
    names = (_named(r.megatron, i) for r in required for i in range(layers if LAYER in r.megatron else 1))
    return [name for name in names if name not in relation.megatron]


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
