"""A scheduler's lists have a value for each param group: dealt anew where a crossing deals the groups anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.families.crossing.schedule import with_fitting_schedule
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.models.spec import ModelSpec

VERL = Path(__file__).parents[2] / "goldens" / "verl" / "fsdp2_tied_ws2"


def test_a_schedule_of_one_group_is_that_of_both_that_megatron_makes_of_it(tmp_path: Path) -> None:
    """What torch pairs with the groups of an engine that has two: a longer or shorter list stops it at its first step."""
    convert(VERL, tmp_path / "megatron", ConvertOptions(to="megatron"))
    job = convert(
        tmp_path / "megatron", tmp_path / "zero", ConvertOptions(to="deepspeed", write=WriteOptions(zero_stage=2))
    )
    state = open_checkpoint(tmp_path / "zero", ReadOptions()).state
    assert state.scheduler is not None
    assert len(state.groups) == 2
    assert {key: len(state.scheduler[key]) for key in ("base_lrs", "_last_lr", "lr_lambdas")} == dict.fromkeys(
        ("base_lrs", "_last_lr", "lr_lambdas"), 2
    )
    assert state.scheduler["base_lrs"] == [0.01, 0.01]
    assert any(
        fate is Fate.DERIVED and "of 1 param groups become those of 2" in text for fate, text in job.report.lines
    )


def scheduled(base: list[float], *groups: dict[str, object]) -> Source:
    scheduler: dict[str, object] = {
        "base_lrs": base, "_last_lr": [rate / 2 for rate in base], "milestones": [1, 2], "last_epoch": 3,
        "_schedulers": [{"base_lrs": base}],
    }  # fmt: skip
    state = TrainingState(3, groups=tuple(ParamGroup(fields) for fields in groups), scheduler=scheduler)
    return Source("dcp", Path("run"), ModelSpec((), 0, False), Chunks(), state=state)


@pytest.mark.parametrize("field", ["initial_lr", "lr"])
def test_different_rates_go_to_the_groups_that_have_them(field: str) -> None:
    rates = (0.4, 0.2, 0.4) if field == "initial_lr" else (0.2, 0.1, 0.2)
    made = with_fitting_schedule(scheduled([0.2, 0.4], *({field: rate} for rate in rates))).state.scheduler
    assert made is not None
    assert (made["base_lrs"], made["_last_lr"]) == ([0.4, 0.2, 0.4], [0.2, 0.1, 0.2])
    assert (made["_schedulers"], made["milestones"]) == ([{"base_lrs": [0.4, 0.2, 0.4]}], [1, 2])


def test_rates_of_which_nobody_knows_whose_they_are_are_lost_by_name() -> None:
    made = with_fitting_schedule(scheduled([0.2, 0.4], {"lr": 0.7}, {}, {}))
    assert made.state.scheduler == {"last_batch_iteration": 2}
    assert any(fate is Fate.LOST and "nobody can tell" in text for fate, text in made.notes.lines)
