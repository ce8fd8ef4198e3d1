"""Experts between families: packed and one by one, their param groups, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert, prepare
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Lossy, Unsupported
from mcore_rlhf.families.crossing.alike import alike
from mcore_rlhf.families.crossing.packing import repacked
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import crossed
from mcore_rlhf.families.sidecar import FormerFamily
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.storage.destination import LocalFolder
from tests.helpers import universal_by_hand
from tests.helpers.conversions import GOLDENS
from tests.helpers.independent_reader import read

EXPERTS = GOLDENS / "ep2dp2_moe_seq_bf16_do"
LAYER = "model.layers.2.mlp.experts."


def to(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))


def opened(**changed: Any) -> Source:
    """The golden, with other values in the param groups of its experts."""
    source = open_checkpoint(EXPERTS, ReadOptions())
    groups = [ParamGroup({**g.fields, **changed}, g.expert) if g.expert else g for g in source.state.groups]
    source.state.groups = tuple(groups)
    return source


def module(source: Source) -> ModuleState:
    assert isinstance(source.family, ModuleState)
    return source.family


@pytest.mark.parametrize("name", ["deepspeed", "universal", "dcp"])
def test_in_memory_the_experts_of_a_layer_are_one_tensor(name: str) -> None:
    seen = crossed(opened(), format_named(name), WriteOptions())
    shapes = {spec.name: spec.global_shape for spec in seen.model.params}
    assert shapes[f"{LAYER}gate_up_proj"] == (4, 96, 64)
    assert shapes[f"{LAYER}down_proj"] == (4, 64, 48)
    assert "model.layers.2.mlp.gate.weight" in shapes
    assert not any("block_sparse_moe" in key for key in shapes)
    assert set(module(seen).order) == set(shapes)
    assert sorted(key for group in seen.state.groups for key in group.params) == sorted(shapes)


def test_on_disk_every_expert_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    """From memory's names to disk's, against what the source itself has."""
    to(EXPERTS, tmp_path / "uni", "universal")
    to(tmp_path / "uni", tmp_path / "hf", "hf")
    source = read(EXPERTS).tensors
    from safetensors.torch import load_file

    found = load_file(tmp_path / "hf" / "model.safetensors")
    expert = "decoder.layers.2.mlp.experts.local_experts.3."
    gate_up = source[f"{expert}linear_fc1.weight", "param"]
    inside = "model.layers.2.block_sparse_moe.experts.3."
    assert torch.equal(found[f"{inside}w1.weight"], gate_up[:48])
    assert torch.equal(found[f"{inside}w3.weight"], gate_up[48:])
    assert torch.equal(found[f"{inside}w2.weight"], source[f"{expert}linear_fc2.weight", "param"])


def test_what_is_no_name_of_an_expert_stays_when_experts_are_packed(tmp_path: Path) -> None:
    """Every field of the format's own view and of the model, be it one that is added tomorrow."""
    seen = crossed(opened(), format_named("hf"), WriteOptions())
    native, model = module(seen), seen.model
    native.config = {**native.config, "model_type": "mixtral"}
    native.without_frozen, native.pipeline, native.tag = True, True, "mine"
    native.optimizer, native.per_rank, native.shared = {"clip_grad": 1.0}, ({"a": 1}, {"a": 2}), {"alias": "owner"}
    seen.model = replace(model, unused=frozenset({"extra"}), mtp_layers=3, num_experts=4, _index={})
    packed = repacked(seen, native.config, packs_experts=True)
    assert len(packed.model.params) < len(model.params)
    assert (native.packs_experts, module(packed).packs_experts) == (False, True)
    renamed = {"order", "buffers", "keys", "params", "_index", "packs_experts"}
    for before, after in ((native, packed.family), (seen.model, packed.model)):
        names = [field.name for field in fields(before) if field.name not in renamed]
        assert len(names) >= 7
        assert [name for name in names if getattr(before, name) != getattr(after, name)] == []


def test_packed_and_unpacked_are_the_same_model(tmp_path: Path) -> None:
    to(EXPERTS, tmp_path / "hf", "hf")
    to(tmp_path / "hf", tmp_path / "ds", "deepspeed", no_optimizer=True, zero_stage=0)
    a, b = (open_checkpoint(tmp_path / name, ReadOptions()) for name in ("hf", "ds"))
    assert f"{LAYER}gate_up_proj" in {spec.name for spec in b.model.params}
    seen = alike(a, b)
    assert {spec.name for spec in seen[0].model.params} == {spec.name for spec in seen[1].model.params}


def test_experts_join_the_groups_of_others_that_are_trained_alike() -> None:
    seen = crossed(opened(), format_named("universal"), WriteOptions())
    assert [group.fields["wd_mult"] for group in seen.state.groups] == [1.0, 0.0]
    assert f"{LAYER}down_proj" in seen.state.groups[0].params


def test_experts_with_a_rate_of_their_own_keep_their_group(tmp_path: Path) -> None:
    seen = crossed(opened(lr=0.5), format_named("universal"), WriteOptions())
    (own,) = [group for group in seen.state.groups if group.fields["lr"] == 0.5]
    assert own.params
    assert all(".experts." in name for name in own.params)
    back = crossed(seen, format_named("megatron"), WriteOptions())
    found = [(g.expert, g.fields["is_expert_parallel"], g.fields["lr"]) for g in back.state.groups]
    assert sorted(found) == [(False, False, 0.001), (False, False, 0.001), (True, True, 0.5)]
    with pytest.raises(Lossy, match="lr"):
        [
            LocalFolder(tmp_path).writer(file.path, file.layout().container.layout(file.path))
            for file in format_named("megatron").target(back, WriteOptions()).files
        ]


def test_experts_of_one_tensor_in_several_groups_cannot_be_packed() -> None:
    seen = crossed(opened(), format_named("hf"), WriteOptions())
    first, second = seen.state.groups
    moved = next(name for name in first.params if ".experts." in name)
    kept = replace(first, params=tuple(name for name in first.params if name != moved))
    seen.state.groups = (kept, replace(second, params=(*second.params, moved)))
    seen.format = "hf"
    with pytest.raises(Lossy, match=r"its experts are in param groups 0 and 1"):
        crossed(seen, format_named("universal"), WriteOptions())


def test_an_expert_that_is_frozen_cannot_be_packed() -> None:
    seen = crossed(opened(), format_named("hf"), WriteOptions())
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    params = tuple(replace(spec, trainable=spec.name != name) for spec in seen.model.params)
    seen.model, seen.format = replace(seen.model, params=params, _index={}), "hf"
    with pytest.raises(LayoutMismatch, match=r"layers\.0\.mlp\.experts\.down_proj: its experts are"):
        crossed(seen, format_named("dcp"), WriteOptions())


def test_names_are_left_alone_where_nobody_says_which_model_it_is(tmp_path: Path) -> None:
    """Other architectures pack differently, GPT-OSS for one: no guess."""
    params = {f"{LAYER}gate_up_proj": universal_by_hand.adam(2, 8, 4), "model.norm.weight": universal_by_hand.adam(4)}
    universal_by_hand.write(tmp_path / "uni", params)
    source = open_checkpoint(tmp_path / "uni", ReadOptions())
    assert crossed(source, format_named("hf"), WriteOptions()) is source


@pytest.mark.parametrize(("kind", "why"), [("gemma2", "four norms"), ("mamba", "add-an-architecture")])
def test_what_megatron_cannot_express_is_refused(kind: str, why: str, tmp_path: Path) -> None:
    params = {"model.embed_tokens.weight": universal_by_hand.adam(50, 8)}
    universal_by_hand.write(tmp_path / "uni", params)
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": kind}))
    with pytest.raises(Unsupported, match=rf"(?s)model_type {kind} .*{why}"):
        prepare(tmp_path / "uni", ConvertOptions(to="megatron", write=WriteOptions(reference_config=str(tmp_path))))
    with pytest.raises(Unsupported, match=f"model_type {kind}"):
        prepare(EXPERTS, ConvertOptions(to="hf", write=WriteOptions(reference_config=str(tmp_path))))


def test_a_reference_of_another_size_is_refused(tmp_path: Path) -> None:
    described = dict(module(crossed(opened(), format_named("hf"), WriteOptions())).config)
    (tmp_path / "config.json").write_text(json.dumps({**described, "num_local_experts": 8}))
    with pytest.raises(Unsupported, match=r"MixtralForCausalLM lacks .*local_experts\.4"):
        prepare(EXPERTS, ConvertOptions(to="hf", write=WriteOptions(reference_config=str(tmp_path))))
    (tmp_path / "config.json").write_text(json.dumps({**described, "intermediate_size": 64}))
    with pytest.raises(
        LayoutMismatch, match=r"linear_fc1\.weight: has shape \(96, 64\), but the sizes of the model make \(128, 64\)"
    ):
        prepare(EXPERTS, ConvertOptions(to="hf", write=WriteOptions(reference_config=str(tmp_path))))


@pytest.mark.parametrize(
    ("spelling", "layout"),
    [("local", {"ep": 4, "dp": 4}), ("transformer_engine", {"tp": 2, "etp": 1, "ep": 2, "dp": 2})],
)
def test_a_folder_becomes_megatrons_at_any_layout(spelling: str, layout: dict[str, int], tmp_path: Path) -> None:
    to(EXPERTS, tmp_path / "hf", "hf", dtype="float32")
    to(tmp_path / "hf", tmp_path / "mcore", "megatron", transformer_impl=spelling, **layout)
    after, before = read(tmp_path / "mcore"), read(EXPERTS)
    assert (after.args.num_experts, after.args.moe_router_topk, after.args.moe_ffn_hidden_size) == (4, 2, 48)
    assert (after.args.expert_model_parallel_size, after.args.moe_grouped_gemm) == (layout["ep"], spelling != "local")
    name, other = "linear_fc1.weight3", "local_experts.3.linear_fc1.weight"
    inside = "decoder.layers.2.mlp.experts."
    found = after.tensors[inside + (other if spelling == "local" else name), "param"]
    assert torch.equal(found, before.tensors[inside + other, "master"])


def test_a_run_with_packed_experts_becomes_megatrons_with_its_optimizer(tmp_path: Path) -> None:
    """As transformers 5 under DeepSpeed has them: gate and up of all experts in one tensor, against slices of it."""
    shapes = {"model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,), "lm_head.weight": (50, 16)}
    inside = {
        "self_attn.q_proj.weight": (32, 16), "self_attn.k_proj.weight": (16, 16), "self_attn.v_proj.weight": (16, 16),
        "self_attn.o_proj.weight": (16, 32), "self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,),
        "mlp.experts.gate_up_proj": (4, 20, 16), "mlp.experts.down_proj": (4, 16, 10), "mlp.gate.weight": (4, 16),
        "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
    }  # fmt: skip
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in inside.items()}
    states = {name: universal_by_hand.adam(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    universal_by_hand.write(tmp_path / "uni", states)
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 10, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    to(
        tmp_path / "uni",
        tmp_path / "mcore",
        "megatron",
        reference_config=str(tmp_path),
        transformer_impl="local",
        ep=2,
        dp=2,
    )
    after = read(tmp_path / "mcore")
    for ours, theirs in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for expert in range(4):
            name = f"decoder.layers.1.mlp.experts.local_experts.{expert}."
            packed = states["model.layers.1.mlp.experts.gate_up_proj"][theirs]
            assert torch.equal(after.tensors[f"{name}linear_fc1.weight", ours], packed[expert])
            packed = states["model.layers.1.mlp.experts.down_proj"][theirs]
            assert torch.equal(after.tensors[f"{name}linear_fc2.weight", ours], packed[expert])
    assert (after.args.moe_router_pre_softmax, after.args.moe_layer_freq, after.args.qk_layernorm) == (False, 1, True)


def test_weights_alone_are_a_release_on_both_sides(tmp_path: Path) -> None:
    """Megatron starts from a release without looking for an optimizer or random states; nothing is lost on the way."""
    to(EXPERTS, tmp_path / "hf", "hf")
    (tmp_path / "hf" / "mcore_rlhf.json").unlink()  # as downloaded: nobody knows an iteration
    to(tmp_path / "hf", tmp_path / "mcore", "megatron")
    assert (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").read_text() == "release"
    job = prepare(tmp_path / "mcore", ConvertOptions(to="hf", strict=True))
    assert job.lossless


def test_a_folder_with_packed_experts_is_the_same_model(tmp_path: Path) -> None:
    """transformers loads such files as well, so somebody writes them."""
    from safetensors.torch import load_file, save_file

    to(EXPERTS, tmp_path / "hf", "hf")
    to(tmp_path / "hf", tmp_path / "a", "megatron", ep=2, dp=2)
    path = tmp_path / "hf" / "model.safetensors"
    tensors, inside = load_file(path), "block_sparse_moe."
    for layer in range(4):
        at, new = f"model.layers.{layer}.{inside}", f"model.layers.{layer}.mlp."
        w1, w3, w2 = ([tensors.pop(f"{at}experts.{e}.{part}.weight") for e in range(4)] for part in ("w1", "w3", "w2"))
        tensors[f"{new}experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
        tensors[f"{new}experts.down_proj"] = torch.stack(w2)
        tensors[f"{new}gate.weight"] = tensors.pop(f"{at}gate.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "hf" / "mcore_rlhf.json").unlink()  # the old file's checksums
    to(tmp_path / "hf", tmp_path / "b", "megatron", ep=2, dp=2)
    a, b = read(tmp_path / "a").tensors, read(tmp_path / "b").tensors
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert a.keys() == b.keys()


def test_an_output_layer_that_is_missing_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    to(EXPERTS, tmp_path / "hf", "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "hf" / "mcore_rlhf.json").unlink()
    with pytest.raises(CheckpointError, match=r"tie|lm_head"):
        prepare(tmp_path / "hf", ConvertOptions(to="megatron"))


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ({}, None, ("transformer_engine", "grouped")),
        ({}, "local", ("local", "sequential")),
        ({"spelling": "local", "experts": "stacked"}, None, ("local", "stacked")),
        ({"spelling": "local", "experts": "stacked"}, "local", ("local", "stacked")),
        ({"spelling": "local", "experts": "stacked"}, "transformer_engine", ("transformer_engine", "grouped")),
    ],
)
def test_experts_are_spelled_as_they_were(stored: dict[str, str], asked: str | None, expected: tuple[str, str]) -> None:
    found = FormerFamily(stored).spelling(asked)
    assert (found.implementation, found.experts) == expected
