"""Which stored param group a live one continues."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rlhf.engines.megatron.groups import continued, identity
from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.source import ParamGroup


def live(wd_mult: float = 1.0, expert: bool = False, **more: Any) -> dict[str, Any]:
    return {"wd_mult": wd_mult, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": expert,
            "params": ["p"], "lr": 0.5, "max_lr": 1.0, "min_lr": 0.1, **more}  # fmt: skip


def stored(wd_mult: float = 1.0, expert: bool = False, **more: Any) -> ParamGroup:
    fields = {**live(wd_mult, expert), "params": [0, 1], "lr": 0.25, "step": 7, **more}
    return ParamGroup(fields, expert)


def found(
    live_groups: list[dict[str, Any]], stored_groups: list[ParamGroup]
) -> tuple[list[dict[str, object]], Problems]:
    problems = Problems()
    return continued(live_groups, stored_groups, problems), problems


def test_groups_are_found_whatever_their_order() -> None:
    fields, problems = found([live(0.0), live(1.0)], [stored(1.0, lr=1e-3), stored(0.0, lr=2e-3)])
    assert [(f["wd_mult"], f["lr"], f["step"]) for f in fields] == [(0.0, 2e-3, 7), (1.0, 1e-3, 7)]
    assert not problems


def test_what_belongs_to_the_layout_stays_live() -> None:
    fields, _ = found([live()], [stored()])
    assert "params" not in fields[0]
    assert "is_expert_parallel" not in fields[0]


def test_nemos_names_are_the_same_keys() -> None:
    nemo = ParamGroup({"pre_wd_mult": 0.0, "pre_lr_mult": 1.0, "lr": 3.0})
    fields, problems = found([live(0.0)], [nemo, stored(1.0)])
    assert fields[0]["lr"] == 3.0
    assert not problems
    assert identity(nemo.fields) == identity(live(0.0))


def test_experts_continue_their_own_group_where_there_is_one() -> None:
    fields, problems = found([live(), live(expert=True)], [stored(expert=True, lr=2.0), stored(lr=1.0)])
    assert [f["lr"] for f in fields] == [1.0, 2.0]
    assert not problems


def test_experts_that_are_dealt_out_now_continue_the_common_group() -> None:
    fields, problems = found([live(), live(expert=True)], [stored(lr=1.0)])
    assert [f["lr"] for f in fields] == [1.0, 1.0]
    assert not problems


def test_experts_that_are_not_dealt_out_any_more_join_the_dense_group() -> None:
    fields, problems = found([live()], [stored(), stored(expert=True)])
    assert len(fields) == 1
    assert not problems


def test_groups_that_would_be_joined_must_be_equal() -> None:
    _, problems = found([live()], [stored(step=7), stored(expert=True, step=6)])
    with pytest.raises(Lossy, match="step 7 and 6"):
        problems.raise_if_any()


def test_experts_of_two_optimizers_join_the_dense_groups_of_each() -> None:
    """Muon's groups name no optimizer; since 0.18 Adam's do, and before it they have betas."""
    for adam in ({"optimizer": "adam", "betas": (0.9, 0.95)}, {"betas": (0.9, 0.95)}):
        both = [stored(momentum=0.95), stored(step=7, **adam), stored(expert=True, momentum=0.95)]
        fields, problems = found([live(momentum=0.95), live(**adam)], [*both, stored(expert=True, step=7, **adam)])
        problems.raise_if_any()
        assert ["betas" in one for one in fields] == [False, True]


def test_groups_that_differ_in_their_rates_alone() -> None:
    """``--decoupled-lr`` in megatron-core 0.16.1: the embedding's group has another ``max_lr``, and nothing else."""
    embedding, others = {"max_lr": 5.0, "min_lr": 0.1}, {"max_lr": 1.0, "min_lr": 0.1}
    fields, problems = found(
        [live(**others), live(**embedding)], [stored(lr=50.0, **embedding), stored(lr=10.0, **others)]
    )
    assert [f["lr"] for f in fields] == [10.0, 50.0]
    assert not problems
    _, problems = found([live(**others), live(**embedding)], [stored(**others)])
    with pytest.raises(LayoutMismatch, match=r"max_lr 5\.0.*0 groups"):
        problems.raise_if_any()


def test_a_missing_group_is_named_with_what_there_is() -> None:
    _, problems = found([live(0.5), live(0.25)], [stored(1.0)])
    with pytest.raises(LayoutMismatch) as caught:
        problems.raise_if_any()
    assert "wd_mult 0.5" in str(caught.value)
    assert "wd_mult 0.25" in str(caught.value)
    assert "it has: wd_mult 1.0" in str(caught.value)
