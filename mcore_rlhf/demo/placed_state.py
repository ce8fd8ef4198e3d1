"""Whole tensors of a live model, put together where Megatron's own ``sharded_state_dict`` says that the pieces belong.

Nothing of the package's layouts or formats is used here, so that what those write can be checked against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.trainer import DemoTrainer

StateKey = tuple[str, str]
"""A state (``param``, ``master``, ``exp_avg``, ``exp_avg_sq``) and Megatron's global name of a tensor."""


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """The part of a whole tensor that one rank has.

    Args:
        key: Which tensor.
        global_shape: Shape of the whole tensor, in elements.
        offset: Where the part begins in every dimension, in elements.
        values: The part, on the CPU.
    """

    key: StateKey
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor


def pieces(trainer: DemoTrainer) -> Iterator[PlacedPiece]:
    """This rank's pieces of all states; a parameter's optimizer states lie where the parameter lies. Every rank calls."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint
    from mcore_rlhf.engines.megatron.importing import unwrapped

    live = live_state.full_state(trainer)
    states = sorted({state for state, _ in live} - {"buffer"})
    keys = megatron_checkpoint.model_keys(trainer)
    prefixes = [""] if keys == ["model"] else [f"{key}." for key in keys]
    for prefix, chunk in zip(prefixes, unwrapped(trainer.chunks), strict=True):
        layers_apart = {"non_homogeneous_layers": True}  # otherwise all layers are one stacked tensor
        for local, sharded in chunk.sharded_state_dict(metadata=layers_apart).items():
            for state in states:
                if (state, prefix + local) in live:
                    yield from _placed(state, sharded, live[state, prefix + local])


_pieces = pieces


def _placed(state: str, sharded: Any, values: torch.Tensor) -> Iterator[PlacedPiece]:
    """Where Megatron would store a tensor of a parameter's shape; it stores gate and up of a gated MLP as two."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(sharded, ShardedTensorFactory):
        built = replace(sharded, data=values).build()
        for part in built.values() if isinstance(built, dict) else built:
            yield from _placed(state, part, part.data)
    elif isinstance(sharded, ShardedTensor):
        yield PlacedPiece(
            (state, sharded.key), tuple(sharded.global_shape), tuple(sharded.global_offset), values.clone()
        )


def assembled(parts: Iterable[PlacedPiece]) -> dict[StateKey, torch.Tensor]:
    """Whole tensors of the pieces of all ranks.

    Raises:
        ValueError: Copies of one piece differ, or elements are missing.
    """
    import torch

    whole: dict[StateKey, torch.Tensor] = {}
    filled: dict[StateKey, torch.Tensor] = {}
    for piece in parts:
        tensor = whole.setdefault(piece.key, torch.empty(piece.global_shape, dtype=piece.values.dtype))
        seen = filled.setdefault(piece.key, torch.zeros(piece.global_shape, dtype=torch.bool))
        values = piece.values.reshape([1] * (tensor.dim() - piece.values.dim()) + list(piece.values.shape))
        window = tuple(slice(at, at + size) for at, size in zip(piece.offset, values.shape, strict=True))
        if seen[window].any() and not torch.equal(tensor[window], values):
            raise ValueError(f"{piece.key}: copies of the part at {piece.offset} differ")
        tensor[window] = values
        seen[window] = True
    holes = [key for key, seen in filled.items() if not seen.all()]
    if holes:
        raise ValueError(f"elements of {holes[:3]} are missing")
    return whole
