"""Controllers of the KL coefficient, and schedules of a clip range, an entropy bonus or any other coefficient.

They are stored by the name of their kind: adding one is adding a class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Generic, TypeVar

from ...errors import Corrupt, Incomplete, Problems, Unsupported, UsageError
from ...storage.records import read_fields, shorten, write_fields

T = TypeVar("T")
C = TypeVar("C")

_MAX_ERROR = 0.2


class KindRegistry(Generic[T]):
    """The kinds of one thing, by the name that stands in the file.

    A registered class is a dataclass, not frozen, whose fields are all of its state: numbers, strings, booleans,
    lists and dicts of such, or None.

    Args:
        what: What they are, for messages: ``KL controller``.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._classes: dict[str, type[T]] = {}

    def register(self, kind: str) -> Callable[[type[C]], type[C]]:
        """Decorate a class that is to be stored as ``"kind": kind``.

        Raises:
            UsageError: The kind is taken, or the class cannot be stored.
        """

        def decorate(cls: type[C]) -> type[C]:
            self._check(kind, cls)
            self._classes[kind] = cls  # type: ignore[assignment]  # the registry's T; the decorator keeps C
            return cls

        return decorate

    def _check(self, kind: str, cls: type[object]) -> None:
        if not is_dataclass(cls) or cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise UsageError(f"{cls.__qualname__}: a {self.what} must be a dataclass that is not frozen.")
        if any(item.name == "kind" for item in fields(cls)):
            raise UsageError(f"{cls.__qualname__}: a {self.what} has no field called 'kind'; that is its name here.")
        taken = self._classes.get(kind)
        # The same class again is a notebook's cell that was run twice.
        if taken and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(f"The {self.what} kind {kind!r} is {taken.__qualname__} already; take another name.")

    def kind_of(self, item: object) -> str | None:
        """The name of an object's kind, or None where its class is not registered."""
        return next((kind for kind, cls in self._classes.items() if type(item) is cls), None)

    def write(self, item: T, place: str, problems: Problems) -> dict[str, object]:
        """An object as plain values, its kind first."""
        kind = self.kind_of(item)
        if kind is None:
            problems.add(
                UsageError,
                f"{place}: {type(item).__qualname__} is not a {self.what} that can be stored; known are {self._known()}",
                "Register your own class: see docs/reference/rlhf-state.md",
            )
            return {}
        return {"kind": kind, **write_fields(item, place, problems)}

    def read(self, content: object, place: str, problems: Problems) -> T | None:
        """Build an object from its JSON; None where something is wrong, which is noted."""
        if not isinstance(content, dict):
            problems.add(Corrupt, f"{place}: expected a {self.what} as an object, found {shorten(content)}")
            return None
        rest = dict(content)
        kind = rest.pop("kind", None)
        if kind is None:
            problems.add(Incomplete, f"{place}: missing fields: kind")
            return None
        if not isinstance(kind, str) or kind not in self._classes:
            advice = "Import the module that registers it before loading."
            text = f"{place}: unknown kind of {self.what} {shorten(kind)}; known are {self._known()}"
            problems.add(Unsupported, text, advice)
            return None
        return read_fields(self._classes[kind], rest, place, problems)

    def _known(self) -> str:
        return ", ".join(sorted(self._classes))


KL_CONTROLLERS: KindRegistry[KLController] = KindRegistry("KL controller")
"""Register a controller of your own: ``@KL_CONTROLLERS.register("name")`` above its ``@dataclass``."""


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


SCHEDULES: KindRegistry[Schedule] = KindRegistry("schedule")
"""Register a schedule of your own: ``@SCHEDULES.register("name")`` above its ``@dataclass``."""


@dataclass
class Schedule(ABC):
    """A value that depends on how far training has come, and on nothing else: resuming restores it exactly."""

    position: int = field(default=0, kw_only=True)

    @abstractmethod
    def at(self, position: int) -> float:
        """The value after ``position`` steps."""

    @property
    def value(self) -> float:
        """The value now."""
        return self.at(self.position)

    def step(self, count: int = 1) -> float:
        """Advance by ``count`` steps; returns the new value."""
        self.position += count
        return self.value


@SCHEDULES.register("constant")
@dataclass
class ConstantSchedule(Schedule):
    """Always the same.

    Args:
        constant: The value.
        position: Steps taken.
    """

    constant: float

    def at(self, position: int) -> float:
        """The constant."""
        return self.constant


@dataclass
class _Ramp(Schedule):
    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"{type(self).__name__}: steps must be at least 1, not {self.steps!r}.")

    def at(self, position: int) -> float:
        """From ``start`` to ``end``, which is exact from ``steps`` on."""
        if position <= 0:
            return self.start
        return self.end if position >= self.steps else self._between(position / self.steps)

    @abstractmethod
    def _between(self, fraction: float) -> float: ...


@SCHEDULES.register("linear")
@dataclass
class LinearSchedule(_Ramp):
    """A straight line, then flat.

    Args:
        start: Value at position 0.
        end: Value from position ``steps`` on.
        steps: Length of the line; at least 1.
        position: Steps taken.
    """

    def _between(self, fraction: float) -> float:
        return self.start + (self.end - self.start) * fraction


@SCHEDULES.register("cosine")
@dataclass
class CosineSchedule(_Ramp):
    """Half a cosine, then flat.

    Args:
        start: Value at position 0.
        end: Value from position ``steps`` on.
        steps: Length of the half wave; at least 1.
        position: Steps taken.
    """

    def _between(self, fraction: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * fraction)) / 2
