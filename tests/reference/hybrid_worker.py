"""Real HybridModel of megatron-core 0.19 on the CPU: what it computes and holds after loading a checkpoint at some layout.

Mamba's and the gated delta net's mixers, their splits of fused tensors, the optimizer and both formats' loaders are Megatron's own.
Stand-ins, all of them plain torch: Transformer Engine's linear layers and norms (Megatron's own linear layers under the same names),
mamba_ssm's scan and gated norm, and two functions of fla, whose gated delta rule Megatron has in torch itself (``--deterministic-mode``).

Nothing of mcore_rlhf is used but the demonstration's stand-ins for CUDA and NCCL.
"""

from __future__ import annotations

import math
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if not hasattr(typing, "override"):
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]


def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None, **_: Any) -> Any:
    """mamba_ssm's ``mamba_chunk_scan_combined`` token by token: x (b l h p), dt (b l h), A (h,), B and C (b l g n)."""
    heads = x.shape[2]
    dt = F.softplus(dt.float() + dt_bias)
    B, C = (m.float().repeat_interleave(heads // m.shape[2], 2) for m in (B, C))
    state, out = x.new_zeros((x.shape[0], heads, x.shape[3], B.shape[3]), dtype=torch.float32), []
    for t in range(x.shape[1]):
        grown = (dt[:, t, :, None] * x[:, t].float())[..., None] * B[:, t, :, None, :]
        state = state * torch.exp(dt[:, t] * A)[..., None, None] + grown
        out.append((state * C[:, t, :, None, :]).sum(-1) + D.float()[:, None] * x[:, t].float())
    return torch.stack(out, 1).to(x.dtype)


class GatedNorm(torch.nn.Module):
    """mamba_ssm's ``RMSNormGated`` with groups, gated before it normalizes."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(size, dtype=dtype)), eps, group_size

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        grouped = (x.float() * F.silu(z.float())).unflatten(-1, (-1, self.group_size))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)


def l2norm(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _module(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def stand_in_for_kernels() -> None:
    """Before megatron is imported: the packages that it looks for."""
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "fla", "fla.modules", "fla.ops"):
        _module(package)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm)
    nothing = lambda *_, **__: None  # noqa: E731
    _module(
        "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=scan, mamba_split_conv1d_scan_combined=nothing
    )
    _module("fla.modules.convolution", causal_conv1d=nothing)
    _module("fla.modules.l2norm", l2norm=l2norm)
    _module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=nothing)


def layer_classes() -> dict[str, Any]:
    """Transformer Engine's layers as Megatron's own, with the parameters, their order and their names."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Norm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)), eps
            self.centred = config.layernorm_zero_centered_gamma

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normed(x, self.weight, self.eps, self.centred)

    def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + centred)).to(x.dtype)

    class NormColumn(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
            super().__init__(input_size, output_size, config=config, **more)
            weights = dict(self._parameters)
            self._parameters.clear()
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
            self._parameters.update(weights)
            self.eps, self.centred = config.layernorm_epsilon, config.layernorm_zero_centered_gamma

        def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
            return super().forward(normed(x, self.layer_norm_weight, self.eps, self.centred), *more, **named)

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(
                state, prefix, {"weight": 0, "bias": 0}, sharded_offsets,
                tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
            )  # fmt: skip

    return {"norm": Norm, "norm_column": NormColumn, "row": RowParallelLinear}


def stack_spec() -> Any:
    """``hybrid_layer_specs.hybrid_stack_spec``, with the stand-ins."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    made = layer_classes()
    column, row = made["norm_column"], made["row"]
    hybrid_block.TENorm = made["norm"]
    bda = get_bias_dropout_add
    attention = ModuleSpec(
        SelfAttention, {"attn_mask_type": AttnMaskType.causal},
        SelfAttentionSubmodules(linear_qkv=column, core_attention=DotProductAttention, linear_proj=row),
    )  # fmt: skip
    delta = ModuleSpec(
        GatedDeltaNet, submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=made["norm"], out_proj=row)
    )
    mamba = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    return ModuleSpec(HybridStack, submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mamba, mamba_bda=bda)),
        gdn_layer=ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=delta, self_attn_bda=bda)),
        attention_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=bda)
        ),
        mlp_layer=ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=bda)),
    ))  # fmt: skip


def config_of(args: Any, tp: int, pp: int) -> Any:
    """The model's configuration, from the arguments that it was saved with."""
    from megatron.core.transformer import TransformerConfig

    same = (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "normalization",
        "layernorm_epsilon", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "linear_conv_kernel_dim",
        "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    )  # fmt: skip
    return TransformerConfig(
        **{name: getattr(args, name) for name in same},
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.bfloat16, params_dtype=torch.bfloat16,
        bf16=True, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=False, use_mamba_mem_eff_path=False, deterministic_mode=True, bias_dropout_fusion=False,
        attention_softmax_in_fp32=True, is_hybrid_model=True,
    )  # fmt: skip


def build(args: Any, tp: int, pp: int) -> tuple[Any, Any, Any]:
    """Model, in Megatron's DDP, and its distributed optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = config_of(args, tp, pp)
    model = HybridModel(
        config, stack_spec(), args.padded_vocab_size, 64, hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    half = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp_config, half)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay, bf16=True,
            params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0,
        ),
        [wrapped],
    )  # fmt: skip
    return model, wrapped, optimizer


def load_legacy(folder: Path, model: Any, optimizer: Any, tp_rank: int, pp_rank: int, pp: int) -> None:
    """As Megatron-LM's ``load_checkpoint`` does for the legacy format."""
    rank = folder / (f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else ""))
    state = torch.load(rank / "model_optim_rng.pt", weights_only=False)
    model.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    optimizer.load_parameter_state(str(rank / "distrib_optim.pt"))


def save_legacy(folder: Path, first: Path, model: Any, optimizer: Any, tp_rank: int) -> None:
    """As Megatron-LM's ``save_checkpoint`` does for the legacy format; what is no state of the model is another file's."""
    rank = f"mp_rank_{tp_rank:02d}"
    (folder / rank).mkdir(parents=True)
    state = torch.load(first / rank / "model_optim_rng.pt", weights_only=False)
    state |= {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    if not any(name.endswith("mixer.conv1d_weight") for name in state["model"]):  # as a run of 0.18 stores them
        del state["args"].mamba_training_ssm_states_dtype
    torch.save(state, folder / rank / "model_optim_rng.pt")
    optimizer.save_parameter_state(str(folder / rank / "distrib_optim.pt"))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("6")


def load_dist(folder: str, model: Any, optimizer: Any, migrated: str | None = None) -> None:
    """As Megatron does for ``torch_dist``; with a pattern it is a GPTModel's."""
    from megatron.core import dist_checkpointing

    asked = sharded(model, optimizer, loading=True)
    if migrated is not None:
        retarget(asked, migrated)
    state, missing, unexpected = dist_checkpointing.load(asked, folder, strict="return_all")
    others = {"rng_state", "rerun_state_machine_state", "common_state"}  # for which this process did not ask
    assert (missing | unexpected) <= others, (missing, unexpected)
    model.load_state_dict({k: v for k, v in state.items() if k.startswith(("embedding.", "decoder.", "output_layer."))})
    optimizer.load_state_dict(state["optimizer"])


def sharded(model: Any, optimizer: Any, loading: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # noqa: F401
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group(
        {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
         "distrib_optim_fully_reshardable_mem_efficient": False}
    )  # fmt: skip
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    state.update(state.pop("model"))
    return state


def retarget(asked: dict[str, Any], pattern: str) -> None:
    """Look for everything in a GPTModel's checkpoint, as Megatron's own migration does."""
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

    interop.retarget_sharded_state_dict_to_gpt_checkpoint(asked, interop.gpt_compatible_layer_maps(pattern))


def contents(model: Any, optimizer: Any) -> dict[str, Any]:
    """Every parameter and every state of this rank, as bytes in hexadecimal; gaps of the buffers are not looked at."""
    found: dict[str, Any] = {}
    names = {param: name for name, param in model.named_parameters()}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in inner.model_float16_groups:
            for param in group:
                index, order = inner.model_param_group_index_map[param]
                main = inner.optimizer.param_groups[index]["params"][order]
                states = {"param": param, "master": main, **inner.optimizer.state[main]}
                for state in ("param", "master", "exp_avg", "exp_avg_sq"):
                    found[f"{names[param]} {state}"] = states[state].detach().flatten().clone()
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One rank, which has a process group."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    tp, pp = job["tp"], job["pp"]
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    tp_rank, pp_rank = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    first = Path(job["legacy"])
    name = f"mp_rank_{0:02d}" + ("_000" if pp > 1 else "")
    args = torch.load(first / name / "model_optim_rng.pt", weights_only=False)["args"]
    model, wrapped, optimizer = build(args, tp, pp)
    if "begin" in job:  # a file that this release does not load by itself: its names are another one's
        load_dist(job["begin"], model, optimizer)
    else:
        load_legacy(first, model, optimizer, tp_rank, pp_rank, pp)
    legacy = contents(model, optimizer)
    if "write" in job:
        save_legacy(Path(job["write"]) / first.name, first, model, optimizer, tp_rank)
    result: dict[str, Any] = {}
    if "save" in job:
        Path(job["save"]).mkdir(parents=True, exist_ok=True)
        state = sharded(model, optimizer, loading=False)
        state |= {"args": args, "iteration": 6, "checkpoint_version": 3.0}
        dist_checkpointing.save(state, job["save"])
    if pp == 1:
        result["losses"] = train(model, wrapped, optimizer, args)
    for folder in [*job.get("dist", []), *job.get("gpt", [])]:
        other, _, second = build(args, tp, pp)
        load_dist(folder, other, second, args.hybrid_layer_pattern if folder in job.get("gpt", []) else None)
        loaded = contents(other, second)
        result[folder] = [key for key in legacy if not torch.equal(legacy[key], loaded[key])]
        result["compared"] = len(loaded)
    return result


def train(model: Any, wrapped: Any, optimizer: Any, args: Any) -> list[float]:
    """Three steps on one fixed batch; the last loss is that behind them."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 131, (2, 33), generator=generator)
    positions = torch.arange(32).expand(2, -1)
    mask = torch.triu(torch.ones(32, 32, dtype=torch.bool), 1)[None, None]
    losses = []
    for _ in range(4):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = wrapped(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        losses.append(loss.item())
        assert math.isfinite(losses[-1])
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    return losses
