"""What a rank does in real megatron-core with a checkpoint made of a Hugging Face folder: build the model from its args, load, run.

The model is built from nothing but the ``args`` that the conversion wrote, so they are on trial as well. Attention of DeepSeek's
kind is the stand-in of the demonstration: Megatron's own needs Transformer Engine.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.formats.carried import FOLDER

if TYPE_CHECKING:
    import torch

# Megatron's configuration calls these otherwise than its arguments.
_RENAMED = {"num_moe_experts": "num_experts"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank found.

    Args:
        logits: (batch, sequence, words) without padding; None on a stage that is not the last.
        keys: The model's own state dict: names and shapes, in order, None for opaque values.
        stored: Names in the file, in order.
    """

    logits: torch.Tensor | None
    keys: dict[str, tuple[int, ...] | None]
    stored: list[str]


def answer(root: str, parallel: Parallel, tokens: torch.Tensor, words: int, head: bool = False) -> Answer:
    """Load a checkpoint strictly, and run it on tokens.

    Args:
        root: The checkpoint.
        parallel: Its layout.
        tokens: (batch, sequence).
        words: True size of the vocabulary.
        head: Whether the model has a value head.
    """
    import torch
    from megatron.core import parallel_state

    from mcore_rlhf.demo.trainer import initialize_parallel_state, seed_everything

    initialize_parallel_state(parallel)
    seed_everything(1)
    file = torch.load(_file(root, parallel), weights_only=False)
    model = _model(file["args"], parallel)
    if head:
        _put_value_head(model, file["args"].hidden_size, bias="output_layer.bias" in file["model"])
    model.load_state_dict(file["model"], strict=True)
    model.eval()
    model.mtp_process, model.config.mtp_num_layers = False, None  # it wants labels; logits do not need it
    state = {name: None if value is None else value.shape for name, value in _tensors(model.state_dict())}
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = model(tokens, positions, None)
    if isinstance(output, tuple):
        output = output[0]
    parts = [torch.empty_like(output) for _ in range(parallel.tp)]
    torch.distributed.all_gather(parts, output.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    logits = torch.cat(parts, dim=-1) if output.shape[-1] > 1 else output
    return Answer(logits[..., :words].clone(), state, list(file["model"]))


def told(root: str, parallel: Parallel) -> dict[str, object]:
    """What an engine tells of the model that a checkpoint's arguments make, where the trainer has no arguments."""
    import torch

    from mcore_rlhf.demo.trainer import initialize_parallel_state
    from mcore_rlhf.engines.megatron.arguments import computed

    initialize_parallel_state(parallel)
    model = _model(torch.load(_file(root, parallel), weights_only=False)["args"], parallel)
    return computed(model.config, model)


def _tensors(state: dict[str, Any]) -> list[tuple[str, Any]]:
    import torch

    return [(name, value if isinstance(value, torch.Tensor) else None) for name, value in state.items()]


def _file(root: str, parallel: Parallel) -> Path:
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    tracker = (Path(root) / "latest_checkpointed_iteration.txt").read_text()
    folder = tracker if tracker == "release" else f"iter_{int(tracker):07d}"
    return Path(root) / folder / name / "model_optim_rng.pt"


def _model(args: Namespace, parallel: Parallel) -> Any:
    """``GPTModel`` as Megatron-LM builds it of its arguments.

    Source: Megatron-LM core_v0.16.1, ``gpt_builders.py`` and ``megatron/training/arguments.py`` (``core_transformer_config_from_args``).
    """
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    from mcore_rlhf.demo.model import PlainAttention

    config = _config(args, parallel)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=getattr(args, "qk_l2_norm", False)
    )
    for layer in block.layer_specs if args.multi_latent_attention else ():
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    mtp = None
    if args.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    return GPTModel(
        config=config, transformer_layer_spec=block, vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        seq_len_interpolation_factor=getattr(args, "rotary_seq_len_interpolation_factor", None),
        rotary_percent=args.rotary_percent, rotary_base=args.rotary_base,
        rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0), mtp_block_spec=mtp, parallel_output=True,
    )  # fmt: skip


def _put_value_head(model: Any, hidden: int, *, bias: bool) -> None:
    """Slime's and older verl's have a bias, RLinf's and verl's have none; all are whole on every rank."""
    import torch

    class Head(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
            return super().forward(hidden), None

    model.output_layer = Head(hidden, 1, bias=bias)


def _config(args: Namespace, parallel: Parallel) -> Any:
    import torch
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    args.multi_latent_attention = getattr(args, "multi_latent_attention", False)
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    names = {f.name: _RENAMED.get(f.name, f.name) for f in fields(kind)}
    said = {name: getattr(args, theirs) for name, theirs in names.items() if hasattr(args, theirs)}
    quick, plain = getattr(args, "quick_geglu", False), getattr(args, "squared_relu", False)
    said.update(
        activation_func=squared_relu if plain else quick_gelu if quick else torch.nn.functional.silu,
        gated_linear_unit=args.swiglu or quick,
        use_cpu_initialization=True, params_dtype=torch.float32, bf16=False, fp16=False, hidden_dropout=0.0,
        attention_dropout=0.0, attention_softmax_in_fp32=True, bias_dropout_fusion=False,
        tensor_model_parallel_size=parallel.tp, expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp or parallel.tp, sequence_parallel=False, cuda_graph_scope=[],
    )  # fmt: skip
    if said.get("num_moe_experts"):
        said.update(moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
    if not args.group_query_attention:
        said.pop("num_query_groups")  # as Megatron-LM does
    if said.get("rope_type") is None:
        said.pop("rope_type", None)  # so does it here
    if args.multi_latent_attention:
        said.update(apply_rope_fusion=False)
    config = kind(**said)
    for name, value in vars(args).items():
        if name.startswith("yarn_"):  # attributes that the configuration does not declare, and the model looks for
            setattr(config, name, value)
    return config


def forget_where_it_came_from(root: str) -> None:
    """Take away the ``config.json`` that travelled with a checkpoint, as if the run had always been Megatron's."""
    for folder in list(Path(root).rglob(FOLDER)):
        shutil.rmtree(folder)
    (Path(root) / "mcore_rlhf.json").unlink()


def take_random_states(root: str, source: str) -> None:
    """Put the first rank's random states of one checkpoint into another, which has a GPU's: a run without one cannot take those."""
    import torch

    first = min(Path(source).glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    states = torch.load(first, weights_only=False)["rng_state"]
    for path in Path(root).glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        tree = torch.load(path, weights_only=False)
        torch.save({**tree, "rng_state": states}, path)


def norm_before_queries(q_lora_rank: int | None) -> str:
    """What megatron-core 0.19 projects queries with, where latent attention has norms: asked of its own resolver.

    Transformer Engine's classes are mere names here; which of them is chosen is Megatron's decision.

    Args:
        q_lora_rank: As in the arguments; None for a full projection.
    """
    from types import SimpleNamespace

    from megatron.core.transformer import mla_qk_norm_config as module
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules

    plain, fused = type("TEColumnParallelLinear", (), {}), type("TELayerNormColumnParallelLinear", (), {})
    engine = SimpleNamespace(
        layer_norm=lambda **_: type("TENorm", (), {}), column_parallel_linear=lambda: plain,
        column_parallel_layer_norm_linear=lambda: fused,
    )  # fmt: skip
    submodules = MLASelfAttentionSubmodules(
        q_layernorm=IdentityOp, kv_layernorm=IdentityOp, linear_proj=plain, core_attention=plain, linear_q_proj=plain,
        linear_q_up_proj=fused, linear_kv_up_proj=fused,
    )  # fmt: skip
    config = SimpleNamespace(
        q_lora_rank=q_lora_rank, experimental_attention_variant=None, transformer_impl="transformer_engine",
        normalization="RMSNorm", qk_l2_norm=False, qk_layernorm=True,
    )  # fmt: skip
    real, module.get_backend = module.get_backend, lambda _: engine
    try:
        found = module.QKNormConfigResolver(config, submodules).resolve()
    finally:
        module.get_backend = real
    return str(found["linear_q_proj" if q_lora_rank is None else "linear_q_up_proj"].__name__)
