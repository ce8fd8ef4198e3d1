"""The catalogue of one family of formats as another wants to see it: other names, other boxes, the same stored elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import Catalog, Chunk, TensorEntry
from mcore_rlhf.core.names import TensorName
from mcore_rlhf.core.views import Share, Shares, with_rows


@dataclass(slots=True)
class CrossingView:
    """A lazy catalogue over another; no tensor is read, only boxes are moved.

    Args:
        catalog: The source's.
        role: Role of all tensors.
        shares: For every tensor of this view, which parts of the source's it is made of.
        shapes: Its shape, without padding.
        rows: Where padding rows are added, how many rows there are then.
    """

    catalog: Catalog
    role: str
    shares: Shares
    shapes: Mapping[str, Shape]
    rows: Mapping[str, int] = field(default_factory=dict)
    _names: list[TensorName] = field(default_factory=list)

    def __iter__(self) -> Iterator[TensorName]:
        if not self._names:
            states: dict[str, list[str]] = {}
            for name in self.catalog:
                states.setdefault(name.param, []).append(name.state)
            for param, shares in self.shares.items():
                self._names.extend(TensorName(self.role, param, state) for state in states.get(shares[0].name, ()))
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None. Parts that the source lacks are missing in it, which the plan will notice."""
        if name.role != self.role or name.param not in self.shares:
            return None
        shares, chunks = self.shares[name.param], list[Chunk]()
        of = {
            part: self.catalog.get(TensorName(self.role, part, name.state)) for part in {s.name: None for s in shares}
        }
        for share in shares:
            entry = of[share.name]
            if entry is not None:
                chunks.extend(_moved(entry, share))
        if not chunks:
            return None
        found = TensorEntry(name, self.shapes[name.param], chunks[0].record.dtype, tuple(chunks))
        rows = self.rows.get(name.param)
        return found if rows is None else with_rows(found, rows)


def _moved(entry: TensorEntry, share: Share) -> Iterator[Chunk]:
    """The chunks of an entry that lie in a share, in the coordinates of the tensor that has it."""
    for chunk in entry.chunks:
        part = chunk.box.intersect(share.other)
        if part is not None:
            narrow = chunk.narrow(part)
            yield Chunk(share.own(part), narrow.record, narrow.start, share.strides(narrow.strides))
