"""GPT models of real megatron-core, built as Megatron-LM builds them. Importing this imports Megatron.

Transformer Engine's attention alone serves context parallelism and latent attention; Megatron's own ("local") attention refuses
both. :class:`PlainAttention` stands in for it. It has no parameters either, so a checkpoint cannot tell them apart; everything
around it (projections, rotary positions, the split of the sequence) is Megatron's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import gelu, silu

from mcore_rlhf.demo import versions
from mcore_rlhf.demo.configs import GPT_OSS, Parallel, TinyGPT

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class ValueHead(torch.nn.Module):
    """One value per token instead of logits.

    Critics of RLinf and verl have the same: ``output_layer.weight`` of one row, whole on every tensor-parallel rank
    (``LinearForLastLayer``; verl/models/mcore/bridge.py). All ranks compute the same values from the same hidden states,
    so its gradients need no communication.

    Args:
        config: Megatron's configuration of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        torch.nn.init.normal_(self.weight, std=config.init_method_std)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Values of hidden states, and no bias: called as Megatron calls its output layer.

        Args:
            hidden: (sequence, batch, hidden).

        Returns:
            (sequence, batch, 1) and None.
        """
        return torch.nn.functional.linear(hidden, self.weight), None


class PlainAttention(torch.nn.Module):
    """Causal attention with softmax and dropout, over the whole sequence also where it is split.

    Keys and values are gathered over the context-parallel group; queries stay where they are.

    Args:
        config: Megatron's configuration.
        softmax_scale: Factor of the scores; one over the root of the head size if not given.
        pg_collection: Process groups, of which the context-parallel one is used.
        other: What Megatron passes to any attention (layer number, mask type, channels).
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout
        self.cp_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (sequence, batch, heads, channels) of this rank.
            key: The same with key/value heads.
            value: The same, with channels of its own.
            attention_mask: Not used; the mask is causal.

        Returns:
            (sequence, batch, heads · value channels).
        """
        query_positions, key_positions = self._positions(query.shape[0])
        key, value = (self._gathered(tensor, query.shape[2]) for tensor in (key, value))
        scale = self.softmax_scale or 1 / math.sqrt(query.shape[-1])
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key) * scale
        future = key_positions[None, :] > query_positions[:, None]
        weights = scores.float().masked_fill(future, -math.inf).softmax(dim=-1).to(query.dtype)
        with get_cuda_rng_tracker().fork():
            weights = torch.nn.functional.dropout(weights, self.dropout, self.training)
        return torch.einsum("bhqk,kbhc->qbhc", weights, value).flatten(2)

    def _gathered(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """The whole sequence (in the order of the ranks), one key/value head per query head."""
        if self.cp_group is not None and self.cp_group.size() > 1:
            tensor = gather_from_sequence_parallel_region(tensor, group=self.cp_group)
        return tensor.repeat_interleave(heads // tensor.shape[2], dim=2)

    def _positions(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of this rank's queries and of the gathered keys: rank r holds chunks r and 2·CP-1-r of 2·CP."""
        size, rank = (self.cp_group.size(), self.cp_group.rank()) if self.cp_group is not None else (1, 0)
        chunks = torch.arange(length * size).chunk(2 * size)
        by_rank = [torch.cat([chunks[number], chunks[2 * size - 1 - number]]) for number in range(size)]
        return by_rank[rank], torch.cat(by_rank)


def virtual_stages(parallel: Parallel) -> int | None:
    """Model chunks per stage as Megatron counts them: ``None`` for one."""
    if parallel.pipeline_layout is None:
        return parallel.vpp
    chunks = PipelineParallelLayerLayout.get_num_stages_from_str(parallel.pipeline_layout) // parallel.pp
    return chunks if chunks > 1 else None


def transformer_config(model: TinyGPT, parallel: Parallel) -> TransformerConfig:
    """Megatron's configuration for a model on a layout."""
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    fields = {
        **_model_fields(model), **_parallel_fields(model, parallel), **_expert_fields(model), **_latent_fields(model)
    }  # fmt: skip
    return kind(**versions.known_fields(kind, fields))


def _model_fields(model: TinyGPT) -> dict[str, Any]:
    return dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        gated_linear_unit=model.gated,
        activation_func=versions.quick_gelu() if model.gpt_oss else silu if model.gated else gelu,
        **(GPT_OSS if model.gpt_oss else {}),
        normalization=model.normalization,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        attention_softmax_in_fp32=False,  # Megatron-LM's default, not megatron-core's
        transformer_impl="local",
        mtp_num_layers=model.mtp_num_layers,
        params_dtype=DTYPES[model.dtype],
        bf16=model.dtype == "bf16",
        fp16=model.dtype == "fp16",
        use_cpu_initialization=True,
        cuda_graph_scope=[],
    )


def _parallel_fields(model: TinyGPT, parallel: Parallel) -> dict[str, Any]:
    interleaved = virtual_stages(parallel) is not None
    return dict(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        pipeline_model_parallel_layout=parallel.pipeline_layout,
        pipeline_dtype=DTYPES[model.dtype],
        deallocate_pipeline_outputs=True,
        # with two stages the interleaved schedule needs separate, overlapping sends
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def _expert_fields(model: TinyGPT) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    frequency = model.moe_layer_freq
    return dict(
        num_moe_experts=model.num_experts,
        moe_router_topk=model.moe_router_topk,
        moe_router_pre_softmax=model.moe_router_pre_softmax,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
        moe_layer_freq=frequency if isinstance(frequency, int) else list(frequency),
        moe_grouped_gemm=model.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=model.moe_grouped_gemm,
        moe_token_dispatcher_type="alltoall",
        moe_router_enable_expert_bias=model.moe_router_enable_expert_bias,
        moe_router_score_function="sigmoid" if model.moe_router_enable_expert_bias else "softmax",
        moe_router_load_balancing_type="none" if model.moe_router_enable_expert_bias else "aux_loss",
        moe_aux_loss_coeff=0.0 if model.moe_router_enable_expert_bias else 1e-2,
    )


def _latent_fields(model: TinyGPT) -> dict[str, Any]:
    if not model.multi_latent_attention:
        return {}
    return dict(
        multi_latent_attention=True,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.kv_channels,
        qk_pos_emb_head_dim=model.kv_channels // 2,
        v_head_dim=model.kv_channels,
        rope_type="rope",
        apply_rope_fusion=False,
    )


def layer_spec(model: TinyGPT, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of a chunk: Megatron's "local" ones, which need neither apex nor Transformer Engine."""
    if model.num_experts is None:
        return _attending(_dense_layer_spec(model), config)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=model.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        _attending(layer, config)
    return block


def _attending(layer: Any, config: TransformerConfig) -> Any:
    """Give a layer an attention that can do what the configuration asks for."""
    if config.context_parallel_size > 1 or config.multi_latent_attention:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return layer


def _dense_layer_spec(model: TinyGPT) -> Any:
    return gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=model.qk_layernorm,
        multi_latent_attention=model.multi_latent_attention,
        normalization=model.normalization,
    )


def _mtp_spec(model: TinyGPT, config: TransformerConfig, vp_stage: int | None) -> Any:
    if model.mtp_num_layers is None:
        return None
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, use_transformer_engine=False, normalization=model.normalization, vp_stage=vp_stage
    )
    layer = _attending(layers[-1], config)
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)


def _let_biases_be_added(chunk: torch.nn.Module) -> None:
    """Copy what experts' second matrices give.

    Megatron adds the bias in place to what an autograd function may have returned as it got it, which torch forbids
    (megatron-core 0.16.1 to 0.19.2, ``transformer/mlp.py``).
    """
    for name, module in chunk.named_modules():
        if ".experts." in name and name.endswith(".linear_fc2"):
            module.register_forward_hook(lambda _module, _inputs, found: (found[0].clone(), found[1]))


def build_chunk(model: TinyGPT, parallel: Parallel, config: TransformerConfig, vp_stage: int | None) -> torch.nn.Module:
    """One model chunk of this rank, in its parameter type, without DDP.

    Args:
        model: The model.
        parallel: The layout.
        config: Megatron's configuration of the two.
        vp_stage: Number of the chunk on this stage; ``None`` without virtual stages.
    """
    placement = dict(ignore_virtual=False, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(model, config, vp_stage),
        vocab_size=model.padded_vocab_size(parallel.tp),
        max_sequence_length=model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**placement),
        post_process=parallel_state.is_pipeline_last_stage(**placement),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        mtp_block_spec=_mtp_spec(model, config, vp_stage),
        vp_stage=vp_stage,
    )
    if model.value_head and chunk.post_process:
        chunk.output_layer = ValueHead(config)
    if model.gpt_oss:
        _let_biases_be_added(chunk)
    chunk.model_type, chunk.vp_stage = ModelType.encoder_or_decoder, vp_stage
    for param in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    chunk.cuda()  # stays where it is under the stand-ins
    if model.dtype == "fp64":
        return chunk.double()  # Megatron makes norms and positions in fp32
    return chunk if model.dtype == "fp32" else Float16Module(config, chunk)
