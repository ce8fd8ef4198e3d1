"""Degrees of parallelism, and which coordinates a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from mcore_rlhf.errors import LayoutMismatch, shown
from mcore_rlhf.models.meaning.bounds import MOST_LAYERS, MOST_LETTERS, MOST_RANKS


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands on every axis. ``dp_rank`` counts data-parallel ranks without the context-parallel ones."""

    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    expert_dp_rank: int


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The degrees of a run.

    Ranks are numbered as Megatron does by default (``tp-cp-ep-dp-pp``): tensor-parallel ranks vary fastest, pipeline
    stages slowest. Experts see the same ranks of a stage as ``etp × ep × expert_dp``.

    Source: megatron-core 0.16.1, ``parallel_state.initialize_model_parallel``.

    Args:
        tp: Tensor-parallel degree of everything but experts.
        pp: Pipeline stages.
        vpp: Model chunks per stage; 1 without virtual pipeline stages.
        cp: Context-parallel degree.
        ep: Expert-parallel degree.
        etp: Tensor-parallel degree of experts.
        dp: Data-parallel degree (context-parallel ranks not counted).
        pipeline_layout: Megatron's layout string, ``Ettt|tt|ttL``, or None for the default split.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    pipeline_layout: str | None = None

    def __post_init__(self) -> None:
        low = [name for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp") if getattr(self, name) < 1]
        if low:
            raise LayoutMismatch(f"parallel degrees must be at least 1: {', '.join(low)}")
        if len(self.pipeline_layout or "") > MOST_LETTERS:
            raise LayoutMismatch(f"pipeline layout {shown(self.pipeline_layout)}: more than {MOST_LETTERS:,} letters")
        if self.world_size > MOST_RANKS or self.pp * self.vpp > MOST_LAYERS:
            raise LayoutMismatch(
                f"degrees of {shown(self.world_size)} ranks and {shown(self.pp * self.vpp)} model chunks; no run has more than "
                f"{MOST_RANKS:,} and {MOST_LAYERS:,}\nLook at the degrees: they are those of the options, or else of the source's args."
            )
        if self.stage_size % (self.etp * self.ep):
            raise LayoutMismatch(
                f"a pipeline stage of TP {self.tp} × CP {self.cp} × DP {self.dp} = {self.stage_size} ranks cannot hold "
                f"ETP {self.etp} × EP {self.ep} = {self.etp * self.ep} expert ranks; DP must be a multiple of {self.least_dp}"
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.stage_size * self.pp

    @property
    def expert_dp(self) -> int:
        """Data-parallel degree of experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def least_dp(self) -> int:
        """The smallest data-parallel degree that can hold the experts."""
        return least_dp(self.tp, self.cp, self.ep, self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a global rank stands."""
        pp_rank, place = divmod(rank, self.stage_size)
        rest, tp_rank = divmod(place, self.tp)
        dp_rank, cp_rank = divmod(rest, self.cp)
        rest, etp_rank = divmod(place, self.etp)
        expert_dp_rank, ep_rank = divmod(rest, self.ep)
        return Coordinates(tp_rank, pp_rank, cp_rank, dp_rank, ep_rank, etp_rank, expert_dp_rank)

    def ranks(self) -> Iterator[tuple[int, Coordinates]]:
        """Every rank and its coordinates."""
        for rank in range(self.world_size):
            yield rank, self.coordinates(rank)

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        parts += [f"VPP{self.vpp}"] if self.vpp > 1 else []
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"ETP{self.etp}"] if self.etp != self.tp else []
        return "×".join([*parts, f"DP{self.dp}"])


def least_dp(tp: int, cp: int, ep: int, etp: int) -> int:
    """The smallest data-parallel degree at which a stage holds all expert ranks a whole number of times."""
    experts = etp * ep
    return experts // gcd(experts, tp * cp)
