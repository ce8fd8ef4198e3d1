"""What a YAML text may cost before it is loaded: PyYAML recurses into brackets, and a few aliases can stand for billions of values.

Of a key that is there twice, PyYAML takes the last without a word; YAML allows none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import yaml

MAX_NBYTES = 4 << 20
"""No settings are longer."""

_AGAIN = re.compile(r"\s+")

MAX_DEPTH = 50
MAX_VALUES = 200_000

_MERGED = "<<"
"""What stands for the keys of another mapping, and may be there more than once."""


@dataclass
class _Begun:
    """A list or mapping whose end was not seen yet.

    Args:
        anchor: Its name, for aliases.
        start: How many values there were before it.
        is_mapping: Whether every other value is a key.
        keys: Those that were seen.
        inside: How many values are directly in it.
        height: How many levels are in it, those behind aliases too.
    """

    anchor: str | None
    start: int
    is_mapping: bool
    keys: set[str] = field(default_factory=set)
    inside: int = 0
    height: int = 1

    def take(self, event: yaml.NodeEvent) -> None:
        """Note what is directly in it.

        Raises:
            yaml.YAMLError: A key that is there already.
        """
        import yaml

        key = (
            event.value if isinstance(event, yaml.ScalarEvent) and self.is_mapping and not self.inside % 2 else _MERGED
        )
        self.inside += 1
        if key != _MERGED and key in self.keys:
            mark = cast("yaml.Mark", event.start_mark)
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is there twice", problem_mark=mark)
        self.keys.add(key)


def _follow(event: yaml.AliasEvent, begun: list[_Begun], whole: Mapping[str, tuple[int, int]]) -> int:
    """Note what is behind an alias; how many values it is.

    Raises:
        yaml.YAMLError: That which it is in itself.
    """
    import yaml

    anchor = str(event.anchor)
    if any(one.anchor == anchor for one in begun):
        mark = cast("yaml.Mark", event.start_mark)
        raise yaml.MarkedYAMLError(problem=f"the alias *{anchor} stands within what it stands for", problem_mark=mark)
    values, height = whole.get(anchor, (0, 0))
    if begun:
        begun[-1].height = max(begun[-1].height, height + 1)
    return values


def check_yaml(text: str) -> None:
    """Look through a text, without making values of it.

    Args:
        text: YAML.

    Raises:
        yaml.YAMLError: It is none, says something twice, is in itself, is too deep, or has too many values when every alias is followed.
    """
    import yaml

    values = 0
    begun: list[_Begun] = []
    whole: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        values += 1
        if isinstance(event, yaml.NodeEvent) and begun:
            begun[-1].take(event)
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append(_Begun(event.anchor, values, isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = begun.pop()
            if begun:
                begun[-1].height = max(begun[-1].height, ended.height + 1)
            if ended.anchor is not None:
                whole[ended.anchor] = values - ended.start, ended.height
        elif isinstance(event, yaml.AliasEvent):
            values += _follow(event, begun, whole)
        if len(begun) > MAX_DEPTH or (begun and len(begun) + begun[-1].height - 1 > MAX_DEPTH):
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} levels deep")
        if values > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, those behind aliases counted each time")


def wrong_yaml(error: yaml.YAMLError) -> str:
    """What is wrong with a text that is no YAML, and where, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return _AGAIN.sub(" ", str(error))
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" + (f" {context}" if context else "")
