"""What the files of a checkpoint are called that transformers' Trainer writes, and accelerate: one table, of which both are rows.

Sources: transformers 5.23.0, ``trainer.py`` (``_save_optimizer_and_scheduler``, ``_save_rng_state``, ``_load_rng_state``,
``_load_optimizer_and_scheduler``), ``trainer_callback.py`` (``TrainerState``); accelerate 1.15.0, ``checkpointing.py``
(``save_accelerator_state``, ``load_accelerator_state``), ``utils/constants.py``. TRL's trainers are transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule
from mcore_rlhf.errors import Incomplete
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.storage.paths import ReadablePath

SCALER = "scaler.pt"
"""Of both: torch's ``GradScaler``."""
COUNTERS, STEP = "trainer_state", "global_step"
"""The key of client state under which the Trainer's counters travel, and the one of them that is the iteration."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """One row.

    Args:
        format: What the command line calls it.
        says: What it is, in a sentence.
        told: How whoever wrote it is told to load it, with ``{path}``.
        optimizer, scheduler: torch's state dicts.
        counters: JSON; empty where there is none.
        alone: The random states of a run of one process.
        of_rank: Those of a rank among several, with ``{rank}``.
        generators: What each generator's state is called there, by what it is called here.
        fixed: What else a file of random states has, and no generator's.
    """

    format: str
    says: str
    told: str
    optimizer: str
    scheduler: str
    counters: str
    alone: str
    of_rank: str
    generators: Mapping[str, str]
    fixed: Mapping[str, object] = field(default_factory=dict)

    def rng_name(self, rank: int, ranks: int) -> str:
        """The file of a rank's random states."""
        return self.alone if ranks == 1 else self.of_rank.format(rank=rank)

    def rng_files(self, folder: ReadablePath) -> list[str]:
        """Those that a folder has, by rank.

        Raises:
            Incomplete: A rank's is missing between others.
        """
        pattern = re.compile(re.escape(self.of_rank).replace(re.escape("{rank}"), r"(\d{1,6})"))
        numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name)))
        ranks = numbers[-1] + 1 if numbers else 0
        if ranks > MOST_RANKS or len(numbers) != ranks:
            missing = next((rank for rank in range(ranks) if rank not in numbers), ranks)
            raise Incomplete(
                f"{folder / self.of_rank.format(rank=missing)}: missing, and there are random states of higher ranks\n"
                "Each node writes the files of its own ranks: bring those of all nodes together."
            )
        if numbers:
            return [self.of_rank.format(rank=rank) for rank in numbers]
        return [self.alone] if (folder / self.alone).is_file() else []


TRANSFORMERS: RunFiles = RunFiles(
    "hf-trainer", "A ``checkpoint-N`` of transformers' ``Trainer``, or TRL's: weights, ``optimizer.pt``, ``trainer_state.json``.",
    'trainer.train(resume_from_checkpoint="{path}")',
    "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "rng_state_{rank}.pth",
    {"random": "python", "numpy": "numpy", "cpu": "cpu", "cuda": "cuda"},
)  # fmt: skip
ACCELERATE: RunFiles = RunFiles(
    "hf-accelerate", "A folder of accelerate's ``save_state``: weights, ``optimizer.bin``, ``random_states_0.pkl``.",
    'accelerator.load_state("{path}")',
    "optimizer.bin", "scheduler.bin", "", "random_states_0.pkl", "random_states_{rank}.pkl",
    {"random": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed", "cuda": "torch_cuda_manual_seed"}, {"step": 0},
)  # fmt: skip

ALIKE = (TRANSFORMERS.format, ACCELERATE.format)


_OF_RANKS: Rule[HfRunState] = Rule(
    Fate.LOST, "random states of {count}: only transformers' and accelerate's own files have a place for them",
    lambda own: {"count": of_ranks(len(own.rng)), "of": [rng_item(rank) for rank in range(len(own.rng))]} if own.rng else None,
)  # fmt: skip


@dataclass(slots=True)
class HfRunState(ModuleState):
    """What such a checkpoint has besides.

    Args:
        rng: Each rank's random states, by generator.
        scalars: What the optimizer keeps per parameter that is no tensor of its shape: ``step``.
        groups: The param groups as the file deals them; those of the source may be of another format that it was made of.
        schedule: The scheduler as the file has it; the same holds.
        within: What the weights' own format keeps besides; None where that is of no use to it.
    """

    homeless: ClassVar[Sequence[Rule[Any]]] = (*ModuleState.homeless, _OF_RANKS)
    rng: tuple[Mapping[str, object], ...] = ()
    groups: tuple[ParamGroup, ...] = ()
    schedule: Mapping[str, object] = field(default_factory=dict)
    within: ModuleState | None = None
    scalars: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def inventory(self) -> Inventory:
        """What it has, item by item; the random states of each rank are one."""
        return {**ModuleState.inventory(self), **{rng_item(rank): states for rank, states in enumerate(self.rng)}}


def of_ranks(count: int) -> str:
    """How many they are, in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def rng_item(rank: int) -> Item:
    """The random states of a rank."""
    return Item(Kind.RNG, f"rank {rank}")
