"""Which rollouts a committed step has trained on: the step's own ``data/data.pt`` says so, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import CheckpointError
from ...storage.paths import ReadablePath
from ...storage.pt import read_pt
from ...storage.records import record_of
from .data_state import WHERE, unpack
from .rollouts import SampleKey
from .sampler import KIND, SamplerState


@dataclass(frozen=True, slots=True)
class Consumed:
    """What a saved sampler has had acknowledged.

    Args:
        epoch_length: Places of an epoch.
        next_slot: The first place that was never handed out, counted over all epochs.
        pending: Samples of earlier places that were not acknowledged, by place.
    """

    epoch_length: int
    next_slot: int
    pending: Mapping[int, frozenset[int]]

    @classmethod
    def of(cls, state: SamplerState) -> Consumed:
        """Of what a sampler saved."""
        length = state.epoch_length
        pending = {one.epoch * length + one.position: frozenset(one.pending) for one in state.in_flight}
        return cls(length, state.next.epoch * length + state.next.position, pending)

    @classmethod
    def by(cls, step: ReadablePath) -> Consumed:
        """Of a committed step.

        Args:
            step: Its folder.

        Raises:
            CheckpointError: It has no such file, or another loader's.
        """
        state, _ = unpack(read_pt(step, WHERE).tree, KIND)
        return cls.of(record_of(SamplerState, state, f"{step}/{WHERE}: state"))

    def __contains__(self, key: SampleKey) -> bool:
        slot = key.epoch * self.epoch_length + key.position
        return slot < self.next_slot and key.sample not in self.pending.get(slot, ())


def consumed_by(step: ReadablePath) -> Consumed | str:
    """See :meth:`Consumed.by`; why nobody knows, where that is so."""
    try:
        return Consumed.by(step)
    except CheckpointError as error:
        return str(error)
