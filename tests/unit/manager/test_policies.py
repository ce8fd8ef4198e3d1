"""When to save."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.run.policies import (
    AnyOf,
    AtEnd,
    BeforeDeadline,
    Deadline,
    EveryMinutes,
    EverySteps,
    OnSignal,
    SaveClock,
    SavePoint,
    SignalFlag,
)


class Hands:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_every_n_steps_but_not_before_the_first() -> None:
    policy = EverySteps(3)
    assert [step for step in range(10) if policy.wants(SavePoint(step))] == [3, 6, 9]
    assert policy.wants(SavePoint(3)) == "every 3 steps"


@pytest.mark.parametrize("make", [lambda: EverySteps(0), lambda: EverySteps(-1), lambda: EveryMinutes(0)])
def test_intervals_are_positive(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match="should be positive"):
        make()


def test_every_t_minutes_since_the_last_save() -> None:
    hands = Hands()
    clock, policy = SaveClock(clock=hands), EveryMinutes(1.5)
    hands.now += 89
    assert policy.wants(clock.at(1)) is None
    hands.now += 1
    assert policy.wants(clock.at(2)) == "every 1.5 minutes"
    clock.save_started()
    assert policy.wants(clock.at(3)) is None


def test_a_wall_clock_that_goes_backwards_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    deadline = Deadline.after(100, hands)
    clock = SaveClock(deadline, hands)
    monkeypatch.setattr(time, "time", lambda: -1e9)
    hands.now += 40
    at = clock.at(1)
    assert (at.seconds_since_save, at.seconds_to_deadline) == (40.0, 60.0)


def test_the_deadline_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    deadline = Deadline.of_job({"SLURM_JOB_END_TIME": "5600"}, Hands())
    assert deadline is not None
    assert deadline.remaining() == 600.0
    assert Deadline.of_job({}, Hands()) is None
    assert Deadline.of_job({"SLURM_JOB_END_TIME": "0"}, Hands()) is None
    with pytest.raises(UsageError, match="SLURM_JOB_END_TIME: expected seconds since 1970, found 'soon'"):
        Deadline.of_job({"SLURM_JOB_END_TIME": "soon"}, Hands())


def test_before_the_deadline_while_there_is_time_for_a_slow_save_and_a_step() -> None:
    policy = BeforeDeadline(factor=2.0, seconds=60.0)

    def wants(left: float) -> bool:
        at = SavePoint(7, 500.0, left, last_save_seconds=30.0, step_seconds=10.0, saves=1)
        return policy.wants(at) is not None

    assert not wants(131.0)
    assert wants(130.0)  # 2 × 30 + 60 + 10
    assert wants(-5.0)  # too late, but better tried
    assert policy.wants(SavePoint(7)) is None


def test_before_the_deadline_only_once() -> None:
    hands = Hands()
    clock, policy, saved = SaveClock(Deadline.after(300, hands), hands), BeforeDeadline(1.0, 50.0), []
    for step in range(1, 30):
        hands.now += 10
        if policy.wants(clock.at(step)):
            saved.append(step)
            clock.save_started()
            hands.now += 5
            clock.save_took(5)
    assert saved == [24]  # 60 s are left: 50 and one more step


@given(st.floats(1, 100), st.floats(0, 100), st.floats(0, 3), st.floats(0, 200), st.floats(100, 5000))
def test_the_save_before_a_deadline_ends_in_time(
    step: float, save: float, factor: float, seconds: float, limit: float
) -> None:
    """Whatever the durations are, a save that takes no longer than expected is over before the job is."""
    hands = Hands()
    clock = SaveClock(Deadline.after(limit, hands), hands)
    clock.save_took(save)
    policy = BeforeDeadline(factor, seconds)
    steps = 0
    while (steps + 1) * step <= limit:
        hands.now = 1000.0 + (steps + 1) * step
        steps += 1
        if policy.wants(clock.at(steps)):
            left = limit - steps * step
            assert left >= min(factor * save + seconds, limit - step) - 1e-6
            return
    raise AssertionError("the job ended, and nothing was saved before")


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(UsageError, match="should not be negative"):
        BeforeDeadline(factor=-1)


def test_the_last_step_and_signals() -> None:
    assert AtEnd().wants(SavePoint(3)) is None
    assert AtEnd().wants(SavePoint(3, last=True)) == "the last step"
    assert OnSignal().wants(SavePoint(3)) is None
    assert OnSignal().wants(SavePoint(3, signalled=signal.SIGUSR1)) == "SIGUSR1"
    assert OnSignal([signal.SIGTERM]).wants(SavePoint(3, signalled=signal.SIGUSR1)) is None


def test_any_of_gives_all_reasons() -> None:
    policy = AnyOf([EverySteps(2), AtEnd(), EverySteps(3)])
    assert policy.wants(SavePoint(1)) is None
    assert policy.wants(SavePoint(6, last=True)) == "every 2 steps, the last step, every 3 steps"
    assert AnyOf().wants(SavePoint(6, last=True)) is None


def test_the_clock_measures_steps_and_saves() -> None:
    hands = Hands()
    clock = SaveClock(clock=hands)
    assert clock.at(0).saves == 0
    hands.now += 7
    assert clock.at(1).step_seconds == 7.0
    hands.now += 1
    assert clock.at(1).step_seconds == 7.0  # asked again at the same boundary
    clock.save_started()
    clock.save_took(3.0)
    hands.now += 4
    at = clock.at(2)
    assert (at.step_seconds, at.seconds_since_save, at.last_save_seconds, at.saves) == (5.0, 4.0, 3.0, 1)


def test_a_signal_is_remembered_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with SignalFlag() as flag:
        assert flag.received == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.received == signal.SIGUSR1  # the first
        flag.clear()
        assert flag.received == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_earlier_handlers_are_called_and_what_they_raise_is_held_back() -> None:
    called = []

    def earlier(number: int, frame: object) -> None:
        called.append(number)
        raise SystemExit(3)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        with SignalFlag([signal.SIGUSR1]) as flag:
            flag.install()  # twice is once
            os.kill(os.getpid(), signal.SIGUSR1)
        assert called == [signal.SIGUSR1]
        assert [type(error) for error in flag.held_back] == [SystemExit]
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_was_set_later_stays() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def later(number: int, frame: object) -> None:
        pass

    flag = SignalFlag([signal.SIGUSR1]).install()
    signal.signal(signal.SIGUSR1, later)
    try:
        flag.restore()
        assert signal.getsignal(signal.SIGUSR1) is later
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_the_main_thread_can_listen() -> None:
    errors: list[BaseException] = []

    def listen() -> None:
        try:
            SignalFlag().install()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=listen, name="trainer")
    thread.start()
    thread.join()
    assert "main thread only, and this is thread 'trainer'" in str(errors[0])
