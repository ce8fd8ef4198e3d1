"""Verdicts and comparisons, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .describe import iteration_text, layout_text
from .output import Column, Facts, console, print_facts, print_table
from .render_plan import source_text
from .units import count, duration, rate, size

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 20


def print_verdict(facts: Facts) -> None:
    """Print what ``verify`` found."""
    out = console()
    found = facts["checkpoint"]
    what = (
        f"{found['format']}, {iteration_text(found)}, {layout_text(found['parallel'])}"
        if found
        else "could not be opened"
    )
    out.print(f"{facts['path']}: {what}")
    out.print(verdict_line(facts))
    for text in facts["checked"]:
        out.print(f"  checked  {text}")
    if facts["unread"]:
        out.print("  not understood  " + facts["unread"].replace("\n", "\n    "))
    print_problems(out, facts["problems"])


def print_newer(problems: list[Facts]) -> None:
    """Print that newer steps than the one that was looked at are damaged."""
    if problems:
        out = console()
        out.print("damaged, by a newer step of the root:")
        print_problems(out, problems)


def verdict_line(facts: Facts) -> str:
    """``intact: 3.2 GiB in 1.5 s, 2.2 GB/s``."""
    word = "intact" if facts["intact"] else f"damaged: {count(len(facts['problems']), 'problem')}"
    if not facts["bytes"]:
        return word
    nbytes, seconds = facts["bytes"], facts["seconds"]
    return f"{word} ({size(nbytes)} read in {duration(seconds)}, {rate(nbytes, seconds)})"


def print_problems(out: Console, problems: list[Facts]) -> None:
    """Print problems, and each piece of advice once."""
    for problem in problems[:_SHOWN]:
        out.print(f"  {problem['kind']}: " + problem["message"].replace("\n", "\n    "))
    if len(problems) > _SHOWN:
        out.print(f"  … and {len(problems) - _SHOWN:,} more (all of them: --json)")
    for advice in dict.fromkeys(problem["advice"] for problem in problems if problem["advice"]):
        out.print(advice)


def print_comparison(facts: Facts) -> None:
    """Print what ``diff`` found."""
    out = console()
    print_facts(out, [("first", source_text(facts["a"])), ("second", source_text(facts["b"]))])
    out.print(comparison_line(facts))
    print_differences(out, facts)


def comparison_line(facts: Facts) -> str:
    """``equal: 212 tensors, 853,504 elements, bit for bit``."""
    how = "bit for bit" if facts["exact"] else f"within atol {facts['atol']:g}, rtol {facts['rtol']:g}"
    what = f"{count(facts['tensors'], 'tensor')}, {count(facts['elements'], 'element')} compared {how}"
    return (
        f"equal: {what}" if facts["equal"] else f"different: {count(len(facts['differences']), 'difference')}; {what}"
    )


def print_differences(out: Console, facts: Facts) -> None:
    """Print differences and notes."""
    if facts["differences"]:
        columns = [Column("what differs"), Column("how"), Column("largest |a − b|", True)]
        rows = [(d["name"], d["what"], f"{d['max_abs']:.3g}" if d["differing"] else "") for d in facts["differences"]]
        print_table(out, columns, rows, limit=_SHOWN)
    for note in facts["notes"]:
        out.print(f"  note: {note}")
