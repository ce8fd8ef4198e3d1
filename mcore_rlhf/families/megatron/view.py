"""The source's catalogue as the target wants to see it: other rows, derived masters, parameters rounded from masters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rlhf.core.catalog import Catalog, TensorEntry
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.views import with_rows
from mcore_rlhf.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TargetView:
    """A catalogue over another.

    Args:
        catalog: The source's.
        model: The source's model.
        rows: Rows of the new embedding, or None to leave it.
        from_masters: Whether parameters are rounded from their fp32 copies, because their dtype changes.
    """

    catalog: Catalog
    model: ModelSpec
    rows: int | None
    from_masters: bool

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.catalog)

    def __len__(self) -> int:
        return len(self.catalog)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name as the target wants it."""
        entry = self._derived(name)
        spec = self.model.get(name.param)
        if entry is None or spec is None or self.rows is None or not spec.partition.vocabulary:
            return entry
        return with_rows(entry, self.rows)

    def _derived(self, name: TensorName) -> TensorEntry | None:
        if name.state == PARAM and self.from_masters:
            return self.catalog.get(name._replace(state=MASTER)) or self.catalog.get(name)
        if name.state == PARAM:  # ZeRO stage 3 stores masters only
            return self.catalog.get(name) or self.catalog.get(name._replace(state=MASTER))
        if name.state == MASTER:
            return self.catalog.get(name) or self.catalog.get(name._replace(state=PARAM))
        return self.catalog.get(name)
