"""How far the values of a resumed run may be off: named profiles, each a few rows with reasons. Nothing else loosens a comparison.

Only floating-point numbers ever have room: tensors with dimensions in the rows' files, metrics that are written with a point,
and numbers with a point that follow from metrics (adaptive KL coefficients, a log of losses). Counters, learning rates, steps, shapes,
types, random states, data and whatever no row names stay equal to the last bit under every profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mcore_rlhf.errors import UsageError
from mcore_rlhf.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One row of a profile: how far values at some places may be off.

    Args:
        where: ``FILE:KEY`` or ``metrics:NAME``, with ``*``.
        relative: Share of the metric's value in the uninterrupted run; of a tensor, of the largest magnitude in it: a sum in another
            order is off by a share of what is added up, not of what is left of it.
        absolute: What is allowed besides.
        why: The reason.
    """

    where: str
    relative: float
    absolute: float
    why: str


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of tolerances with a name.

    Args:
        name: What it is called on the command line.
        rows: The first one that names a place counts; a place that none names has no room.
        why: What it is for.
    """

    name: str
    rows: Sequence[ProfileRow]
    why: str

    def row(self, place: str) -> ProfileRow | None:
        """The row for a place; None where the value has to be the same."""
        row = next((row for row in self.rows if fnmatchcase(place, row.where)), None)
        return row if row is not None and (row.relative or row.absolute) else None


@dataclass(frozen=True, slots=True)
class MeasuredDifference:
    """A value that is not the same, measured.

    Args:
        where: The file, or ``metrics``.
        key: Its place there.
        off: The difference; of a tensor the largest one in it.
        allowed: What the profile allows there.
    """

    where: str
    key: str
    off: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether the profile lets it pass; what is no number never passes."""
        return self.off <= self.allowed

    @property
    def share(self) -> float:
        """How much of what is allowed it takes: up to 1 where it passes."""
        if self.off == 0:
            return 0.0
        return self.off / self.allowed if self.allowed else math.inf


def _rows(
    metrics: float, near_zero: float, momentum: float, weights: float, why: Sequence[str]
) -> tuple[ProfileRow, ...]:
    said = dict(zip(("metrics", "momentum", "weights"), why, strict=True))
    return (
        ProfileRow("metrics:*", metrics, near_zero, said["metrics"]),
        ProfileRow("rlhf/*.json:*", metrics, near_zero, "KL coefficients and running statistics follow the metrics"),
        ProfileRow(
            "trainer_state.json:log_history/*",
            metrics,
            near_zero,
            "the metrics again, as transformers' Trainer keeps them",
        ),
        ProfileRow("*.json:report/metrics/*", metrics, near_zero, "the metrics again, as a manifest has them"),
        ProfileRow("rng/*", 0.0, 0.0, "no rounding changes a generator"),
        ProfileRow("*step", 0.0, 0.0, "a counter"),
        ProfileRow("*grad_scaler*", 0.0, 0.0, "a power of two and counters"),
        ProfileRow("data/*", 0.0, 0.0, "no rounding changes which prompts were read"),
        ProfileRow("*exp_avg*", momentum, 0.0, said["momentum"]),
        ProfileRow("*momentum*", momentum, 0.0, said["momentum"]),
        ProfileRow("*.pt:*", weights, 0.0, said["weights"]),
        ProfileRow("*.safetensors:*", weights, 0.0, said["weights"]),
    )


EXACT = Profile("exact", (), "everything is equal to the last bit")

PROFILES: tuple[Profile, ...] = (
    EXACT,
    Profile(
        "fp32-reduction",
        _rows(
            2**-14, 1e-6, 2**-8, 2**-10,
            (
                "sums of some thousand fp32 products (2^-24 each) in another order, through every layer and step",
                "a gradient cancels: what is left of it is off by more than its summands (on an H200, after seven steps: up to 2^-9.2)",
                "an update of which a few per mille are off; a bias that began at zero is nothing but updates (there: up to 2^-10.4)",
            ),
        ),
        "fp32 training with kernels that add in another order at every run: atomics, split-K, another ring",
    ),
    Profile(
        "bf16-reduction",
        _rows(
            2**-6, 1e-4, 2**-4, 2**-8,
            (
                "bf16 has 8 bits: each product or sum is off by up to 2^-9, and several layers add theirs",
                "a gradient cancels: what is left of it is off by more than its summands; its square by twice that",
                "one unit in the last place of the largest bf16 weight: an update on the edge is rounded to its other side",
            ),
        ),
        "bf16 training with kernels that add in another order at every run",
    ),
    Profile(
        "loose",
        _rows(
            2**-3, 1e-2, 2**-1, 2**-5,
            (
                "the same course, step by step, no more: a loss of another batch or another policy is further off",
                "the same direction at large",
                "the same model at large",
            ),
        ),
        "another number of ranks or other kernels, where only the course is to be the same",
    ),
)  # fmt: skip
"""The profiles, strictest first; ``exact`` is what is taken where none is named."""


def profile_named(name: str) -> Profile:
    """The profile of that name.

    Raises:
        UsageError: There is none.
    """
    found = next((one for one in PROFILES if one.name == name), None)
    if found is None:
        known = [one.name for one in PROFILES]
        hint = did_you_mean(name, known)
        raise UsageError(f"--profile: expected one of {', '.join(known)}, found {name!r}{hint}")
    return found


def decimal(value: object) -> float | None:
    """The number that a text of JSON with a point or an exponent is; None for all else, whole numbers among it."""
    if not isinstance(value, str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def between(where: str, key: str, a: float | None, b: float | None, row: ProfileRow) -> MeasuredDifference | None:
    """How far two numbers are apart, and what a row allows there; None where one is no number with a point."""
    if a is None or b is None:
        return None
    return MeasuredDifference(where, key, abs(a - b), row.absolute + row.relative * abs(a))
