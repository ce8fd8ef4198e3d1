"""Where a trainer has what Megatron-core has in one folder, and how its loader wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DistParts:
    """Where a trainer has what Megatron-core has in one folder of ``torch_dist``: in several, relative to a model's own.

    Args:
        model: The folder of the weights; empty where they are Hugging Face's files, in that of the description.
        optimizer: That of the optimizer and the scheduler.
        extra: That of the random states.
        scheduler: The key of the scheduler's state.
        described: The folder of the model's ``config.json`` and tokenizer.
        contents: The file, written last, that says what lies where.
        sharding: How its loader takes a distributed optimizer's states where it takes the weights from there, too.
        arguments: What decides how its buffers are cut, as its runs have it unless they are told otherwise.
        told: How the trainer is told to take the weights from there, with ``{path}`` for the step's folder.
        adapted: Whether the weights are each rank's own, and the schedule and every rank's random states files beside them: ROLL's.
    """

    model: str = ""
    optimizer: str = ""
    extra: str = ""
    scheduler: str
    described: str = ""
    contents: str = ""
    sharding: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    told: str = ""
    adapted: bool = False

    @property
    def is_one(self) -> bool:
        """Whether all parts are one folder, which has another name or other keys than Megatron's own."""
        return self.model == self.optimizer

    @property
    def together(self) -> bool:
        """Whether the random states lie beside the optimizer, and the weights elsewhere."""
        return self.extra == self.optimizer

    @property
    def as_asked(self) -> bool:
        """Whether its loader asks for a distributed optimizer's states as its run says, whatever the folder says."""
        return self.adapted or self.is_one
