"""A plan, for people, and the report lines that ``convert`` prints as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .describe import iteration_text, layout_text
from .output import Column, Facts, console, print_facts, print_table
from .units import count, size

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_FILES = 40


def print_plan(facts: Facts) -> None:
    """Print everything."""
    out = console()
    totals = facts["totals"]
    casts = f", {count(totals['casts'])} of them with a cast" if totals["casts"] else ""
    out.print("plan (nothing was written)")
    print_facts(
        out,
        [
            ("source", source_text(facts["source"])),
            ("target", f"{facts['target']['format']}, {layout_text(facts['target']['parallel'])}"),
            ("work", f"{count(totals['copies'])} copies{casts}"),
            ("output", f"{size(totals['bytes'])} of tensors in {_records(totals)}"),
            ("lossless", yes_no(facts["lossless"])),
            ("account", account_text(facts["account"])),
        ],
    )
    print_report(out, facts["report"])
    out.print("\nfiles")
    columns = [Column("file"), *(Column(name, True) for name in ("records", "copies", "casts", "bytes"))]
    rows = [
        (f["path"], count(f["records"]), count(f["copies"]), count(f["casts"]), size(f["bytes"]))
        for f in facts["files"]
    ]
    print_table(out, columns, rows, limit=_SHOWN_FILES)
    for file in facts["files"][:_SHOWN_FILES]:
        if "copy_list" in file:
            _print_copies(out, file)


def source_text(source: Facts) -> str:
    """``/runs/a: megatron, iteration 50, TP2×PP2×DP2 (8 ranks)``."""
    return f"{source['path']}: {source['format']}, {iteration_text(source)}, {layout_text(source['parallel'])}"


def print_report(out: Console, report: list[Facts]) -> None:
    """Print what is kept, derived, changed and lost."""
    if report:
        out.print("\nreport")
    print_report_lines(out, report)


def print_report_lines(out: Console, report: list[Facts]) -> None:
    """Print the lines of a report, without a heading."""
    width = max((len(line["fate"]) for line in report), default=0)
    for line in report:
        out.print(f"  {line['fate']:<{width}}  {line['text']}")


def account_text(account: Facts) -> str:
    """``205 items: 203 kept, 2 derived``."""
    fates = ("kept", "derived", "changed", "left_behind", "lost")
    counts = [f"{count(account[fate])} {fate.replace('_', ' ')}" for fate in fates if account[fate]]
    if account["unaccounted"]:
        counts.append(f"{count(len(account['unaccounted']))} not accounted for")
    return f"{count(account['items'], 'item')}: {', '.join(counts)}"


def yes_no(value: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def _records(totals: Facts) -> str:
    return f"{count(totals['records'], 'record')} of {count(totals['files'], 'file')}"


def _print_copies(out: Console, file: Facts) -> None:
    out.print(f"\n{file['path']}")
    columns = [Column("shape"), Column("source"), Column("start", True), Column("strides"), Column("")]
    columns += [Column("target record"), Column("start", True), Column("strides")]
    rows = [_copy_row(copy) for copy in file["copy_list"]]
    if rows:
        print_table(out, columns, rows)
    if file["copies"] > len(rows):
        out.print(f"  … and {file['copies'] - len(rows):,} more (all of them: --json)")


def _copy_row(copy: Facts) -> list[str]:
    source, target = copy["source"], copy["target"]
    cast = "→" if source["dtype"] == target["dtype"] else f"→ {target['dtype']} →"
    return [
        _dims(copy["shape"]), f"{source['file']}:{source['record']}", count(source["start"]), _dims(source["strides"]),
        cast, target["record"], count(target["start"]), _dims(target["strides"]),
    ]  # fmt: skip


def _dims(numbers: list[int]) -> str:
    return "×".join(map(str, numbers))
