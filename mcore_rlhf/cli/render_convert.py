"""The summary of a conversion, for people."""

from __future__ import annotations

from .describe import layout_text
from .output import Facts, console, print_facts
from .render_plan import account_text, print_report, source_text, yes_no
from .render_verify import comparison_line, print_differences, print_problems, verdict_line
from .units import count, duration, rate, size


def print_conversion(facts: Facts) -> None:
    """Print everything."""
    out = console()
    target = facts["target"]
    out.print(f"converted {facts['name']}" if facts["name"] else "converted")
    print_facts(
        out,
        [
            ("source", source_text(facts["source"])),
            ("target", f"{target['path']}: {target['format']}, {layout_text(target['parallel'])}"),
            ("tensors", f"{count(facts['tensors'])} in all states, {count(facts['copies'])} copies"),
            ("written", _written(facts)),
            ("lossless", yes_no(facts["lossless"])),
            ("account", account_text(facts["account"])),
            ("load", facts["load"]),
        ],
    )
    print_report(out, facts["report"])
    if "verify" in facts:
        out.print(f"\nverify  {verdict_line(facts['verify'])}")
        print_problems(out, facts["verify"]["problems"])
        if facts["diff"] is not None:
            out.print(f"diff    {comparison_line(facts['diff'])}")
            print_differences(out, facts["diff"])


def _written(facts: Facts) -> str:
    nbytes, seconds = facts["bytes"], facts["seconds"]
    return f"{size(nbytes)} in {count(facts['files'], 'file')}, {duration(seconds)}, {rate(nbytes, seconds)}"
