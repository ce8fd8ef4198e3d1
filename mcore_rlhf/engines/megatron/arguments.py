"""Megatron-LM's ``args`` for a trainer that has none: what a reader needs, read off the live objects.

Trainers built on megatron-core alone (verl, NeMo-RL) have a ``TransformerConfig`` instead. Names and meanings are those of
Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcore_rlhf.families.megatron.arguments import BY_LAYOUT, DISTRIBUTED
from mcore_rlhf.families.megatron.groups import by_adam
from mcore_rlhf.models.meaning.arguments import ROWS

from .model import LiveModel
from .optimizers import ChainMember, is_laid_out, kind_of
from .parallel_state import ParallelRank

_OF_THE_RUN = (
    "params_dtype", "bf16", "fp16", "hidden_dropout", "attention_dropout", "init_method_std", "moe_grouped_gemm",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "sequence_parallel",
)  # fmt: skip
_TOLD_OTHERWISE = ("activation_func", "gated_linear_unit", "num_moe_experts")
"""What a configuration calls otherwise than the arguments do."""
_YARN = "yarn_"
"""Attributes that a configuration does not declare, and that ``GPTModel`` looks for."""
_OF_THE_OPTIMIZER = (
    "optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps",
    "clip_grad", "apply_wd_to_qk_layernorm", "overlap_param_gather_with_optimizer_step",
    "use_precision_aware_optimizer", "store_param_remainders", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
)  # fmt: skip


def described(model: LiveModel, chain: Sequence[ChainMember | None], place: ParallelRank) -> dict[str, object]:
    """The arguments that the model, its DDP and its optimizer tell.

    The true size of the vocabulary is not among them: without it, a checkpoint can be loaded at any layout whose padded
    vocabulary is given.
    """
    return {
        **_model(model),
        **_parallel(model, place),
        **_buckets(model),
        **_optimizer(chain),
        "rank": place.rank,
        "ckpt_format": "torch",
    }


def _model(model: LiveModel) -> dict[str, object]:
    config: Any = model.config
    found = {"position_embedding_type": "rope", **computed(config, model.chunks[0].module)}
    found |= {name: getattr(config, name) for name in _OF_THE_RUN if hasattr(config, name)}
    first = model.chunks[0].module
    found |= {
        "num_experts": config.num_moe_experts,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "untie_embeddings_and_output_weights": not getattr(first, "share_embeddings_and_output_weights", False),
        "add_position_embedding": True,
        "transformer_impl": "transformer_engine" if _uses_transformer_engine(model) else "local",
    }
    if hasattr(first, "vocab_size"):
        found["padded_vocab_size"] = first.vocab_size
    if hasattr(first, "max_sequence_length"):
        found["max_position_embeddings"] = first.max_sequence_length
    return found


def computed(config: Any, module: Any) -> dict[str, object]:
    """Everything that decides what a model computes, under the names of Megatron-LM's arguments.

    Args:
        config: Its ``TransformerConfig``.
        module: The ``GPTModel``, which has its own of rotary positions.
    """
    names = [row.name for row in ROWS if row.name not in _TOLD_OTHERWISE]
    found = {name: getattr(config, name) for name in names if hasattr(config, name)}
    found |= {name: value for name, value in vars(config).items() if name.startswith(_YARN)}
    found |= _feed_forward(config)
    rotary = getattr(module, "rotary_pos_emb", None)
    for name, holder, attribute in (
        ("rotary_base", module, "rotary_base"),
        ("rotary_percent", module, "rotary_percent"),
        ("position_embedding_type", module, "position_embedding_type"),
        ("use_rope_scaling", module, "rotary_scaling"),
        ("rotary_seq_len_interpolation_factor", rotary, "seq_len_interpolation_factor"),
    ):
        if hasattr(holder, attribute):
            found[name] = getattr(holder, attribute)
    if found.get("use_rope_scaling") and rotary is not None:
        found["rope_scaling_factor"] = _scaled_by(rotary.inv_freq, float(getattr(module, "rotary_base", 10000)))
    return found


def _feed_forward(config: Any) -> dict[str, object]:
    """What the arguments call its activation; any other that is gated is called ``geglu``, which is no argument."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    gated, activation = bool(config.gated_linear_unit), config.activation_func
    swiglu, quick = gated and activation is torch.nn.functional.silu, gated and activation is quick_gelu
    return {
        "swiglu": swiglu, "quick_geglu": quick, "geglu": gated and not swiglu and not quick,
        "squared_relu": activation is squared_relu,
    }  # fmt: skip


def _scaled_by(frequencies: torch.Tensor, base: float) -> float:
    """By how much Llama 3's scaling divided the lowest frequency, which is all that a model keeps of it.

    Source: megatron-core 0.16.1, ``models/common/embeddings/rotary_pos_embedding.py`` (``_apply_scaling``).
    """
    count = len(frequencies)
    lowest: float = base ** (-(count - 1) / count)
    return round(lowest / float(frequencies[-1]), 3)


def _parallel(model: LiveModel, place: ParallelRank) -> dict[str, object]:
    config: Any = model.config
    parallel = place.parallel
    layout = config.pipeline_model_parallel_layout
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "data_parallel_size": parallel.dp,
        "world_size": parallel.world_size,
        "decoder_first_pipeline_num_layers": config.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": config.num_layers_in_last_pipeline_stage,
        "pipeline_model_parallel_layout": getattr(layout, "input_data", layout),
    }


def _buckets(model: LiveModel) -> dict[str, object]:
    ddp: Any = getattr(model.chunks[0].wrapped, "ddp_config", None)
    if ddp is None:
        return {}
    return {
        "overlap_grad_reduce": ddp.overlap_grad_reduce,
        "overlap_param_gather": ddp.overlap_param_gather,
        "ddp_bucket_size": ddp.bucket_size,
        "ddp_num_buckets": None,
        "ddp_pad_buckets_for_high_nccl_busbw": ddp.pad_buckets_for_high_nccl_busbw,
        "num_distributed_optimizer_instances": ddp.num_distributed_optimizer_instances,
        "accumulate_allreduce_grads_in_fp32": ddp.grad_reduce_in_fp32,
    }


def _optimizer(chain: Sequence[ChainMember | None]) -> dict[str, object]:
    first = next((member for member in chain if member is not None), None)
    if first is None:
        return {"no_save_optim": True}
    config = getattr(first.optimizer, "config", None)
    found = {name: getattr(config, name) for name in _OF_THE_OPTIMIZER if hasattr(config, name)}
    if by_adam(found) and any("Muon" in one.label for one in chain if one is not None):  # 0.16.1 says so
        found["optimizer"] = "dist_muon" if first.layer_wise else "muon"
    found["use_layer_wise_distributed_optimizer"] = any(one.layer_wise for one in chain if one is not None)
    found[BY_LAYOUT] = is_laid_out(chain)
    return {**found, "use_distributed_optimizer": kind_of(chain) == DISTRIBUTED}


def _uses_transformer_engine(model: LiveModel) -> bool:
    modules = (module for chunk in model.chunks for module in chunk.module.modules())
    return any("transformer_engine" in type(module).__module__ for module in modules)
