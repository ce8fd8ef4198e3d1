"""What ``inspect`` found, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rlhf.errors import headline

from .describe import iteration_text, layout_text
from .output import Column, Facts, console, print_facts, print_table
from .units import count, size

if TYPE_CHECKING:
    from rich.console import Console


def print_inspection(facts: Facts) -> None:
    """Print everything."""
    out = console()
    out.print(facts["path"])
    print_facts(
        out,
        [
            ("format", f"{facts['format']}, {iteration_text(facts)}"),
            ("role", facts["role"]),
            ("layout", layout_text(facts["parallel"])),
            ("model", _model(facts["model"])),
            ("vocabulary", _vocabulary(facts["model"])),
            ("parameters", _parameters(facts["model"])),
            ("optimizer", _optimizer(facts)),
            ("samples", ", ".join(f"{name} {_value(value)}" for name, value in facts["counters"].items())),
            ("files", f"{count(len(facts['files']), 'file')}, {size(facts['bytes'])}"),
            ("manifest", _manifest(facts["manifest"])),
        ],
    )
    if facts["optimizer"] is not None:
        _print_groups(out, facts["optimizer"]["param_groups"])
    _print_notes(out, facts["notes"])
    if "tensors" in facts:
        _print_tensors(out, facts["tensors"])


def _model(model: Facts) -> str:
    parts = [count(model["num_layers"], "layer")]
    parts += [f"{model['mtp_layers']} for multi-token prediction"] if model["mtp_layers"] else []
    parts += [f"{model['num_experts']} experts per mixture layer"] if model["num_experts"] else []
    parts += ["embedding and output tied" if model["tied"] else "embedding and output not tied"]
    return ", ".join(parts)


def _vocabulary(model: Facts) -> str:
    words, rows = model["vocab_size"], model["padded_vocab_size"]
    if rows is None:
        return ""
    if words is None:
        return f"{count(rows)} rows with padding; the true number of words is not stored (--vocab-size)"
    return f"{count(words)} words in {count(rows)} rows, {count(rows - words)} of them padding"


def _parameters(model: Facts) -> str:
    dtypes = model["dtypes"]
    kinds = ", ".join(dtypes if len(dtypes) == 1 else [f"{count(n)} {dtype}" for dtype, n in dtypes.items()])
    return f"{count(model['parameters'])} in {count(model['tensors'], 'tensor')}, {kinds}"


def _optimizer(facts: Facts) -> str:
    optimizer = facts["optimizer"]
    if optimizer is None:
        return f"not understood: {headline(facts['unread'])}" if facts["unread"] else "none stored"
    states = ", ".join(f"{state} {dtype or ''}".strip() for state, dtype in optimizer["states"].items())
    return f"{optimizer['kind']}: {states}"


def _manifest(manifest: Facts | None) -> str:
    if manifest is None:
        return "none: not written by mcore_rlhf"
    if "error" in manifest:
        return f"damaged: {manifest['error']}"
    made = manifest["provenance"]
    kept = {True: ", lossless", False: ", not lossless"}.get(manifest["lossless"], "")
    return (
        f"{count(manifest['files'], 'file')}{kept}, mcore_rlhf {made.get('mcore_rlhf', '?')}, {made.get('time', '?')}"
    )


def _print_groups(out: Console, groups: list[Facts]) -> None:
    if not groups:
        return
    names = ("lr", "weight_decay", "step", "betas", "eps", "wd_mult", "lr_mult", "max_lr", "min_lr")
    shown = [name for name in names if any(name in group for group in groups)]
    out.print("\nparam groups")
    rows = [
        [f"{number} (experts)" if group["expert"] else str(number), *(_value(group.get(name, "")) for name in shown)]
        for number, group in enumerate(groups)
    ]
    print_table(out, [Column("group"), *(Column(name, True) for name in shown)], rows)


def _print_notes(out: Console, notes: list[Facts]) -> None:
    if notes:
        out.print("\nnotes")
    for note in notes:
        fate = "" if note["fate"] == "note" else f"{note['fate']}: "
        out.print(f"  {fate}{note['text']}")


def _print_tensors(out: Console, tensors: list[Facts]) -> None:
    out.print(f"\n{count(len(tensors), 'tensor')}")
    columns = [Column("name"), Column("state"), Column("global_shape"), Column("dtype"), Column("cut")]
    rows = [
        (t["name"], t["state"], str(tuple(t["global_shape"])), t["dtype"], t["partition"] or "",
         count(t["chunks"]), count(t["replicas"]))
        for t in tensors
    ]  # fmt: skip
    if rows:
        print_table(out, [*columns, Column("chunks", True), Column("replicas", True)], rows)


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
