"""Hugging Face folders with real transformers at one end and real Megatron-core at the other: same weights, same predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference import hf_jobs
from tests.reference.lab import Lab

TIMEOUT = 200.0
TOLERANCE = 3e-5
"""Of logits up to about 10; both sides add in another order. Facts: at most 1e-5, and 0.01 on one norm makes 0.08."""
GOLDEN = Path(__file__).parents[1] / "goldens" / "huggingface" / "llama_tied_bf16_sharded"
FP32 = TinyGPT(dtype="fp32", dropout=0.0, vocab_size=131)


@dataclass(frozen=True)
class Family:
    """One architecture, in the words of both sides.

    Args:
        name: What transformers calls it.
        model: Megatron's side of it.
    """

    name: str
    model: TinyGPT

    @property
    def model_type(self) -> str:
        """The key of transformers' classes."""
        return self.name.partition("_")[0]

    def build(self) -> PreTrainedModel:
        """The model of transformers' own, with random weights that are large enough for attention to look at something."""
        torch.manual_seed(11)
        mine = self.model
        config = AutoConfig.for_model(
            self.model_type, vocab_size=mine.vocab_size, hidden_size=mine.hidden_size,
            intermediate_size=mine.ffn_hidden_size, num_hidden_layers=mine.num_layers,
            num_attention_heads=mine.num_attention_heads, num_key_value_heads=mine.num_query_groups,
            head_dim=mine.kv_channels, rms_norm_eps=1e-5, rope_theta=10000.0, initializer_range=0.2,
            max_position_embeddings=mine.seq_length, tie_word_embeddings=not mine.untie_embeddings_and_output_weights,
        )  # fmt: skip
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return model.eval()


FAMILIES = (
    Family("llama", FP32),
    Family("llama_tied", replace(FP32, untie_embeddings_and_output_weights=False)),
    Family("qwen2", replace(FP32, add_qkv_bias=True)),
    Family("qwen3", replace(FP32, qk_layernorm=True)),
)


def tokens(rows: int) -> list[list[int]]:
    found: list[list[int]] = torch.randint(0, rows, (2, 17), generator=torch.Generator().manual_seed(3)).tolist()
    return found


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, workers=1, fsync=False, write=WriteOptions(**write)))


def loaded(folder: Path) -> PreTrainedModel:
    """The folder as transformers loads it; every tensor of the model must be in it, and none more."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    problems = {key: value for key, value in info.items() if value}
    assert problems == {}, problems
    return model.eval()  # type: ignore[no-any-return]


def predicted(model: PreTrainedModel, samples: list[list[int]]) -> hf_jobs.Logits:
    with torch.no_grad():
        found: hf_jobs.Logits = model(input_ids=torch.tensor(samples)).logits.float().numpy()
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_transformers_predicts_what_megatron_does(family: Family, lab: Lab, pool: WorkerPool, tmp_path: Path) -> None:
    """Megatron trains on TP 2 and PP 2; its weights predict the same in both."""
    trained = lab.train(family.model, Parallel(tp=2, pp=2), Training())
    whole, _ = lab.reshape(trained.root, tp=1, pp=1)
    converted(trained.root, tmp_path / "hf", "hf", max_shard_size=60_000)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 5
    samples = tokens(family.model.vocab_size)
    model = loaded(tmp_path / "hf")
    (theirs,) = pool.run(hf_jobs.logits, family.model, str(whole), samples, world_size=1, timeout=TIMEOUT)
    ours = predicted(model, samples)
    assert model.config.model_type == family.model_type
    assert ours.shape == (2, 17, family.model.vocab_size)
    assert np.abs(ours).max() > 0.1
    np.testing.assert_allclose(ours, theirs[..., : family.model.vocab_size], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_megatron_predicts_what_transformers_does(family: Family, pool: WorkerPool, tmp_path: Path) -> None:
    """A model that was never Megatron's, in shards, becomes one; and comes back from TP 2 and PP 2 bit by bit."""
    model, samples = family.build(), tokens(family.model.vocab_size)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 5
    converted(
        tmp_path / "theirs", tmp_path / "mcore", "megatron", tp=1, pp=1, padded_vocab_size=144, transformer_impl="local"
    )
    (found,) = pool.run(hf_jobs.logits, family.model, str(tmp_path / "mcore"), samples, world_size=1, timeout=TIMEOUT)
    expected = predicted(model, samples)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found[..., : family.model.vocab_size], expected, rtol=0, atol=TOLERANCE)
    converted(tmp_path / "theirs", tmp_path / "sharded", "megatron", tp=2, pp=2)
    converted(tmp_path / "sharded", tmp_path / "back", "hf")
    assert differing(loaded(tmp_path / "back"), model) == []


@pytest.mark.parametrize("mistake", ["gate and up swapped", "query heads reversed", "a norm moved by 0.01"])
def test_mistakes_would_be_seen(mistake: str, pool: WorkerPool, tmp_path: Path) -> None:
    """A negative control: what a wrong table would do moves the predictions by far more than the tolerance."""
    family, samples = FAMILIES[0], tokens(131)
    model = family.build()
    layer = model.model.layers[1]
    expected = predicted(model, samples)
    with torch.no_grad():
        if mistake == "gate and up swapped":
            layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj
        elif mistake == "query heads reversed":
            query = layer.self_attn.q_proj.weight
            query.copy_(query.view(4, 16, -1).flip(0).reshape_as(query).clone())
        else:
            layer.input_layernorm.weight += 0.01
    model.save_pretrained(tmp_path / "wrong")
    converted(tmp_path / "wrong", tmp_path / "mcore", "megatron", padded_vocab_size=144, transformer_impl="local")
    (found,) = pool.run(hf_jobs.logits, family.model, str(tmp_path / "mcore"), samples, world_size=1, timeout=TIMEOUT)
    assert np.abs(found[..., :131] - expected).max() > 100 * TOLERANCE


def differing(found: PreTrainedModel, expected: PreTrainedModel) -> list[str]:
    a, b = found.state_dict(), expected.state_dict()
    return sorted(a.keys() ^ b.keys()) + [name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(
    "way", [("deepspeed",), ("universal",), ("dcp",), ("megatron-dist",), ("dcp", "deepspeed")], ids="-".join
)
def test_weights_come_back_from_every_framework(way: tuple[str, ...], tmp_path: Path) -> None:
    """Weights alone, without an optimizer, where a format has a place for such."""
    model = FAMILIES[1].build()
    model.save_pretrained(tmp_path / "0")
    for number, to in enumerate((*way, "hf")):
        config = {"reference_config": str(tmp_path / "0")} if to == "hf" else {}
        converted(tmp_path / str(number), tmp_path / str(number + 1), to, no_optimizer=True, **config)
    assert differing(loaded(tmp_path / str(len(way) + 1)), model) == []


def test_transformers_takes_tokenizer_and_generation_config(tmp_path: Path) -> None:
    converted(GOLDEN, tmp_path / "out", "hf", eos_token_ids=(2, 3, 68), dtype="fp32", max_shard_size=10_000)
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == [2, 3, 68]
    assert model.generation_config.eos_token_id == [2, 3, 68]
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    mine, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", GOLDEN))
    assert mine("w1 w2 <think>").input_ids == theirs("w1 w2 <think>").input_ids == [5, 6, 68]
    same = AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32)
    assert differing(model, same) == []


def test_a_critic_values_what_megatrons_does(lab: Lab, pool: WorkerPool, tmp_path: Path) -> None:
    """One value per token in the place of words: a sequence classifier with one label, whose head all tokens go through."""
    critic = replace(FP32, value_head=True)
    trained = lab.train(critic, Parallel(pp=2), Training())
    whole, _ = lab.reshape(trained.root, tp=1, pp=1)
    converted(trained.root, tmp_path / "hf", "hf")
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert model.config.num_labels == 1
    samples = tokens(critic.vocab_size)
    with torch.no_grad():
        ours = model.score(model.model(torch.tensor(samples)).last_hidden_state).numpy()
    (theirs,) = pool.run(hf_jobs.logits, critic, str(whole), samples, world_size=1, timeout=TIMEOUT)
    assert ours.shape == theirs.shape == (2, 17, 1)
    assert np.abs(ours).max() > 0.05
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_masters_are_what_megatron_trains(lab: Lab, tmp_path: Path) -> None:
    """A run in bf16, exported from its fp32 masters: rounding them is the other export."""
    trained = lab.train(replace(FP32, dtype="bf16"), Parallel(tp=2), Training())
    converted(trained.root, tmp_path / "half", "hf")
    converted(trained.root, tmp_path / "masters", "hf", masters=True)
    half, masters = loaded(tmp_path / "half"), loaded(tmp_path / "masters")
    assert (half.dtype, masters.dtype) == (torch.bfloat16, torch.float32)
    rounded = {name: tensor.bfloat16() for name, tensor in masters.state_dict().items()}
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in half.state_dict().items())
    assert any(not torch.equal(t, rounded[name].float()) for name, t in masters.state_dict().items())
