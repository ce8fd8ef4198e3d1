"""The table: figures beside the bars they are held against."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
_HEAD = ("#", "what", "figure", "min / median / max", "bar", "stretch", "")


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        number: Of the row in the list of bars.
        what: What was measured.
        figure: The median, or the only one.
        unit: Its unit: ``×``, ``s``, ``MiB``, …
        bar: What it must reach.
        stretch: What would be better still.
        spread: All rounds, in words.
        at_least: Whether more is better.
    """

    number: int
    what: str
    figure: float
    unit: str
    bar: float
    stretch: float | None = None
    spread: str = ""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def cells(self) -> tuple[str, ...]:
        sign = "≥" if self.at_least else "≤"
        stretch = "" if self.stretch is None else f"{sign} {self.stretch:g}{self.unit}"
        figure, bar = f"{self.figure:.3g}{self.unit}", f"{sign} {self.bar:g}{self.unit}"
        return (str(self.number), self.what, figure, self.spread, bar, stretch, "pass" if self.passed else "MISS")


def as_text(rows: list[Row]) -> str:
    """For a terminal."""
    cells = [_HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def as_markdown(rows: list[Row], notes: list[str]) -> str:
    """For RESULTS.md."""
    lines = [
        "# Results",
        "",
        "Written by `make bench`. A figure is the median of all rounds; sizes count 10^9 bytes.",
        "",
    ]
    lines += [f"* {note}" for note in [*machine(), *notes]] + [""]
    lines += ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def machine() -> list[str]:
    """What the figures were measured on."""
    import torch

    from mcore_rlhf.storage.checksum import IMPLEMENTATION

    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()
    return [
        f"{datetime.date.today()}; {os.cpu_count()} cores ({_processor()}), {ram:.0f} GiB RAM, Linux {platform.release()}",
        f"Python {platform.python_version()}, torch {torch.__version__}, CRC-32 by {IMPLEMENTATION}",
        f"load average at the end {load[0]:.1f} (1 min), {load[2]:.1f} (15 min): above the number of cores, other work "
        "disturbed the figures, and only ratios and CPU times count",
    ]


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
