"""The live model: this rank's chunks, what their tensors are called, and where in the whole model their layers lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore_rlhf.errors import LayoutMismatch, Problem, UsageError
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.models.megatron import OUTPUT, expert_of, is_routed_expert, layer_of, renumbered
from mcore_rlhf.models.spec import ModelSpec

from .importing import unwrapped
from .parallel_state import ParallelRank


@dataclass(frozen=True, slots=True)
class LiveChunk:
    """One model chunk of this rank.

    Args:
        vpp_rank: Its number on this rank.
        wrapped: As the trainer has it, in Megatron's DDP or bare.
        module: The model itself.
        first_layer: Global number of its first decoder layer, as its layers themselves say; 0 where it has none.
        num_layers: Decoder layers in it.
    """

    vpp_rank: int
    wrapped: torch.nn.Module
    module: torch.nn.Module
    first_layer: int
    num_layers: int

    @classmethod
    def of(cls, vpp_rank: int, wrapped: torch.nn.Module, module: torch.nn.Module) -> LiveChunk:
        """Look at a module."""
        layers = list(_layers(module))
        first = next((number - local for local, number in layers), 0)
        return cls(vpp_rank, wrapped, module, first, len(layers))

    def state(self) -> Mapping[str, object]:
        """The state dict that Megatron saves: tensors share memory with the live ones."""
        state: Mapping[str, object] = self.module.state_dict_for_save_checkpoint()  # type: ignore[operator]
        return state

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by local name, in registration order; they share the live memory."""
        found = self.state().items()
        return {name: value for name, value in found if isinstance(value, torch.Tensor) and not _is_extra(name)}

    def opaque(self) -> dict[str, object]:
        """Everything else in the state dict (``_extra_state``)."""
        return {
            name: value
            for name, value in self.state().items()
            if _is_extra(name) or not isinstance(value, torch.Tensor)
        }

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by local name."""
        return dict(self.module.named_parameters())


@dataclass(frozen=True, slots=True)
class LiveModel:
    """All chunks of this rank.

    Args:
        chunks: In the order of their numbers.
    """

    chunks: tuple[LiveChunk, ...]

    @classmethod
    def of(cls, chunks: torch.nn.Module | Sequence[torch.nn.Module]) -> LiveModel:
        """From what a training script has.

        Raises:
            UsageError: There is none.
        """
        listed = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
        if not listed:
            raise UsageError("a MegatronEngine needs at least one model chunk")
        pairs = zip(listed, unwrapped(listed), strict=True)
        return cls(tuple(LiveChunk.of(number, *pair) for number, pair in enumerate(pairs)))

    @property
    def config(self) -> object:
        """Megatron's ``TransformerConfig``."""
        return self.chunks[0].module.config

    @property
    def num_experts(self) -> int:
        """Routed experts per layer of the whole model; 0 for a dense one."""
        return int(getattr(self.config, "num_moe_experts", None) or 0)

    def key(self, chunk: LiveChunk) -> str:
        """What the model file calls a chunk: ``model``, or ``model0``, ``model1``, … with virtual stages."""
        return f"model{chunk.vpp_rank}" if len(self.chunks) > 1 else "model"

    def global_name(self, chunk: LiveChunk, local: str, ep_rank: int, ep: int) -> str:
        """A name with the layer and expert numbers of the whole model."""
        experts = ep_rank * (self.num_experts // ep) if is_routed_expert(local) else 0
        return renumbered(local, chunk.first_layer, experts)

    def gather_parameters(self) -> None:
        """Wait until all parameters are up to date, where they are gathered during the next forward pass.

        Collective in that case, as Megatron-LM's own save is. Source: Megatron-LM core_v0.16.1,
        ``megatron/training/training.py`` (``save_checkpoint_and_time``: ``disable_forward_pre_hook``).
        """
        for chunk in self.chunks:
            ddp = chunk.wrapped
            if getattr(ddp, "use_forward_hook", False) and getattr(ddp, "remove_forward_pre_hook_handles", None):
                ddp.disable_forward_pre_hook()  # type: ignore[operator]
                ddp.enable_forward_pre_hook()  # type: ignore[operator]


def _is_extra(name: str) -> bool:
    """Whether a value is Transformer Engine's own, whatever its type."""
    return name.endswith("._extra_state")


def _layers(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """(number in this chunk, global number from 0) of every decoder layer."""
    for name, module in model.named_modules():
        local = layer_of(f"{name}.")
        if local is not None and name.endswith(f"layers.{local}") and hasattr(module, "layer_number"):
            yield local, int(module.layer_number) - 1


_ADVICE = "Build the model that the checkpoint holds, or load another checkpoint."


def unexpected(stored: ModelSpec, live: LiveModel, place: ParallelRank, known: Collection[str]) -> Iterator[Problem]:
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


def _is_here(name: str, stored: ModelSpec, live: LiveModel, place: ParallelRank) -> bool:
    layer, first = layer_of(name), [chunk.module for chunk in live.chunks if getattr(chunk.module, "pre_process", True)]
    if layer is not None:
        in_layers = any(0 <= layer - chunk.first_layer < chunk.num_layers for chunk in live.chunks)
        return in_layers and _is_own_expert(name, live, place)
    if name.startswith("mtp.") or (name == OUTPUT and stored.tied):
        return False
    if name.startswith("embedding."):
        return bool(first)
    return any(getattr(chunk.module, "post_process", True) for chunk in live.chunks)


def _is_own_expert(name: str, live: LiveModel, place: ParallelRank) -> bool:
    number = expert_of(name) if is_routed_expert(name) else None
    if number is None:
        return True
    count = max(1, live.num_experts // place.parallel.ep)
    return number // count == place.at.ep_rank
