"""The catalogue of a legacy Megatron checkpoint: chunks are computed from places and partitions when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rlhf.core.catalog import Chunk, TensorEntry
from mcore_rlhf.core.names import PARAM, TensorName
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.rank_layout import local_chunks
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.ptfile import StoredTensor


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that holds a part of a parameter.

    Args:
        at: The rank.
        param: Where the parameter lies, or None where only its states do.
        states: Where its optimizer states lie, by name; empty where another rank's file has them.
    """

    at: FileRank
    param: StoredTensor
    states: dict[str, StoredTensor]


@dataclass(slots=True)
class MegatronCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        model: Shapes and partitions.
        parallel: Degrees of the files.
        holders: For each parameter, the ranks that hold a part of it.
        states: Names of the optimizer's tensor states.
    """

    role: str
    model: ModelSpec
    parallel: ParallelConfig
    holders: dict[str, list[Holder]]
    states: tuple[str, ...]

    def __iter__(self) -> Iterator[TensorName]:
        for param in self.model.params:
            yield TensorName(self.role, param.name, PARAM)
            if param.trainable:
                for state in self.states:
                    yield TensorName(self.role, param.name, state)

    def __len__(self) -> int:
        return sum(1 + (len(self.states) if param.trainable else 0) for param in self.model.params)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """Compute one entry, or None where the checkpoint does not have it."""
        spec = self.model.get(name.param)
        if spec is None or name.role != self.role:
            return None
        chunks: list[Chunk] = []
        for holder in self.holders.get(name.param, []):
            stored = holder.param if name.state == PARAM else holder.states.get(name.state)
            if stored is not None:
                chunks.extend(local_chunks(spec, stored, self._layout(spec, holder.at)))
        if not chunks:
            return None
        return TensorEntry(name, spec.global_shape, chunks[0].record.dtype, tuple(chunks))

    def _layout(self, spec: ParamSpec, at: FileRank) -> LocalLayout:
        expert = is_routed_expert(spec.name)
        return local_layout(spec.partition, spec.global_shape, at.split(self.parallel, expert), at.stack(self.parallel))
