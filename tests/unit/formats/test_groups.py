"""Which param group a parameter is in, and which groups a layout has; against what the goldens store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.core.catalog import BFLOAT16
from mcore_rlhf.errors import LayoutMismatch, Lossy
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.groups import ChainedOptimizer, LocalParam, Membership, groups_for, merged_groups
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.formats.registry import open_without_manifest
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import REPLICATED, ParamRule, ParamSpec, Rules
from tests.helpers.conversions import GOLDENS, Conversions, golden
from tests.helpers.damage import edited
from tests.unit.formats.refusal import refused

DECAYED = ParamGroup({"wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 1e-3, "step": 2, "is_expert_parallel": False})
SPARED = ParamGroup({"wd_mult": 0.0, "lr_mult": 1.0, "max_lr": 1e-3, "step": 2, "is_expert_parallel": False})
DECOUPLED = ParamGroup({"wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 5e-4, "step": 2, "is_expert_parallel": False})


def membership(rules: Rules | None = None, **args: Any) -> Membership:
    return Membership(Arguments(args), rules or Rules())


@pytest.mark.parametrize(
    ("name", "ndim", "args", "wd_mult"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", 2, {}, 1.0),
        ("decoder.layers.0.mlp.linear_fc1.bias", 1, {}, 0.0),
        ("decoder.layers.0.input_layernorm.weight", 1, {}, 0.0),
        ("embedding.word_embeddings.weight", 2, {}, 1.0),
        ("some.module.bias", 2, {}, 0.0),
        ("decoder.layers.0.self_attention.q_layernorm.weight", 1, {}, 0.0),
        ("decoder.layers.0.self_attention.q_layernorm.weight", 1, {"apply_wd_to_qk_layernorm": True}, 1.0),
        ("decoder.layers.0.self_attention.k_layernorm.weight", 1, {"apply_wd_to_qk_layernorm": True}, 1.0),
        ("decoder.layers.0.input_layernorm.weight", 1, {"apply_wd_to_qk_layernorm": True}, 0.0),
    ],
)
def test_weight_decay(name: str, ndim: int, args: dict[str, bool], wd_mult: float) -> None:
    assert membership(**args).wd_mult(name, ndim) == wd_mult


def test_rules_win() -> None:
    chosen = membership(Rules((ParamRule("*.special", wd_mult=0.5), ParamRule("*norm*", wd_mult=1.0))))
    assert chosen.wd_mult("x.special", 2) == 0.5
    assert chosen.wd_mult("decoder.final_layernorm.weight", 1) == 1.0


def test_the_group_is_found_whatever_the_order() -> None:
    chosen = membership()
    for groups in ([DECAYED, SPARED], [SPARED, DECAYED]):
        assert groups[chosen.index("x.weight", 2, groups)] is DECAYED
        assert groups[chosen.index("x.weight", 1, groups)] is SPARED
    nemo = [ParamGroup({"pre_wd_mult": g.fields["wd_mult"]}) for g in (SPARED, DECAYED)]
    assert chosen.index("x.weight", 2, nemo) == 1


def test_a_decoupled_rate_is_that_of_embeddings_and_output() -> None:
    chosen, groups = membership(decoupled_lr=5e-4), [DECAYED, DECOUPLED, SPARED]
    assert chosen.index("embedding.word_embeddings.weight", 2, groups) == 1
    assert chosen.index("output_layer.weight", 2, groups) == 1
    assert chosen.index("decoder.layers.0.mlp.linear_fc1.weight", 2, groups) == 0
    assert chosen.index("decoder.final_layernorm.weight", 1, groups) == 2


def test_no_group_or_two_are_no_guess() -> None:
    with pytest.raises(LayoutMismatch, match=r"x\.weight: 0 of the 1 param groups.*\n.*--rules"):
        membership().index("x.weight", 1, [DECAYED])
    with pytest.raises(LayoutMismatch, match=r"2 of the 2 .*differ in max_lr \(0\.001, 0\.0005\), and nothing says"):
        membership().index("x.weight", 2, [DECAYED, DECOUPLED])


@pytest.mark.parametrize(("optimizer", "scaled"), [("adam", (False, True, True)), ("sgd", (True, False, False))])
def test_mup_gives_hidden_matrices_a_rate_of_their_own(optimizer: str, scaled: tuple[bool, ...]) -> None:
    """As Megatron's ``get_mup_config_overrides`` says; with SGD it is the others' that is scaled."""
    chosen = membership(use_mup=True, lr=1e-3, optimizer=optimizer, untie_embeddings_and_output_weights=True)
    names = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "output_layer.weight")
    for groups in ([DECAYED, DECOUPLED, SPARED], [SPARED, DECOUPLED, DECAYED]):
        assert [groups[chosen.index(name, 2, groups)] is DECOUPLED for name in names] == [*scaled]
        assert groups[chosen.index("decoder.final_layernorm.weight", 1, groups)] is SPARED
    tied = membership(use_mup=True, lr=1e-3, optimizer=optimizer, untie_embeddings_and_output_weights=False)
    assert tied.index("output_layer.weight", 2, [DECAYED, DECOUPLED]) == scaled[0]


def test_groups_of_ranks_are_merged_and_must_agree() -> None:
    assert merged_groups([[DECAYED, SPARED], [DECAYED, SPARED]]) == (DECAYED, SPARED)
    assert merged_groups([[DECAYED], [SPARED]]) == (DECAYED, SPARED)
    later = ParamGroup({**DECAYED.fields, "step": 3})
    with pytest.raises(Lossy, match=r"step \(2 and 3\)"):
        merged_groups([[DECAYED], [later]])


def test_a_group_that_is_empty_on_a_rank_has_the_step_of_the_others() -> None:
    """Which it lacks there; it may have what they lack, and another epsilon is another group."""
    empty = ParamGroup({key: value for key, value in DECAYED.fields.items() if key != "step"} | {"of_a_hook": 1})
    whole = ParamGroup({**DECAYED.fields, "of_a_hook": 1})
    other = ParamGroup({**DECAYED.fields, "eps": 1e-6, "step": 9})
    for ranks in ([[empty, other], [DECAYED, other]], [[DECAYED, other], [empty, other]]):
        first, second = merged_groups(ranks)
        assert (first, second) == (whole, other)


def _spec(name: str, *shape: int) -> ParamSpec:
    return ParamSpec(name, shape, BFLOAT16, REPLICATED)


EXPERT = ParamGroup({**DECAYED.fields, "is_expert_parallel": True}, expert=True)
SPECS = [
    _spec("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", 8, 4),
    _spec("decoder.layers.0.mlp.linear_fc1.weight", 8, 4),
    _spec("decoder.final_layernorm.weight", 4),
]


def test_experts_share_a_group_only_if_they_agree() -> None:
    assert groups_for([DECAYED, SPARED, EXPERT], False, SPECS, membership()) == ([DECAYED, SPARED], [])
    assert groups_for([DECAYED, SPARED, EXPERT], True, SPECS, membership()) == ([DECAYED, SPARED], [EXPERT])
    slower = ParamGroup({**EXPERT.fields, "step": 1}, expert=True)
    with pytest.raises(Lossy, match="step"):
        groups_for([DECAYED, SPARED, slower], False, SPECS, membership())


def test_dealt_experts_get_the_groups_that_they_have_parameters_for() -> None:
    assert groups_for([DECAYED, SPARED], True, SPECS, membership()) == ([DECAYED, SPARED], [EXPERT])
    assert groups_for([DECAYED, SPARED], True, SPECS[1:], membership()) == ([DECAYED, SPARED], [])
    bias = _spec("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.bias", 8)
    both = groups_for([DECAYED, SPARED], True, [*SPECS, bias], membership())[1]
    assert [group.fields["wd_mult"] for group in both] == [1.0, 0.0]


def test_only_dealt_experts_have_an_optimizer_of_their_own() -> None:
    shared = _spec("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", 8, 4)
    experts = ChainedOptimizer((0,), expert=True)
    expert, other = (LocalParam(spec.name, 0, spec.global_shape, BFLOAT16, False) for spec in (SPECS[0], shared))
    assert experts.owns(expert, True)
    assert not experts.owns(expert, False)
    assert not experts.owns(other, True)


@pytest.mark.parametrize(("newer", "ep", "etp", "apart"), [
    (False, 2, 2, True), (False, 1, 2, False), (False, 1, 1, False),
    (True, 2, 2, True), (True, 1, 2, False), (True, 1, 1, True),
])  # fmt: skip
def test_experts_that_are_cut_otherwise_are_apart_since_0_19(newer: bool, ep: int, etp: int, apart: bool) -> None:
    args = Arguments({"num_experts": 4, **({"mamba_training_ssm_states_dtype": None} if newer else {})})
    assert args.experts_apart(ParallelConfig(tp=2, ep=ep, etp=etp, dp=2)) == apart
    assert not Arguments({**args.values, "num_experts": None}).experts_apart(ParallelConfig(tp=2, ep=ep, etp=etp, dp=2))


def test_experts_that_are_dealt_out_again_have_megatrons_groups(conversions: Conversions) -> None:
    """Megatron makes a group only where some rank has a parameter for it: experts without biases have one group."""
    name = "ep2dp2_moe_seq_bf16_do"
    together = conversions.of(GOLDENS / name, ep=1)
    again = conversions.reading(conversions.of(together, ep=2, dp=2))
    for old, new in zip(golden(name).ranks, again.ranks, strict=True):
        assert new.model["optimizer"] == old.model["optimizer"]


GROUPLESS = [
    ("megatron/tp2pp2dp2_bf16_do", "iter_0000002/mp_rank_01_001/model_optim_rng.pt"),
    ("megatron_dist/tp2pp2dp2_fully_reshardable", "iter_0000002/common.pt"),
]


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize(("name", "file"), GROUPLESS)
def test_a_group_is_gone_that_parameters_belong_to(name: str, file: str, gone: int, tmp_path: Path) -> None:
    """Of any rank's file: a distributed optimizer's loader takes groups by what they are, and fails with a KeyError."""
    root = Path(shutil.copytree(GOLDENS.parent / name, tmp_path / "source"))
    with edited(root / file) as tree:
        del tree["optimizer"]["optimizer"]["param_groups"][gone]
    refused(root, LayoutMismatch, file.rpartition("/")[2], "0 of the 1 param groups have weight-decay multiplier")
    assert open_without_manifest(root, ReadOptions(optimizer=False)).optimizer is None
