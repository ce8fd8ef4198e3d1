"""``docs/reference/what-trainers-load.md``, made of the loaders' rows: ``python -m tests.helpers.loader_rows`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rlhf.trainers.loaders.known import LOADERS
from mcore_rlhf.trainers.resuming import Habit, Loader

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-trainers-load.md"
_HEAD = """# What trainers load

Written by `python -m tests.helpers.loader_rows`; a test compares. Of each trainer, what
[`will-resume`](../how-to/will-it-resume.md) knows of its loader: of each thing the first row that is meant decides. *ran*: a test runs that
loader on a folder from which the thing was taken, or that is whole, and what it restored is what the row says; *read*: the row was read
in the loader's code, and nobody ran it here. Words in braces stand for what is found.
"""


def written() -> str:
    """The page as the rows are now."""
    return "\n".join([_HEAD, *map(_section, LOADERS)])


def _section(loader: Loader) -> str:
    trainer = loader.trainer
    called = ", ".join(f"`{name}`" for name in (trainer.name, *loader.others))
    head = [f"## {trainer.title}", f"`--trainer` {called}; rows are of {loader.version}.", ""]
    lines = dict.fromkeys(map(_line, loader.rows))  # rows that ask for other keys say the same
    return "\n".join([*head, "| what | becomes | where it says | source | |", "|---|---|---|---|---|", *lines, ""])


def _line(row: Habit) -> str:
    why = re.sub(r"\{(\w+)\}", r"`{\1}`", row.why).replace("|", "\\|")
    things = ", ".join(thing.value for thing in row.things)
    return f"| {things} | {row.outcome.value} | {why} | {row.source} | {'ran' if row.ran else 'read'} |"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
