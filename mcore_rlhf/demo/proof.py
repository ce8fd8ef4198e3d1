"""What the demonstration proves: a model after reshaping and resuming, beside the uninterrupted run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.placed_state import StateKey

LOSS_TOLERANCE = 1e-2
"""Relative, for a changed layout: sums are taken in another order, bf16 has 8 bits, and two optimizer steps lie between. Seen: 1e-3."""
SHOWN_STEPS = 2


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a checkpoint was reshaped.

    Args:
        nbytes: Bytes of tensors written.
        seconds: Wall time, planning, checks and checksums included.
    """

    nbytes: int
    seconds: float

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Row:
    """The proof of one resumed run.

    Args:
        layout: What it ran on, and how its checkpoint came about.
        tensors: Whole tensors compared, over all states.
        equal: How many of them are equal in every bit.
        uninterrupted: Losses of the run that was not interrupted, by iteration.
        resumed: Losses of the run that was.
        exact: Whether losses have to be equal to the last bit: they have where the layout is that of the source.
        conversion: How its checkpoint was made; None where it is the source's own.
        lines: How many lines of the metrics are equal to the uninterrupted run's, and how many there are: where the row is
            exact everything in them (loss, reward, KL, gradient norm, digests of model and optimizer, to the last bit),
            otherwise the prompts. None where nothing was compared.
    """

    layout: str
    tensors: int
    equal: int
    uninterrupted: dict[int, float]
    resumed: dict[int, float]
    exact: bool
    conversion: Conversion | None
    lines: tuple[int, int] | None = None

    @property
    def max_difference(self) -> float:
        """Largest absolute difference of two losses; infinite where one is missing or no number."""
        pairs = [(loss, self.resumed.get(step, math.nan)) for step, loss in self.uninterrupted.items()]
        differences = [abs(resumed - loss) for loss, resumed in pairs]
        return max(differences) if differences and all(map(math.isfinite, differences)) else math.inf

    @property
    def passed(self) -> bool:
        """Whether it is proved."""
        if self.tensors == 0 or self.equal != self.tensors or not math.isfinite(self.max_difference):
            return False
        if self.lines is not None and (self.lines[0] != self.lines[1] or not self.lines[1]):
            return False
        bound = 0.0 if self.exact else LOSS_TOLERANCE * max(map(abs, self.uninterrupted.values()))
        return self.max_difference <= bound


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that the demonstration proved.

    Args:
        rows: One per resumed run.
        seconds: Wall time of everything.
    """

    rows: tuple[Row, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether everything is proved."""
        return bool(self.rows) and all(row.passed for row in self.rows)


def count_equal(expected: dict[StateKey, torch.Tensor], found: dict[StateKey, torch.Tensor]) -> tuple[int, int]:
    """Number of tensors that either model has, and of those that are in both and equal bit for bit."""
    equal = sum(same_bits(expected[key], found[key]) for key in expected.keys() & found.keys())
    return len(expected.keys() | found.keys()), equal


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, type and every bit."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def render(report: DemoReport) -> list[tuple[str, ...]]:
    """The report as the cells of a table, header first; of the first steps the expected loss, then the resumed one."""
    steps = sorted({step for row in report.rows for step in row.uninterrupted})[:SHOWN_STEPS]
    losses = [text for step in steps for text in (f"loss {step}", "resumed")]
    header = ("resumed on", "tensors equal", "metrics equal", *losses, "difference", "reshaped")
    return [header, *(_cells(row, steps) for row in report.rows)]


def table(report: DemoReport) -> list[str]:
    """The report as aligned lines of plain text."""
    rows = render(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:], "", verdict(report)]


def verdict(report: DemoReport) -> str:
    """One sentence on whether everything is proved."""
    failed = [row.layout for row in report.rows if not row.passed]
    if failed or not report.rows:
        return f"FAILED: {', '.join(failed) or 'nothing was proved'}"
    return (
        f"Proved in {report.seconds:.0f} s. The run that was killed and resumed wrote the metrics of the one that was not, to the last\n"
        "bit: loss, reward, KL, gradient norm, digests of all parameters and of the optimizer. On every other layout every\n"
        "parameter, fp32 master and moment of Adam is the same in every bit, and training goes on with the same prompts and\n"
        f"with equal losses (to the last bit on the layout of the source, within {LOSS_TOLERANCE:.0%} on others)."
    )


def _cells(row: Row, steps: list[int]) -> tuple[str, ...]:
    losses = [_loss(run, step) for step in steps for run in (row.uninterrupted, row.resumed)]
    difference = "none" if row.max_difference == 0 else f"{row.max_difference:.1e}"
    conversion = row.conversion
    speed = f"{conversion.nbytes / 1e6:.0f} MB, {conversion.speed / 1e6:.0f} MB/s" if conversion else "as saved"
    lines = f"{row.lines[0]} of {row.lines[1]}{'' if row.exact else ' (prompts)'}" if row.lines else "–"
    return (
        row.layout,
        f"{row.equal} of {row.tensors}",
        lines,
        *losses,
        difference + ("" if row.passed else " FAILED"),
        speed,
    )


def _loss(run: dict[int, float], step: int) -> str:
    return f"{run[step]:.6f}" if step in run else "–"
