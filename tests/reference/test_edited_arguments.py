"""Whatever a run's arguments say: the folder that is made of it computes what Megatron computes with them, or there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.models.meaning.arguments import BY_NAME
from tests.reference.architectures_jobs import forget_where_it_came_from, told
from tests.reference.test_architectures import CASES, TOKENS, TOLERANCE, run, to, to_megatron

DENSE: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window_size": (4, 0)}, "mistral"),
    "window of some layers": ({"window_size": (4, 0), "window_attn_skip_freq": 2}, "ministral"),
    "window of all layers by number": ({"window_size": (4, 0), "window_attn_skip_freq": 9}, "mistral"),
    "window of no layer": ({"window_size": (4, 0), "window_attn_skip_freq": [0, 0]}, "llama"),
    "off by one": ({"softmax_type": "off-by-one"}, ""),
    "softmax scale": ({"softmax_scale": 0.1}, ""),
    "l2 norm": ({"qk_l2_norm": True}, ""),
    "offset": ({"glu_linear_offset": 1.0}, ""),
    "clamp": ({"activation_func_clamp_value": 0.5}, ""),
    "no positions": ({"no_rope_freq": [0, 1]}, "smollm3"),
    "no positions in no layer": ({"no_rope_freq": [0, 0]}, "llama"),
    "half a head": ({"rotary_percent": 0.5}, ""),
    "pairs": ({"rotary_interleaved": True}, "ernie4_5"),
    "epsilon": ({"layernorm_epsilon": 1e-2}, "llama"),
    "base": ({"rotary_base": 500}, "llama"),
    "llama 3": ({"use_rope_scaling": True, "rope_scaling_factor": 4.0}, "llama"),
    "interpolation": ({"rotary_seq_len_interpolation_factor": 2, "use_rope_scaling": False}, "llama"),
    "interpolation besides": ({"rotary_seq_len_interpolation_factor": 2}, ""),
    "layer scaling": ({"apply_query_key_layer_scaling": True}, "llama"),
    "training": ({"hidden_dropout": 0.3, "attention_dropout": 0.2, "init_method_std": 0.1, "lr": 1.0}, "llama"),
}  # fmt: skip
MIXTURE: dict[str, tuple[dict[str, Any], str]] = {
    "one expert more": ({"moe_router_topk": 3}, "mixtral"),
    "softmax before": ({"moe_router_pre_softmax": True}, ""),
    "scaled": ({"moe_router_topk_scaling_factor": 2.0}, ""),
    "scaled by one": ({"moe_router_topk_scaling_factor": 1.0}, "mixtral"),
    "sigmoid": ({"moe_router_score_function": "sigmoid"}, ""),
    "window": ({"window_size": (3, 0)}, "mixtral"),
    "losses": ({"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}, "mixtral"),
}  # fmt: skip
LATENT: dict[str, tuple[dict[str, Any], str]] = {
    "yarn, unless told otherwise": ({"rope_type": None, "rotary_scaling_factor": 4.0, "mscale": 0.7}, "deepseek_v3"),
    "yarn with an attention factor": ({"rotary_scaling_factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.0}, "deepseek_v3"),
    "scaled attention": ({"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0}, ""),
    "not scaled": ({"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.0}, "deepseek_v3"),
    "a scale": ({"moe_router_topk_scaling_factor": 0.5}, "deepseek_v3"),
    "no scale": ({"moe_router_topk_scaling_factor": None}, "deepseek_v3"),
    "one expert": ({"moe_router_topk": 1}, "deepseek_v3"),
    "groups": ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "deepseek_v3"),
}  # fmt: skip
GPT_OSS: dict[str, tuple[dict[str, Any], str]] = {
    "another limit": ({"activation_func_clamp_value": 0.7}, "gpt_oss"),
    "no limit": ({"activation_func_clamp_value": None}, ""),
    "another offset": ({"glu_linear_offset": 0.5}, ""),
    "another window": ({"window_size": (2, 0), "window_attn_skip_freq": 3}, "gpt_oss"),
    "no window": ({"window_size": None}, "gpt_oss"),
    "positions as they are": ({"position_embedding_type": "rope", "yarn_rotary_scaling_factor": 1.0}, "gpt_oss"),
    "scaled sines": ({"position_embedding_type": "rope"}, ""),
    "another YaRN": ({"yarn_beta_fast": 8.0, "yarn_correction_range_round_to_int": True}, "gpt_oss"),
    "SwiGLU": ({"quick_geglu": False, "swiglu": True}, ""),
}
EDITS = [
    pytest.param(case, edit, becomes, id=f"{case}: {name}")
    for case, edits in (("llama", DENSE), ("mixtral", MIXTURE), ("deepseek_v3_yarn", LATENT), ("gpt_oss", GPT_OSS))
    for name, (edit, becomes) in edits.items()
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of transformers' by case, each made once."""
    return {
        name: folder(tmp_path_factory.mktemp(name), name)
        for name in ("llama", "mixtral", "deepseek_v3_yarn", "gpt_oss")
    }


def folder(path: Path, name: str) -> Path:
    CASES[name].save(path / "hf")
    return path / "hf"


@pytest.mark.parametrize(("case", "edit", "becomes"), EDITS)
def test_an_edited_run_is_the_same_model_or_none(
    case: str, edit: dict[str, Any], becomes: str, made: dict[str, Path], pool: WorkerPool, tmp_path: Path
) -> None:
    root = tmp_path / "mcore"
    to_megatron(made[case], root, Parallel())
    forget_where_it_came_from(str(root))
    before = run(pool, root, Parallel()).logits
    edited(root, edit)
    expected = run(pool, root, Parallel()).logits
    if not becomes:
        with pytest.raises(Unsupported, match="|".join(edit)):
            to(root, tmp_path / "back", "hf")
        assert (before - expected).abs().max() > 100 * TOLERANCE  # what is refused would be another model
        return
    job = to(root, tmp_path / "back", "hf")
    assert not [text for _, text in job.report.lines if "passed over" in text]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert model.config.model_type == becomes
    with torch.no_grad():
        found = model(TOKENS, use_cache=False).logits
    assert (found - expected).abs().max() < TOLERANCE
    to_megatron(tmp_path / "back", tmp_path / "again", Parallel())
    assert (run(pool, tmp_path / "again", Parallel()).logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("case", "edit", "becomes"), EDITS)
def test_an_engine_tells_it_all(
    case: str, edit: dict[str, Any], becomes: str, made: dict[str, Path], pool: WorkerPool, tmp_path: Path
) -> None:
    """verl and NeMo-RL have no arguments: what a live model computes is read off its configuration, and off itself."""
    to_megatron(made[case], tmp_path / "mcore", Parallel())
    edited(tmp_path / "mcore", edit)
    found = pool.run(told, str(tmp_path / "mcore"), Parallel(), world_size=1, timeout=100)[0]
    wanted = {name: value for name, value in edit.items() if name in BY_NAME and value is not None}
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["rotary_base"] == edit.get(
        "rotary_base", {"llama": 500000, "mixtral": 1000000, "gpt_oss": 150000}.get(case, 10000)
    )


def edited(root: Path, edit: dict[str, Any]) -> None:
    (path,) = root.glob("*/mp_rank_*/model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    vars(tree["args"]).update(edit)
    torch.save(tree, path)
