"""The catalogue of a universal checkpoint: whole tensors, one file each; parameters lie in the module, if anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcore_rlhf.core.box import Box, Shape, flat_boxes, row_major
from mcore_rlhf.core.catalog import Chunk, TensorEntry
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.ptfile import StoredTensor

from .names import state_key
from .param_files import ParamFiles


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a parameter's own bytes lie, as the model computes with it.

    Args:
        whole: Copies of the whole tensor; empty where only the ``fp32`` file has its value.
        slices: Flat slices of a frozen parameter, one per data-parallel rank (stage 3).
    """

    whole: tuple[StoredTensor, ...] = ()
    slices: tuple[StoredTensor, ...] = ()


@dataclass(slots=True)
class UniversalCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        model: Names and shapes.
        weights: Where the parameters themselves lie.
        params: The parameters' files.
        states: Names of the optimizer's tensor states; empty where the optimizer was not asked for.
    """

    role: str
    model: ModelSpec
    weights: Mapping[str, Weights]
    params: Mapping[str, ParamFiles]
    states: tuple[str, ...]

    def __iter__(self) -> Iterator[TensorName]:
        for spec in self.model.params:
            for state in self._states_of(spec):
                yield TensorName(self.role, spec.name, state)

    def __len__(self) -> int:
        return sum(len(self._states_of(spec)) for spec in self.model.params)

    def _states_of(self, spec: ParamSpec) -> tuple[str, ...]:
        """What of a parameter is stored: stage 3 and pipelines keep no weights but the masters of what they train."""
        weights = self.weights.get(spec.name, Weights())
        files = self.params.get(spec.name) if spec.trainable else None
        states = tuple(s for s in self.states if s == MASTER or (files is not None and state_key(s) in files.tensors))
        states = states if spec.trainable else ()
        return (PARAM, *states) if weights.whole or weights.slices or not states else states

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """Compute one entry, or None where the checkpoint does not have it."""
        spec = self.model.get(name.param)
        if spec is None or name.role != self.role or name.state not in self._states_of(spec):
            return None
        if name.state == PARAM:
            chunks = self._weights(name.param, spec.global_shape)
        else:
            chunks = self._state(name.param, name.state, spec.global_shape)
        return TensorEntry(name, spec.global_shape, chunks[0].record.dtype, chunks) if chunks else None

    def _state(self, param: str, state: str, shape: Shape) -> tuple[Chunk, ...]:
        files = self.params.get(param)
        stored = files.tensors.get(state_key(state)) if files is not None else None
        return (whole_chunk(stored, shape),) if stored is not None else ()

    def _weights(self, param: str, shape: Shape) -> tuple[Chunk, ...]:
        weights = self.weights.get(param, Weights())
        if weights.slices:
            return tuple(_slice_chunks(weights.slices, shape))
        if weights.whole:
            return tuple(whole_chunk(stored, shape) for stored in weights.whole)
        return self._state(param, MASTER, shape)


def whole_chunk(stored: StoredTensor, shape: Shape) -> Chunk:
    """A stored tensor as the whole of a logical one; a flat one is seen in the other's shape."""
    strides = stored.strides if stored.shape == shape else row_major(shape)
    return Chunk(Box.whole(shape), stored.record, stored.start, strides)


def _slice_chunks(slices: tuple[StoredTensor, ...], shape: Shape) -> Iterator[Chunk]:
    """Equal flat slices, the last ones padded.

    Source: DeepSpeed 0.19.8, ``runtime/zero/partition_parameters.py``: ``ceil(numel / world)`` elements per rank.
    """
    numel, start, strides = Box.whole(shape).numel, 0, row_major(shape)
    for stored in slices:
        stop, at = min(numel, start + stored.shape[0]), stored.start
        for box in flat_boxes(shape, start, stop):
            yield Chunk(box, stored.record, at, strides)
            at += box.numel
        start += stored.shape[0]
