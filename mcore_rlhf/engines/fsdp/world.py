"""Which ranks a sharded model is dealt out to, and what has wrapped it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mcore_rlhf.errors import Unsupported, UsageError

from .agreeing import Ranks
from .flat import FlatParams
from .held import HeldModule

FSDP1, FSDP2 = "fsdp", "fsdp2"
"""What RLinf stores as ``fsdp_version`` (``rlinf/hybrid_engines/fsdp/utils.py``, ``FSDPVersion``)."""


@dataclass(frozen=True, slots=True)
class ShardedWorld:
    """The ranks of a model.

    Args:
        ranks: Global ranks, in order.
        layout: How it is cut, for people, and by which random states are told apart.
        version: What has wrapped it: :data:`FSDP1` or :data:`FSDP2`.
    """

    ranks: tuple[int, ...]
    layout: str
    version: str

    @classmethod
    def of(cls, module: torch.nn.Module) -> ShardedWorld:
        """Look at a model.

        Raises:
            UsageError: Nothing of it is sharded.
            Unsupported: FSDP1 has wrapped it in a way that is not supported.
        """
        flat = FlatParams.of(module).ranks()
        meshes = {param.device_mesh._get_root_mesh() for param in module.parameters() if isinstance(param, DTensor)}
        if not dist.is_initialized() or not (flat or meshes):
            raise UsageError(
                f"FsdpEngine: no parameter of this {type(module).__name__} is sharded\n"
                "Wrap it with fully_shard (or FSDP1) first; a model that is whole on every rank is a TorchEngine's."
            )
        ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()} | set(flat)
        widest = max((tuple(mesh.mesh.shape) for mesh in meshes), key=len, default=(len(flat),))
        return cls(tuple(sorted(ranks)), f"FSDP{'×'.join(map(str, widest))}", FSDP1 if flat else FSDP2)


def check_alike(ranks: Ranks, look: Callable[[], HeldModule]) -> None:
    """See that all ranks have the same model: each describes the parts of all others by its own. Collective.

    Args:
        ranks: All that the model is dealt out to.
        look: Gives this rank's tensors.

    Raises:
        Unsupported: Ranks have other tensors, as under pipeline parallelism.
    """
    _, told = ranks.shared(look, lambda module: [(one.name, one.split.global_shape) for one in module.tensors])
    for rank, other in zip(ranks.ranks, told, strict=True):
        if other != told[0]:
            raise Unsupported(
                f"FsdpEngine: rank {rank} has other tensors than rank {ranks.ranks[0]}\n"
                "Every rank must hold a part of the same model; pipeline parallelism is not supported."
            )
