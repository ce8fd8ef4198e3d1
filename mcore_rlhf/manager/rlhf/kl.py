"""Controllers of the KL coefficient, with the arithmetic of the trainers that people know."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ...errors import UsageError
from .kinds import Kinds

KL_CONTROLLERS: Kinds[KLController] = Kinds("KL controller")
"""Register a controller of your own: ``@KL_CONTROLLERS.register("name")`` above its ``@dataclass``."""

_MAX_ERROR = 0.2


@dataclass
class KLController(ABC):
    """Holds the coefficient β of the KL penalty.

    Args:
        coefficient: The β to use now.
    """

    coefficient: float

    @property
    def value(self) -> float:
        """The coefficient, by the name that TRL, verl and OpenRLHF give it."""
        return self.coefficient

    @abstractmethod
    def update(self, current: float, n_steps: int) -> None:
        """Take note of what was measured.

        Args:
            current: Mean KL divergence between the policy and its reference, in nats.
            n_steps: How much was sampled since the last update, in the unit of a horizon (episodes).
        """


@KL_CONTROLLERS.register("fixed")
@dataclass
class FixedKL(KLController):
    """A coefficient that stays.

    Args:
        coefficient: β.
    """

    def update(self, current: float, n_steps: int) -> None:
        """Does nothing."""


@KL_CONTROLLERS.register("adaptive")
@dataclass
class AdaptiveKL(KLController):
    """Moves the coefficient so that the KL divergence stays near a target (Ziegler et al. 2019, section 2.2).

    The formula and its order of operations are those of ``AdaptiveKLController`` in ``openai/lm-human-preferences``
    (``lm_human_preferences/train_policy.py`` at f774e89), ``volcengine/verl`` (``verl/trainer/ppo/core_algos.py`` at
    012be9d) and ``OpenRLHF/OpenRLHF`` (``openrlhf/trainer/ppo_utils/kl_controller.py`` at 658ecc3), so that the same
    float64 measurements give the same bits. As there, a KL of NaN makes the coefficient NaN.

    Args:
        coefficient: β to start with.
        target: The wished KL divergence, in nats; positive.
        horizon: In how many steps an error is made up for; positive.
    """

    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            number = getattr(self, name)
            if not (number > 0 and math.isfinite(number)):
                raise UsageError(f"AdaptiveKL: {name} must be a positive number, not {number!r}.")

    def update(self, current: float, n_steps: int) -> None:
        """β := β · (1 + clip(current / target − 1, ±0.2) · n_steps / horizon)."""
        error = float(current) / self.target - 1
        # Not min(max()): they would turn NaN into a bound, where numpy.clip keeps it.
        if error > _MAX_ERROR:
            error = _MAX_ERROR
        elif error < -_MAX_ERROR:
            error = -_MAX_ERROR
        self.coefficient *= 1 + error * n_steps / self.horizon
