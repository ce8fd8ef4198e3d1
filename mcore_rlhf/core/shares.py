"""What views of a table of chunks are made of: parts of other tensors, states that stand for one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .catalog import MASTER, PARAM, Box, Chunk, Shape

FROM_MASTERS: Mapping[str, tuple[str, ...]] = {PARAM: (MASTER, PARAM), MASTER: (MASTER, PARAM)}
"""A parameter is rounded from its fp32 copy where there is one."""
EITHER: Mapping[str, tuple[str, ...]] = {PARAM: (PARAM, MASTER), MASTER: (MASTER, PARAM)}
"""Each is made of the other where it is stored nowhere: ZeRO stage 3 stores masters only, an fp32 model parameters only."""

ABSENT = -1
"""In place of a dimension that the other tensor does not have; it is one element long."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor: which box of which tensor under other names holds it.

    Args:
        box: In the tensor itself.
        name: The other tensor.
        other: In that tensor; of the same shape unless ``axes`` says otherwise. One of the two boxes may have steps.
        axes: For every dimension of ``box``, the dimension of ``other`` that it is, or -1 where it is none of them and one
            element long; None where all are the same.
    """

    box: Box
    name: str
    other: Box
    axes: tuple[int, ...] | None = None

    def inverse(self, name: str) -> Share:
        """The same part, seen from the other tensor.

        Args:
            name: Of the tensor that has this share.
        """
        if self.axes is None:
            return Share(self.other, name, self.box)
        places = {axis: dim for dim, axis in enumerate(self.axes)}
        return Share(self.other, name, self.box, tuple(places.get(dim, ABSENT) for dim in range(len(self.other.shape))))

    def moved(self, chunk: Chunk) -> Chunk | None:
        """What of a chunk of the other tensor lies in this share, in this tensor's coordinates; None where nothing does."""
        part = chunk.box.intersect(self.other)
        if part is None:
            return None
        narrow = chunk.narrow(part)
        return Chunk(self.own(part), narrow.record, narrow.start, self.strides(narrow.strides))

    def own(self, part: Box) -> Box:
        """A part of ``other`` in the coordinates of the tensor that has this share."""
        if self.box.step is not None or self.other.step is not None:
            return self._stepped(part)
        if self.axes is None:
            return part.shift(
                tuple(there - here for there, here in zip(self.other.offset, self.box.offset, strict=True))
            )
        offset = tuple(
            here if axis == ABSENT else here + part.offset[axis] - self.other.offset[axis]
            for here, axis in zip(self.box.offset, self.axes, strict=True)
        )
        return Box(offset, tuple(1 if axis == ABSENT else part.shape[axis] for axis in self.axes))

    def _stepped(self, part: Box) -> Box:
        """The same, where elements next to each other here are some steps apart there, or the other way round."""
        offset, shape = [], []
        for dim, axis in enumerate(range(len(self.box.shape)) if self.axes is None else self.axes):
            way = 0 if axis == ABSENT else (part.offset[axis] - self.other.offset[axis]) // self.other.steps[axis]
            offset.append(self.box.offset[dim] + way * self.box.steps[dim])
            shape.append(1 if axis == ABSENT else part.shape[axis])
        return Box(tuple(offset), tuple(shape), self.box.step)

    def strides(self, others: Shape) -> Shape:
        """Strides in the dimensions of the tensor that has this share, given those of the other one."""
        if self.axes is None:
            return others
        return tuple(1 if axis == ABSENT else others[axis] for axis in self.axes)


Shares = Mapping[str, tuple[Share, ...]]
"""For every tensor, the parts of others that it is made of."""
