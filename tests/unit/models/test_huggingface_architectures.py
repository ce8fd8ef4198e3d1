"""All architectures' tables: every element has one place on the other side, and descriptions say the same both ways."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Box, Shape
from mcore_rlhf.core.shares import Share
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.crossing.packing import Packing, from_files, from_modules
from mcore_rlhf.models.huggingface import ARCHITECTURES, REFUSED
from mcore_rlhf.models.huggingface.config import (
    Build,
    architecture_of,
    args_of,
    config_of,
    doubts,
    sizes_of_args,
    sizes_of_config,
)
from mcore_rlhf.models.huggingface.relation import Relation, filled, from_huggingface, from_megatron
from mcore_rlhf.models.huggingface.table import (
    GROUPED,
    LINEAR,
    LOCAL,
    MTP_MODEL_LAYER,
    SEQUENTIAL,
    STACKED,
    TRANSFORMER_ENGINE,
    Architecture,
    Sizes,
    Spelling,
)

KNOWN = {known.model_type: known for known in ARCHITECTURES}
SPELLINGS = [Spelling(*parts) for parts in product((LOCAL, TRANSFORMER_ENGINE), (SEQUENTIAL, GROUPED, STACKED))]
SIZES = Sizes(
    3, 8, 6, 4, 2, 3, 10, experts=3, expert_ffn=5, shared=4, mixture=frozenset({1, 2}), q_lora=5, kv_lora=6, nope=3, rope=2,
    v_head=4,
)  # fmt: skip
DENSE = replace(SIZES, experts=0, expert_ffn=0, shared=0, mixture=frozenset())
DELTA_NETS: dict[str, Any] = {
    "linear": frozenset({0}), "delta_keys": 2, "delta_key": 3, "delta_values": 4, "delta_value": 5, "kernel": 3,
}  # fmt: skip

# What transformers 5.23.0 writes for small models of each kind, without what has no counterpart.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": False, "qkv_bias": True,
    },
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "mlp_only_layers": [], "decoder_sparse_step": 1, "attention_bias": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "num_key_value_heads": 4, "head_dim": 4, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": False,
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 2, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "num_key_value_heads": 4, "head_dim": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
        "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
                         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 7.0, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "glm4_moe": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip


def config_for(kind: str, **more: Any) -> dict[str, Any]:
    base = {
        "model_type": kind, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    return {**base, **CONFIGS.get(kind, {}), **more}


def relation_of(known: Architecture, sizes: Sizes, spelling: Spelling, *, tied: bool = False) -> Relation:
    """The relation of a model that has all optional rows but the value head's, and maybe the output layer."""
    rows = (row for row in filled(known, sizes, spelling) if not next(iter(row.tensors)).startswith("score."))
    shapes = {row.name: row.shape for row in rows if not (tied and row.name == "output_layer.weight")}
    return from_megatron(shapes, sizes, [known])


def fitting(known: Architecture, sizes: Sizes) -> Sizes:
    found = sizes if known.needs else replace(DENSE, layers=sizes.layers)
    return replace(found, **DELTA_NETS) if any(LINEAR in row.needs for row in known.rows) else found


def tiles(shares: tuple[Share, ...], shape: Shape) -> bool:
    """Whether the parts cover a tensor once: every element is counted."""
    counted = np.zeros(shape, int)
    for share in shares:
        counted[inside(share.box)] += 1
    return bool((counted == 1).all())


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b, by) for a, b, by in zip(box.offset, box.stop, box.steps, strict=True))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
@pytest.mark.parametrize("known", ARCHITECTURES, ids=lambda known: known.model_type)
def test_every_element_has_one_place_on_the_other_side(known: Architecture, spelling: Spelling) -> None:
    sizes = fitting(known, SIZES)
    if known is KNOWN["gpt_oss"] and spelling.experts == STACKED:
        pytest.skip("Megatron's GroupedMLP has no biases")
    relation = relation_of(known, sizes, spelling)
    for shares, shapes in (
        (relation.of_huggingface(), relation.huggingface),
        (relation.of_megatron(), relation.megatron),
    ):
        assert list(shares) == list(shapes)
        assert [name for name, shape in shapes.items() if not tiles(shares[name], shape)] == []
    expected = spelling if known.needs else replace(spelling, experts=SEQUENTIAL)
    assert from_huggingface(dict(relation.huggingface), sizes, expected, [known]) == relation


@given(st.data())
def test_sizes_do_not_matter(data: Any) -> None:
    count = st.integers(1, 3)
    known, spelling = data.draw(st.sampled_from(ARCHITECTURES)), data.draw(st.sampled_from(SPELLINGS))
    assume(known is not KNOWN["gpt_oss"] or spelling.experts != STACKED)
    groups, layers = data.draw(count), data.draw(count)
    sizes = Sizes(
        layers, data.draw(count), data.draw(count), groups * data.draw(count), groups, data.draw(count), data.draw(st.integers(2, 5)),
        experts=data.draw(count), expert_ffn=data.draw(count), shared=data.draw(st.integers(0, 2)),
        mixture=data.draw(st.frozensets(st.integers(0, layers - 1))), q_lora=data.draw(st.integers(0, 2)),
        kv_lora=data.draw(count), nope=data.draw(count), rope=data.draw(count), v_head=data.draw(count),
    )  # fmt: skip
    sizes = fitting(known, sizes)
    relation = relation_of(known, sizes, spelling, tied=data.draw(st.booleans()))
    for shares, shapes in (
        (relation.of_huggingface(), relation.huggingface),
        (relation.of_megatron(), relation.megatron),
    ):
        assert all(tiles(shares[name], shape) for name, shape in shapes.items())


def filled_in(shares: tuple[Share, ...], shape: Shape, values: dict[str, np.ndarray]) -> np.ndarray:
    """A tensor put together of others, through strides, as the executor does it."""
    made = np.full(shape, -1)
    for share in shares:
        stored = values[share.name]
        part = stored[inside(share.other)]
        strides = share.strides(tuple(s // stored.itemsize for s in part.strides))
        box = share.own(share.other)
        assert box == share.box
        seen = np.lib.stride_tricks.as_strided(part, box.shape, [s * stored.itemsize for s in strides])
        made[inside(box)] = seen
    return made


def numbered(shapes: Any) -> dict[str, np.ndarray]:
    at, made = 0, {}
    for name, shape in shapes.items():
        made[name] = np.arange(at, at + prod(shape)).reshape(shape)
        at += prod(shape)
    return made


@pytest.mark.parametrize("experts", [SEQUENTIAL, GROUPED])
def test_gate_and_up_lie_in_turn(experts: str) -> None:
    """In one tensor of all experts, transposed: the even columns are the gate's. Both ways, biases as well."""
    relation = relation_of(KNOWN["gpt_oss"], SIZES, Spelling(LOCAL, experts))
    files, layer = numbered(relation.huggingface), "model.layers.2.mlp.experts"
    parameters = {
        name: filled_in(shares, relation.megatron[name], files) for name, shares in relation.of_megatron().items()
    }
    for number in range(3):
        one = f"local_experts.{number}.linear_fc1." if experts == SEQUENTIAL else "linear_fc1."
        end = "" if experts == SEQUENTIAL else str(number)
        for kind, tensor in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias")):
            found = parameters[f"decoder.layers.2.mlp.experts.{one}{kind}{end}"]
            turned = files[f"{layer}.{tensor}"][number].T
            assert np.array_equal(found, np.concatenate([turned[::2], turned[1::2]]))
        second = parameters[f"decoder.layers.2.mlp.experts.{one.replace('fc1', 'fc2')}weight{end}"]
        assert np.array_equal(second, files[f"{layer}.down_proj"][number].T)
    for name, shares in relation.of_huggingface().items():
        assert np.array_equal(filled_in(shares, relation.huggingface[name], parameters), files[name])


def test_stacked_experts_are_transposed() -> None:
    """``GroupedMLP`` multiplies from the other side; gate comes before up, as anywhere."""
    relation = relation_of(KNOWN["mixtral"], SIZES, Spelling(LOCAL, STACKED))
    files, inside = numbered(relation.huggingface), "model.layers.2.block_sparse_moe.experts"
    shares = relation.of_megatron()
    first, second = (f"decoder.layers.2.mlp.experts.weight{number}" for number in (1, 2))
    parts = [np.concatenate([files[f"{inside}.{e}.w1.weight"], files[f"{inside}.{e}.w3.weight"]]).T for e in range(3)]
    assert np.array_equal(filled_in(shares[first], relation.megatron[first], files), np.stack(parts))
    parts = [files[f"{inside}.{e}.w2.weight"].T for e in range(3)]
    assert np.array_equal(filled_in(shares[second], relation.megatron[second], files), np.stack(parts))
    back, parameters = (
        relation.of_huggingface(),
        {name: filled_in(shares[name], s, files) for name, s in relation.megatron.items()},
    )
    assert all(np.array_equal(filled_in(back[name], value.shape, parameters), value) for name, value in files.items())


def test_packed_experts_are_gate_then_up() -> None:
    relation = relation_of(KNOWN["qwen3_moe"], SIZES, Spelling())
    packing = from_files(relation.huggingface, KNOWN["qwen3_moe"].packed)
    name, files = "model.layers.1.mlp.experts.gate_up_proj", numbered(packing.files)
    made = filled_in(packing.of_modules()[name], packing.modules[name], files)
    inside = "model.layers.1.mlp.experts"
    expected = [np.concatenate([files[f"{inside}.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(3)]
    assert np.array_equal(made, np.stack(expected))
    assert packing.modules["model.layers.1.mlp.experts.down_proj"] == (3, 8, 5)
    modules = {name: filled_in(packing.of_modules()[name], shape, files) for name, shape in packing.modules.items()}
    back = packing.of_files()
    assert all(np.array_equal(filled_in(back[name], value.shape, modules), value) for name, value in files.items())


def test_mixtral_has_other_names_in_memory() -> None:
    relation = relation_of(KNOWN["mixtral"], SIZES, Spelling())
    packing = from_files(relation.huggingface, KNOWN["mixtral"].packed)
    inside = [name for name in packing.modules if name.startswith("model.layers.0.")]
    assert [name.removeprefix("model.layers.0.") for name in inside if ".mlp." in name] == []
    layer = [name.removeprefix("model.layers.1.") for name in packing.modules if name.startswith("model.layers.1.mlp.")]
    assert layer == ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    again: Packing = from_modules(packing.modules, KNOWN["mixtral"].packed)
    assert again.files == packing.files


def test_experts_that_cannot_be_packed_are_named() -> None:
    relation = relation_of(KNOWN["qwen3_moe"], SIZES, Spelling())
    shapes = dict(relation.huggingface)
    del shapes["model.layers.1.mlp.experts.1.up_proj.weight"]
    shapes["model.layers.2.mlp.experts.0.down_proj.weight"] = (8, 6)
    with pytest.raises(
        LayoutMismatch, match=r"(?s)layers\.1\.mlp\.experts\.1\.up_proj.* is missing.*experts\.0\.down_proj.*\(8, 6\)"
    ):
        from_files(shapes, KNOWN["qwen3_moe"].packed)
    with pytest.raises(LayoutMismatch, match=r"gate_up_proj: has shape \(3, 9, 8\)"):
        from_modules({"model.layers.1.mlp.experts.gate_up_proj": (3, 9, 8)}, KNOWN["qwen3_moe"].packed)


def names_of(kind: str, spelling: Spelling, layer: int) -> list[str]:
    start = f"decoder.layers.{layer}."
    names = relation_of(KNOWN[kind], fitting(KNOWN[kind], SIZES), spelling).megatron
    return [name.removeprefix(start) for name in names if name.startswith(start)]


def test_norms_that_transformer_engine_fuses_and_those_that_it_does_not() -> None:
    """Before a mixture, and before latent attention, the norm keeps its own name."""
    engine = Spelling(TRANSFORMER_ENGINE, GROUPED)
    dense, mixture = names_of("qwen3_moe", engine, 0), names_of("qwen3_moe", engine, 1)
    assert "mlp.linear_fc1.layer_norm_weight" in dense
    assert "pre_mlp_layernorm.weight" not in dense
    assert "pre_mlp_layernorm.weight" in mixture
    assert "self_attention.linear_qkv.layer_norm_weight" in mixture
    latent = names_of("deepseek_v3", engine, 0)
    assert "input_layernorm.weight" in latent
    assert "self_attention.linear_kv_up_proj.layer_norm_weight" in latent
    assert "self_attention.kv_layernorm.weight" in names_of("deepseek_v3", Spelling(), 0)


def test_layers_for_further_tokens_follow_the_last() -> None:
    sizes = replace(SIZES, mtp=2)
    for inner in ("transformer_layer", MTP_MODEL_LAYER):
        relation = relation_of(KNOWN["deepseek_v3"], sizes, Spelling(mtp=inner))
        assert relation.spelling.mtp == inner
        owners = {name: shares[0].name for name, shares in relation.of_megatron().items()}
        assert owners["mtp.layers.1.eh_proj.weight"] == "model.layers.4.eh_proj.weight"
        assert owners["mtp.layers.0.final_layernorm.weight"] == "model.layers.3.shared_head.norm.weight"
        assert (
            owners[f"mtp.layers.0.{inner}.mlp.router.expert_bias"] == "model.layers.3.mlp.gate.e_score_correction_bias"
        )
        order = list(relation.megatron)
        assert order.index("decoder.final_layernorm.weight") < order.index("mtp.layers.0.enorm.weight") < len(order) - 1


@pytest.mark.parametrize("kind", KNOWN)
def test_an_architecture_is_found_by_its_tensors(kind: str) -> None:
    """Without a config.json the tensors tell all but those whose names and shapes are another's as well."""
    known = KNOWN[kind]
    relation = relation_of(known, fitting(known, SIZES), Spelling(TRANSFORMER_ENGINE, GROUPED))
    rows = {row.name: row.row.optional for row in filled(known, fitting(known, SIZES), relation.spelling)}
    shapes = {
        name: shape for name, shape in relation.megatron.items() if not rows[name] or name == "output_layer.weight"
    }
    found = from_megatron(shapes, fitting(known, SIZES)).architecture
    same = {
        "mistral": "llama", "ministral": "llama", "smollm3": "llama", "ernie4_5": "llama", "glm": "llama", "phi3": "llama",
        "seed_oss": "qwen2", "glm4_moe_lite": "deepseek_v3", "dots1": "glm4_moe",
    }  # fmt: skip
    assert found.model_type == same.get(kind, kind)


def test_a_contradicting_number_of_experts_is_named() -> None:
    relation = relation_of(KNOWN["qwen3_moe"], SIZES, Spelling())
    with pytest.raises(
        Unsupported, match=r"Qwen3MoeForCausalLM lacks model\.layers\.1\.mlp\.experts\.3\.gate_proj\.weight"
    ):
        from_huggingface(dict(relation.huggingface), replace(SIZES, experts=4), Spelling(), [KNOWN["qwen3_moe"]])


@pytest.mark.parametrize("kind", CONFIGS)
def test_descriptions_say_the_same_both_ways(kind: str) -> None:
    config, known = config_for(kind), KNOWN[kind]
    build = Build(biased=kind in ("qwen2_moe", "glm4_moe"))
    if kind == "gpt_oss":
        build = Build(biased=True, proj_biased=True, mlp_biased=True)
    args = args_of(config, known, build)
    back = config_of(args, sizes_of_args(args, 61), known, build)
    assert {key: back[key] for key in config} == config
    assert args_of(back, known, build) == args
    assert sizes_of_config(config) == sizes_of_args(args, 61)


def test_which_layers_are_mixtures() -> None:
    assert sizes_of_config(config_for("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=1)).mixture == {0, 2}
    assert sizes_of_config(config_for("qwen3_moe", decoder_sparse_step=2)).mixture == {1}
    assert sizes_of_config(config_for("deepseek_v3")).mixture == {2}
    assert sizes_of_config(config_for("llama")).mixture == frozenset()


def test_what_config_json_cannot_say_is_refused() -> None:
    args = args_of(config_for("deepseek_v3"), KNOWN["deepseek_v3"], Build())
    wrong = {**args, "moe_layer_freq": [1, 0, 1], "moe_shared_expert_intermediate_size": 25}
    with pytest.raises(
        Unsupported, match=r"(?s)dense layers after mixtures.*25 is no multiple of moe_ffn_hidden_size 24"
    ):
        config_of(wrong, sizes_of_args(wrong, 61), KNOWN["deepseek_v3"], Build())


def test_a_model_that_was_trained_otherwise_is_not_exported_as_one_that_computes_otherwise() -> None:
    args = args_of(config_for("llama"), KNOWN["llama"], Build())
    wrong = {**args, "layernorm_zero_centered_gamma": True}
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM: args: layernorm_zero_centered_gamma is True"):
        config_of(wrong, sizes_of_args(wrong, 61), KNOWN["llama"], Build())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"glu_linear_offset": 0.0}, "glu_linear_offset is 0.0, and transformers computes as with 1.0"),
        ({"glu_linear_offset": None}, "glu_linear_offset is 0.0, and transformers computes as with 1.0"),
        ({"activation_func_clamp_value": None}, "activation_func_clamp_value is None, and transformers always clamps"),
        ({"quick_geglu": False, "swiglu": True}, "quick_geglu is off, and transformers computes as with it"),
        ({"softmax_type": "off-by-one"}, "softmax_type is off-by-one, and transformers computes as with learnable"),
    ],
)
def test_a_feed_forward_that_gpt_oss_does_not_have_is_refused(wrong: dict[str, Any], why: str) -> None:
    build = Build(biased=True, proj_biased=True, mlp_biased=True)
    args = args_of(config_for("gpt_oss"), KNOWN["gpt_oss"], build)
    changed = {name: value for name, value in {**args, **wrong}.items() if value is not None}
    with pytest.raises(Unsupported, match=re.escape(why)):
        config_of(changed, sizes_of_args(changed, 61), KNOWN["gpt_oss"], build)


@pytest.mark.parametrize(
    ("said", "why"), [({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0; Megatron's"), ({"attention_bias": False}, "biases of")]
)
def test_a_gpt_oss_that_megatron_does_not_compute_is_refused(said: dict[str, Any], why: str) -> None:
    build = Build(biased=False, proj_biased=False, mlp_biased=True)
    with pytest.raises(Unsupported, match=why):
        args_of(config_for("gpt_oss", **said), KNOWN["gpt_oss"], build)


def test_positions_that_are_not_scaled_are_said_to_be_so() -> None:
    """A ``config.json`` of GPT-OSS that says nothing of them means YaRN, and layers in turn."""
    build = Build(biased=True, proj_biased=True, mlp_biased=True)
    known, plain = KNOWN["gpt_oss"], {"rope_scaling": {"rope_type": "default"}, "layer_types": ["full_attention"] * 3}
    args = args_of(config_for("gpt_oss", **plain), known, build)
    assert (args["position_embedding_type"], args["window_size"]) == ("rope", None)
    assert args_of(config_of(args, sizes_of_args(args, 61), known, build), known, build) == args
    silent = {name: value for name, value in config_for("gpt_oss").items() if name not in plain}
    args = args_of({**silent, "sliding_window": 5}, known, build)
    assert (args["position_embedding_type"], args["window_size"]) == ("yarn", (4, 0))
    assert args["window_attn_skip_freq"] == [1, 0, 1]


@pytest.mark.parametrize(
    ("said", "factor"),
    [
        ({"yarn_mscale": None, "yarn_mscale_all_dim": 0.5, "mscale": 3.0}, None),  # one is None: both are as by default
        ({"yarn_mscale": 2.0, "yarn_mscale_all_dim": 0.0}, 0.2 * np.log(32.0) + 1),
        ({"mscale": 2.0}, None),  # Megatron-LM's argument, where the configuration has attributes of its own
    ],
)
def test_what_yarn_multiplies_sines_by(said: dict[str, Any], factor: float | None) -> None:
    build = Build(biased=True, proj_biased=True, mlp_biased=True)
    args = {**args_of(config_for("gpt_oss"), KNOWN["gpt_oss"], build), **said}
    rope = config_of(args, sizes_of_args(args, 61), KNOWN["gpt_oss"], build)["rope_scaling"]
    assert isinstance(rope, dict)
    assert rope.get("attention_factor") == (None if factor is None else pytest.approx(factor))
    assert "mscale" not in rope


def test_biases_that_megatron_cannot_have_apart() -> None:
    config = config_for("llama", attention_bias=True)
    with pytest.raises(Unsupported, match="biases of the output projection, and not the feed-forward"):
        args_of(config, KNOWN["llama"], Build(biased=True, proj_biased=True))
    build = Build(biased=True, proj_biased=True, mlp_biased=True)
    args = args_of(config, KNOWN["llama"], build)
    assert (args["add_bias_linear"], args["add_qkv_bias"]) == (True, True)
    back = config_of(args, sizes_of_args(args, 61), KNOWN["llama"], build)
    assert (back["attention_bias"], back["mlp_bias"]) == (True, True)


def test_latent_sizes_in_the_args_of_other_models_mean_nothing() -> None:
    """Megatron-LM gives them to all models."""
    args = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 8,
        "num_attention_heads": 2,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
    }
    assert sizes_of_args(args, 10).kv_lora == 0
    assert sizes_of_args({**args, "multi_latent_attention": True}, 10).kv_lora == 512


@pytest.mark.parametrize(("chosen", "topk", "doubtful"), [(4, 8, False), (2, 8, True), (None, 8, False)])
def test_groups_of_experts_that_transformers_chooses_otherwise(chosen: int | None, topk: int, doubtful: bool) -> None:
    args = {"moe_router_group_topk": chosen, "moe_router_topk": topk, "moe_router_score_function": "sigmoid"}
    assert bool(list(doubts(args))) is doubtful


def test_what_both_sides_compute_differently_is_said() -> None:
    (said,) = doubts({"multi_latent_attention": True, "layernorm_epsilon": 1e-5})
    assert "epsilon of 1e-06" in said
    assert list(doubts({"layernorm_epsilon": 1e-5})) == []


@pytest.mark.parametrize("kind", REFUSED)
def test_those_that_megatron_cannot_express_are_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(
        Unsupported, match=f"model_type {kind} has no relation to Megatron-core's GPT: .*\nKnown are qwen2"
    ):
        architecture_of({"model_type": kind})


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        (
            "deepseek_v3",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5; Megatron's latent",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "type yarn are the class's own",
        ),  # longrope's name there
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "type longrope are the class's own"),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 3},
            "use_sliding_window is false: transformers takes a window of 0",
        ),
        ("smollm3", {"no_rope_layers": "1111"}, "no_rope_layers '1111': expected a number for each of 3 layers"),
        (
            "ministral",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 kinds, expected one for each of 3 layers",
        ),
        ("ernie4_5", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "YaRN that rotates pairs"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers .1.: expected a number for each of 3 layers"),
    ],
)
def test_a_config_that_megatron_does_not_compute_is_refused(kind: str, said: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        args_of({**config_for("deepseek_v3"), "model_type": kind, "num_hidden_layers": 3, **said}, KNOWN[kind], Build())


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("phi3", {"use_rope_scaling": True}, "use_rope_scaling, and transformers' class does not scale positions so"),
        (
            "ernie4_5",
            {"rotary_interleaved": False},
            "rotary_interleaved is False, and transformers computes as with True",
        ),
        ("llama", {"no_rope_freq": [0, 1, 0]}, "no_rope_freq is .*these could say it: SmolLM3ForCausalLM"),
    ],
)
def test_arguments_that_a_class_does_not_compute_are_refused(kind: str, said: dict[str, Any], why: str) -> None:
    args = args_of({**config_for("qwen3"), "model_type": kind}, KNOWN[kind], Build()) | said
    with pytest.raises(Unsupported, match=why):
        config_of(args, sizes_of_args(args, 61), KNOWN[kind], Build())


@pytest.mark.parametrize("kind", [{"llama": 1}, ["llama"], 3, True])
def test_a_type_that_is_no_text_is_refused(kind: Any) -> None:
    with pytest.raises(Unsupported, match="model_type should be a text"):
        architecture_of({"model_type": kind})


def test_an_unknown_architecture_is_told_how_to_add_one() -> None:
    with pytest.raises(
        Unsupported, match=r"(?s)model_type bloom is in no table; known are .*deepseek_v3.*add-an-architecture\.md"
    ):
        architecture_of({"model_type": "bloom"})
