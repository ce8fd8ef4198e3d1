"""A schedule of another trainer's, where a run of one's own shows how it is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rlhf.core.account import Report
from mcore_rlhf.families.crossing.going_on import _scheduler
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
