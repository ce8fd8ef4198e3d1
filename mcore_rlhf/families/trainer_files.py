"""What the files of a checkpoint are called that transformers' Trainer writes, and accelerate: one table, of which both are rows.

They lie in a model's folder, or beside the tag of a DeepSpeed run, which has weights and optimizer itself.

Sources: transformers 5.23.0, ``trainer.py`` (``_save_optimizer_and_scheduler``, ``_save_rng_state``, ``_load_rng_state``,
``_load_optimizer_and_scheduler``), ``trainer_callback.py`` (``TrainerState``); accelerate 1.15.0, ``checkpointing.py``
(``save_accelerator_state``, ``load_accelerator_state``), ``accelerator.py`` (``save_state``), ``utils/constants.py``. TRL's trainers are
transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.facts import Item, Kind
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.storage.paths import ReadablePath, absolute, lies_in
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.record_file import StoredFile

from .fsdp.state import random_states

RankStates = Mapping[str, object]
"""The random states of a rank, by generator."""


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
        loader: The state of torchdata's ``StatefulDataLoader``, which every rank writes under the same name; empty where there is none.
        registered: A pattern of files in which a script's own objects have their states; empty where there are none.
        unscheduled: What its loader does where there is no schedule beside an optimizer.
        optimizers: Patterns of what has an optimizer, where optimizer, schedule and random states are written together, and counters
            always; none where a script decides.
        schedulers: Those of them that have the schedule in them, or may.
        called: A pattern of the names of its folders; empty where a script decides.
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
    loader: str = ""
    registered: str = ""
    unscheduled: str = ""
    optimizers: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    called: str = ""

    @property
    def of_fsdp(self) -> RunFiles:
        """The same beside :data:`FSDP_WHOLE`: the optimizer is then accelerate's, whoever calls it."""
        return replace(self, optimizer=ACCELERATE.optimizer)

    def of_model(self, number: int) -> RunFiles:
        """The same for one of several models, as accelerate counts them: ``optimizer_1.bin``.

        Args:
            number: Which, from 0.
        """
        optimizer, scheduler = (name.replace(".", f"{numbered(number)}.") for name in (self.optimizer, self.scheduler))
        return replace(self, optimizer=optimizer, scheduler=scheduler)

    def lie_in(self, folder: ReadablePath) -> bool:
        """Whether schedule or random states lie in a folder under these names."""
        names = (self.scheduler, self.alone)
        return any((folder / name).is_file() for name in names) or next(self._numbers(folder), None) is not None

    def _numbers(self, folder: ReadablePath) -> Iterator[int]:
        """The ranks among several whose random states a folder has."""
        pattern = re.compile(re.escape(self.of_rank).replace(re.escape("{rank}"), r"(\d{1,6})"))
        return (int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name)))

    def rng_name(self, rank: int, ranks: int) -> str:
        """The file of a rank's random states."""
        return self.alone if ranks == 1 else self.of_rank.format(rank=rank)

    def rng_files(self, folder: ReadablePath) -> list[str]:
        """Those that a folder has, by rank.

        Raises:
            Incomplete: A rank's is missing between others.
        """
        numbers = sorted(self._numbers(folder))
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

    def gone(self, folder: ReadablePath) -> list[str]:
        """What is written together with files that a folder has, and is not there: names of files, or ``the optimizer``."""
        if not self.optimizers:
            return []
        optimizer, scheduled, counted, scheduler = (
            any(lies_in(folder, pattern) for pattern in patterns)
            for patterns in (self.optimizers, self.schedulers, (self.counters,), (self.scheduler,))
        )
        ranks = {*self._numbers(folder)}
        random = bool(ranks) or (folder / self.alone).is_file()
        more, called = (optimizer, scheduler, random), re.fullmatch(self.called, absolute(folder).name)
        if not any(more) or not (counted or (called and all(more))):  # a model alone, or another's files
            return []
        wanted = {
            "the optimizer": optimizer, self.scheduler: scheduler or scheduled or not optimizer, self.counters: counted,
            self.alone: random, self.of_rank.format(rank=1): ranks != {0},
        }  # fmt: skip
        return [name for name, there in wanted.items() if not there]

    def read_rng(self, folder: ReadablePath, stubs: Sequence[str]) -> tuple[tuple[RankStates, ...], list[StoredFile]]:
        """Each rank's random states, by generator, and the files that have them.

        Args:
            folder: Where they lie.
            stubs: Further classes that may become inert stubs.

        Raises:
            CheckpointError: A file is damaged, a rank's is missing, or what it has are no random states.
        """
        ours = {theirs: here for here, theirs in self.generators.items()}
        found, stored = [], []
        for file in self.rng_files(folder):
            opened = read_pt(folder, file, stubs=stubs)
            stored.append(StoredFile.of_zip(file, opened.directory))
            tree = opened.materialize(opened.tree)
            if not isinstance(tree, Mapping):
                raise Unsupported(
                    f"{folder / file}: expected random states by generator, found a {type(tree).__name__}"
                )
            found.append({ours.get(str(key), str(key)): value for key, value in tree.items()})
        return tuple(found), stored

    def spelled(self, states: RankStates) -> dict[str, object]:
        """A rank's random states as these files have them."""
        return {**self.fixed, **{self.generators.get(key, key): value for key, value in states.items()}}


TRANSFORMERS: RunFiles = RunFiles(
    "hf-trainer", "A ``checkpoint-N`` of transformers' ``Trainer``, or TRL's: weights, ``optimizer.pt``, ``trainer_state.json``.",
    'trainer.train(resume_from_checkpoint="{path}")',
    "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "rng_state_{rank}.pth",
    {"random": "python", "numpy": "numpy", "cpu": "cpu", "cuda": "cuda"},
    unscheduled="without which the trainer does not load its optimizer, and says nothing",
    optimizers=("*optimizer*", "latest", "global_step*"), schedulers=("latest", "global_step*"),
    called=r"checkpoint-\d+",
)  # fmt: skip
ACCELERATE: RunFiles = RunFiles(
    "hf-accelerate", "A folder of accelerate's ``save_state``: weights, ``optimizer.bin``, ``random_states_0.pkl``.",
    'accelerator.load_state("{path}")',
    "optimizer.bin", "scheduler.bin", "", "random_states_0.pkl", "random_states_{rank}.pkl",
    {"random": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed", "cuda": "torch_cuda_manual_seed"}, {"step": 0},
    "dl_state_dict.bin", "custom_checkpoint_*.pkl", "and a script that prepares a scheduler stops there",
)  # fmt: skip
ROWS = (ACCELERATE, TRANSFORMERS)
FSDP_WHOLE = "pytorch_model_fsdp.bin"
"""The weights of an FSDP run that saves whole tensors (``FULL_STATE_DICT``), with parameters' names in its optimizer's file.

Source: accelerate 1.15.0, ``utils/fsdp_utils.py`` (``save_fsdp_model``, ``save_fsdp_optimizer``).
"""


def numbered(number: int) -> str:
    """What stands in the names of files of one of several models, which has that number, from 0."""
    return f"_{number}" if number else ""


def place_of_model(number: int) -> str:
    """The folder for what accelerate's files have no place for and is of one of several models alone: its description, what we keep.

    Args:
        number: Which, from 0; what is the first's lies at the top, as where there is one.
    """
    return f"mcore_rlhf/model{numbered(number)}/" if number else ""


def of_ranks(count: int) -> str:
    """How many they are, in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def new_states(iteration: int, ranks: int) -> tuple[RankStates, ...]:
    """Fresh random states of ranks on CPUs, made of the iteration and of each rank's number.

    Args:
        iteration: Of the checkpoint.
        ranks: How many.
    """
    made = (random_states(_seed(f"mcore_rlhf rng {iteration} rank {rank}")) for rank in range(ranks))
    return tuple({key: value for key, value in states.items() if key != "cuda"} for states in made)


def _seed(text: str) -> bytes:
    """What random states are made of. They begin with it, and it with a byte that no pickle begins with: what is written is looked into
    for pickles, and of so many ranks' states one would look like one.
    """
    from hashlib import sha256  # what only looks does not need it

    digest = sha256(text.encode()).digest()
    return bytes((digest[0] & 0x5F | 0xA0, *digest[1:]))


def rng_item(rank: int) -> Item:
    """The random states of a rank."""
    return Item(Kind.RNG, f"rank {rank}")
