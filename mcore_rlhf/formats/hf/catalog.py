"""The catalogue of a Hugging Face folder: whole tensors, each in one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcore_rlhf.core.box import Box
from mcore_rlhf.core.catalog import Chunk, TensorEntry
from mcore_rlhf.core.names import TensorName
from mcore_rlhf.storage.stored import StoredTensor

Places = Mapping[str, Mapping[str, tuple[StoredTensor, ...]]]
"""For each parameter and each of its states, where its elements lie: in more than one place where it is stored twice."""


@dataclass(frozen=True, slots=True)
class HuggingFaceCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        places: Where they lie.
    """

    role: str
    places: Places

    def __iter__(self) -> Iterator[TensorName]:
        for param, states in self.places.items():
            for state in states:
                yield TensorName(self.role, param, state)

    def __len__(self) -> int:
        return sum(len(states) for states in self.places.values())

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        stored = self.places.get(name.param, {}).get(name.state) if name.role == self.role else None
        if not stored:
            return None
        chunks = tuple(Chunk(Box.whole(s.shape), s.record, s.start, s.strides) for s in stored)
        return TensorEntry(name, stored[0].shape, stored[0].record.dtype, chunks)
