"""Standard output: JSON for machines; tables, and numbers as people read them, for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from shutil import get_terminal_size
from typing import Any

import click

from mcore_rlhf.errors import UNPRINTABLE, printable

Facts = dict[str, Any]
"""What a command found, as plain data: exactly what ``--json`` prints."""

_NARROWEST = 8
"""Characters below which no column of a table is folded."""
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def emit_json(facts: Any) -> None:
    """Print facts as JSON, and nothing else."""
    text = json.dumps(plain(facts), indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n")


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what JSON does not know becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print for people; texts come out of files as well, and none may command the terminal.

    Args:
        text: It; ends of lines are its own.
        err: Whether it goes to standard error.
        nl: Whether a line ends with it.
    """
    click.echo(printable(text), err=err, nl=nl)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        title: Its heading.
        right: Whether it holds numbers, which stand at the right.
    """

    title: str
    right: bool = False


def print_facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns; a pair without value is left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"  {name:<{width}}  {value}")


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], limit: int | None = None) -> None:
    """Print a table; on a terminal that is too narrow, its widest cells go on in the next line.

    Args:
        columns: Its columns.
        rows: Cells as text, one per column.
        limit: Rows that are shown; the rest is counted.
    """
    listed = list(rows)
    table = [[column.title for column in columns], *([printable(cell) for cell in row] for row in listed[:limit])]
    widths = [max(1, *map(len, cells)) for cells in zip(*table, strict=True)]
    while sys.stdout.isatty() and sum(widths) + 2 * len(widths) > get_terminal_size().columns > _NARROWEST * len(
        widths
    ):
        widths[widths.index(max(widths))] -= 1
    heading, *body = (list(_lines(columns, widths, row)) for row in table)
    click.echo("\n".join(click.style(line, bold=True) for line in heading))
    if body:
        click.echo("\n".join(line for lines in body for line in lines))
    if limit is not None and len(listed) > limit:
        say(f"  … and {len(listed) - limit:,} more")


def _lines(columns: Sequence[Column], widths: Sequence[int], row: Sequence[str]) -> Iterator[str]:
    """A row, whose cells are folded where they are wider than their columns."""
    folded = [
        [cell[at : at + width] for at in range(0, len(cell), width)] for cell, width in zip(row, widths, strict=True)
    ]
    for parts in zip_longest(*folded, fillvalue=""):
        cells = [
            f"{part:>{width}}" if column.right else f"{part:<{width}}"
            for column, part, width in zip(columns, parts, widths, strict=True)
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def size(nbytes: int) -> str:
    """A number of bytes: ``3.21 GiB``."""
    value, unit = float(nbytes), _BINARY[0]
    for unit in _BINARY:
        if value < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return count(nbytes, "byte") if unit == "bytes" else f"{value:.2f} {unit}"


def count(number: int, thing: str = "") -> str:
    """A count with separators, and its noun in the right number: ``1,024 tensors``, ``1 file``."""
    if not thing:
        return f"{number:,}"
    if number != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number:,} {thing}"


def rate(nbytes: int, seconds: float) -> str:
    """A speed, in the units of :func:`size`: ``1.25 GiB/s``, ``0.8 MiB/s``."""
    speed = nbytes / max(seconds, 1e-9) / (1 << 20)
    return f"{speed / 1024:.2f} GiB/s" if speed >= 100 else f"{speed:.1f} MiB/s"


def duration(seconds: float) -> str:
    """A time: ``0.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
