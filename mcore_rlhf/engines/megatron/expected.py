"""What the checkpoint has for this rank, and the live model lacks: the other half of "the model does not match"."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mcore_rlhf.errors import LayoutMismatch, Problem
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.buffers import OUTPUT
from mcore_rlhf.models.megatron import expert_of, is_routed_expert, layer_of
from mcore_rlhf.models.spec import ModelSpec

from .chunks import LiveModel
from .place import Place

_ADVICE = "Build the model that the checkpoint holds, or load another checkpoint."


def unexpected(stored: ModelSpec, live: LiveModel, place: Place, known: Collection[str]) -> Iterator[Problem]:
    """Problems with parameters that belong to this rank's chunks by their names, and are in none of them.

    Args:
        stored: The model of the checkpoint.
        live: The live model.
        place: This rank.
        known: Global names of all live tensors.
    """
    counts = (
        ("decoder layers", stored.num_layers, int(getattr(live.config, "num_layers", stored.num_layers))),
        ("experts per layer", stored.num_experts, live.num_experts),
        ("multi-token-prediction layers", stored.mtp_layers, int(getattr(live.config, "mtp_num_layers", None) or 0)),
    )
    for what, theirs, ours in counts:
        if theirs != ours:
            yield Problem(LayoutMismatch, f"{what}: live {ours}, checkpoint {theirs}", _ADVICE)
    for param in stored.params:
        if param.name not in known and param.name not in stored.unused and _is_here(param.name, stored, live, place):
            text = f"{param.name}: stored {param.global_shape}, not in the live model"
            yield Problem(LayoutMismatch, text, _ADVICE)


def other_attention(args: Arguments, live: LiveModel) -> Iterator[Problem]:
    """Problems that no shape shows: the same matrices, read as other heads. Megatron-LM compares some of these too.

    Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``check_checkpoint_args``).

    Args:
        args: The stored arguments; what they do not have is not compared.
        live: The live model.
    """
    heads = args.optional("num_attention_heads")
    groups = args.optional("num_query_groups") if args.flag("group_query_attention") else heads
    stored = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": args.optional("kv_channels")}
    for name, theirs in stored.items():
        ours = getattr(live.config, name, None)
        if theirs is not None and ours is not None and ours != theirs:
            yield Problem(LayoutMismatch, f"{name}: live {ours}, checkpoint {theirs}", _ADVICE)


def _is_here(name: str, stored: ModelSpec, live: LiveModel, place: Place) -> bool:
    layer, first = layer_of(name), [chunk.module for chunk in live.chunks if getattr(chunk.module, "pre_process", True)]
    if layer is not None:
        in_layers = any(0 <= layer - chunk.first_layer < chunk.num_layers for chunk in live.chunks)
        return in_layers and _is_own_expert(name, live, place)
    if name.startswith("mtp.") or (name == OUTPUT and stored.tied):
        return False
    if name.startswith("embedding."):
        return bool(first)
    return any(getattr(chunk.module, "post_process", True) for chunk in live.chunks)


def _is_own_expert(name: str, live: LiveModel, place: Place) -> bool:
    number = expert_of(name) if is_routed_expert(name) else None
    if number is None:
        return True
    count = max(1, live.num_experts // place.parallel.ep)
    return number // count == place.at.ep_rank
