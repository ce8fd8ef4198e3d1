"""The tables of ``docs/reference/cli.md``, made of the table of options: ``python -m tests.helpers.option_tables`` writes them there.

Each stands between ``<!-- options: TITLE -->`` and ``<!-- end -->``, where the title is a heading of the help, or ``targets``.
"""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rlhf.families.option_types import GROUPS, Option
from mcore_rlhf.families.options import OPTIONS
from mcore_rlhf.formats.base import Format
from mcore_rlhf.formats.registry import named

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
TARGETS = "targets"
MEGATRON = tuple(known for known in named() if known.family == "megatron")
_COLUMNS = (MEGATRON, *((known,) for known in named() if known not in MEGATRON))
_PLACE = re.compile(r"(<!-- options: ([^>]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def written(page: str) -> str:
    """A page with its tables as the options are now."""
    return _PLACE.sub(lambda found: f"{found[1]}{_table(found[2])}{found[3]}", page)


def titles(page: str) -> list[str]:
    """The tables that a page has."""
    return [found[1] for found in _PLACE.findall(page)]


def _table(title: str) -> str:
    rows = [row for row in OPTIONS if row.commands]
    if title == TARGETS:
        return _of_targets([row for row in rows if row.takes])
    assert title in GROUPS
    lines = [f"| `{row.flag}` | {_cell(row)} |" for row in rows if row.group == title]
    return "\n".join(["| option | is |", "|---|---|", *lines, ""])


def _cell(row: Option) -> str:
    default = f"Default: {row.default}." if row.default else ""
    return " ".join(part for part in (row.help, default, row.more) if part).replace("|", "\\|")


def _of_targets(rows: list[Option]) -> str:
    """Options that are for the same targets, in one line."""
    groups: dict[tuple[Format, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(tuple(one for one in named() if row.is_for(one.takes)), []).append(f"`{row.flag}`")
    head = " | ".join(["option", *(", ".join(f"`{one.name}`" for one in column) for column in _COLUMNS)])
    lines = [
        f"| {', '.join(flags)} |{''.join(_mark(column, targets) for column in _COLUMNS)}"
        for targets, flags in groups.items()
    ]
    return "\n".join([f"| {head} |", "|---|" + "---|" * len(_COLUMNS), *lines, ""])


def _mark(column: tuple[Format, ...], targets: tuple[Format, ...]) -> str:
    """A tick where an option is for all targets of a column, and their names where it is for some."""
    meant = [one for one in column if one in targets]
    return " ✓ |" if len(meant) == len(column) else "".join([" ", *(f"`{one.name}` " for one in meant), "|"])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
