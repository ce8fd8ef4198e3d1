"""What a load has to fill on this rank: its parameters and buffers whole, of optimizer states the parts that it owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.dtype import FLOAT32, DType, dtype_of
from mcore_rlhf.core.names import MASTER, PARAM
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.source import TrainingState
from mcore_rlhf.storage.paths import ReadablePath

from .model import LiveModel
from .optimizers import Member, Owned

LIVE = "live"
"""What plans call the live model, where otherwise the name of a target file stands."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A flat range of a local tensor that is to be filled.

    Args:
        vpp_rank: The model chunk.
        name: Local name of the parameter or buffer.
        state: ``param``, ``master``, ``exp_avg``, …
        shape: Shape of the local parameter.
        start: First element of the range.
        stop: One past the last.
        record: The live memory, as a record of a plan.
        owned: Whose state it is; None for the parameter or buffer itself.
        member: The optimizer that has the state.
    """

    vpp_rank: int
    name: str
    state: str
    shape: Shape
    start: int
    stop: int
    record: Record
    owned: Owned | None = None
    member: Member | None = None


def slots(model: LiveModel, chain: Sequence[Member | None], states: Sequence[str]) -> list[Slot]:
    """Everything that is to be filled.

    Args:
        model: The live model.
        chain: Its optimizers; empty to load weights only.
        states: Names of the stored states without the master; each becomes a slot of every trained parameter.

    Raises:
        Unsupported: A live tensor is not contiguous.
    """
    found: list[Slot] = []

    def record(dtype: DType, numel: int) -> Record:
        return Record(LIVE, str(len(found)), dtype, numel, 0)

    for chunk in model.chunks:
        for name, tensor in chunk.tensors().items():
            _check(name, tensor)
            whole = record(dtype_of(tensor.dtype), tensor.numel())
            found.append(Slot(chunk.vpp_rank, name, PARAM, tuple(tensor.shape), 0, tensor.numel(), whole))
    names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
    for member, owned, state in _states(chain, states):
        vpp_rank, name = names[owned.param]
        shape, part = tuple(owned.param.shape), record(FLOAT32, owned.stop - owned.start)
        found.append(Slot(vpp_rank, name, state, shape, owned.start, owned.stop, part, owned, member))
    return found


def live_tensors(model: LiveModel, chosen: Sequence[Slot]) -> dict[str, torch.Tensor]:
    """The memory of slots by record key, once the optimizer has its states; without those kept in another form."""
    params = {(chunk.vpp_rank, name): tensor for chunk in model.chunks for name, tensor in chunk.tensors().items()}
    found: dict[str, torch.Tensor] = {}
    for slot in chosen:
        if slot.member is None or slot.owned is None:
            found[slot.record.key] = params[slot.vpp_rank, slot.name]
        elif not slot.member.converts:
            found[slot.record.key] = slot.member.tensors(slot.owned)[slot.state]
    return found


def _states(chain: Sequence[Member | None], states: Sequence[str]) -> Iterator[tuple[Member, Owned, str]]:
    for member in chain:
        if member is not None:
            for owned in member.owned():
                for state in (*([MASTER] if member.has_master(owned) else []), *states):
                    yield member, owned, state


def _check(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise Unsupported(
            f"{name}: the live tensor is not contiguous ({tuple(tensor.shape)}, strides {tensor.stride()})"
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint, seen from one rank.

    Args:
        root: Folder to which the plan's files are relative.
        files: The files that this rank reads.
        plan: What fills the slots.
        state: What the checkpoint holds besides tensors.
        states: Names of the optimizer's tensor states, without the master.
        kind: The optimizer that wrote it: ``distributed``, ``plain`` or None.
        report: What is kept, derived, changed and lost.
        scalars: Values that a plain optimizer keeps per parameter.
        opaque: By model chunk: values of the state dict that are no tensors.
        rng: Random states that this rank's own file holds, under the manager's names; None where it holds none.
    """

    root: ReadablePath
    files: tuple[ReadablePath, ...]
    plan: FilePlan
    state: TrainingState
    states: tuple[str, ...]
    kind: str | None
    report: Report
    scalars: Mapping[str, object] = field(default_factory=dict)
    opaque: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    rng: Mapping[str, object] | None = None
