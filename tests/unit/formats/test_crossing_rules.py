"""What a conversion between families derives, asks for and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert, prepare
from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import EXP_AVG, MASTER
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, Lossy, UsageError
from mcore_rlhf.families.megatron.schedule import counted_as, new_scheduler
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import crossed
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.models.spec import ParamRule, Rules
from mcore_rlhf.storage.stored import stub_class
from tests.helpers import universal_by_hand
from tests.helpers.conversions import GOLDENS
from tests.helpers.independent_reader import Reading, read
from tests.helpers.plain_load import plain_load

LLAMA = GOLDENS / "tp2pp2dp2_bf16_do"
HIDDEN, FFN, HEADS, GROUPS, HEAD, WORDS = 16, 24, 4, 2, 8, 50
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": HEAD, "vocab_size": WORDS, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The parameters of a Qwen2 or Qwen3 as transformers lists them."""
    q, k = HEADS * HEAD, GROUPS * HEAD
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for part, rows in (("q", q), ("k", k), ("v", k)):
            found[f"{layer}self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if kind == "qwen2":
                found[f"{layer}self_attn.{part}_proj.bias"] = (rows,)
        found[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, q)
        if kind == "qwen3":
            found.update({f"{layer}self_attn.{part}_norm.weight": (HEAD,) for part in "qk"})
        found.update({f"{layer}mlp.{part}_proj.weight": (FFN, HIDDEN) for part in ("gate", "up")})
        found[f"{layer}mlp.down_proj.weight"] = (HIDDEN, FFN)
        found.update({f"{layer}{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")})
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}


def trained_by_deepspeed(folder: Path, kind: str) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A universal checkpoint of a run that was never Megatron's, and what is in it."""
    states = {name: universal_by_hand.adam(*shape, seed=n) for n, (name, shape) in enumerate(shapes(kind).items())}
    return universal_by_hand.write(folder, states), states


def megatron_of(source: Path, target: Path, **write: Any) -> tuple[Job, Reading]:
    options = ConvertOptions(to="megatron", fsync=False, write=WriteOptions(**write))
    return convert(source, target, options), read(target)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with the description of the model."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "hf"


def said(job: Job, fate: Fate) -> str:
    return "\n".join(text for found, text in job.report.lines if found == fate)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("spelling", ["local", "transformer_engine"])
def test_a_run_of_deepspeeds_own_becomes_megatrons(kind: str, spelling: str, tmp_path: Path, config: Path) -> None:
    source, states = trained_by_deepspeed(tmp_path / "uni", kind)
    _, after = megatron_of(
        source, tmp_path / "out", tp=2, pp=2, reference_config=str(config), transformer_impl=spelling
    )
    layer, hf = "decoder.layers.1.", "model.layers.1."
    for ours, theirs in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):

        def stored(name: str, state: str = theirs) -> torch.Tensor:
            return states[f"{hf}{name}"][state]

        for suffix in ("weight", "bias") if kind == "qwen2" else ("weight",):
            q, k, v = (stored(f"self_attn.{part}_proj.{suffix}") for part in "qkv")
            per_group = [
                t for j in range(2) for t in (q[16 * j : 16 * j + 16], k[8 * j : 8 * j + 8], v[8 * j : 8 * j + 8])
            ]
            assert after.tensors[f"{layer}self_attention.linear_qkv.{suffix}", ours].equal(torch.cat(per_group))
        if kind == "qwen3":
            assert after.tensors[f"{layer}self_attention.k_layernorm.weight", ours].equal(
                stored("self_attn.k_norm.weight")
            )
        norm = "input_layernorm.weight" if spelling == "local" else "self_attention.linear_qkv.layer_norm_weight"
        assert after.tensors[layer + norm, ours].equal(stored("input_layernorm.weight"))
        gate_up = torch.cat([stored("mlp.gate_proj.weight"), stored("mlp.up_proj.weight")])
        assert after.tensors[f"{layer}mlp.linear_fc1.weight", ours].equal(gate_up)
    assert (after.args.qk_layernorm, after.args.add_qkv_bias) == (kind == "qwen3", kind == "qwen2")
    assert (after.args.rotary_base, after.args.padded_vocab_size, after.args.transformer_impl) == (
        1000000,
        256,
        spelling,
    )


def test_a_model_that_nothing_describes_needs_its_config(tmp_path: Path) -> None:
    source, _ = trained_by_deepspeed(tmp_path / "uni", "qwen2")
    with pytest.raises(UsageError, match="--reference-config"):
        megatron_of(source, tmp_path / "out")


def test_one_group_is_dealt_by_megatrons_rule(tmp_path: Path, config: Path) -> None:
    source, _ = trained_by_deepspeed(tmp_path / "uni", "qwen3")
    job, after = megatron_of(source, tmp_path / "out", reference_config=str(config))
    groups = after.ranks[0].model["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"]) for group in groups] == [
        (1.0, groups[0]["step"]),
        (0.0, groups[0]["step"]),
    ]
    assert groups[0]["lr"] == groups[1]["lr"]
    assert "weight-decay multiplier 0: of group 0" in said(job, Fate.DERIVED)


def test_every_stage_has_its_groups_in_the_order_in_which_it_meets_them(tmp_path: Path, config: Path) -> None:
    """By place megatron-core before 0.14 takes them; the second stage begins with a norm."""
    source, _ = trained_by_deepspeed(tmp_path / "uni", "qwen3")
    _, after = megatron_of(source, tmp_path / "out", pp=2, reference_config=str(config), transformer_impl="local")
    stages = [rank.model["optimizer"]["optimizer"]["param_groups"] for rank in after.ranks]
    assert [[group["wd_mult"] for group in groups] for groups in stages] == [[1.0, 0.0], [0.0, 1.0]]


def test_rules_say_what_is_decayed(tmp_path: Path, config: Path) -> None:
    source, _ = trained_by_deepspeed(tmp_path / "uni", "qwen3")
    rules = Rules((ParamRule("*", wd_mult=1.0),))
    _, after = megatron_of(source, tmp_path / "out", reference_config=str(config), rules=rules)
    groups = after.ranks[0].model["optimizer"]["optimizer"]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [1.0]


def test_a_scheduler_of_another_step_does_not_come_back(tmp_path: Path) -> None:
    convert(LLAMA, tmp_path / "ds", ConvertOptions(to="deepspeed", fsync=False, write=WriteOptions(zero_stage=2)))
    file = tmp_path / "ds" / "global_step2" / "mp_rank_00_model_states.pt"
    tree = plain_load(file)
    assert tree["lr_scheduler"] == {"last_batch_iteration": 1}
    assert tree["global_samples"] == 16
    tree["global_steps"] = 7  # DeepSpeed went on and kept its client state
    torch.save(tree, file)
    (tmp_path / "ds" / "mcore_rlhf.json").unlink()  # the old file's checksums
    job, after = megatron_of(tmp_path / "ds", tmp_path / "out")
    made = after.ranks[0].model["opt_param_scheduler"]
    assert (made["num_steps"], made["lr_decay_style"]) == (16, "constant"), "samples that DeepSpeed counted"
    assert "lr_scheduler" in said(job, Fate.LOST)


@pytest.mark.parametrize(
    ("samples", "rate"),
    [(10**5000, 0.1), (-16, 0.1), (True, 0.1), (16, 10**400)],
    ids=["many", "fewer", "flag", "rate"],
)
def test_numbers_that_no_run_has_make_a_scheduler_too(tmp_path: Path, samples: int, rate: float) -> None:
    convert(LLAMA, tmp_path / "ds", ConvertOptions(to="deepspeed", fsync=False, write=WriteOptions(zero_stage=2)))
    source = open_checkpoint(tmp_path / "ds", ReadOptions())
    groups = tuple(replace(group, fields={**group.fields, "max_lr": rate}) for group in source.state.groups)
    other = {**source.state.other, "global_samples": samples}
    source = replace(source, origin={}, state=replace(source.state, groups=groups, other=other))
    made = new_scheduler(source, None)
    assert made is not None
    assert (made["num_steps"], made["max_lr"]) == (16 if samples == 16 else 2, rate)
    for number in (samples, 3):
        given = replace(source.state, scheduler={"num_steps": number, "lr_decay_steps": 8})
        report = Report()
        assert counted_as(replace(source, state=given), None, report, by_steps=True).state.scheduler is not None
        assert all(isinstance(text, str) for _, text in report.lines)


def without_words() -> Source:
    """A source whose args do not say how many words there are, as after training with a Hugging Face tokenizer."""
    source = open_checkpoint(GOLDENS / "tp1_bf16_do", ReadOptions())
    source.model = replace(source.model, vocab_size=None, _index={})
    return source


def test_megatrons_padding_is_not_cut_on_a_guess() -> None:
    with pytest.raises(UsageError, match="--vocab-size"):
        crossed(without_words(), format_named("universal"), WriteOptions())
    assert crossed(without_words(), format_named("universal"), WriteOptions(vocab_size=131)).model.vocab_size == 131


def test_the_reference_says_how_many_words_there_are(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_key_value_heads": 2, "vocab_size": 140}))
    model = crossed(without_words(), format_named("deepspeed"), WriteOptions(reference_config=str(tmp_path))).model
    assert [model.params[0].global_shape, model.params[-1].global_shape] == [(140, 64), (140, 64)]


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "is no JSON"), ("[]", "expected an object"), (None, "cannot read the model's config")]
)
def test_a_reference_that_is_none(text: str | None, complaint: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        prepare(LLAMA, ConvertOptions(to="universal", write=WriteOptions(reference_config=str(tmp_path))))


@pytest.mark.parametrize(
    ("golden", "complaint"),
    [
        ("z1_bf16acc32_untied_dp2", "--reference-config"),
        ("z2_bf16_ac_dp2", "model.embed_tokens.weight"),
        ("pp2_z1_fp32_dp2", "PipelineModule"),
    ],
)  # fmt: skip
def test_deepspeeds_own_goldens_are_no_llamas(golden: str, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        prepare(GOLDENS.parent / "deepspeed" / golden, ConvertOptions(to="megatron"))


def test_rng_cannot_be_kept(tmp_path: Path, config: Path) -> None:
    source, _ = trained_by_deepspeed(tmp_path / "uni", "qwen3")
    with pytest.raises(UsageError, match="--rng keep"):
        megatron_of(source, tmp_path / "out", reference_config=str(config), rng="keep")


def test_weights_alone(tmp_path: Path, config: Path) -> None:
    source, states = trained_by_deepspeed(tmp_path / "uni", "qwen3")
    options = WriteOptions(reference_config=str(config), no_optimizer=True)
    convert(source, tmp_path / "out", ConvertOptions(to="megatron", fsync=False, read=ReadOptions(), write=options))
    after = read(tmp_path / "out")
    assert {state for _, state in after.tensors} == {"param"}
    assert after.tensors["decoder.final_layernorm.weight", "param"].equal(states["model.norm.weight"]["fp32"])


def test_parameters_of_one_group_that_are_trained_differently(tmp_path: Path) -> None:
    convert(LLAMA, tmp_path / "ds", ConvertOptions(to="deepspeed", fsync=False, write=WriteOptions(zero_stage=2, dp=1)))
    rules = Rules((ParamRule("*", wd_mult=1.0),))  # both groups become one, but they have different weight decays
    with pytest.raises(Lossy, match=r"weight_decay \(0\.1, 0\.0\)"):
        megatron_of(tmp_path / "ds", tmp_path / "out", rules=rules)


def test_lion_has_betas_and_corrects_no_bias() -> None:
    """Nor does it keep a second moment, by which Adam is told from it."""
    seen = crossed(open_checkpoint(LLAMA, ReadOptions()), format_named("universal"), WriteOptions())
    fields = [{k: v for k, v in group.fields.items() if k != "bias_correction"} for group in seen.state.groups]
    seen.state.groups = tuple(replace(one, fields=more) for one, more in zip(seen.state.groups, fields, strict=True))
    lion = replace(seen, states=(MASTER, EXP_AVG))
    for source, corrects in ((seen, True), (lion, False)):
        groups = crossed(source, format_named("megatron"), WriteOptions()).state.groups
        assert ["bias_correction" in group.fields for group in groups] == [corrects] * 2
        assert all("betas" in group.fields for group in groups)


def test_classes_in_the_groups_of_an_offloaded_optimizer_stay_behind() -> None:
    """DeepSpeed and torch would have to import Transformer Engine to read the file."""
    source = open_checkpoint(LLAMA, ReadOptions())
    adam = stub_class("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam")
    source.state.groups = tuple(replace(g, fields={**g.fields, "gpu_optimizer_cls": adam}) for g in source.state.groups)
    seen = crossed(source, format_named("deepspeed"), WriteOptions())
    assert [group.fields["lr"] for group in seen.state.groups] == [1e-3, 1e-3]
    assert not any("gpu_optimizer_cls" in group.fields for group in seen.state.groups)
    assert any("gpu_optimizer_cls: classes" in text for fate, text in seen.notes.lines if fate is Fate.DERIVED)


def test_a_loss_scale_goes_along() -> None:
    """With the scale of 1 that other runs store, a run in fp16 would go on without its scaling."""
    source = open_checkpoint(LLAMA, ReadOptions())
    source.state.args["loss_scale_window"] = 500.0
    source.state.grad_scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 1, "hysteresis_tracker": 2}
    scaler: Any = crossed(source, format_named("deepspeed"), WriteOptions()).state.grad_scaler
    assert (scaler.dynamic, scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter, scaler.scale_window) == (
        True,
        4096.0,
        1,
        500,
    )
    source.state.grad_scaler, source.state.args["loss_scale"] = {}, 128.0
    constant: Any = crossed(source, format_named("deepspeed"), WriteOptions()).state.grad_scaler
    assert (constant.dynamic, constant.cur_scale) == (False, 128.0)


def test_the_reference_goes_along_for_the_way_back(config: Path, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    (config / "config.json").write_text(
        json.dumps({**sizes, "num_key_value_heads": 2, "vocab_size": 130, "rope_theta": 7e5})
    )
    options = WriteOptions(reference_config=str(config), vocab_size=132)
    convert(LLAMA, tmp_path / "uni", ConvertOptions(to="universal", fsync=False, write=options))
    carried = open_checkpoint(tmp_path / "uni", ReadOptions()).origin
    assert isinstance(carried, dict)
    assert (carried["config"]["rope_theta"], carried["config"]["vocab_size"]) == (7e5, 132)
