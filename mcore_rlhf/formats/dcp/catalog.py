"""The catalogue of a DCP folder: every tensor under its parameter's name, its chunks found when they are looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.names import TensorName
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.dcp import DcpFolder


@dataclass(frozen=True, slots=True)
class DcpCatalog:
    """Lazy mapping from names to where their elements lie.

    Args:
        role: Role of all its tensors.
        model: Names and shapes.
        folder: The folder.
        keys: For every parameter, the folder's key of each of its states. A trained fp32 parameter is its own master, and
            stands under that name; ``param`` is what a target rounds from it.
    """

    role: str
    model: ModelSpec
    folder: DcpFolder
    keys: Mapping[str, Mapping[str, str]]

    def __iter__(self) -> Iterator[TensorName]:
        for spec in self.model.params:
            for state in self.keys[spec.name]:
                yield TensorName(self.role, spec.name, state)

    def __len__(self) -> int:
        return sum(len(self.keys[spec.name]) for spec in self.model.params)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """Find the chunks of one tensor, or None where the folder does not have it."""
        key = self.keys.get(name.param, {}).get(name.state)
        if key is None or name.role != self.role:
            return None
        return self.folder.tensors[key].entry(name)
