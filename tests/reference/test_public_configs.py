"""Ordinary models become Megatron's without any option, and compute there what they compute in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mcore_rlhf.core.facts import Fate
from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.models.huggingface import ARCHITECTURES
from mcore_rlhf.models.huggingface.config import Build, architecture_of, args_of, config_of, sizes_of_config
from mcore_rlhf.models.huggingface.rotary_fields import rope_of
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.meaning.declared import complete, config_fields
from tests.reference.architectures_jobs import forget_where_it_came_from
from tests.reference.public_configs import PUBLIC, WITH_IMAGES, small
from tests.reference.test_architectures import (
    ROUTED,
    TOKENS,
    TOLERANCE,
    WORDS,
    different_tensors,
    loaded,
    run,
    to,
    to_megatron,
)

LOSSY = {
    "deepseek-ai/DeepSeek-V2": "transformers scores a group by its best 1, Megatron by its best 2",
    "moonshotai/Moonlight-16B-A3B": "norms inside latent attention",
    "zai-org/GLM-4.7-Flash": "norms inside latent attention",
}
"""Those of which the two authors compute another thing whatever is written, and what is said of it."""


def saved(config: dict[str, Any], folder: Path) -> torch.Tensor:
    """Have transformers write weights of a published configuration, which stays as it is published; returns the logits."""
    torch.manual_seed(7)
    (known,) = architecture_of(config)
    described = {name: value for name, value in config.items() if name not in ("model_type", "torch_dtype", "auto_map")}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(known.model_type, **described), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for param in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]:
            param.copy_(torch.randn_like(param) * (0.3 if param.dim() > 1 else 0.1) + (param.dim() == 1))
        logits: torch.Tensor = model(TOKENS, use_cache=False).logits
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return logits


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_computes_the_same(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    config = small(PUBLIC[name], WORDS)
    expected = saved(config, tmp_path / "hf")
    job = to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    lost = "\n".join(text for fate, text in job.report.lines if fate is Fate.LOST)
    assert (LOSSY[name] in lost) if name in LOSSY else (lost == "")
    found = run(pool, tmp_path / "mcore", Parallel())
    if name not in LOSSY:
        assert (found.logits - expected).abs().max() < TOLERANCE
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    assert different_tensors(tmp_path / "hf", tmp_path / "back") == []
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    further = {} if "num_nextn_predict_layers" not in config else {"num_nextn_predict_layers": 0}  # there are none
    assert back == {**config, **further, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", [*PUBLIC, *WITH_IMAGES])
def test_a_public_config_at_its_own_size(name: str) -> None:
    """No number in it is refused, and what Megatron's arguments say leads back to what it means."""
    config = text_of({**PUBLIC, **WITH_IMAGES}[name])
    (known,) = architecture_of(config)
    biased, everywhere = (
        known.model_type in ("qwen2", "qwen2_moe", "glm4_moe", "seed_oss"),
        known.model_type == "gpt_oss",
    )
    build = Build(config["tie_word_embeddings"], biased or everywhere, proj_biased=everywhere, mlp_biased=everywhere)
    args = args_of(config, known, build)
    back = config_of(args, sizes_of_config(config), known, build)
    assert args_of(back, known, build) == args
    meant, found = (
        {**filled, **rope_of(filled)}
        for filled in (complete(config, known.model_type), complete(back, known.model_type))
    )
    same = ("rms_norm_eps", "rope_theta", "head_dim", "num_key_value_heads", "norm_topk_prob", "routed_scaling_factor")
    assert {n: found.get(n) for n in same if meant.get(n) is not None} == {
        n: meant[n] for n in same if meant.get(n) is not None
    }


SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "moe_intermediate_size": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "q_lora_rank": 12, "shared_expert_intermediate_size": 40, **ROUTED, "n_routed_experts": 16,
    "num_experts": 8, "num_local_experts": 8,
}  # fmt: skip


BY_THE_DEMO = [known for known in ARCHITECTURES if known.implementation is None]
"""Those that the demo's Megatron builds: it has no Transformer Engine, for which test_qwen3_next.py has stand-ins."""


@pytest.mark.parametrize("known", BY_THE_DEMO, ids=lambda known: known.model_type)
def test_what_a_config_does_not_say_is_what_its_class_fills_in(known: Any, pool: WorkerPool, tmp_path: Path) -> None:
    """Only sizes are said; transformers itself reads the same file, and Megatron computes the same logits."""
    own = config_fields(known.model_type)
    sizes = {n: v for n, v in SIZES.items() if n in own and n not in ("n_shared_experts", "num_experts_per_tok")}
    if isinstance(groups := own["num_key_value_heads"], int) and groups > SIZES["num_attention_heads"]:
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if own.get("num_experts_per_tok", 1) is None:
        sizes["num_experts_per_tok"] = 2
    of_class: dict[str, dict[str, Any]] = {
        "dots1": {"num_experts_per_tok": 1, "n_shared_experts": 2},
        "ministral": {"head_dim": 4},
    }
    sizes |= of_class.get(known.model_type, {})  # what it has no default for
    if own.get("pad_token_id"):
        sizes["pad_token_id"] = None  # the class's own is beyond so few words
    if "first_k_dense_replace" in own:
        sizes["first_k_dense_replace"] = 1
    if known.model_type == "glm4_moe_lite":  # with its own epsilon the two compute otherwise, which is said
        sizes["rms_norm_eps"] = 1e-6
    config = {"model_type": known.model_type, "architectures": [known.class_name], **sizes}
    expected = saved(config, tmp_path / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS, use_cache=False).logits, expected)
    to_megatron(tmp_path / "hf", tmp_path / "mcore", Parallel())
    found = run(pool, tmp_path / "mcore", Parallel())
    assert (found.logits - expected).abs().max() < TOLERANCE
    forget_where_it_came_from(str(tmp_path / "mcore"))
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    back = loaded(tmp_path / "back")
    theirs, ours = again.state_dict(), back.state_dict()
    if known.model_type != "phi3":  # which is a Llama then
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    with torch.no_grad():  # where in memory the same weights lie decides the last bit on some CPUs
        assert (back(TOKENS, use_cache=False).logits - expected).abs().max() < 1e-5
