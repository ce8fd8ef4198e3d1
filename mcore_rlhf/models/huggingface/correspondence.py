"""Which parts two sets of tensors have in common: links between boxes, computed once, read both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mcore_rlhf.core.box import Box, Shape

_NONE = -1
"""In place of a dimension that the other tensor does not have; it is one element long."""


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


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor: which box of which tensor under other names holds it.

    Args:
        box: In the tensor itself.
        name: The other tensor.
        other: In that tensor; of the same shape unless ``axes`` says otherwise.
        axes: For every dimension of ``box``, the dimension of ``other`` that it is, or -1 where it is none of them and one
            element long; None where all are the same.
    """

    box: Box
    name: str
    other: Box
    axes: tuple[int, ...] | None = None

    def own(self, part: Box) -> Box:
        """A part of ``other`` in the coordinates of the tensor that has this share."""
        if self.axes is None:
            return part.shift(
                tuple(there - here for there, here in zip(self.other.offset, self.box.offset, strict=True))
            )
        offset = tuple(
            here if axis == _NONE else here + part.offset[axis] - self.other.offset[axis]
            for here, axis in zip(self.box.offset, self.axes, strict=True)
        )
        return Box(offset, tuple(1 if axis == _NONE else part.shape[axis] for axis in self.axes))

    def strides(self, others: Shape) -> Shape:
        """Strides in the dimensions of the tensor that has this share, given those of the other one."""
        if self.axes is None:
            return others
        return tuple(1 if axis == _NONE else others[axis] for axis in self.axes)


Shares = Mapping[str, tuple[Share, ...]]
"""For every tensor, the parts of others that it is made of."""


def shares_of_huggingface(names: Iterable[str], links: Iterable[Link]) -> dict[str, tuple[Share, ...]]:
    """For every Hugging Face tensor, in order, the parts of the others that it is made of."""
    shares = ((link.huggingface, Share(link.huggingface_box, link.other, link.other_box, link.axes)) for link in links)
    return _by_name(names, shares)


def shares_of_others(names: Iterable[str], links: Iterable[Link]) -> dict[str, tuple[Share, ...]]:
    """For every other tensor, in order, the parts of Hugging Face's that it is made of."""
    shares = (
        (link.other, Share(link.other_box, link.huggingface, link.huggingface_box, _inverse(link))) for link in links
    )
    return _by_name(names, shares)


def _inverse(link: Link) -> tuple[int, ...] | None:
    if link.axes is None:
        return None
    places = {axis: dim for dim, axis in enumerate(link.axes)}
    return tuple(places.get(dim, _NONE) for dim in range(len(link.other_box.shape)))


def _by_name(names: Iterable[str], shares: Iterable[tuple[str, Share]]) -> dict[str, tuple[Share, ...]]:
    found: dict[str, list[Share]] = {name: [] for name in names}
    for name, share in shares:
        found[name].append(share)
    return {name: tuple(listed) for name, listed in found.items()}
