"""The account of a conversion: an inventory of everything that a source has, and what became of each item.

Nothing is taken as carried because somebody says so: an item is *kept* where the next holder has it with the same value. Every
other fate must be said, with its reason, by whoever brings it about. What is neither there nor spoken of is *unaccounted*: a fault
of ours, which makes a conversion lossy and a contract test fail. Whether a conversion is lossless is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

ANY = "*"
"""As the name of an item in what is said: all of its kind of which nothing else is said."""


class Fate(str, Enum):
    """What became of a thing."""

    KEPT = "kept"
    DERIVED = "derived"
    CHANGED = "changed"
    LOST = "lost"
    LEFT = "left behind"
    NOTE = "note"


class Reason(str, Enum):
    """Why a thing was left behind though the target might have had it: there is no other reason than these."""

    NOT_ASKED = "an option leaves it out"
    NO_PLACE = "the target has no place for files of other programs"
    WEIGHTS = "holds weights, or says where they are, and was not opened"
    TRAINER = "holds a trainer's state, and was not opened"
    VERSION_CONTROL = "belongs to a version control system or a cache"
    TOO_LARGE = "is larger than the 64 MB that a carried file may have"
    NOT_REGULAR = "is no regular file"
    DANGLING = "is a link that leads nowhere"
    LINKED_FOLDER = "is a link to a folder, which is not followed"
    UNREADABLE = "cannot be read"
    ODD_NAME = "has a name that not every file system takes"
    UNLISTED = "is not listed by the step's manifest: somebody put it there later"
    OUTDATED = "describes how weights were quantized that are plain now"
    TOO_MANY = "comes after 10,000 other files"
    CALLS = "is a pickle, and calls what is on no list of harmless names: --stub NAME vouches for one"
    TOO_DEEP = "lies 64 folders deep"
    NO_RUN = "a release has no run that goes on"
    OF_ENGINE = "a setting of the other framework's run, of which a new run has its own"
    OF_LAYOUT = "describes the source's own files and ranks, which the target has its own of"


class Kind(str, Enum):
    """What an item is."""

    TENSOR = "tensor"
    GROUP = "param group"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SCALER = "loss scaler"
    RNG = "rng"
    ARGUMENT = "argument"
    CONFIG = "config"
    MODEL = "model"
    VALUE = "value"
    FILE = "file"


class Item(NamedTuple):
    """One thing that a source has.

    Args:
        kind: What it is.
        name: Its own name: a field of ``config.json``, an argument, a key, a file's path; of tensors the name of their state.
    """

    kind: Kind
    name: str = ANY

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


Inventory = Mapping[Item, object]
"""Items and their values."""


class Said(NamedTuple):
    """What somebody says of an item.

    Args:
        fate: What became of it.
        text: How, or why.
        reason: Why it is left behind; None for any other fate.
    """

    fate: Fate
    text: str
    reason: Reason | None = None


@dataclass(slots=True)
class Report:
    """What is said: lines for people, in the order in which they were noted, and the items that they speak of."""

    lines: list[tuple[Fate, str]] = field(default_factory=list)
    said: dict[Item, Said] = field(default_factory=dict)
    about: dict[str, tuple[Item, ...]] = field(default_factory=dict)

    def add(self, fate: Fate, text: str, *about: Item) -> None:
        """Note a line once.

        Args:
            fate: What became of the items.
            text: For people.
            about: The items of which it speaks.
        """
        if (fate, text) not in self.lines:
            self.lines.append((fate, text))
        if about:
            self.about.setdefault(text, about)
            self.settle(fate, text, *about)

    def settle(self, fate: Fate, text: str, *about: Item) -> None:
        """Say what became of items without a line of its own. A loss is always one."""
        assert fate is not Fate.LEFT  # which needs a reason
        for item in about:
            self.said.setdefault(item, Said(fate, text))
        if fate is Fate.LOST and (fate, text) not in self.lines:
            self.lines.append((fate, text))

    def leave(self, reason: Reason, *about: Item) -> None:
        """Say that items are left behind."""
        for item in about:
            self.said.setdefault(item, Said(Fate.LEFT, reason.value, reason))

    def extend(self, other: Iterable[tuple[Fate, str]]) -> None:
        """Note the lines of another report."""
        for fate, text in other:
            self.add(fate, text)

    def copy(self) -> Report:
        """The same, to be added to."""
        return Report(list(self.lines), dict(self.said), dict(self.about))

    def for_target(self) -> Report:
        """The same lines, for a target to go on with: what it says of an item is not what was said on the way to it."""
        return Report(list(self.lines), about=dict(self.about))

    def close(self, account: Account) -> None:
        """Make the lines agree with the account: what a later stage lost after all is not said to be kept, and nothing is left out.

        Args:
            account: Of the whole way, of which these are the lines.
        """
        gone = {item for item, said in account.entries.items() if said.fate in (Fate.LOST, Fate.LEFT)}
        self.lines = [
            line for line in self.lines if line[0] is Fate.LOST or not self._overtaken(line[1], account, gone)
        ]
        self.lines.extend(account.lines())

    def _overtaken(self, text: str, account: Account, gone: set[Item]) -> bool:
        """Whether everything of which a line speaks is gone."""
        wanted = self.about.get(text, ())
        items = {item for item in account.entries if item in wanted or item._replace(name=ANY) in wanted}
        return bool(items) and items <= gone

    @property
    def lost(self) -> list[str]:
        """What is said to be lost."""
        return [text for fate, text in self.lines if fate is Fate.LOST]

    def as_json(self) -> list[dict[str, str]]:
        """The lines as plain data."""
        return [{"fate": fate.value, "text": text} for fate, text in self.lines]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step on the way from a source to a target.

    Args:
        holds: Everything that is there after it, with its value.
        said: What became of items that are not there, or have another value.
        moved: Items that go on under another name or as a part of something: their fate is that one's.
    """

    holds: Inventory
    said: Mapping[Item, Said] = field(default_factory=dict)
    moved: Mapping[Item, Item] = field(default_factory=dict)


_SHOWN = 3
"""Of items that are left behind together, so many are named."""
_WORSE = (Fate.KEPT, Fate.DERIVED, Fate.CHANGED, Fate.LEFT, Fate.LOST)


@dataclass(frozen=True, slots=True)
class Account:
    """What became of every item of a source.

    Args:
        entries: Every item that is accounted for.
        unaccounted: Items that nobody spoke of and that are not where they should be.
        losses: Lines of the report that speak of a loss, whether of whole items or of a part of one.
    """

    entries: Mapping[Item, Said]
    unaccounted: tuple[Item, ...]
    losses: tuple[str, ...] = ()

    @classmethod
    def of(cls, inventory: Inventory, stages: Sequence[Stage], losses: Iterable[str] = ()) -> Account:
        """Follow every item through all stages.

        Args:
            inventory: What the source has.
            stages: From the source to the target.
            losses: What the report says was lost.
        """
        entries: dict[Item, Said] = {}
        unaccounted: list[Item] = []
        for item, value in inventory.items():
            fate = _followed(item, value, stages)
            if fate is None:
                unaccounted.append(item)
            else:
                entries[item] = fate
        return cls(entries, tuple(unaccounted), tuple(losses))

    @property
    def lossless(self) -> bool:
        """Whether everything that the source has is in the target, or can be derived from it."""
        return not self.lost

    @property
    def lost(self) -> list[str]:
        """Everything that is lost, and everything of which nobody knows what became of it."""
        single = (said.text for said in self.entries.values() if said.fate is Fate.LOST)
        unknown = (f"{item}: nothing accounts for it; please report this" for item in self.unaccounted)
        return list(dict.fromkeys([*self.losses, *single, *unknown]))

    def of_fate(self, fate: Fate) -> list[Item]:
        """The items that have a fate."""
        return [item for item, said in self.entries.items() if said.fate is fate]

    def lines(self) -> list[tuple[Fate, str]]:
        """What people should read of it besides the report: what was left behind, and losses of which no line speaks."""
        found = [(Fate.LOST, text) for text in self.lost if text not in self.losses]
        for reason in Reason:
            items = [item for item, said in self.entries.items() if said.reason is reason]
            if items:
                found.append((Fate.LEFT, f"{named(items)}: {reason.value}"))
        return found

    def as_json(self) -> dict[str, object]:
        """How many items of each fate, and all that are not simply kept, by fate and explanation."""
        told: dict[str, dict[str, list[str]]] = {}
        for item, said in self.entries.items():
            if said.fate is not Fate.KEPT:
                told.setdefault(said.fate.value, {}).setdefault(said.text, []).append(str(item))
        counts = {fate.value.replace(" ", "_"): len(self.of_fate(fate)) for fate in _WORSE}
        return {
            "items": len(self.entries) + len(self.unaccounted), **counts, "told": told,
            "unaccounted": [str(item) for item in self.unaccounted],
        }  # fmt: skip


def named(items: Sequence[Item]) -> str:
    """Files one by one; of other kinds the first and how many there are."""
    kinds: dict[Kind, list[str]] = {}
    for item in items:
        kinds.setdefault(item.kind, []).append(item.name)
    return "; ".join(_names(kind, names) for kind, names in kinds.items())


def _names(kind: Kind, names: Sequence[str]) -> str:
    shown = names if kind is Kind.FILE else names[:_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"{kind.value}{'s' if len(names) > 1 else ''} {', '.join(shown)}{more}"


def _followed(item: Item, value: object, stages: Sequence[Stage]) -> Said | None:
    """The fate of an item, the worst of all stages; None where a stage neither holds it nor speaks of it."""
    worst, of_its_kind = Said(Fate.KEPT, ""), item._replace(name=ANY)
    for stage in stages:
        here, said = stage.moved.get(item, item), stage.said.get(item)
        there = here in stage.holds
        if said is None and not (there and (here is not item or same(value, stage.holds[here]))):
            said = stage.said.get(of_its_kind) or stage.said.get(item._replace(name=ANY))
            if said is None:
                return None
        if said is not None:
            worst = max(worst, said, key=lambda one: _WORSE.index(one.fate))
        if not there:
            return worst
        item, value = here, stage.holds[here]
    return worst


def same(a: object, b: object) -> bool:
    """Whether two nests of values are equal; arrays and tensors compare as a whole, and a NaN equals itself."""
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b) or getattr(a, "shape", ()) != getattr(b, "shape", ()):
        return False
    if getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
