"""Digests of what a model is at a step: equal digests, equal bits on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mcore_rlhf.demo.trainer import Trainer


def digest(trainer: Trainer) -> str:
    """SHA-256 over the parameters of all ranks, in the order of ranks, chunks and Megatron's own parameters.

    It depends on the layout. Every rank calls and gets the same.

    Returns:
        64 hexadecimal digits.
    """
    return _over_ranks(_parameters(trainer))


def optimizer_digest(trainer: Trainer) -> str:
    """SHA-256 over the fp32 masters and the moments of all ranks, in the same way."""
    return _over_ranks(_optimizer_tensors(trainer))


def _parameters(trainer: Trainer) -> Iterator[torch.Tensor]:
    for chunk in unwrap_model(trainer.chunks):
        yield from chunk.parameters()


def _optimizer_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    if trainer.optimizer is None:
        return
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for group in part.optimizer.param_groups if not part.is_stub_optimizer else []:
            for master in group["params"]:
                yield master
                state = part.optimizer.state[master]
                yield from (state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))


def _over_ranks(tensors: Iterator[torch.Tensor]) -> str:
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    mine = torch.frombuffer(bytearray(own.digest()), dtype=torch.uint8).to("cuda")
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return hashlib.sha256(torch.cat(every).cpu().numpy().tobytes()).hexdigest()
