"""A schedule of another trainer's, where a run of one's own shows how it is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from mcore_rlhf.core.account import Report
from mcore_rlhf.families.crossing.going_on import _scheduler, schedule_at
from mcore_rlhf.families.source import ParamGroup


@pytest.mark.parametrize("count", [1, 2])
def test_functions_without_a_state_are_written_as_the_run_writes_them(count: int) -> None:
    """``{}`` of a transformers schedule vanishes in DCP's flat keys, and NeMo-RL's loader asks for the key."""

    def source(lambdas: list[Any]) -> Any:
        rates = [0.01] * len(lambdas)
        schedule = {"base_lrs": rates, "last_epoch": 3, "_last_lr": rates, "lr_lambdas": lambdas}
        return SimpleNamespace(state=SimpleNamespace(scheduler=schedule, iteration=3))

    groups = tuple(ParamGroup({"lr": 0.01}) for _ in range(count))
    found = _scheduler(source([{}, {}]), source([None] * count), groups, Report())
    assert found is not None
    assert found["lr_lambdas"] == [None] * count
    kept = _scheduler(source([{"warmup": 5}] * count), source([None] * count), groups, Report())
    assert kept is not None
    assert kept["lr_lambdas"] == [{"warmup": 5}] * count


def _sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts: list[lr_scheduler.LRScheduler] = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4),
        lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [4, 7])


def _chain(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    )


@pytest.mark.parametrize("made", [_sequence, _chain])
def test_a_schedule_of_several_is_where_torch_itself_would_have_it(
    made: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
) -> None:
    """From any step of the run to any other: torch goes on with the rates of a run that had come there."""

    def run() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        return optimizer, made(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its step(0)
        (optimizer, scheduler), states, rates = run(), [], list[float]()
        for _ in range(12):
            states.append(deepcopy(scheduler.state_dict()))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        for before, at in product((0, 3, 4, 9), (0, 1, 3, 4, 6, 7, 10)):
            optimizer, scheduler = run()
            scheduler.load_state_dict(schedule_at(deepcopy(states[before]), at, [rates[at]]))
            optimizer.param_groups[0]["lr"] = rates[at]
            for wanted in rates[at + 1 :]:
                optimizer.step()
                scheduler.step()
                assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted, abs=1e-12)
