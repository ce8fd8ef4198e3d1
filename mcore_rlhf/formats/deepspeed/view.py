"""The source's catalogue as a native target wants to see it: weights from masters, and masters from fp32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mcore_rlhf.core.catalog import Catalog, TensorEntry
from mcore_rlhf.core.names import MASTER, PARAM, TensorName

_MOST_CHUNKS = 200_000
"""Of remembered entries: about 100 MB."""


@dataclass(slots=True)
class TargetView:
    """A catalogue over another.

    Args:
        catalog: The source's.
        from_masters: Whether parameters are rounded from their masters even where they are stored, because their dtype
            changes.
    """

    catalog: Catalog
    from_masters: bool
    _known: dict[TensorName, TensorEntry | None] = field(default_factory=dict)
    _chunks: int = 0

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.catalog)

    def __len__(self) -> int:
        return len(self.catalog)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name as the target wants it; remembered, since every rank's file asks for its part."""
        try:
            return self._known[name]
        except KeyError:
            entry = self._entry(name)
        if self._chunks > _MOST_CHUNKS:
            self._known, self._chunks = {}, 0
        self._known[name] = entry
        self._chunks += len(entry.chunks) if entry is not None else 0
        return entry

    def _entry(self, name: TensorName) -> TensorEntry | None:
        master, param = name._replace(state=MASTER), name._replace(state=PARAM)
        if name.state == PARAM and self.from_masters:
            return self.catalog.get(master) or self.catalog.get(param)
        if name.state == PARAM:
            return self.catalog.get(param) or self.catalog.get(master)
        if name.state == MASTER:
            return self.catalog.get(master) or self.catalog.get(param)
        return self.catalog.get(name)
