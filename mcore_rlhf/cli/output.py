"""Standard output: JSON for machines; tables, and numbers as people read them, for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
_MIB = 1 << 20
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class OutputError(Exception):
    """What a command found cannot be printed: standard output is closed, or on a full disk. Raised from the OSError."""


@contextmanager
def printing() -> Iterator[None]:
    """Tell a failure to print from all others.

    Raises:
        OutputError: It cannot be printed; a reader that has seen enough is a BrokenPipeError as ever.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(reason(error)) from error


def reason(error: Exception) -> str:
    """What is wrong with standard output."""
    return f"{error.strerror} (errno {error.errno})" if isinstance(error, OSError) else str(error)


def emit_json(facts: Any) -> None:
    """Print facts as JSON, and nothing else."""
    text = json.dumps(plain(facts), indent=2, ensure_ascii=False, allow_nan=False)
    with printing():
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
    with printing() if not err else nullcontext():
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
    with printing():
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
    power = _power(nbytes)
    return f"{nbytes / 1024**power:.2f} {_BINARY[power]}" if power else count(nbytes, "byte")


def of_total(nbytes: int, total: int) -> str:
    """How many bytes of all are done, in one unit: ``0.21 of 3.21 GiB``."""
    power = _power(total)
    return f"{nbytes / 1024**power:.2f} of {size(total)}" if power else f"{nbytes} of {size(total)}"


def _power(nbytes: float) -> int:
    return next((power for power in range(len(_BINARY)) if nbytes < 1024 ** (power + 1)), len(_BINARY) - 1)


def count(number: int, thing: str = "") -> str:
    """A count with separators, and its noun in the right number: ``1,024 tensors``, ``1 file``."""
    if not thing:
        return f"{number:,}"
    if number != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number:,} {thing}"


def rate(nbytes: int, seconds: float, total: int = 0) -> str:
    """A speed, in the units of :func:`size`: ``1.25 GiB/s``; beside a total in the unit of that, from MiB on."""
    speed = nbytes / max(seconds, 1e-9)
    power = _power(total) if total >= _MIB else max(_power(10 * speed), _power(_MIB))
    return f"{speed / 1024**power:.{2 if power > _power(_MIB) else 1}f} {_BINARY[power]}/s"


def duration(seconds: float) -> str:
    """A time: ``0.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
