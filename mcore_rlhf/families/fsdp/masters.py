"""What becomes of fp32 masters in the files of an FSDP run, whose parameters are the masters themselves."""

from __future__ import annotations

from typing import NamedTuple

from mcore_rlhf.core.catalog import FLOATING, MASTER, DType
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.families.source import Source


class Trained(NamedTuple):
    """Parameters that an FSDP run trains.

    Args:
        source: Where they come from.
        dtype: What they become; None to leave them.
        optimizer: Whether the optimizer goes with them.
    """

    source: Source
    dtype: DType | None
    optimizer: bool

    @property
    def rounded(self) -> bool:
        """Whether the masters are."""
        return self.optimizer and self.dtype is not None and self.dtype.itemsize < 4

    @property
    def halves(self) -> list[DType]:
        """Types of parameters that FSDP rounds as it computes."""
        specs = self.source.model.params
        return [s.dtype for s in specs if s.trainable and s.dtype in FLOATING and s.dtype.itemsize == 2]


NO_OTHER_PLACE = "fp32 masters: the parameters become {found}, and torch's optimizers have no other place for them"
OF_MASTERS: tuple[Rule[Trained], ...] = (
    Rule(Fate.LOST, NO_OTHER_PLACE,
         lambda t: t.rounded and t.dtype, [Item(Kind.TENSOR, MASTER)]),
    Rule(Fate.DERIVED, "parameters: the fp32 masters, which FSDP trains and rounds as it computes; {found[0]} is written nowhere",
         lambda t: t.optimizer and not t.rounded and MASTER in t.source.states and t.halves),
)  # fmt: skip
