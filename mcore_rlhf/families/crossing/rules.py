"""What becomes of arguments and fields of a ``config.json`` on the way from one family of names to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, Values
from mcore_rlhf.models.meaning import About

_SHOWN = 8


class CrossedPlaces(NamedTuple):
    """Where each argument, or field of a description, is after a crossing.

    Args:
        moved: Those that go on under another name, or as a part of something.
        along: Those that go along in a file as they are.
        nowhere: All others, and what each says something about.
    """

    moved: Mapping[Item, Item]
    along: Sequence[Item]
    nowhere: Mapping[Item, About]

    def gone_about(self, about: About) -> list[Item]:
        """Those that are nowhere, and say something about this."""
        return [item for item, found in self.nowhere.items() if found is about]


def listed(names: Sequence[str]) -> str:
    """The first of many names."""
    more = f", … ({len(names)})" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


OF_PLACES: tuple[Rule[CrossedPlaces], ...] = (
    Rule(Fate.KEPT, "in config.json, which goes along", lambda places: {"of": places.along}, told=False),
    Rule(Fate.DERIVED, "the architecture implies it", lambda places: {"of": places.gone_about(About.COMPUTES)}, told=False),
    Rule(Fate.LOST, "{name}: a field of the model's description that nobody declares",
         lambda places: [{"name": i.name, "of": [i]} for i in places.gone_about(About.UNDECLARED) if i.kind is Kind.CONFIG]),
    Rule(Reason.OF_ENGINE, when=lambda places: {"of": list(places.nowhere)}),
)  # fmt: skip
"""What becomes of those that are nowhere."""


def _passed_over(asked: tuple[Sequence[str], Mapping[str, object]]) -> list[Values]:
    there = _there(asked[1])
    of = {name: [Item(Kind.ARGUMENT, name), Item(Kind.CONFIG, name)] for name in asked[0] if name in there}
    return [{"name": name, "value": there[name], "of": items} for name, items in of.items()]


def _there(values: Mapping[str, object]) -> dict[str, object]:
    """Arguments, or fields of a ``config.json`` with those of rotary embeddings."""
    there = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        inside = values.get(name)
        there.update(inside if isinstance(inside, Mapping) else {})
    return there


IGNORED: tuple[Rule[tuple[Sequence[str], Mapping[str, object]]], ...] = (
    Rule(Fate.LOST, "{name} {value!r}: passed over, as --ignore-field asks", _passed_over),
    Rule(Fate.NOTE, "--ignore-field {name}: the source has nothing of that name",
         lambda asked: [{"name": name} for name in asked[0] if name not in _there(asked[1])]),
)  # fmt: skip
"""What was passed over because the user said so: names that the user gave, and the source's arguments or its ``config.json``."""
CARRIED_FIELDS: Rule[Sequence[str]] = Rule(
    Fate.KEPT,
    "fields of config.json that nobody declares: {found}: in the file that goes along",
    lambda names: names and listed(names),
)
"""Of fields that nobody declares."""
