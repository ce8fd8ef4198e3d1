"""What a step of ROLL's has in files beside its iteration: the schedule, and each rank's random states. The relation that its optimizer
and its weights are read and written by.

Source: ROLL 8eb27cc2, ``roll/distributed/strategy/megatron_strategy.py`` (``save_checkpoint``, ``load_checkpoint``); ``McaTrainer`` has one
file, without a number, where one process runs (``mcore_adapter/trainer/trainer.py``, ``_save_rng_state``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.facts import Fate, Rule, Values
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import SCHEDULE, random_files
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.record_file import StoredFile

from .folders import TRACKER, FileRank, iteration_folder_name, tracked
from .state import SCHEDULER_KEYS

RNG, MOST_STEPS = "rng_state", 10**15


@dataclass(frozen=True, slots=True)
class BesideIteration:
    """Those files, opened.

    Args:
        top: The schedule, under the key that Megatron has for one that counts steps.
        random: Random states by rank.
        files: All of them.
        astray: What the tracker names, where that is no iteration, or none that is there; empty otherwise.
    """

    top: Mapping[str, object] = field(default_factory=dict)
    random: Mapping[int, object] = field(default_factory=dict)
    files: Sequence[StoredFile] = ()
    astray: str = ""

    @classmethod
    def of(cls, step: ReadablePath, options: ReadOptions) -> BesideIteration:
        """Open those of a step.

        Args:
            step: Its folder.
            options: Without an optimizer its schedule is left alone.

        Raises:
            CheckpointError: One is damaged, or asks for code.
        """
        named = [(None, SCHEDULE)] if (step / SCHEDULE).is_file() and options.optimizer else []
        opened = [
            (rank, read_pt(step, file, stubs=options.stubs)) for rank, file in [*named, *random_files(step).items()]
        ]
        values = {rank: pt.materialize(pt.tree) for rank, pt in opened}
        return cls(
            {SCHEDULER_KEYS[1]: values[None]} if None in values else {},
            {rank: value for rank, value in values.items() if rank is not None},
            [StoredFile.of_zip(pt.file, pt.directory) for _, pt in opened],
            _astray(step),
        )

    @property
    def counted(self) -> int:
        """The updates that the schedule has counted; 0 where none is there."""
        scheduler = self.top.get(SCHEDULER_KEYS[1])
        steps = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else 0
        return steps if type(steps) is int and 0 <= steps < MOST_STEPS else 0

    def of_rank(self, parallel: ParallelConfig, at: FileRank) -> dict[str, object]:
        """The random states of the data-parallel ranks that have one part of the model; empty unless all ranks have theirs.

        Args:
            parallel: The run's degrees.
            at: One of them.
        """
        if {*self.random} != {*range(parallel.world_size)}:
            return {}
        ranks = (n for n, other in parallel.ranks() if (other.tp_rank, other.pp_rank) == (at.tp_rank, at.pp_rank))
        return {RNG: [self.random[rank] for rank in ranks]}


def _astray(step: ReadablePath) -> str:
    named = [*map(iteration_folder_name, tracked(step))]
    if not named and (step / TRACKER).is_file():
        return "no iteration"
    return next((f"{name}, which is not there" for name in named if not (step / name).is_dir()), "")


def _gap(asked: tuple[BesideIteration, int]) -> list[int]:
    around, world = asked
    return [rank for rank in range(world) if around.random and rank not in around.random][:1]


def _surplus(asked: tuple[BesideIteration, int]) -> Values | None:
    around, world = asked
    return None if _gap(asked) or len(around.random) <= world else {"has": len(around.random), "world": world}


GAPS: tuple[Rule[tuple[BesideIteration, int]], ...] = (
    Rule(Fate.LOST, "RNG states: rank {found} has no file of them, and those of all ranks are derived", _gap),
    Rule(Fate.LOST, "RNG states: of {has} ranks, and the run has {world}: derived", _surplus),
    Rule(Fate.NOTE, f"{TRACKER} names {{found}}: ROLL finds no weights",
         lambda asked: asked[0].astray, contradicts=True),
)  # fmt: skip
"""Of the run's number of ranks: who has no random states, with which ROLL goes on and says so in its log alone; and its tracker."""
