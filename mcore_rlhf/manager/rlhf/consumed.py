"""Which rollouts a committed step has trained on: the step's own ``data/data.pt`` says so, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...errors import CheckpointError
from ...storage.paths import ReadablePath
from ...storage.pt import read_pt
from ...storage.records import record_of
from . import carried, loader_prompts, sampler
from .data_state import WHERE, unpack
from .rollouts import SampleKey
from .sampler import NextPlace, PendingPrompt, SamplerState


@dataclass(frozen=True, slots=True)
class Consumed:
    """What had been acknowledged when something was saved.

    Args:
        next: The first place, by epoch and position, that was never handed out.
        pending: Samples of earlier places that were not acknowledged, by place.
    """

    next: tuple[int, int]
    pending: Mapping[tuple[int, int], frozenset[int]]

    @classmethod
    def of(cls, place: NextPlace, in_flight: Iterable[PendingPrompt]) -> Consumed:
        """Of what a sampler saved."""
        pending = {(one.epoch, one.position): frozenset(one.pending) for one in in_flight}
        return cls((place.epoch, place.position), pending)

    @classmethod
    def by(cls, step: ReadablePath) -> Consumed:
        """Of a committed step.

        Args:
            step: Its folder.

        Raises:
            CheckpointError: It has no such file, or another loader's.
        """
        saved = read_pt(step, WHERE).tree
        if isinstance(saved, Mapping) and saved.get("kind") == carried.KIND:
            loader, _ = unpack(saved, carried.KIND)
            state = loader_prompts.read_state(loader.get(carried.DRIVER))
            return cls.of(state.next, state.in_flight)
        told, _ = unpack(saved, sampler.KIND)
        found = record_of(SamplerState, told, f"{step}/{WHERE}: state")
        return cls.of(found.next, found.in_flight)

    def __contains__(self, key: SampleKey) -> bool:
        place = (key.epoch, key.position)
        return place < self.next and key.sample not in self.pending.get(place, ())


def consumed_by(step: ReadablePath) -> Consumed | str:
    """See :meth:`Consumed.by`; why nobody knows, where that is so."""
    try:
        return Consumed.by(step)
    except CheckpointError as error:
        return str(error)
