"""The pieces of the RLHF state: running statistics, the best value of a metric, buffers, and prompts in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...errors import UsageError


@dataclass
class RunningStatistics:
    """Count, mean, spread and bounds of all numbers seen so far.

    Updates and merges follow Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances". NaN and infinities go into the sums as in numpy: mask out what shall not count.

    Args:
        count: How many numbers.
        mean: Their mean; 0 where there are none.
        m2: Sum of squared distances from the mean.
        min: The least.
        max: The greatest.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @classmethod
    def of(cls, values: torch.Tensor | Sequence[float] | float, mask: torch.Tensor | None = None) -> RunningStatistics:
        """Statistics of one batch.

        Args:
            values: Any shape, dtype and device; read as float64.
            mask: Same shape; what is zero or False there does not count.

        Raises:
            UsageError: The mask has another shape.
        """
        numbers = torch.as_tensor(values, dtype=torch.float64).detach()
        if mask is not None:
            if mask.shape != numbers.shape:
                raise UsageError(f"The mask has shape {tuple(mask.shape)}, the values {tuple(numbers.shape)}.")
            numbers = numbers[mask.to(device=numbers.device, dtype=torch.bool)]
        return cls(numbers.numel(), *_moments(numbers)) if numbers.numel() else cls()

    def update(self, values: torch.Tensor | Sequence[float] | float, mask: torch.Tensor | None = None) -> None:
        """Add the numbers of one batch; see :meth:`of`."""
        self.merge(self.of(values, mask))

    def merge(self, other: RunningStatistics) -> None:
        """Add all that ``other`` has seen. ``a`` with ``b`` gives the same bits as ``b`` with ``a``."""
        if other.count == 0:
            return
        small, large = sorted((self, other), key=lambda part: (part.count, part.mean))
        count = self.count + other.count
        delta = small.mean - large.mean if small.count else 0.0
        share = small.count / count
        m2 = small.m2 + large.m2 + delta * delta * large.count * share
        # Between infinities the difference says nothing, and the sum is what the mean comes to.
        self.mean = large.mean + delta * share if math.isfinite(delta) else small.mean + large.mean
        self.min, self.max = _bound(min, self.min, other.min), _bound(max, self.max, other.max)
        self.count, self.m2 = count, m2

    def variance(self, ddof: int = 0) -> float:
        """Variance with divisor ``count − ddof``; NaN where there are too few numbers."""
        return self.m2 / (self.count - ddof) if self.count > ddof else math.nan

    def std(self, ddof: int = 0) -> float:
        """Standard deviation; see :meth:`variance`."""
        return math.sqrt(variance) if (variance := self.variance(ddof)) >= 0 else math.nan

    def merged_across(self, group: dist.ProcessGroup | None = None) -> RunningStatistics:
        """The statistics of all ranks together, the same bits on each of them; a collective call.

        Meant for a batch: ``state.reward.merge(RunningStatistics.of(rewards).merged_across(group))``. Merging
        running statistics that already hold all ranks would count everything once per rank.

        Args:
            group: The process group; the default one where None.
        """
        parts: list[RunningStatistics | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self, group=group)
        return merged(part for part in parts if part is not None)


def merged(parts: Iterable[RunningStatistics]) -> RunningStatistics:
    """The statistics of several parts together, merged in their order; the parts stay as they are."""
    total = RunningStatistics()
    for part in parts:
        total.merge(part)
    return total


def _moments(numbers: torch.Tensor) -> tuple[float, float, float, float]:
    """Mean, sum of squared distances, least and greatest, with the mean's rounding error taken out again."""
    mean = numbers.mean()
    distances = numbers - mean
    rest = torch.where(mean.isfinite(), distances.mean(), 0.0)
    m2 = (distances.square().sum() - numbers.numel() * rest.square()).clamp(min=0)
    least, greatest = torch.aminmax(numbers)
    first, second, third, fourth = torch.stack([mean + rest, m2, least, greatest]).tolist()  # one copy from a GPU
    return first, second, third, fourth


def _bound(choose: Callable[[float, float], float], first: float, second: float) -> float:
    return math.nan if math.isnan(first) or math.isnan(second) else choose(first, second)


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


@dataclass(eq=False)
class Buffer:
    """A replay or rollout buffer: tensors by name, streamed into a file of its own, and what a person may read.

    Args:
        tensors: The contents; any shapes and dtypes.
        meta: What belongs to them: plain values that JSON can hold.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meta: dict[str, object] = field(default_factory=dict)


@dataclass(eq=False)
class InFlightPrompt:
    """A prompt that was given out, and whose samples have not all been trained on.

    Args:
        epoch: The epoch that it was drawn in.
        prompt_id: Its identity in the data set.
        samples: Indices, within its group, of the samples that are still out.
        weight_version: Version of the policy that samples it.
        attempt: How often it was given out before.
        tensors: What was sampled so far, by a name of the trainer's choice: tokens, log-probabilities.
    """

    epoch: int
    prompt_id: int | str
    samples: tuple[int, ...]
    weight_version: int
    attempt: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
