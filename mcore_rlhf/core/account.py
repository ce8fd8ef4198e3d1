"""The account of a conversion: an inventory of everything that a source has, and what became of each item.

What becomes of an item is recorded where it is handed on (:class:`~.facts.Facts`), and said by rules. Whether a conversion is lossless,
what ``--strict`` refuses, and what pages and ``--json`` show are asked of the account, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .facts import WORSE, Asked, Fate, Item, Kind, Reason, Rule, Said


@dataclass(slots=True)
class Report:
    """What is said: lines for people, in the order in which they were noted, and the items that they speak of."""

    lines: list[tuple[Fate, str]] = field(default_factory=list)
    said: dict[Item, Said] = field(default_factory=dict)
    about: dict[str, tuple[Item, ...]] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)

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
        assert fate not in (Fate.LEFT, Fate.NOTE)  # the one needs a reason, the other is of no item
        for item in about:
            self.said.setdefault(item, Said(fate, text))
        if fate is Fate.LOST and (fate, text) not in self.lines:
            self.lines.append((fate, text))

    def leave(self, reason: Reason, *about: Item) -> None:
        """Say that items are left behind."""
        for item in about:
            self.said.setdefault(item, Said(Fate.LEFT, reason.value, reason))

    @classmethod
    def of(cls, rules: Iterable[Rule[Asked]], asked: Asked) -> Report:
        """What a table of rules says."""
        report = cls()
        report.through(rules, asked)
        return report

    def through(self, rules: Iterable[Rule[Asked]], asked: Asked) -> None:
        """Say what a table of rules says, row by row.

        Args:
            rules: The table.
            asked: What its rows ask, and speak of.
        """
        for rule in rules:
            for why, items in rule.said_of(asked):
                self.contradictions += [why] * rule.contradicts
                if isinstance(rule.fate, Reason):
                    self.leave(rule.fate, *items)
                else:
                    (self.add if rule.told else self.settle)(rule.fate, why, *items)

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
        gone, of_kind = set[Item](), dict[Item, set[Item]]()
        for item, said in account.entries.items():
            for meant in (item, Item(item.kind)):
                of_kind.setdefault(meant, set()).add(item)
            if said.fate in (Fate.LOST, Fate.LEFT):
                gone.add(item)
        self.lines = [
            line for line in self.lines if line[0] is Fate.LOST or not self._overtaken(line[1], of_kind, gone)
        ]
        self.lines.extend(account.lines())

    def _overtaken(self, text: str, of_kind: Mapping[Item, set[Item]], gone: set[Item]) -> bool:
        """Whether everything of which a line speaks is gone."""
        items = set[Item]().union(*(of_kind.get(wanted, ()) for wanted in self.about.get(text, ())))
        return bool(items) and items <= gone

    @property
    def lost(self) -> list[str]:
        """What is said to be lost."""
        return [text for fate, text in self.lines if fate is Fate.LOST]

    def as_json(self) -> list[dict[str, str]]:
        """The lines as plain data."""
        return [{"fate": fate.value, "text": text} for fate, text in self.lines]


_SHOWN = 3
"""Of items that are left behind together, so many are named."""


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
    def of(cls, told: Mapping[Item, Said | None], losses: Iterable[str] = ()) -> Account:
        """Take down what became of everything.

        Args:
            told: Items, and what is said of each; of None nobody speaks.
            losses: What the report says was lost. A line of which no item is lost speaks of a part of something, which is then an item.
        """
        lines, entries = tuple(losses), {item: said for item, said in told.items() if said is not None}
        known = {said.text for said in entries.values() if said.fate is Fate.LOST}
        parts = {_part(text): Said(Fate.LOST, text) for text in lines if text not in known}
        return cls({**entries, **parts}, tuple(item for item, said in told.items() if said is None), lines)

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
        counts = {fate.value.replace(" ", "_"): len(self.of_fate(fate)) for fate in WORSE}
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


def _part(text: str) -> Item:
    """The item of which a line of the report alone speaks, named by how the line begins."""
    return Item(Kind.PART, text.partition(": ")[0])
