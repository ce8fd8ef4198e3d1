"""Standard output: JSON for machines; tables, and numbers as people read them, for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import UNPRINTABLE, printable

if TYPE_CHECKING:
    from rich.console import Console

Facts = dict[str, Any]
"""What a command found, as plain data: exactly what ``--json`` prints."""

_PIPED_WIDTH = 500
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


def console() -> Console:
    """Where people read: as wide as the terminal, or as wide as needed where there is none."""
    from rich.console import Console

    class PlainConsole(Console):
        """Leaves a broken pipe to the guard, which knows the exit code."""

        def print(self, *objects: Any, **options: Any) -> None:
            """Texts come out of files as well: none may command the terminal."""
            super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    piped = None if sys.stdout.isatty() else _PIPED_WIDTH
    return PlainConsole(markup=False, highlight=False, emoji=False, width=piped, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        title: Its heading.
        right: Whether it holds numbers, which stand at the right.
    """

    title: str
    right: bool = False


def print_facts(out: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns; a pair without value is left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        out.print(f"  {name:<{width}}  {value}")


def print_table(
    out: Console, columns: Sequence[Column], rows: Iterable[Sequence[str]], limit: int | None = None
) -> None:
    """Print a table.

    Args:
        out: Where.
        columns: Its columns.
        rows: Cells as text, one per column.
        limit: Rows that are shown; the rest is counted.
    """
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    listed = list(rows)
    for row in listed[:limit]:
        table.add_row(*map(printable, row))
    out.print(Padding(table, (0, 0, 0, 2), expand=False), soft_wrap=False)
    if limit is not None and len(listed) > limit:
        out.print(f"  … and {len(listed) - limit:,} more")


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
    """A speed, in the decimal units in which disks are sold: ``1.25 GB/s``, ``0.8 MB/s``."""
    speed = nbytes / max(seconds, 1e-9)
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"


def duration(seconds: float) -> str:
    """A time: ``0.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
