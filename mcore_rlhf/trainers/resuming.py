"""What a trainer's loader makes of a step: rows that say when, what becomes of which thing, and in which line of its code that is.

A row asks facts of a folder and of a configuration (:class:`Seen`). For each thing the first row that is meant decides, so the rows of a
table stand from what stops a run, over what is passed over, to what is restored. Whoever adds a trainer adds rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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


MOST_RANKS = 1 << 20
"""More do not load a checkpoint, whatever a configuration says."""
OF_OPTIMIZER = (Thing.OPTIMIZER, Thing.GROUPS)
EVERYTHING = tuple(Thing)


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
        args: The run's arguments.
        values: Keys of further values.
        unread: Why there is an optimizer that it does not understand; empty where it does, or there is none.
    """

    problem: str = ""
    incomplete: bool = False
    unread: str = ""
    optimizer: bool = False
    scheduler: bool = False
    scaler: bool = False
    rng: bool = False
    release: bool = False
    dtype: str = ""
    dp: int = 0
    args: Mapping[str, object] = field(default_factory=dict)
    values: frozenset[str] = frozenset()


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
        keys: Gives the keys of what a file of the model's folder, or of the step's, holds, those of nests with ``/``; none where it
            holds no such thing.
    """

    role: str
    files: frozenset[str]
    above: frozenset[str]
    broken: Mapping[str, str]
    held: Held
    settings: Settings
    world: int | None = None
    keys: Callable[[str], frozenset[str]] = lambda name: frozenset()

    def matching(self, *patterns: str) -> list[str]:
        """The model's files that a pattern fits, in order."""
        return sorted(name for name in self.files if any(fnmatchcase(name, pattern) for pattern in patterns))

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
    """

    trainer: Trainer
    version: str
    rows: Sequence[Habit]
    named: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    once: tuple[Thing, ...] = (Thing.COUNTERS, Thing.DATA)
    takes_any: bool = False

    def prospects(self, seen: Seen) -> Iterator[Prospect]:
        """What becomes of each thing of which it has rows, in the order of :class:`Thing`."""
        for thing in Thing:
            said = ((row, row.said(seen)) for row in self.rows if thing in row.things)
            found = next(((row, why) for row, why in said if why is not None), None)
            if found is not None:
                yield Prospect(thing, found[1], found[0])


def rows_of(source: str, *rows: Habit) -> tuple[Habit, ...]:
    """Rows whose sources begin alike: repository, version and file."""
    return tuple(replace(row, source=f"{source}{row.source}") for row in rows)


# What rows often ask.


def lacks(*patterns: str) -> Callable[[Seen], object]:
    """No file fits any of the patterns."""
    return lambda seen: not seen.has(*patterns)


def has(*patterns: str) -> Callable[[Seen], object]:
    """A file fits a pattern."""
    return lambda seen: seen.has(*patterns)


def broken(*patterns: str) -> Callable[[Seen], object]:
    """A file that fits cannot be read: ``{file}`` and ``{wrong}``."""

    def when(seen: Seen) -> object:
        found = next((name for name in seen.matching(*patterns) if name in seen.broken), None)
        return found and {"file": found, "wrong": seen.broken[found]}

    return when


def without(pattern: str, *keys: str, inside: str = "") -> Callable[[Seen], object]:
    """A file that fits can be read, and lacks a key: ``{file}`` and ``{key}``.

    Args:
        pattern: Of the file.
        keys: Each a key, or several with ``|`` between them, of which one is enough.
        inside: A key with a ``/`` behind it: only where something lies there, which the keys are looked for in.
    """

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            there = {key.removeprefix(inside) for key in seen.keys(name) if key.startswith(inside)}
            gone = [key for key in keys if there.isdisjoint(key.split("|"))]
            if there and gone:
                return {"file": name, "key": inside + gone[0].partition("|")[0]}
        return None

    return when


def lacks_of(pattern: str, group: str, *lists: str) -> Callable[[Seen], object]:
    """A file that fits lists names, in a list or in several, that are not in a group of keys beside it: ``{file}`` and ``{key}``."""

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            there = seen.keys(name)
            listed = {
                match[1]
                for key in there
                for one in lists
                if (match := re.fullmatch(rf"{one}(?:/\d+)?/([^/]*[^/\d][^/]*)", key))
            }
            gone = sorted(one for one in listed if f"{group}/{one}" not in there)
            if gone and group in there:
                return {"file": name, "key": f"{group}/{gone[0]}"}
        return None

    return when


def stateless(pattern: str, inside: str = "") -> Callable[[Seen], object]:
    """An optimizer of the Adam family that fits has parameters without a state: ``{file}`` and ``{count}``.

    Args:
        pattern: Of its file.
        inside: The key at which it lies there, with a ``/`` behind it.
    """

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            params, states = _numbered(seen.keys(name), inside)
            if gone := params - states.keys():
                return {"file": name, "count": f"{len(gone)} of {len(params)}"}
        return None

    return when


def uneven(pattern: str, inside: str = "") -> Callable[[Seen], object]:
    """Some parameters' states in an optimizer that fits lack what others have, or Adam's one moment: ``{file}``, ``{key}``, ``{count}``.

    Args:
        pattern: Of its file.
        inside: The key at which it lies there, with a ``/`` behind it.
    """

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            _, states = _numbered(seen.keys(name), inside)
            counts = Counter(key for keys in states.values() for key in keys)
            if "exp_avg_sq" in counts:
                counts.setdefault("exp_avg", 0)
            short = {
                key: many
                for key, many in counts.items()
                if (len(states) <= 2 * many or key == "exp_avg") and many < len(states)
            }
            if short:
                key = min(short)
                return {"file": name, "key": key, "count": f"{len(states) - short[key]} of {len(states)}"}
        return None

    return when


def ungrouped(pattern: str, inside: str = "") -> Callable[[Seen], object]:
    """A param group of an optimizer that fits lacks what its first step asks for, or a parameter that has a state: ``{file}``, ``{key}``.

    Args:
        pattern: Of its file.
        inside: The key at which it lies there, with a ``/`` behind it.
    """

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            keys = [key.removeprefix(inside) for key in seen.keys(name) if key.startswith(inside)]
            has_adam = any(key.endswith("/exp_avg_sq") for key in keys)
            groups: dict[str, set[str]] = {}
            for found in filter(None, map(_GROUP.fullmatch, keys)):
                groups.setdefault(found[1], set()).add(found[2])
            for number, there in sorted(groups.items()):
                is_adam = has_adam and there & {"betas", "eps"}
                if gone := sorted(({*_ASKED_FOR, *_OF_ADAM} if is_adam else _ASKED_FOR) - there):
                    return {"file": name, "key": f"{inside}param_groups/{number}/{gone[0]}"}
            listed = sum(1 for key in keys if _PARAM.fullmatch(key))
            strange = [int(one[1]) for key in keys if (one := _STATE.fullmatch(key)) and int(one[1]) >= listed]
            if strange and groups:
                return {
                    "file": name,
                    "key": f"number of parameter {min(strange)}, which has a state, in {inside}param_groups",
                }
        return None

    return when


_GROUP, _PARAM, _STATE, _ADAMS = (
    re.compile(pattern)
    for pattern in (
        r"param_groups/(\d+)/([^/]+)",
        r"param_groups/(\d+)/params/(\d+)",
        r"state/(\d+)/([^/]+)",
        r"param_groups/(\d+)/betas",
    )
)
_ASKED_FOR, _OF_ADAM = {"params", "lr"}, {"betas", "eps", "weight_decay"}


def _numbered(everything: frozenset[str], inside: str) -> tuple[set[int], dict[int, set[str]]]:
    """The parameters of a torch optimizer's Adam groups, as it numbers them, and the keys of each one's state."""
    keys = [key.removeprefix(inside) for key in everything if key.startswith(inside)]
    places = sorted((int(found[1]), int(found[2])) for key in keys if (found := _PARAM.fullmatch(key)))
    adams = {int(found[1]) for key in keys if (found := _ADAMS.fullmatch(key))}
    states: dict[int, set[str]] = {}
    for found in filter(None, map(_STATE.fullmatch, keys)):
        states.setdefault(int(found[1]), set()).add(found[2])
    params = {number for number, (group, _) in enumerate(places) if group in adams}
    return params, {number: found for number, found in states.items() if number in params}


ADAM = ("step", "exp_avg", "exp_avg_sq")
OF_GROUP = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
)
OF_SCHEDULE = ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step")
"""What torch's Adam keeps of a parameter and of a param group, and its schedules, in every release since 2.0.

Source: torch 2.13.0, ``optim/adam.py``, ``optim/lr_scheduler.py`` (``LRScheduler``).
"""


def unlisted(file: str, before: str, *names: str) -> Callable[[Seen], object]:
    """Of the names in a DCP folder that begin alike, one is not there that belongs to them, or that most such have: ``{file}``, ``{key}``.

    Args:
        file: The folder's ``.metadata``, in the model's folder or in the step's; a pattern.
        before: A pattern of what they begin with, up to the last dot; each beginning that it finds is asked for all.
        names: What belongs to them.
    """
    begins = re.compile(before)

    def when(seen: Seen) -> object:
        for name in sorted(one for one in {*seen.files, *seen.above} if fnmatchcase(one, file)):
            found: dict[str, set[str]] = {}
            for key in seen.keys(name):
                if match := begins.match(key):
                    found.setdefault(match[0], set()).add(key[match.end() :])
            counts = Counter(rest for there in found.values() for rest in there)
            usual = {rest for rest, many in counts.items() if 2 * many > len(found)} if len(found) > 1 else set()
            for at, there in sorted(found.items()):
                if gone := sorted(({*names} | usual) - there):
                    return {"file": name, "key": at + gone[0]}
        return None

    return when


def asked(*keys: str) -> Callable[[Seen], object]:
    """The configuration says yes to a key: ``{key}``."""
    return lambda seen: next(({"key": key} for key in keys if seen.settings.says(key)), None)


def refused(*keys: str) -> Callable[[Seen], object]:
    """The configuration says no to a key: ``{key}``."""
    return lambda seen: next(({"key": key} for key in keys if seen.settings.denies(key)), None)


def missing_ranks(pattern: str, least: Callable[[Seen], int] = lambda seen: seen.held.dp) -> Callable[[Seen], object]:
    """Some rank that loads, or that saved, has no file of its own: ``{file}`` and ``{ranks}``."""

    def when(seen: Seen) -> object:
        there = seen.ranks(pattern)
        count = seen.world if seen.world is not None else max([least(seen), *(rank + 1 for rank in there)])
        gone = [rank for rank in range(min(count, MOST_RANKS)) if rank not in there]
        return there and gone and {"file": pattern.format(rank=gone[0]), "ranks": f"{len(gone)} of {count}"}

    return when


def both(*conditions: Callable[[Seen], object]) -> Callable[[Seen], object]:
    """All of them are meant; the values are the last one's."""

    def when(seen: Seen) -> object:
        found: object = None
        for condition in conditions:
            found = condition(seen)
            if not found:
                return None
        return found

    return when


def incomplete(seen: Seen) -> object:
    """The reader misses a file, or a rank: ``{problem}``."""
    return {"problem": seen.held.problem} if seen.held.incomplete else None


def incomplete_in(*words: str) -> Callable[[Seen], object]:
    """The reader misses a file in whose path one of the words is: ``{problem}``."""
    return lambda seen: incomplete(seen) if any(word in seen.held.problem for word in words) else None
