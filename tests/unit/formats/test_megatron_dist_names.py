"""The relation between Megatron's names and torch_dist keys: read both ways, and against what megatron-core wrote."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import BFLOAT16
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.megatron_dist.names import (
    Experts,
    Home,
    KeySpelling,
    home_of,
    homes_of,
    name_at,
    names_in,
    spelling_of_keys,
    spelling_of_names,
    stacked_axes,
    without_holes,
)
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.models.megatron import registration_order
from mcore_rlhf.models.spec import GATED, ROW, ParamSpec
from tests.helpers.conversions import GOLDENS, NAMES

LOCAL = KeySpelling(True, Experts.SEQUENTIAL, True)
FUSED = KeySpelling(False, Experts.GROUPED, True)
DENSE = ("self_attention.linear_proj.weight", "self_attention.linear_qkv.bias", "mlp.linear_fc1.weight", "mlp.router.weight",
         "mlp.shared_experts.linear_fc1.weight", "self_attention.q_layernorm.weight", "mlp.linear_fc2._extra_state")  # fmt: skip
OUTSIDE = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    "mtp.layers.0.eh_proj.weight",
)


def experts_of(kind: Experts, layer: str, expert: int) -> list[str]:
    if kind is Experts.PACKED:
        return [f"{layer}mlp.experts.weight1", f"{layer}mlp.experts.weight2"]
    if kind is Experts.GROUPED:
        return [f"{layer}mlp.experts.linear_fc{n}.{what}{expert}" for n in (1, 2) for what in ("weight", "bias")]
    return [f"{layer}mlp.experts.local_experts.{expert}.linear_fc{n}.weight" for n in (1, 2)]


@given(
    st.builds(KeySpelling, st.booleans(), st.sampled_from(Experts), st.booleans())
    | st.builds(KeySpelling, st.booleans(), st.sampled_from(Experts), st.just(False), singleton=st.just(True)),
    st.integers(0, 93), st.integers(0, 127), st.sampled_from(["decoder.layers", "mtp.layers"]),
)  # fmt: skip
def test_every_name_has_one_home_and_comes_back_from_it(
    spelling: KeySpelling, layer: int, expert: int, block: str
) -> None:
    prefix = f"{block}.{layer}." + ("transformer_layer." if block == "mtp.layers" else "")
    names = [*OUTSIDE, *(prefix + name for name in DENSE), *experts_of(spelling.experts, prefix, expert)]
    norms = ("input_layernorm.weight", "pre_mlp_layernorm.bias")
    fused = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    names += [prefix + norm for norm in (norms if spelling.separate_norms else (*norms, *fused))]
    homes = {name: home_of(name, spelling) for name in names}
    assert len({(home.key, home.index) for home in homes.values()}) == len(names)
    for name, home in homes.items():
        assert name_at(home.key, home.index, spelling) == name
        assert stacked_axes(home.key, spelling) == len(home.index)


# Keys that megatron-core 0.16.1 wrote, and the names that its own model has for them.
SEEN = [
    (LOCAL, "decoder.layers.3.input_layernorm.weight", Home("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (3,))),
    (LOCAL, "decoder.layers.3.pre_mlp_layernorm.weight", Home("decoder.layers.mlp.linear_fc1.layer_norm_weight", (3,))),
    (LOCAL, "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
     Home("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3))),
    (LOCAL, "mtp.layers.0.transformer_layer.input_layernorm.weight",
     Home("mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight")),
    (KeySpelling(True, Experts.PACKED, True), "decoder.layers.1.mlp.experts.weight1",
     Home("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1,), transposed=True)),
    (KeySpelling(True, Experts.SEQUENTIAL, False), "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
     Home("decoder.layers.1.mlp.experts.experts.linear_fc2.weight", (2,))),
    (KeySpelling(False, Experts.SEQUENTIAL, True), "decoder.layers.1.input_layernorm.weight",
     Home("decoder.layers.input_layernorm.weight", (1,))),
    (FUSED, "decoder.layers.1.mlp.experts.linear_fc1.weight12",
     Home("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 12))),
]  # fmt: skip


@pytest.mark.parametrize(("spelling", "name", "home"), SEEN)
def test_keys_are_those_of_megatron_core(spelling: KeySpelling, name: str, home: Home) -> None:
    assert home_of(name, spelling) == home


def test_the_names_in_a_stack_are_all_layers_and_experts() -> None:
    found = dict(names_in("decoder.layers.mlp.experts.experts.linear_fc2.weight", (2, 3, 64, 48), LOCAL))
    assert found == {
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight": Home(
            "decoder.layers.mlp.experts.experts.linear_fc2.weight", (layer, expert)
        )
        for layer, expert in product(range(2), range(3))
    }


def test_halves_with_keys_of_their_own_are_one_parameter() -> None:
    spelling = KeySpelling(True, Experts.SEQUENTIAL, False, singleton=True)
    gate, up = (dict(names_in(f"decoder.layers.0.mlp.linear_fc1.weight_{half}", (96, 64), spelling)) for half in "wv")
    assert list(gate) == list(up) == ["decoder.layers.0.mlp.linear_fc1.weight"]
    assert (next(iter(gate.values())).part, next(iter(up.values())).part) == (0, 1)
    key = "decoder.layers.0.mlp.experts.experts.3.linear_fc2.weight"
    assert [name for name, _ in names_in(key, (64, 48), spelling)] == [
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"
    ]


GATED_EXPERT = {Experts.SEQUENTIAL: "local_experts.{}.linear_fc1.weight", Experts.GROUPED: "linear_fc1.weight{}"}


@pytest.mark.parametrize("kind", GATED_EXPERT)
def test_what_differs_in_its_states_has_keys_of_its_own(kind: Experts) -> None:
    """Layers first, and experts with the halves of gated matrices where that is not enough: read and written by one relation."""
    usual = KeySpelling(False, kind, True)
    names = [f"decoder.layers.{n}.mlp.experts.{GATED_EXPERT[kind].format(e)}" for n in range(2) for e in range(2)]
    layers, alone = replace(usual, stacked=False), replace(usual, stacked=False, singleton=True)
    assert without_holes(usual, dict.fromkeys(names, True)) == usual
    assert without_holes(usual, {name: name < "decoder.layers.1" for name in names}) == layers
    assert without_holes(usual, {name: name != names[3] for name in names}) == alone
    spec = ParamSpec(names[3], (12, 4), BFLOAT16, GATED)
    key = "decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight"
    halves = homes_of(spec, alone)
    assert halves == [(Home(f"{key}_w"), 0, 6), (Home(f"{key}_v"), 6, 6)]
    for part, (home, _, rows) in enumerate(halves):
        assert list(names_in(home.key, (rows, 4), alone)) == [(spec.name, replace(home, part=part))]
    plain = replace(spec, name=names[3].replace("fc1", "fc2"), partition=ROW)
    assert [home.key for home, _, _ in homes_of(plain, alone)] == [key.replace("fc1", "fc2")]


@pytest.mark.parametrize("kind", ["attn_mlp", "mamba", "gdn"])
def test_registration_order_of_hybrid_models_is_theirs(kind: str, seed: int) -> None:
    golden = GOLDENS.parent / "megatron_0_19" / f"hybrid_{kind}_tp2_bf16_do"
    order = open_checkpoint(golden, ReadOptions()).family.order  # type: ignore[attr-defined]
    shuffled = list(order)
    random.Random(seed).shuffle(shuffled)
    assert registration_order(shuffled) == order


@pytest.mark.parametrize("name", NAMES)
def test_registration_order_is_that_of_real_models(name: str, seed: int) -> None:
    order = open_checkpoint(GOLDENS / name, ReadOptions()).family.order  # type: ignore[attr-defined]
    shuffled = list(order)
    random.Random(seed).shuffle(shuffled)
    assert registration_order(shuffled) == order


def test_grouped_experts_are_registered_one_after_the_other() -> None:
    prefix = "decoder.layers.0.mlp."
    order = [
        f"{prefix}router.weight",
        *(f"{prefix}experts.linear_fc1.{kind}{n}" for n in range(12) for kind in ("weight", "bias")),
    ]
    assert registration_order(reversed(order)) == order


def test_an_unknown_parameter_stands_behind_its_neighbours() -> None:
    names = [
        "output_layer.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.adapter.weight",
        "v_head.weight",
    ]
    assert registration_order(names) == [names[1], names[2], names[0], names[3]]


def spelled(**values: object) -> KeySpelling:
    return spelling_of_keys(["decoder.layers.mlp.linear_fc2.weight"], Arguments(values))


def test_the_arguments_say_which_module_holds_the_experts() -> None:
    """As ``grouped_mlp_modules`` of both back ends decides."""
    te, local = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}
    assert spelled(**te).experts is Experts.SEQUENTIAL
    assert spelled(**te, moe_grouped_gemm=True).experts is Experts.GROUPED
    assert spelled(**te, moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True).experts is Experts.PACKED
    assert spelled(**local, moe_grouped_gemm=True).experts is Experts.PACKED
    assert spelled(**local).separate_norms
    assert not spelled(**local, multi_latent_attention=True).separate_norms
    assert not spelled(**te).separate_norms


def test_layers_of_several_kinds_keep_their_numbers() -> None:
    layers = [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(2)]
    assert spelling_of_names(layers, Arguments({})).stacked
    assert spelling_of_names(layers, Arguments({"moe_layer_freq": 1})).stacked
    assert not spelling_of_names(layers, Arguments({"moe_layer_freq": [0, 1]})).stacked
    assert not spelling_of_names([*layers, "decoder.layers.1.mlp.router.weight"], Arguments({})).stacked
    experts = [
        f"decoder.layers.{n}.mlp.experts.local_experts.{e}.linear_fc1.weight" for n in range(2) for e in range(4)
    ]
    assert spelling_of_names(experts, Arguments({})).stacked
