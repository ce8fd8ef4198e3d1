"""The relation between Megatron's and Hugging Face's tensors, against rows written out by hand and against geometry."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.shares import Share
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.models.huggingface.relation import Relation, from_huggingface, from_megatron
from mcore_rlhf.models.huggingface.table import Sizes, Spelling

SIZES = Sizes(layers=2, hidden=8, ffn=6, heads=4, groups=2, head=3, vocabulary=10)
QKV = "decoder.layers.1.self_attention.linear_qkv"
HF = "model.layers.1.self_attn"


def megatron(sizes: Sizes = SIZES, *, fused: bool = False, tied: bool = False, padding: int = 0) -> dict[str, Shape]:
    """A Llama's parameters, written out."""
    h, rows = sizes.hidden, sizes.vocabulary + padding
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (rows, h)}
    for i in range(sizes.layers):
        layer = f"decoder.layers.{i}."
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        norms = norms if fused else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        shapes.update({layer + norm: (h,) for norm in norms})
        shapes[f"{layer}self_attention.linear_proj.weight"] = (h, sizes.heads * sizes.head)
        shapes[f"{layer}self_attention.linear_qkv.weight"] = ((sizes.heads + 2 * sizes.groups) * sizes.head, h)
        shapes[f"{layer}mlp.linear_fc1.weight"] = (2 * sizes.ffn, h)
        shapes[f"{layer}mlp.linear_fc2.weight"] = (h, sizes.ffn)
    shapes["decoder.final_layernorm.weight"] = (h,)
    return shapes if tied else {**shapes, "output_layer.weight": (rows, h)}


def with_each_layer(shapes: dict[str, Shape], **more: Shape) -> dict[str, Shape]:
    added = {f"decoder.layers.{i}.{name.replace('__', '.')}": shape for i in range(2) for name, shape in more.items()}
    return {**shapes, **added}


def rows(relation: Relation, name: str) -> list[tuple[int, int, str, int]]:
    """Which rows of a Megatron parameter are which rows of what: (first, count, tensor, first)."""
    shares = relation.of_megatron()[name]
    return [(s.box.offset[0], s.box.shape[0], s.name.rpartition("self_attn.")[2], s.other.offset[0]) for s in shares]


def test_queries_keys_and_values_lie_group_by_group() -> None:
    expected = [
        (0, 6, "q_proj.weight", 0), (6, 3, "k_proj.weight", 0), (9, 3, "v_proj.weight", 0),
        (12, 6, "q_proj.weight", 6), (18, 3, "k_proj.weight", 3), (21, 3, "v_proj.weight", 3),
    ]  # fmt: skip
    assert rows(from_megatron(megatron(), SIZES), f"{QKV}.weight") == expected


def test_biases_lie_like_their_weights() -> None:
    shapes = with_each_layer(megatron(), self_attention__linear_qkv__bias=(24,))
    relation = from_megatron(shapes, SIZES)
    assert relation.architecture.model_type == "qwen2"
    weight = rows(relation, f"{QKV}.weight")
    assert rows(relation, f"{QKV}.bias") == [(a, n, t.replace("weight", "bias"), b) for a, n, t, b in weight]
    assert relation.huggingface[f"{HF}.k_proj.bias"] == (6,)


def test_gate_comes_before_up() -> None:
    shares = from_megatron(megatron(), SIZES).of_megatron()["decoder.layers.0.mlp.linear_fc1.weight"]
    assert [(s.name, s.box.offset, s.box.shape, s.other.offset) for s in shares] == [
        ("model.layers.0.mlp.gate_proj.weight", (0, 0), (6, 8), (0, 0)),
        ("model.layers.0.mlp.up_proj.weight", (6, 0), (6, 8), (0, 0)),
    ]


def test_padding_rows_of_a_vocabulary_are_in_no_tensor() -> None:
    relation = from_megatron(megatron(padding=6), SIZES)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert relation.huggingface[name] == (10, 8)
        (share,) = relation.of_huggingface()[name]
        assert share.other.shape == (10, 8)


@pytest.mark.parametrize("fused", [False, True])
def test_both_spellings_of_norms_are_the_same_tensors(fused: bool) -> None:
    relation = from_megatron(megatron(fused=fused), SIZES)
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    assert relation.of_huggingface()["model.layers.1.input_layernorm.weight"][0].name == f"decoder.layers.1.{norm}"
    back = from_huggingface(dict(relation.huggingface), SIZES, relation.spelling)
    assert back == relation


def test_tied_models_have_no_output_layer_on_either_side() -> None:
    relation = from_megatron(megatron(tied=True), SIZES)
    assert "lm_head.weight" not in relation.huggingface
    assert "output_layer.weight" not in relation.megatron


def test_an_output_layer_of_one_row_is_a_value_head() -> None:
    relation = from_megatron({**megatron(tied=True), "output_layer.weight": (1, 8)}, SIZES)
    assert relation.huggingface["score.weight"] == (1, 8)
    assert "lm_head.weight" not in relation.huggingface
    assert from_huggingface(dict(relation.huggingface), SIZES, Spelling()).megatron["output_layer.weight"] == (1, 8)


def test_qwen3_is_known_by_its_norms_of_heads() -> None:
    norms = {f"self_attention__{part}_layernorm__weight": (3,) for part in "qk"}
    relation = from_megatron(with_each_layer(megatron(), **norms), SIZES)
    assert relation.architecture.model_type == "qwen3"
    assert relation.of_huggingface()[f"{HF}.k_norm.weight"][0].name.endswith("1.self_attention.k_layernorm.weight")


def test_hugging_faces_order_is_that_of_its_modules() -> None:
    relation = from_megatron(with_each_layer(megatron(), self_attention__linear_qkv__bias=(24,)), SIZES)
    inside = [n.removeprefix("model.layers.0.") for n in relation.huggingface if n.startswith("model.layers.0.")]
    assert inside == [
        "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight", "self_attn.k_proj.bias",
        "self_attn.v_proj.weight", "self_attn.v_proj.bias", "self_attn.o_proj.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    ]  # fmt: skip
    assert next(iter(relation.huggingface)) == "model.embed_tokens.weight"
    assert list(relation.huggingface)[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_a_parameter_without_a_place_is_named() -> None:
    shapes = {**megatron(), "decoder.layers.0.mlp.router.weight": (4, 8)}
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM has no place for decoder\.layers\.0\.mlp\.router\.weight"):
        from_megatron(shapes, SIZES)


def test_a_layer_that_is_missing_is_named() -> None:
    shapes = {name: shape for name, shape in megatron().items() if name != "decoder.layers.1.mlp.linear_fc2.weight"}
    with pytest.raises(Unsupported, match=r"lacks decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        from_megatron(shapes, SIZES)


@pytest.mark.parametrize(
    "wrong", [{"heads": 2}, {"groups": 4}, {"head": 6}, {"ffn": 12}, {"vocabulary": 11}], ids=lambda wrong: str(wrong)
)
def test_sizes_of_another_model_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(LayoutMismatch, match=r"has shape .* but the sizes of the model make"):
        from_megatron(megatron(), replace(SIZES, **wrong))


def test_hugging_faces_vocabulary_has_no_padding() -> None:
    shapes = dict(from_megatron(megatron(), SIZES).huggingface)
    with pytest.raises(LayoutMismatch, match=r"lm_head\.weight: has shape \(16, 8\)"):
        from_huggingface({**shapes, "lm_head.weight": (16, 8)}, SIZES, Spelling())


GROUPS = st.integers(1, 3)
COUNTS = st.integers(1, 4)


@given(COUNTS, COUNTS, COUNTS, GROUPS, st.integers(1, 3), COUNTS, st.integers(0, 5), st.booleans(), st.booleans())
def test_every_element_has_exactly_one_place_on_the_other_side(
    layers: int, hidden: int, ffn: int, groups: int, per_group: int, head: int, padding: int, fused: bool, tied: bool
) -> None:
    sizes = Sizes(layers, hidden, ffn, groups * per_group, groups, head, vocabulary=5)
    relation = from_megatron(megatron(sizes, fused=fused, tied=tied, padding=padding), sizes)
    for shares, shapes in (
        (relation.of_huggingface(), relation.huggingface),
        (relation.of_megatron(), relation.megatron),
    ):
        assert list(shares) == list(shapes)
        assert [tiles(shares[name], shape) for name, shape in shapes.items()] == [True] * len(shapes)
    assert all(link.huggingface_box.shape == link.other_box.shape for link in relation.links)


def tiles(shares: tuple[Share, ...], shape: Shape) -> bool:
    """Whether the parts cover a tensor once: as many elements as it has, and no two of them meet."""
    boxes = [share.box for share in shares]
    alone = all(a.intersect(b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    inside = all(stop <= size for box in boxes for stop, size in zip(box.stop, shape, strict=True))
    return alone and inside and sum(box.numel for box in boxes) == prod(shape)
