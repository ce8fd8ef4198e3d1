"""Logits of a Qwen3-Next or Qwen3.5 that real megatron-core 0.19 loads.

The gated delta net, the gated attention, the mixture and how layers are chosen are Megatron's own. Transformer Engine's linear layers and
norms are the plain torch of :mod:`hybrid_worker`, and so are two functions of fla; experts are loaded one by one (``SequentialMLP``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.reference.hybrid_worker import layer_classes

_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")


def block_of(config: Any) -> Any:
    """The layers, as Megatron chooses them."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    made = layer_classes()

    class Engine(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> Any:
            return made["norm_column"]

        def layer_norm(self, *_: Any, **__: Any) -> Any:
            return made["norm"]

    gpt_layer_specs.TESpecProvider = Engine
    layers = variants.get_transformer_layer_with_experimental_attention_variant_spec(config, Engine())
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=made["norm"])


def logits(root: str, words: list[list[int]]) -> torch.Tensor:
    """Load, run, and return the logits of all words; of a rank that has a process group, one of tensor-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mcore_rlhf.demo.configs import Parallel
    from tests.reference.architectures_jobs import _config

    rank, tp = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(1)
    (path,) = Path(root).glob(f"*/mp_rank_{rank:02d}/model_optim_rng.pt")
    file = torch.load(path, weights_only=False)
    args = file["args"]
    args.deterministic_mode, args.moe_grouped_gemm = True, False
    config = _config(args, Parallel(tp=tp))
    block = block_of(config)
    further = (
        gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=True)
        if config.mtp_num_layers
        else None
    )
    model = GPTModel(
        config=config, transformer_layer_spec=block, mtp_block_spec=further, vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, position_embedding_type="rope",
        rotary_percent=args.rotary_percent, rotary_base=args.rotary_base, parallel_output=True,
    )  # fmt: skip
    tensors = {k: v for k, v in file["model"].items() if isinstance(v, torch.Tensor)}
    tensors = {_GROUPED.sub(r"experts.local_experts.\2.\1.weight", name): value for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    registered, stored = (
        [name for name in names if ".local_experts." not in name] for names in (dict(model.named_parameters()), tensors)
    )
    assert stored == registered, [pair for pair in zip(stored, registered, strict=True) if pair[0] != pair[1]]
    model.mtp_process, model.config.mtp_num_layers = False, None  # it wants labels; logits do not need it
    tokens = torch.tensor(words)
    with torch.no_grad():
        output = model.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    parts = [torch.empty_like(output) for _ in range(tp)]
    dist.all_gather(parts, output.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)
