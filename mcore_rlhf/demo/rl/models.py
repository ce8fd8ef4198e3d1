"""Actor, frozen reference policy and critic, on one layout of one set of ranks, and digests of what they are at a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.model import build_chunk, transformer_config, virtual_stages
from mcore_rlhf.demo.trainer import DemoTrainer, seed_everything
from mcore_rlhf.engines.megatron.importing import unwrapped


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run on this rank.

    Args:
        actor: The policy that is trained.
        reference: Chunks of the policy as it was at first, without gradients, DDP or optimizer.
        critic: The value model of PPO, with optimizer and scheduler of its own; None for GRPO.
    """

    actor: DemoTrainer
    reference: list[torch.nn.Module]
    critic: DemoTrainer | None

    @property
    def trained(self) -> dict[str, DemoTrainer]:
        """The models with an optimizer, by role."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}


def build_models(model: TinyGPT, parallel: Parallel, training: Training, *, critic: bool) -> Models:
    """Make the models; everything random is seeded anew after it, so that training starts from the seed alone.

    The critic starts as the policy does, trunk and all, as critics start from the supervised model in practice.

    Args:
        model: The policy.
        parallel: The layout.
        training: How actor and critic are trained.
        critic: Whether there is one.
    """
    actor = DemoTrainer(model, parallel, training)
    value = DemoTrainer(replace(model, value_head=True), parallel, training) if critic else None
    models = Models(actor, frozen_copy(actor), value)
    seed_everything(training.seed)
    return models


def frozen_copy(actor: DemoTrainer, dtype: Literal["fp32", "fp64"] | None = None) -> list[torch.nn.Module]:
    """The chunks of a model again, with the same weights and no gradients; in another type, if one is given."""
    model = actor.model if dtype is None else replace(actor.model, dtype=dtype)
    config = transformer_config(model, actor.parallel)
    stages = virtual_stages(actor.parallel)
    chunks = [build_chunk(model, actor.parallel, config, stage) for stage in (range(stages) if stages else [None])]
    for copy, original in zip(unwrapped(chunks), unwrapped(actor.chunks), strict=True):
        copy.load_state_dict(original.state_dict())
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return chunks


def digest(trainer: DemoTrainer) -> str:
    """SHA-256 over the parameters of all ranks, in the order of ranks, chunks and Megatron's own parameters.

    It depends on the layout. Every rank calls and gets the same.

    Returns:
        64 hexadecimal digits.
    """
    return _over_ranks(_parameters(trainer))


def optimizer_digest(trainer: DemoTrainer) -> str:
    """SHA-256 over the fp32 masters and the moments of all ranks, in the same way."""
    return _over_ranks(_optimizer_tensors(trainer))


def _parameters(trainer: DemoTrainer) -> Iterator[torch.Tensor]:
    for chunk in unwrapped(trainer.chunks):
        yield from chunk.parameters()


def _optimizer_tensors(trainer: DemoTrainer) -> Iterator[torch.Tensor]:
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
