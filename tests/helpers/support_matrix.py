"""The page of what converts to what, made of what really happens: ``python -m tests.helpers.support_matrix`` writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from mcore_rlhf.core.facts import Fate
from mcore_rlhf.formats.registry import FORMATS, format_named
from mcore_rlhf.models.huggingface import ARCHITECTURES
from mcore_rlhf.models.huggingface.table import Architecture
from tests.helpers.every_format import EVERY, Zoo, opened

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support-matrix.md"

_NEVER_RUN = {
    "linear_kv_down_proj": "the kernel of latent attention (a stand-in computed it)",
    "mtp.layers": "the arithmetic of multi-token prediction (its names and shapes are Megatron's and the release files')",
    "mlp.experts": "TEGroupedMLP",
}
"""Part of a Megatron name → what could only be read in the code."""

_BEGINNING = """# What converts to what

This page is made by a test from the registry of formats and from conversions that it runs; it fails when the page says anything else.
The model is a Llama that megatron-core trained, with its distributed optimizer.

**w** weights, **o** optimizer (masters, both moments, param groups), **r** random states. A number is a note below: what that pair
loses, or does not carry. `hf` holds an optimizer with `--with-optimizer` only. What `plan` prints of *your* checkpoint is more exact than
any table. What of a format was run in its framework, and what was only read in its code, stands on the format's own page:
[Megatron](formats-megatron.md), [torch_dist](formats-megatron-dist.md),
[DeepSpeed](formats-deepspeed.md), [universal](formats-universal.md), [DCP](formats-dcp.md), [rank files](formats-fsdp-ranks.md),
[Hugging Face](formats-hf.md), [adapters](formats-peft.md), [`state.pt`](formats-torch.md).
"""


def page(zoo: Zoo) -> str:
    """The whole page.

    Args:
        zoo: The model in every format, and every conversion of it.
    """
    return "\n".join([_BEGINNING, *_formats(), "", *_pairs(zoo), "", *_architectures(), ""])


def _formats() -> Iterator[str]:
    yield "## Formats"
    yield "| `--to`, and detected as | what it is | names | loaded by |"
    yield "|---|---|---|---|"
    for known in FORMATS:
        yield f"| `{known.name}` | {_summary(known.name)} | {known.family} | `{known.load_hint(Path('DST'))}` |"


def _summary(name: str) -> str:
    """The first line of what the format says of itself."""
    return (format_named(name).__doc__ or "").splitlines()[0].rstrip(".").replace("``", "`")


def _pairs(zoo: Zoo) -> Iterator[str]:
    notes: dict[str, int] = {}
    yield "## From each to each"
    yield "| from ↓ to → | " + " | ".join(f"`{name}`" for name in EVERY) + " |"
    yield "|---|" + "---|" * len(EVERY)
    for source in EVERY:
        cells = [_cell(zoo, source, target, notes) for target in EVERY]
        yield f"| `{source}` | " + " | ".join(cells) + " |"
    yield ""
    yield from (f"{number}. {text}" for text, number in notes.items())


def _cell(zoo: Zoo, source: str, target: str, notes: dict[str, int]) -> str:
    there, job = zoo.pair(source, target)
    found = opened(there)
    has = "w" + ("o" if {"master", "exp_avg", "exp_avg_sq"} <= set(found.states) and found.state.groups else "")
    has += "r" if _has_random_states(source, target, job.report.lines) else ""
    numbers = [str(notes.setdefault(text, len(notes) + 1)) for text in job.report.lost]
    return " ".join([has, *([f"<sup>{', '.join(numbers)}</sup>"] if numbers else [])])


def _has_random_states(source: str, target: str, lines: list[tuple[Fate, str]]) -> bool:
    both = {format_named(source).family, format_named(target).family} == {"megatron"}
    return both and not any(fate is Fate.LOST and "RNG" in text for fate, text in lines)


def _architectures() -> Iterator[str]:
    yield "## Models whose names are known in both families"
    yield "Of every one, transformers and megatron-core (local spec, CPU) computed the same logits from what was converted."
    yield ""
    yield "| `model_type` | class | read, not run |"
    yield "|---|---|---|"
    for known in ARCHITECTURES:
        yield f"| `{known.model_type}` | `{known.class_name}` | {'; '.join(_not_run(known))} |"
    yield ""
    yield "Between other formats than Megatron's two, a model needs no table: its names stay as they are."


def _not_run(known: Architecture) -> Iterator[str]:
    """What of an architecture the machines of its tests could not compute."""
    names = {row.megatron for row in known.rows}
    alone = "Transformer Engine's layers, with which alone Megatron builds it (plain torch stood in for them)"
    yield "Transformer Engine's names" if known.implementation is None else alone
    for part, text in _NEVER_RUN.items():
        if any(part in name for name in names):
            yield text


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(Zoo(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main()
