"""Real Megatron trains models with experts, latent attention and prediction of further tokens; they go through Hugging Face's
names, with optimizer, and real Megatron trains on at another layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.reference.architectures_jobs import take_random_states
from tests.reference.cases import LATENT, LOSS_TOLERANCE, MOE
from tests.reference.lab import Lab, layout_options
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK

WORDS = 192  # no padding rows at any layout here: they would come back as repetitions of the last word
ROUTED = {
    "moe_shared_expert_intermediate_size": 96,
    "moe_router_enable_expert_bias": True,
    "moe_layer_freq": (0, 1, 1, 1),
}


@dataclass(frozen=True)
class Case:
    """A model, its layouts, and what it is called.

    Args:
        kind: transformers' ``model_type`` for such a model.
        model: What is trained.
        source: On which layout.
        target: On which layout it is trained on.
    """

    kind: str
    model: TinyGPT
    source: Parallel
    target: Parallel


QUICK = {
    "mixtral": Case("mixtral", MOE, Parallel(ep=2, dp=2), Parallel(pp=2)),
    "gpt_oss": Case("gpt_oss", replace(MOE, gpt_oss=True, add_bias_linear=True), Parallel(ep=2, dp=2), Parallel(pp=2)),
    "deepseek_v3": Case("deepseek_v3", replace(LATENT, num_experts=4, mtp_num_layers=1, **ROUTED), Parallel(), Parallel(ep=2, dp=2)),
}  # fmt: skip
SLOW = {
    "qwen3_moe_packed": Case("qwen3_moe", replace(MOE, qk_layernorm=True, moe_grouped_gemm=True),
        Parallel(ep=2, dp=2), Parallel(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True)),
    "glm4_moe": Case("glm4_moe", replace(MOE, qk_layernorm=True, add_qkv_bias=True, mtp_num_layers=1, **ROUTED),
        Parallel(tp=2, ep=2, dp=2, sequence_parallel=True), Parallel(pp=2, ep=2, dp=2)),
    "deepseek_v2": Case("deepseek_v2", replace(LATENT, num_experts=4, moe_shared_expert_intermediate_size=48, moe_router_pre_softmax=True),
        Parallel(ep=2, dp=2), Parallel(tp=2, sequence_parallel=True)),
}  # fmt: skip


def cases() -> list[Any]:
    return [pytest.param(case, id=name) for name, case in QUICK.items()] + [
        pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()
    ]


@pytest.mark.parametrize("case", cases())
def test_training_goes_on_at_another_layout(case: Case, lab: Lab) -> None:
    model = replace(case.model, vocab_size=WORDS)
    source = lab.train(model, case.source, Training())
    names, root = lab.new_root(), lab.new_root()
    convert(source.root, names, ConvertOptions(to="universal", fsync=False))
    native: Any = open_checkpoint(names, ReadOptions()).family
    origin: Any = open_checkpoint(names, ReadOptions()).origin
    assert (native.config or origin["config"])["model_type"] == case.kind
    options = WriteOptions(**layout_options(case.target, model.num_layers))
    convert(names, root, ConvertOptions(to="megatron", fsync=False, write=options))
    lab.pool.run(take_random_states, str(root), str(source.root), world_size=1, timeout=60)
    resumed = lab.resume(root, model, case.target, Training())
    assert differences(source.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.groups == source.groups
    assert resumed.scheduler == source.scheduler
    assert resumed.losses[END] == pytest.approx(source.losses[END], rel=LOSS_TOLERANCE[model.dtype])


def test_a_correction_bias_stays_in_fp32(lab: Lab) -> None:
    case = QUICK["deepseek_v3"]
    source = lab.train(replace(case.model, vocab_size=WORDS), case.source, Training())
    target = lab.new_root()
    convert(source.root, target, ConvertOptions(to="hf", fsync=False, write=WriteOptions(dtype="bf16")))
    opened = open_checkpoint(target, ReadOptions())
    biases = {s.name: s.dtype.name for s in opened.model.params if s.name.endswith("e_score_correction_bias")}
    assert set(biases.values()) == {"float32"}
    assert len(biases) == 4  # of three layers and of the one for further tokens
    masters, back = lab.new_root(), lab.new_root()
    convert(source.root, masters, ConvertOptions(to="hf", fsync=False, write=WriteOptions(masters=True)))
    convert(masters, back, ConvertOptions(to="megatron", fsync=False, write=WriteOptions(dtype="bf16")))
    dtypes = {s.name.rpartition(".")[2]: s.dtype.name for s in open_checkpoint(back, ReadOptions()).model.params}
    assert (dtypes["expert_bias"], dtypes["weight"]) == ("float32", "bfloat16")
