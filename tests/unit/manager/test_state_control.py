"""KL controllers, schedules, the best metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.rlhf.controls import (
    KL_CONTROLLERS,
    SCHEDULES,
    AdaptiveKL,
    ConstantSchedule,
    CosineSchedule,
    FixedKL,
    KLController,
    LinearSchedule,
    Schedule,
)
from mcore_rlhf.manager.rlhf.pieces import BestMetric


def test_adaptive_kl_by_hand() -> None:
    controller = AdaptiveKL(0.2, target=6.0, horizon=10_000)
    controller.update(6.0, 256)  # on target: unchanged
    assert controller.value == controller.coefficient == 0.2
    controller.update(6.6, 256)  # 10 % too high: 1 + 0.1 · 0.0256
    assert controller.value == pytest.approx(0.2 * 1.00256, rel=1e-15)
    controller.coefficient = 0.2
    controller.update(60.0, 256)  # clipped at +0.2
    assert controller.value == pytest.approx(0.2 * 1.00512, rel=1e-15)
    controller.coefficient = 0.2
    controller.update(0.0, 256)  # clipped at −0.2
    assert controller.value == pytest.approx(0.2 * 0.99488, rel=1e-15)


class _Ziegler:
    """The formula as lm-human-preferences, verl and OpenRLHF write it, with numpy."""

    def __init__(self, value: float, target: float, horizon: float) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        error = np.clip(current / self.target - 1, -0.2, 0.2)
        self.value *= 1 + error * n_steps / self.horizon


@given(
    st.floats(1e-4, 10), st.floats(0.01, 100), st.integers(1, 10**6),
    st.lists(st.tuples(st.floats(-10, 1e3) | st.just(math.nan), st.integers(0, 4096)), max_size=20),
)  # fmt: skip
@settings(max_examples=60)
def test_adaptive_kl_has_the_bits_of_the_numpy_formula(
    start: float, target: float, horizon: int, measured: list[tuple[float, int]]
) -> None:
    ours, theirs = AdaptiveKL(start, target, horizon), _Ziegler(start, target, horizon)
    for current, n_steps in measured:
        ours.update(current, n_steps)
        theirs.update(current, n_steps)
        assert ours.value.hex() == float(theirs.value).hex()


def test_adaptive_kl_keeps_the_bits_over_a_long_run() -> None:
    measured, ours, theirs = np.random.default_rng(3), AdaptiveKL(0.2, 6.0, 130), _Ziegler(0.2, 6.0, 130)
    # Large steps, so that the order of operations shows in the last bits.
    for current in 6 + measured.normal(size=1000):
        ours.update(float(current), 97)
        theirs.update(float(current), 97)
    assert ours.value.hex() == float(theirs.value).hex()


def test_fixed_kl_stays() -> None:
    controller = FixedKL(0.05)
    controller.update(1e9, 10)
    assert controller.value == 0.05


@pytest.mark.parametrize(
    ("name", "number"), [("target", 0.0), ("target", math.nan), ("horizon", -1), ("horizon", math.inf)]
)
def test_adaptive_kl_refuses_what_it_would_divide_by(name: str, number: float) -> None:
    with pytest.raises(UsageError, match=f"AdaptiveKL: {name} must be a positive number"):
        AdaptiveKL(0.1, **{"target": 6.0, "horizon": 100, name: number})


def test_schedules_at_known_positions() -> None:
    linear, cosine = LinearSchedule(0.2, 0.1, 10), CosineSchedule(0.0, 1.0, 4)
    assert [linear.at(position) for position in (-1, 0, 10, 11)] == [0.2, 0.2, 0.1, 0.1]
    assert linear.at(5) == pytest.approx(0.15, rel=1e-15)
    halves = [0.0, (1 - math.sqrt(0.5)) / 2, 0.5, (1 + math.sqrt(0.5)) / 2, 1.0, 1.0]
    assert [cosine.at(position) for position in range(6)] == pytest.approx(halves, abs=1e-15)
    assert ConstantSchedule(0.3).at(1000) == 0.3


def test_a_schedule_advances() -> None:
    schedule = LinearSchedule(1.0, 0.0, 4)
    assert (schedule.value, schedule.step(), schedule.step(2), schedule.step(5)) == (1.0, 0.75, 0.25, 0.0)
    assert schedule.position == 8


@pytest.mark.parametrize("cls", [LinearSchedule, CosineSchedule])
def test_a_schedule_of_no_steps_is_refused(cls: type[LinearSchedule] | type[CosineSchedule]) -> None:
    with pytest.raises(UsageError, match=f"{cls.__name__}: steps must be at least 1, not 0"):
        cls(1.0, 0.0, 0)


def test_the_best_metric() -> None:
    best = BestMetric("reward")
    news = [best.update(value, step) for step, value in enumerate([math.nan, 1.0, 0.5, 1.0, 2.0, math.inf, math.nan])]
    assert news == [False, True, False, False, True, True, False]
    assert (best.value, best.step) == (math.inf, 5)
    least = BestMetric("loss", "min")
    assert [least.update(value, 0) for value in (1.0, 2.0, 0.5)] == [True, False, True]
    with pytest.raises(UsageError, match="mode must be 'max' or 'min', not 'best'"):
        BestMetric("loss", "best")


def test_only_what_can_be_stored_is_registered() -> None:
    class Plain(FixedKL):
        pass

    @dataclass(frozen=True)
    class Frozen:
        coefficient: float

    @dataclass
    class Kind(Schedule):
        kind: str

        def at(self, position: int) -> float:
            return 0.0

    @dataclass
    class Other(KLController):
        pass

    for cls in (Frozen, int):
        with pytest.raises(UsageError, match="must be a dataclass that is not frozen"):
            KL_CONTROLLERS.register("mine")(cls)
    with pytest.raises(UsageError, match="no field called 'kind'"):
        SCHEDULES.register("mine")(Kind)
    with pytest.raises(UsageError, match="kind 'fixed' is FixedKL already"):
        KL_CONTROLLERS.register("fixed")(Other)
    assert KL_CONTROLLERS.kind_of(Plain(0.1)) is None
