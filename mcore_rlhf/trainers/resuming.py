"""What a trainer's loader makes of a step: rows that say when, what becomes of which thing, and in which line of its code that is.

A row asks facts of a folder and of a configuration (:class:`Seen`). For each thing the first row that is meant decides, so the rows of a
table stand from what stops a run, over what is passed over, to what is restored. Whoever adds a trainer adds rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase

from .table import Trainer


class Thing(str, Enum):
    """What a run has that goes on."""

    WEIGHTS = "weights"
    LORA = "LoRA"
    DTYPE = "dtype"
    OPTIMIZER = "optimizer"
    GROUPS = "param groups"
    SCHEDULER = "scheduler"
    SCALER = "loss scaler"
    COUNTERS = "counters"
    RNG = "RNG"
    DATA = "data"
    AVERAGE = "EMA"


class Outcome(str, Enum):
    """What the loader does about a thing."""

    RESTORED = "restored"
    ANEW = "started anew"
    IGNORED = "ignored"
    REFUSED = "refused"
    ABSENT = "not there"

    @property
    def is_loss(self) -> bool:
        """Whether the run does not go on with it as it was."""
        return self not in {Outcome.RESTORED, Outcome.ABSENT}


INSIDE = "//"
"""Between a DCP folder's ``.metadata`` and the name of an object in it, whose keys are asked for."""
MOST_RANKS = 1 << 20
"""More do not load a checkpoint, whatever a configuration says."""
OF_OPTIMIZER = (Thing.OPTIMIZER, Thing.GROUPS)
EVERYTHING = tuple(thing for thing in Thing if thing is not Thing.AVERAGE)
"""What any run has."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a reader finds in a model's folder.

    Args:
        problem: Why it cannot be opened; empty where it can, and nothing else is known where it cannot.
        incomplete: Whether that is because a file or rank is missing.
        optimizer: Whether there is optimizer state.
        scheduler: Whether there is a scheduler's state.
        scaler: Whether there is a loss scaler's.
        rng: Whether there are random states.
        release: Whether it is a release, weights alone.
        dtype: Of most parameters.
        dp: Data-parallel ranks.
        fsdp: The version of FSDP whose rank files they are; 0 where nobody knows.
        args: The run's arguments.
        values: Keys of further values.
        counted: Where a schedule of Megatron-core's stands; 0 elsewhere.
        sharding: How a distributed optimizer's states are stored in ``torch_dist``; empty elsewhere.
        unread: Why there is an optimizer that it does not understand; empty where it does, or there is none.
        unportable: Whether that is because it is of use to its own framework alone, and nothing is known to be wrong with it.
        contradicts: What two places say otherwise.
        frozen: Parameters of the optimizer that have no state since the run froze them, by number and by name.
        headed: Whether a value head lies beside a whole model, as TRL's wrapper of both names them in its state dict.
    """

    problem: str = ""
    incomplete: bool = False
    unread: str = ""
    unportable: bool = False
    optimizer: bool = False
    scheduler: bool = False
    scaler: bool = False
    rng: bool = False
    release: bool = False
    dtype: str = ""
    dp: int = 0
    fsdp: int = 0
    args: Mapping[str, object] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    counted: int = 0
    sharding: str = ""
    contradicts: tuple[str, ...] = ()
    headed: bool = False
    frozen: frozenset[str] = frozenset()


_STOPPED = "the weights are refused: training does not begin"
_REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")
_MOST_REFERENCES = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration: dotted keys and values, ``-`` as ``_``; empty where none was given.

    Args:
        values: Them.
    """

    values: Mapping[str, object] = field(default_factory=dict)

    def get(self, *keys: str) -> object:
        """The value of the first key that is there, by its whole name or by its last parts; None where none is.

        What refers to another key, as OmegaConf writes it (``${.save_contents}``, ``${trainer.steps}``), is that one's value.
        """
        for key in keys:
            names = [key] if key in self.values else [name for name in self.values if name.endswith(f".{key}")]
            if names:
                return self._followed(names[0])
        return None

    def _followed(self, name: str) -> object:
        for _ in range(_MOST_REFERENCES):
            value = self.values.get(name)
            referred = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if referred is None:
                return None if isinstance(value, str) and "${" in value else value
            above = name.rpartition(".")[0]
            name = ".".join(filter(None, [above, referred[2]])) if referred[1] else referred[2]
        return None

    def says(self, *keys: str) -> bool:
        """Whether it says yes."""
        return str(self.get(*keys)).lower() in ("true", "1", "yes")

    def denies(self, *keys: str) -> bool:
        """Whether it says no, which is more than to say nothing."""
        found = self.get(*keys)
        return found is not None and str(found).lower() in ("false", "0", "no", "none", "", "[]")

    def number(self, *keys: str) -> int | None:
        """A whole number; None where there is none."""
        found = str(self.get(*keys))
        return int(found) if found.isdecimal() and found.isascii() and len(found) < 10 else None

    def listed(self, *keys: str) -> list[str] | None:
        """The words of a list; None where there is none."""
        found = self.get(*keys)
        if isinstance(found, list | tuple):
            return [str(one) for one in found]
        return re.findall(r"[\w.-]+", found) if isinstance(found, str) and found else None


@dataclass(frozen=True, slots=True)
class Seen:
    """What rows ask: a model's folder in a step, what lies beside it, and the configuration.

    Args:
        role: Whose model; empty where a step is one model.
        files: Files of the model's folder, relative to it.
        above: Files of the step's folder, relative to it.
        broken: Of both: those that no loader could read, each with what is wrong.
        held: What a reader finds.
        settings: The configuration.
        world: Ranks that are to load; None where nobody says, and they are as many as saved.
        step: The number of the step, by its folder's name; None where that does not say.
        keys: Gives the keys of what a file of the model's folder, or of the step's, or an object in it (see :meth:`places`), holds,
            those of nests with ``/``; none where it holds no such thing.
        beside: Of the files that belong to the step and lie beside it in the root: those that are there, relative to the root, each with
            what is wrong with it, or nothing.
        on: Gives those of the keys whose values are numbers or switches, and not 0.
    """

    role: str
    files: frozenset[str]
    above: frozenset[str]
    broken: Mapping[str, str]
    held: Held
    settings: Settings
    world: int | None = None
    step: int | None = None
    keys: Callable[[str], frozenset[str]] = lambda name: frozenset()
    beside: Mapping[str, str] = field(default_factory=dict)
    on: Callable[[str], frozenset[str]] = lambda name: frozenset()

    def matching(self, *patterns: str) -> list[str]:
        """The model's files that a pattern fits, in order."""
        return sorted(name for name in self.files if any(fnmatchcase(name, pattern) for pattern in patterns))

    def places(self, *patterns: str) -> list[str]:
        """The model's files that a pattern fits, and, of patterns with ``//``, the objects of a DCP folder: ``.metadata//name``.

        Args:
            patterns: Of files; behind ``//`` one of names in the ``.metadata`` before it.
        """
        found = self.matching(*(one for one in patterns if INSIDE not in one))
        for file, _, item in (one.partition(INSIDE) for one in patterns if INSIDE in one):
            named = ((name, key) for name in self.matching(file) for key in self.keys(name))
            found += sorted(f"{name}{INSIDE}{key}" for name, key in named if fnmatchcase(key, item))
        return found

    def has(self, *patterns: str) -> bool:
        """Whether a file of the model fits a pattern."""
        return bool(self.matching(*patterns))

    def ranks(self, pattern: str) -> set[int]:
        """The ranks that have a file of a name with ``{rank}`` in it."""
        wanted = re.compile(re.escape(pattern).replace(re.escape("{rank}"), r"(\d{1,6})"))
        return {int(match[1]) for name in self.files if (match := wanted.fullmatch(name))}


Values = Mapping[str, object]


def _always(_: Seen) -> object:
    return True


@dataclass(frozen=True, slots=True)
class Habit:
    """A row of a loader's table.

    Args:
        things: Of what it speaks.
        outcome: What becomes of it.
        why: The sentence; its names in braces are values that ``when`` gives.
        source: Repository, version, file and line, or function.
        when: Whether it is meant: nothing, or what is empty, says that it is not; a mapping is the sentence's values.
        ran: Whether a test runs the loader and sees the same; otherwise it was read in the code, and not run.
    """

    things: tuple[Thing, ...]
    outcome: Outcome
    why: str
    source: str
    when: Callable[[Seen], object] = _always
    ran: bool = False

    def said(self, seen: Seen) -> str | None:
        """Its sentence; None where it is not meant."""
        meant = self.when(seen)
        if not meant:
            return None
        return self.why.format_map(meant) if isinstance(meant, Mapping) else self.why


@dataclass(frozen=True, slots=True)
class Prospect:
    """What becomes of a thing.

    Args:
        thing: It.
        why: In words.
        row: The row that says so.
    """

    thing: Thing
    why: str
    row: Habit


@dataclass(frozen=True, slots=True)
class Loader:
    """How a trainer resumes.

    Args:
        trainer: How it lays out its runs.
        version: The release of which the rows are.
        rows: The rows.
        named: Keys of the configuration that name the step; of numbers, or of folders.
        others: What else people call it.
        once: Things that a step has once, whatever roles it has.
        takes_any: Whether it takes the highest number whatever lies in that folder.
        reads: How its own code reads a step's number off a name, where that is not as it writes them; a ValueError where it stops there.
        knows: Whether the rows say all of a step, though no reader here opens it.
        counted: Keys of the file of counters in the root, see :attr:`.Trainer.counted`, each of which it asks for.
        stops_at: Why it stops at a root, by the step that its tracker names, None for none, the names in the root, and the configuration.
    """

    trainer: Trainer
    version: str
    rows: Sequence[Habit]
    named: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    once: tuple[Thing, ...] = (Thing.COUNTERS, Thing.DATA)
    takes_any: bool = False
    reads: Callable[[str], int | None] | None = None
    knows: Callable[[Seen], object] = lambda seen: False
    counted: tuple[str, ...] = ()
    stops_at: Callable[[int | None, Collection[str], Settings], str] = lambda tracked, names, settings: ""

    def number_of(self, name: str) -> int | None:
        """The step that it takes a folder for; None where it takes it for none.

        Raises:
            ValueError: It stops at such a name.
        """
        return self.trainer.step_of(name) if self.reads is None else self.reads(name)

    def prospects(self, seen: Seen) -> Iterator[Prospect]:
        """What becomes of each thing of which it has rows, in the order of :class:`Thing`: nothing goes on where the weights do not."""
        refusing = ""
        for thing in Thing:
            said = ((row, row.said(seen)) for row in self.rows if thing in row.things)
            found = next(((row, why) for row, why in said if why is not None), None)
            if found is None:
                continue
            row, why = found
            if thing is Thing.WEIGHTS and row.outcome is Outcome.REFUSED:
                refusing = row.source
            elif refusing and row.outcome is Outcome.RESTORED:
                row, why = replace(row, outcome=Outcome.IGNORED, source=refusing), _STOPPED
            yield Prospect(thing, why, row)


def rows_of(source: str, *rows: Habit) -> tuple[Habit, ...]:
    """Rows whose sources begin alike: repository, version and file."""
    return tuple(replace(row, source=f"{source}{row.source}") for row in rows)
