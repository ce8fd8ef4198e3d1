"""Every architecture against its two authors: transformers writes a folder, and real megatron-core computes the same logits.

The folder becomes a Megatron checkpoint, whose own ``args`` build the model that loads it, strictly; then it becomes a folder
again, bit for bit, which transformers loads.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.demo import versions
from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.crossing.packing import from_files, from_modules
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.models.huggingface import seed_oss
from mcore_rlhf.models.huggingface.config import architecture_of, sizes_of_config
from mcore_rlhf.models.huggingface.order import module_order
from mcore_rlhf.models.huggingface.relation import from_huggingface
from mcore_rlhf.models.huggingface.table import Spelling
from tests.reference.architectures_jobs import Answer, answer, forget_where_it_came_from, norm_before_queries

TOLERANCE = 2e-5
WORDS, LENGTH = 61, 17
TOKENS = torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(3))

BASE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


LAST = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
FIRST = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
PLAIN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ALL_ROUTED = {name: value for name, value in ROUTED.items() if name != "first_k_dense_replace"}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3, "swiglu_limit": 0.5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and the layout that Megatron gets.

    Args:
        kind: transformers' ``model_type``.
        config: What makes it different.
        parallel: The layout.
        taken_for: What its tensors alone say that it is, where another architecture has the same.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    parallel: Parallel = field(default_factory=Parallel)
    taken_for: str | None = None

    def huggingface(self) -> Any:
        """Its configuration."""
        return transformers.AutoConfig.for_model(self.kind, **{**BASE, **self.config})

    def save(self, folder: Path) -> torch.Tensor:
        """Have transformers write a folder with weights that matter; returns the logits."""
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(self.huggingface()).eval()
        with torch.no_grad():
            for param in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]:
                scale = 0.3 if param.dim() > 1 else 0.1
                param.copy_(torch.randn_like(param) * scale + (1.0 if param.dim() == 1 else 0.0))
            logits: torch.Tensor = model(TOKENS, use_cache=False).logits
        model.save_pretrained(folder)
        return logits


CASES = {
    "llama": Case("llama", {"rope_parameters": LLAMA3}, Parallel(tp=2)),
    "llama_linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama_yarn": Case("llama", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    "mistral": Case("mistral", {"sliding_window": None}, taken_for="llama"),
    "mistral_window": Case("mistral", {"sliding_window": 5}, Parallel(tp=2)),
    "qwen2_yarn": Case("qwen2", {"rope_parameters": PLAIN_YARN}),
    "qwen2_window": Case("qwen2", LAST),
    "qwen3_yarn": Case("qwen3", {"head_dim": 16, "rope_parameters": {**PLAIN_YARN, "attention_factor": 1.3, "truncate": False}}),
    "qwen3_window": Case("qwen3", {"head_dim": 16, **FIRST}),
    "qwen2_moe_window": Case("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 4}),
    "qwen3_moe_window": Case("qwen3_moe", {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 4}),
    "mixtral_window": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen2": Case("qwen2", {}, Parallel(tp=2)),
    "qwen3": Case("qwen3", {"head_dim": 16}),
    "qwen3_tied": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2_moe": Case("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}, Parallel(ep=2, dp=2)),
    "qwen3_moe": Case("qwen3_moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}, Parallel(ep=2, dp=2)),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Case("gpt_oss", GPT_OSS, Parallel(tp=2, ep=2, etp=1)),
    "gpt_oss_experts": Case("gpt_oss", {**GPT_OSS, "swiglu_limit": 7.0,
        "layer_types": ["full_attention"] * 3, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}, Parallel(ep=2, dp=2)),
    "glm4_moe": Case("glm4_moe", {**ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": Case("glm4_moe_lite", {**{n: v for n, v in ROUTED.items() if n != "first_k_dense_replace"}, **LATENT,
        "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}),
    "seed_oss": Case("seed_oss", {"head_dim": 16, "attention_bias": True}, Parallel(tp=2), taken_for="qwen2"),
    "phi3": Case("phi3", {"pad_token_id": None, "rope_parameters": HALF}, Parallel(tp=2)),
    "phi3_window": Case("phi3", {"sliding_window": 5, "pad_token_id": None, "rope_parameters": HALF}),
    "glm": Case("glm", {"head_dim": 16, "pad_token_id": None, "rope_parameters": {**HALF, "rope_theta": 500.0}}, Parallel(tp=2)),
    "glm_unbiased": Case("glm", {"head_dim": 8, "pad_token_id": None, "attention_bias": False}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 16}, Parallel(tp=2)),
    "ernie4_5_biased": Case("ernie4_5", {"head_dim": 8, "use_bias": True}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4, "pad_token_id": None}, Parallel(tp=2)),
    "smollm3_window": Case("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4, "pad_token_id": None}),
    "smollm3_everywhere": Case("smollm3", {"no_rope_layers": [1, 1], "pad_token_id": None}, taken_for="llama"),
    "ministral": Case("ministral", {"head_dim": 16, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
    "youtu": Case("youtu", {**LATENT, "initializer_range": 0.02}, Parallel(tp=2)),
    "dots1": Case("dots1", {**ROUTED, "head_dim": 16, "norm_topk_prob": True, "routed_scaling_factor": 2.5}, Parallel(ep=2, dp=2),
        taken_for="glm4_moe"),
    "dots1_window": Case("dots1", {**ROUTED, "norm_topk_prob": True, "sliding_window": 4, "max_window_layers": 1}),
    "solar_open": Case("solar_open", {**ALL_ROUTED, "head_dim": 16, "attention_bias": True}, Parallel(ep=2, dp=2), taken_for="glm4_moe"),
    "arcee": Case("arcee", {"head_dim": 8, "hidden_act": "relu2"}, Parallel(tp=2)),
    "deepseek_v2": Case("deepseek_v2", {**ROUTED, **LATENT, "routed_scaling_factor": 1.5}),
    "deepseek_v3": Case("deepseek_v3", {**ROUTED, **LATENT, "n_group": 1, "topk_group": 1}, Parallel(tp=2)),
    "deepseek_v3_full_q": Case("deepseek_v3", {**ROUTED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3_yarn": Case("deepseek_v3", {**ROUTED, **LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
    "deepseek_v3_groups": Case("deepseek_v3", {**ROUTED, **LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}),
    "deepseek_v3_one": Case("deepseek_v3", {**ROUTED, **LATENT, "num_experts_per_tok": 1, "norm_topk_prob": False, **ONE_GROUP}),
    "deepseek_v3_mscale": Case("deepseek_v3", {**ROUTED, **LATENT, **ONE_GROUP, "rope_parameters": {**YARN, "mscale": None}}),
    "deepseek_v2_yarn": Case("deepseek_v2", {**ROUTED, **LATENT, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
}  # fmt: skip


def to(root: Path, target: Path, to: str, **write: Any) -> Any:
    return convert(root, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))


def to_megatron(root: Path, target: Path, parallel: Parallel) -> Any:
    layout = {"tp": parallel.tp, "ep": parallel.ep, "dp": parallel.dp}
    write = {} if parallel.etp is None else {"etp": parallel.etp}
    return to(root, target, "megatron", transformer_impl="local", **write, **{k: v for k, v in layout.items() if v > 1})


def run(pool: WorkerPool, root: Path, parallel: Parallel, *, head: bool = False) -> Answer:
    found: list[Answer] = pool.run(
        answer, str(root), parallel, TOKENS, 1 if head else WORDS, head, world_size=parallel.world_size, timeout=100
    )
    return found[0]


@pytest.mark.parametrize("name", CASES)
def test_the_table_has_what_transformers_has(name: str) -> None:
    """Names, shapes and order of parameters in memory, of the real class; only sizes come from its config."""
    case = CASES[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(case.huggingface())
    real = {key: tuple(param.shape) for key, param in model.named_parameters()}
    buffers = {key: tuple(value.shape) for key, value in model.named_buffers() if key in model.state_dict()}
    config = case.huggingface().to_dict()
    (known,) = architecture_of(config)
    files = from_modules({**real, **buffers}, known.packed).files
    sizes = replace(sizes_of_config(config), mtp=0)
    relation = from_huggingface(files, sizes, Spelling(), [known])
    assert relation.huggingface.keys() == files.keys()
    modules = from_files(relation.huggingface, known.packed).modules
    assert {key: modules[key] for key in modules if key not in buffers} == real
    assert [key for key in modules if key not in buffers] == list(real)
    assert module_order(config, sorted({*real, *buffers})) == list(real)


@pytest.mark.skipif(versions.MEGATRON < (0, 19), reason="0.16 to 0.18 have no such norm, which the logits above show")
def test_full_queries_of_latent_attention_have_a_norm_of_their_own_since_0_19(pool: WorkerPool, tmp_path: Path) -> None:
    """So a model without ``q_lora_rank`` that 0.19 trained is none of transformers', and one of transformers' is none of 0.19's."""
    found = {rank: pool.run(norm_before_queries, rank, world_size=1, timeout=100)[0] for rank in (None, 8)}
    assert found == {None: "TELayerNormColumnParallelLinear", 8: "TELayerNormColumnParallelLinear"}
    CASES["deepseek_v3_full_q"].save(tmp_path / "hf")
    job = to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    assert any("0.19 has a norm before linear_q_proj" in text for _, text in job.report.lines)


def test_gate_and_up_are_not_interchangeable(pool: WorkerPool, tmp_path: Path) -> None:
    """The comparison of logits can fail: two matrices are swapped in what we wrote, and nothing else."""
    case = CASES["qwen3_moe"]
    expected = case.save(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    gate, up = (f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, path, metadata={"format": "pt"})
    to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    found = run(pool, tmp_path / "mcore", Parallel())
    assert (found.logits - expected).abs().max() > 100 * TOLERANCE


def test_a_phi_without_its_config_becomes_a_llama(pool: WorkerPool, tmp_path: Path) -> None:
    """Which computes the same; with its own config it is the same to the bit."""
    case = Case("phi3", {"pad_token_id": None})
    expected = case.save(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    assert (run(pool, tmp_path / "mcore", Parallel()).logits - expected).abs().max() < TOLERANCE
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    assert different_tensors(tmp_path / "hf", tmp_path / "back") == []
    forget_where_it_came_from(str(tmp_path / "mcore"))
    to(tmp_path / "mcore", tmp_path / "llama", "hf")
    model = loaded(tmp_path / "llama")
    assert type(model).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert (model(TOKENS, use_cache=False).logits - expected).abs().max() < TOLERANCE


def test_further_tokens_are_the_layer_after_the_last(pool: WorkerPool, tmp_path: Path) -> None:
    """As in DeepSeek's release files: transformers passes over that layer, Megatron loads it."""
    case = CASES["deepseek_v3_yarn"]
    replace(case, config={**case.config, "num_hidden_layers": 3}).save(tmp_path / "hf")
    path, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    tensors = load_file(path)
    hidden, vocabulary = BASE["hidden_size"], (tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    made = {name: torch.rand(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    made |= {
        "eh_proj": torch.rand(hidden, 2 * hidden),
        "embed_tokens": vocabulary[0],
        "shared_head.head": vocabulary[1],
    }
    tensors |= {f"model.layers.2.{name}.weight": tensor.clone() for name, tensor in made.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    description = {**json.loads(config.read_text()), "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(description))
    job = to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    assert any("model.layers.2.embed_tokens.weight" in text for _, text in job.report.lines)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
    found = run(pool, tmp_path / "mcore", Parallel())
    assert (found.logits - expected).abs().max() < TOLERANCE
    assert found.stored == list(found.keys)
    assert found.keys["mtp.layers.0.eh_proj.weight"] == (hidden, 2 * hidden)
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    copies = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
    assert different_tensors(tmp_path / "hf", tmp_path / "back") == copies
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4},
    "qwen3_vl": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
        "deepstack_visual_indexes": [0]},
}  # fmt: skip
POSITIONS = {"type": "mrope", "mrope_section": [2, 3, 3]}
"""As folders of 2025 have them, beside ``rope_theta``."""


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("kind", VISION)
def test_the_text_of_a_model_of_images(kind: str, old: bool, pool: WorkerPool, tmp_path: Path) -> None:
    """Its description in a section of its own, or, as in folders of 2025, among all others: it is a model of text in Megatron."""
    text = {**BASE, "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}
    text |= {"head_dim": 16} if kind == "qwen3_vl" else {}
    described = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=VISION[kind], tie_word_embeddings=False
    )
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(described).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn_like(param) * 0.2 + (1.0 if "norm" in name else 0.0))
        expected = model(TOKENS, use_cache=False).logits
    model.save_pretrained(tmp_path / "hf")
    if old:
        path = tmp_path / "hf" / "config.json"
        config = json.loads(path.read_text())
        inside = {n: v for n, v in config["text_config"].items() if n not in ("rope_parameters", "model_type")}
        sections = {"text_config": inside} if kind == "qwen3_vl" else inside
        config = {n: v for n, v in config.items() if n != "text_config"} | sections
        (config["text_config"] if kind == "qwen3_vl" else config).update(rope_theta=5000.0, rope_scaling=POSITIONS)
        path.write_text(json.dumps(config))
    job = to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel(tp=2))
    (lost,) = (text for fate, text in job.report.lines if fate is Fate.LOST)
    assert lost.startswith("the model of images, ")
    assert expected.abs().max() > 1
    assert (run(pool, tmp_path / "mcore", Parallel(tp=2)).logits - expected).abs().max() < TOLERANCE
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    back = loaded(tmp_path / "back")
    assert type(back).__name__ == {"qwen3_vl": "Qwen3ForCausalLM"}.get(kind, "Qwen2ForCausalLM")
    with torch.no_grad():
        assert (back(TOKENS, use_cache=False).logits - expected).abs().max() < TOLERANCE
    twice = tmp_path / "twice"
    shutil.copytree(tmp_path / "hf", twice)
    tensors = load_file(twice / "model.safetensors")
    save_file(
        {**tensors, "model.norm.weight": torch.rand(64), "model.language_model.norm.weight": torch.rand(64)},
        twice / "model.safetensors",
    )
    with pytest.raises(
        LayoutMismatch, match=r"norm\.weight and .*norm\.weight are both model\..*norm\.weight; expected one of them"
    ):
        to(twice, tmp_path / "of_twice", "megatron")
    for framework in ("deepspeed", "dcp", "universal"):  # which hold all of it, under the names that it has in memory
        to(tmp_path / "hf", tmp_path / framework, framework)
        assert set(open_checkpoint(tmp_path / framework, ReadOptions()).model.shapes) == set(model.state_dict())
        to(tmp_path / framework, tmp_path / f"of_{framework}", "hf")
        assert different_tensors(tmp_path / "hf", tmp_path / f"of_{framework}") == []


def test_a_bridges_model_of_images_is_no_damaged_one(tmp_path: Path) -> None:
    """Under the names of mbridge 0.15.1, which verl runs: none of our formats has them."""
    CASES["qwen3"].save(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    (path,) = tmp_path.glob("mcore/*/mp_rank_00/model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    tree["model"] = {f"language_model.{name}": value for name, value in tree["model"].items()}
    tree["model"]["vision_model.patch_embed.proj.weight"] = torch.rand(4, 3, 2, 2, 2)
    torch.save(tree, path)
    forget_where_it_came_from(str(tmp_path / "mcore"))
    with pytest.raises(Unsupported, match=r"a model of images \(vision_model\.patch_embed\.proj\.weight, …\)"):
        to(tmp_path / "mcore", tmp_path / "back", "hf")


@pytest.mark.parametrize("biased", [False, True])
def test_a_critic_gives_the_same_values(biased: bool, pool: WorkerPool, tmp_path: Path) -> None:
    torch.manual_seed(6)
    config = transformers.AutoConfig.for_model("qwen2", **BASE, num_labels=1, dtype="float32")
    kind = transformers.AutoModelForTokenClassification if biased else transformers.AutoModelForSequenceClassification
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.3)
        hidden = model.model(TOKENS, use_cache=False).last_hidden_state
        expected = model.score(hidden)
    model.save_pretrained(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel(tp=2))
    found = run(pool, tmp_path / "mcore", Parallel(tp=2), head=True)
    assert found.logits.shape == (1, LENGTH, 1)
    assert (found.logits - expected).abs().max() < TOLERANCE
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    assert different_tensors(tmp_path / "hf", tmp_path / "back") == []
    back = kind.from_pretrained(tmp_path / "back")
    assert (type(back), back.config.num_labels) == (type(model), 1)
    assert torch.equal(back.score.weight, model.score.weight)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    case = CASES[name]
    expected = case.save(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "mcore", case.parallel)
    found = run(pool, tmp_path / "mcore", case.parallel)
    difference = (found.logits - expected).abs().max().item()
    print(f"{name}: {difference:.2g} of {expected.abs().max().item():.2g}")
    assert expected.abs().max() > 1
    assert difference < TOLERANCE
    assert found.stored == list(found.keys)  # as Megatron registers them
    forget_where_it_came_from(str(tmp_path / "mcore"))
    to(tmp_path / "mcore", tmp_path / "back", "hf")  # with a config that is made of args
    assert different_tensors(tmp_path / "hf", tmp_path / "back") == []
    back = loaded(tmp_path / "back")
    assert back.config.model_type == (case.taken_for or case.kind)
    with torch.no_grad():
        assert torch.equal(back(TOKENS, use_cache=False).logits, expected)


def loaded(folder: Path) -> Any:
    """What transformers makes of a folder, whose ids of special tokens are those of a whole vocabulary where args made its config."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = None
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).eval()


def different_tensors(a: Path, b: Path) -> list[str]:
    """Names of tensors that only one folder has, or that are not equal to the bit."""
    before, after = (load_file(folder / "model.safetensors") for folder in (a, b))
    both = before.keys() & after.keys()
    return sorted(
        (before.keys() ^ after.keys()) | {name for name in both if not torch.equal(before[name], after[name])}
    )


def test_the_example_of_the_documentation_is_the_table_itself() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/add-an-architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block == Path(str(seed_oss.__file__)).read_text(encoding="utf-8")
