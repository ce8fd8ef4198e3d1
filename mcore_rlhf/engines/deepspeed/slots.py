"""What a load has to fill on this rank: weights, buffers, masters and states, each a live tensor with its place in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore_rlhf.core.box import Shape, row_major
from mcore_rlhf.core.catalog import Chunk, Record
from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.core.names import MASTER, PARAM
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.formats.deepspeed.catalog import Cut, place_chunks
from mcore_rlhf.formats.deepspeed.layout import whole_layout
from mcore_rlhf.layouts.zero import SlicedGroup
from mcore_rlhf.storage.stored import StoredTensor

from .optimizers import Flat, LiveOptimizer
from .origin import States

LIVE = "live"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of the module.

    Args:
        name: Its name, the owner's where it is tied.
        shape: Its whole shape.
        tensor: The live one: whole, or this rank's slice in stage 3.
        trained: Whether the optimizer has it.
        sliced: How stage 3 cuts it; None where it is whole.
        rank: This rank's number among the slices.
    """

    name: str
    shape: Shape
    tensor: torch.Tensor
    trained: bool
    sliced: SlicedGroup | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A live tensor to be filled.

    Args:
        state: ``param``, ``master``, or the name of an optimizer state.
        record: The live tensor as a record; its key is the slot's own.
        weight: The module's tensor that it is, or None.
        flat: The flat tensor that it belongs to, or None.
    """

    state: str
    record: Record
    weight: Weight | None = None
    flat: Flat | None = None

    @property
    def label(self) -> str:
        """What it is, for messages."""
        if self.weight is not None:
            return self.weight.name
        return ", ".join(self.flat.names[:3]) if self.flat is not None else ""

    def chunks(self) -> Iterator[tuple[str, Shape, tuple[Chunk, ...]]]:
        """Its parameters: (name, whole shape, which parts of it lie where in the slot)."""
        whole = StoredTensor(self.record, 0, (self.record.numel,), (1,))
        if self.flat is not None:
            flat, geometry = self.flat, self.flat.geometry_of(self.state)
            for index in flat.indices(self.state):
                cut = Cut(geometry, index, {flat.rank: whole})
                yield flat.names[index], flat.shapes[index], tuple(place_chunks(cut, whole_layout(flat.shapes[index])))
        elif self.weight is not None:
            weight = self.weight
            place: StoredTensor | Cut = StoredTensor(self.record, 0, weight.shape, row_major(weight.shape))
            if weight.sliced is not None:
                place = Cut(weight.sliced, 0, {weight.rank: whole})
            yield weight.name, weight.shape, tuple(place_chunks(place, whole_layout(weight.shape)))


@dataclass(slots=True)
class Slots:
    """All slots of a load.

    Args:
        weights: The module's tensors.
        optimizer: The optimizer; None to load weights alone.
        states: Of every flat tensor, the names of the states that the checkpoint has, without masters.
    """

    weights: Sequence[Weight]
    optimizer: LiveOptimizer | None
    states: States
    model: LiveOptimizer | None = None
    found: list[Slot] = field(default_factory=list)

    def all(self) -> list[Slot]:
        """The slots, in order: weights, then flat tensors."""
        for weight in self.weights:
            if not (weight.sliced is not None and weight.trained):
                self._add(PARAM, weight.tensor, weight=weight)
        if self.optimizer is not None:
            for flat in self.optimizer.flats:
                for state in ((MASTER,) if self.optimizer.masters else ()) + self.states.get(flat.number, ()):
                    self._add(state, flat.held, flat=flat)
        elif self.model is not None:  # weights alone, in stage 3: they are slices in flat tensors
            for flat in self.model.flats:
                if flat.model is not None:
                    self._add(PARAM, flat.model, flat=flat)
        return self.found

    def _add(self, state: str, like: torch.Tensor, weight: Weight | None = None, flat: Flat | None = None) -> None:
        numel = like.numel() if flat is None else flat.numel(state)
        record = Record(LIVE, str(len(self.found)), dtype_of(like.dtype), numel, 0)
        self.found.append(Slot(state, record, weight, flat))


def live_tensors(slots: Sequence[Slot], optimizer: LiveOptimizer | None) -> dict[str, torch.Tensor]:
    """The memory of the slots by key, once the optimizer has its states."""
    found: dict[str, torch.Tensor] = {}
    for slot in slots:
        if slot.weight is not None:
            found[slot.record.key] = slot.weight.tensor
        elif slot.flat is not None and slot.state == PARAM and slot.flat.model is not None:
            found[slot.record.key] = slot.flat.model
        elif slot.flat is not None and slot.state == MASTER:
            found[slot.record.key] = slot.flat.held
        elif slot.flat is not None and optimizer is not None:
            found[slot.record.key] = optimizer.state_of(slot.flat)[slot.state]
    return found


def weights_of(engine: Any, optimizer: LiveOptimizer | None) -> list[Weight]:
    """The tensors of an engine's module that a checkpoint holds: parameters and persistent buffers, each once.

    Raises:
        Unsupported: A tensor that is not contiguous.
    """
    trained = {name for flat in optimizer.flats for name in flat.names} if optimizer is not None else set()
    found = [_weight(engine, name, param, name in trained) for param, name in engine.param_names.items()]
    known = {id(buffer) for buffer in (weight.tensor for weight in found)}
    kept = engine.module.state_dict(keep_vars=True)
    for name, buffer in engine.module.named_buffers():
        if name in kept and id(buffer) not in known:
            found.append(Weight(name, tuple(buffer.shape), buffer, False))
    for weight in found:
        if not weight.tensor.is_contiguous():
            raise Unsupported(
                f"{weight.name}: the live tensor is not contiguous ({weight.shape}, {weight.tensor.stride()})"
            )
    return found


def _weight(engine: Any, name: str, param: Any, trained: bool) -> Weight:
    if not hasattr(param, "ds_id"):
        return Weight(name, tuple(param.shape), param, trained)
    among = param.ds_process_group
    ranks, rank = torch.distributed.get_world_size(among), torch.distributed.get_rank(among)
    geometry = SlicedGroup((int(param.ds_numel),), ranks)
    if geometry.length() != param.ds_tensor.numel():
        raise Unsupported(
            f"{name}: stage 3 keeps {param.ds_tensor.numel()} elements of it here, {geometry.length()} expected\n"
            "NVMe offload and quantized or hierarchical slices are not supported."
        )
    return Weight(name, tuple(param.ds_shape), param.ds_tensor, trained, geometry, rank)
