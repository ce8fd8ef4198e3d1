"""Megatron to DeepSpeed and back: values against a split by hand, with readers that know nothing of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS, Conversions, golden
from tests.helpers.independent_reader import read
from tests.helpers.plain_load import bits, plain_load
from tests.helpers.zero_reader import read_zero

WORDS, HEADS, GROUPS, HEAD, LAYERS = 132, 4, 2, 16, 4
STATES = ("master", "exp_avg", "exp_avg_sq")
LLAMA = "tp2pp2dp2_bf16_do"
Tensors = dict[tuple[str, str], torch.Tensor]


def split_by_hand(tensors: Tensors) -> Tensors:
    """A golden's tensors under Hugging Face's names: cut with views and cat, as one would by hand."""
    out: Tensors = {}
    for state in ("param", *STATES):
        if ("embedding.word_embeddings.weight", state) not in tensors:
            continue
        out["model.embed_tokens.weight", state] = tensors["embedding.word_embeddings.weight", state][:WORDS]
        out["model.norm.weight", state] = tensors["decoder.final_layernorm.weight", state]
        if ("output_layer.weight", state) in tensors:
            out["lm_head.weight", state] = tensors["output_layer.weight", state][:WORDS]
        for i in range(LAYERS):
            ours, theirs = f"model.layers.{i}.", f"decoder.layers.{i}."
            qkv = tensors[f"{theirs}self_attention.linear_qkv.weight", state]
            grouped = qkv.view(GROUPS, HEADS // GROUPS + 2, HEAD, -1)
            for part, heads in (("q", slice(0, -2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
                out[f"{ours}self_attn.{part}_proj.weight", state] = grouped[:, heads].reshape(-1, qkv.shape[1])
            gate, up = tensors[f"{theirs}mlp.linear_fc1.weight", state].chunk(2)
            out[f"{ours}mlp.gate_proj.weight", state], out[f"{ours}mlp.up_proj.weight", state] = gate, up
            for hf, mcore in (
                ("self_attn.o_proj", "self_attention.linear_proj"),
                ("mlp.down_proj", "mlp.linear_fc2"),
                ("input_layernorm", "input_layernorm"),
                ("post_attention_layernorm", "pre_mlp_layernorm"),
            ):
                out[f"{ours}{hf}.weight", state] = tensors[f"{theirs}{mcore}.weight", state]
    return out


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, fsync=False, write=WriteOptions(**write)))


def unequal(found: Tensors, expected: Tensors) -> list[str]:
    assert expected
    missing = [str(key) for key in expected.keys() ^ found.keys()]
    return missing + [
        str(k) for k in expected.keys() & found.keys()
        if (found[k].dtype, found[k].shape, bits(found[k])) != (expected[k].dtype, expected[k].shape, bits(expected[k]))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stage", "dp"),
    [(LLAMA, 0, 1), (LLAMA, 1, 3), (LLAMA, 2, 2), (LLAMA, 3, 4), ("tp2pp2dp2_fp32_do", 2, 3), ("pp2_vpp2_bf16_do", 3, 2),
     ("tp2pp2dp2_bf16_nodo", 1, 2), ("tp1_bf16_do", 2, 1)],
)  # fmt: skip
def test_megatron_to_deepspeed(name: str, stage: int, dp: int, tmp_path: Path) -> None:
    converted(GOLDENS / name, tmp_path / "ds", "deepspeed", zero_stage=stage, dp=dp)
    merged = read_zero(tmp_path / "ds" / "global_step2")
    expected = split_by_hand(golden(name).tensors)
    assert unequal(merged.states, {key: value for key, value in expected.items() if key[1] != "param"}) == []
    if stage < 3:
        assert unequal({(k, "param"): v for k, v in merged.param.items()}, only(expected, "param")) == []
    assert [len(group) for group in merged.groups] == [2 + 7 * LAYERS, 1 + 2 * LAYERS]
    assert merged.groups[0][:3] == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk"),
    ]
    assert [group["weight_decay"] for group in merged.settings] == [0.1, 0.0]
    assert set(merged.step.values()) == {2.0}


def only(tensors: Tensors, state: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key[1] == state}


def test_megatron_to_universal(tmp_path: Path) -> None:
    converted(GOLDENS / LLAMA, tmp_path / "uni", "universal")
    expected = split_by_hand(golden(LLAMA).tensors)
    zero = tmp_path / "uni" / "global_step2_uni" / "zero"
    for (name, state), value in expected.items():
        if state != "param":
            file = zero / name / ("fp32.pt" if state == "master" else f"{state}.pt")
            assert bits(plain_load(file)["param"]) == bits(value), (name, state)
    assert {path.name for path in zero.iterdir() if path.is_dir()} == {name for name, _ in expected}


def test_tied_models_share_the_embedding(tmp_path: Path) -> None:
    converted(GOLDENS / "tp2pp2dp2_tied_bf16_do", tmp_path / "ds", "deepspeed", zero_stage=2, dp=2)
    merged = read_zero(tmp_path / "ds" / "global_step2")
    assert merged.top["shared_params"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert bits(merged.param["lm_head.weight"]) == bits(merged.param["model.embed_tokens.weight"])
    assert not any("lm_head" in name for group in merged.groups for name in group)
    tensors = {key: value for key, value in golden("tp2pp2dp2_tied_bf16_do").tensors.items() if "output" not in key[0]}
    assert unequal(merged.states, {k: v for k, v in split_by_hand(tensors).items() if k[1] != "param"}) == []


@pytest.mark.parametrize(
    ("name", "between", "degrees"),
    [
        (LLAMA, {"to": "deepspeed", "zero_stage": 3, "dp": 3}, {"tp": 1, "pp": 4}),
        (LLAMA, {"to": "deepspeed", "zero_stage": 1, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}),
        ("tp2pp2dp2_tied_bf16_do", {"to": "universal"}, {"tp": 2, "pp": 1, "dp": 3}),
        ("tp2pp2dp2_tied_bf16_do", {"to": "deepspeed", "zero_stage": 2}, {"tp": 1, "pp": 2}),
        ("tp2pp2dp2_fp32_do", {"to": "universal"}, {"tp": 4, "pp": 1}),
        ("tp1_bf16_do", {"to": "deepspeed", "zero_stage": 0}, {"tp": 2, "pp": 2, "vpp": 2}),
        ("tp1_bf16_do", {"to": "universal"}, {"tp": 1, "optimizer": "plain"}),
    ],
)
def test_there_and_back(
    name: str, between: dict[str, Any], degrees: dict[str, Any], tmp_path: Path, conversions: Conversions
) -> None:
    converted(GOLDENS / name, tmp_path / "ds", **between)
    converted(tmp_path / "ds", tmp_path / "back", "megatron", **degrees)
    before, after = golden(name), read(tmp_path / "back")
    assert unequal(without_padding(after.tensors), without_padding(before.tensors)) == []
    embedding = after.tensors["embedding.word_embeddings.weight", "param"]
    assert len(embedding) == after.args.padded_vocab_size == -(-WORDS // (16 * degrees["tp"])) * 16 * degrees["tp"]
    assert all(bits(row) == bits(embedding[WORDS - 1]) for row in embedding[WORDS:])
    assert after.iteration == before.iteration
    same = (
        "num_layers",
        "num_query_groups",
        "swiglu",
        "untie_embeddings_and_output_weights",
        "bf16",
        "transformer_impl",
        "lr",
    )
    assert all(getattr(after.args, key) == getattr(before.args, key) for key in same)
    assert after.args.tensor_model_parallel_size == degrees["tp"]
    first, origin = after.ranks[0].model, before.ranks[0].model
    assert first["opt_param_scheduler"] == origin["opt_param_scheduler"]
    assert keys_of(tmp_path / "back") == keys_of(conversions.of(GOLDENS / name, **degrees))


def without_padding(tensors: Tensors) -> Tensors:
    return {k: v[:WORDS] if "word_embeddings" in k[0] or "output_layer" in k[0] else v for k, v in tensors.items()}


def keys_of(root: Path) -> list[str]:
    """All keys of the model, as one process would register them."""
    return list(open_checkpoint(root, ReadOptions()).family.order)  # type: ignore[attr-defined]


def test_groups_are_those_that_megatron_had(tmp_path: Path) -> None:
    converted(GOLDENS / LLAMA, tmp_path / "ds", "deepspeed", zero_stage=2)
    converted(tmp_path / "ds", tmp_path / "back", "megatron")
    groups = [open_checkpoint(root, ReadOptions()).state.groups for root in (GOLDENS / LLAMA, tmp_path / "back")]
    assert [dict(group.fields) for group in groups[0]] == [dict(group.fields) for group in groups[1]]
