"""The best value that a metric has had, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import UsageError


@dataclass
class BestMetric:
    """The best value of one metric so far.

    Args:
        name: The metric.
        mode: ``max`` where more is better, ``min`` where less is.
        value: The best value; None before the first.
        step: The training step that had it.
    """

    name: str
    mode: str = "max"
    value: float | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UsageError(f"BestMetric {self.name!r}: mode must be 'max' or 'min', not {self.mode!r}.")

    def update(self, value: float, step: int) -> bool:
        """Take note of a value; NaN is never the best, and of equals the first stays.

        Returns:
            Whether it is the best so far.
        """
        value = float(value)
        if math.isnan(value) or (self.value is not None and not self._better(value, self.value)):
            return False
        self.value, self.step = value, step
        return True

    def _better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than
