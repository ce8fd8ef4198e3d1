"""Facts: everything that a checkpoint has besides its tensors' elements, and the rules that say what becomes of each.

A rule is a row of a table at the format, or the crossing, whose doing it is: which items, what becomes of them, the sentence that people
read, and when it is meant. Who goes :func:`through <mcore_rlhf.core.account.Report.through>` a table says of all its rows at once what
they say; so that what is said stands in tables, and nowhere between the statements that do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from string import Formatter
from typing import Any, Generic, NamedTuple, TypeVar

Asked = TypeVar("Asked")
Whole = TypeVar("Whole")
Alike = TypeVar("Alike")

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
    PART = "part"


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


WORSE = (Fate.KEPT, Fate.DERIVED, Fate.CHANGED, Fate.LEFT, Fate.LOST)
"""Fates of items, each worse than the one before."""
KEPT = Said(Fate.KEPT, "")


class Fact(NamedTuple):
    """One thing of a source's, as far as it has come.

    Args:
        value: Its value.
        said: What became of it, at the worst; None where somebody had to speak of it and did not.
        now: What it is, or is a part of, where it has come to; None where it is gone.
    """

    value: object
    said: Said | None
    now: Item | None


class Facts(dict[Item, Fact]):
    """Everything that a source has besides the elements of its tensors, by what it was there.

    Nothing is taken as carried because somebody says so: an item is *kept* where the next holder has it with the same value. Every other
    fate must be said, with its reason, by whoever brings it about. What is neither there nor spoken of is *unaccounted*: a fault of ours,
    which makes a conversion lossy and a contract test fail.
    """

    @classmethod
    def of(cls, inventory: Inventory) -> Facts:
        """Those of a source."""
        return cls({item: Fact(value, KEPT, item) for item, value in inventory.items()})

    def handed_on(self, holds: Inventory, said: Mapping[Item, Said], moved: Mapping[Item, Item] | None = None) -> Facts:
        """The same one holder further; the only way in which a fact changes.

        Args:
            holds: Everything that the next holder has, with its value.
            said: What rules say of items that are not there, or have another value.
            moved: Items that go on under another name or as a part of something: their fate is that one's.
        """
        return Facts({item: _handed_on(item, fact, holds, said, moved or {}) for item, fact in self.items()})

    @property
    def fates(self) -> dict[Item, Said | None]:
        """What became of each."""
        return {item: fact.said for item, fact in self.items()}


def _handed_on(item: Item, fact: Fact, holds: Inventory, said: Mapping[Item, Said], moved: Mapping[Item, Item]) -> Fact:
    if fact.now is None or fact.said is None:
        return fact
    here, told = moved.get(fact.now, fact.now), said.get(fact.now)
    there = here in holds
    if told is None and not (there and (here is not fact.now or same(fact.value, holds[here]))):
        told = said.get(item._replace(name=ANY)) or said.get(fact.now._replace(name=ANY))
        if told is None:  # of what was lost on the way nobody has to speak again
            return fact._replace(said=fact.said if fact.said.fate in (Fate.LEFT, Fate.LOST) else None, now=None)
    worst = fact.said if told is None else max(fact.said, told, key=lambda one: WORSE.index(one.fate))
    return Fact(holds[here], worst, here) if there else Fact(fact.value, worst, None)


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


def distinct(values: Mapping[str, Alike]) -> list[tuple[Alike, list[str]]]:
    """Values that are the same once each, with the names of those that have it; only those that look alike are compared.

    Args:
        values: By name; each of them may be another one.
    """
    found, alike = list[tuple[Alike, list[str]]](), dict[object, list[tuple[Alike, list[str]]]]()
    for name, value in values.items():
        near = alike.setdefault(_looks(value), [])
        known = next((one for one in near if same(one[0], value)), None)
        if known is None:
            near.append(known := (value, []))
            found.append(known)
        known[1].append(name)
    return found


def _looks(value: object) -> object:
    """What values that are the same have in common: all of numbers, texts, small tensors and nests of such; of others the type alone."""
    if isinstance(value, Mapping):
        return frozenset((key, _looks(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_looks, value))
    plain = value if isinstance(value, str | bytes | int) else repr(value) if isinstance(value, float) else None
    held = getattr(value, "data", None)  # of a tensor that is held in memory
    return type(value), held if isinstance(held, bytes) else plain


Values = Mapping[str, Any]
"""What a sentence's names in braces stand for; ``of`` are items that only who is asked can name."""


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule(Generic[Asked]):
    """A row of a table of rules.

    Args:
        fate: What becomes of the items; a reason says that they are left behind, and is its own sentence.
        why: The sentence. Its names in braces are values that ``when`` gives; ``{0.zero.dp}`` is of what is asked. A list is joined, and
            of ``{names:3}`` its first three are shown.
        when: Whether it is meant, as it is asked. Nothing, or what is empty, says that it is not; values are for the sentence, and a list
            of values makes a sentence of each; of anything else, the sentence calls it ``{found}``.
        of: The items of which it speaks: a name of :data:`ANY` is all of their kind of which nothing else is said. ``when`` gives others as
            ``of``; a row that has none of its own, and is given an empty ``of``, says nothing.
        told: Whether people read it in the report; a loss always is.
        contradicts: Whether it says that two places say different things, of which one is taken: one of them is not as it was saved.
    """

    fate: Fate | Reason
    why: str = ""
    when: Callable[[Asked], object] = _always
    of: Sequence[Item] = ()
    told: bool = True
    contradicts: bool = False

    def said_of(self, asked: Asked) -> Iterator[tuple[str, tuple[Item, ...]]]:
        """Its sentences, each with the items of which it speaks."""
        for values in _rows(self.when(asked)):
            if not (self.of or values.get("of", True)):  # about the items that it found, and it found none
                continue
            yield _SENTENCES.vformat(self.why, (asked,), values), (*self.of, *values.get("of", ()))

    def of_part(self, part: Callable[[Whole], Asked | None]) -> Rule[Whole]:
        """The same row for who has what it asks about as a part; where there is none, it is not meant."""

        def when(whole: Whole) -> object:
            asked = part(whole)
            return None if asked is None else self.when(asked)

        return Rule(self.fate, self.why, when, self.of, self.told, self.contradicts)


def _rows(meant: object) -> Sequence[Values]:
    if not meant:
        return ()
    if isinstance(meant, list) and isinstance(meant[0], Mapping):
        return meant
    return (meant,) if isinstance(meant, Mapping) else ({"found": meant},)


class _Sentences(Formatter):
    """Sentences with lists in them."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value[: int(format_spec) if format_spec else None]))
        return str(super().format_field(value, format_spec))


_SENTENCES = _Sentences()
