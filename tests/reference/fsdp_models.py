"""Tiny models wrapped by real FSDP in all the ways that the engine supports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Wrapped:
    """How a model is made and wrapped.

    Args:
        kind: ``fsdp2`` or ``fsdp1``.
        mesh: Lengths of the mesh's axes; the last one shards, one before it replicates.
        dtype: Of the parameters.
        optimizer: ``adamw``, ``amsgrad``, ``sgd``, ``none``.
        seed: Of the first weights.
        unused: Whether there is a layer that gets no gradient, so that the optimizer has no state of it.
        pauses: Whether the value head takes part in every second step only, so that counts of steps differ within a group.
        golden: Whether it is the model of the checkpoints in ``tests/goldens/dcp``.
    """

    kind: str = "fsdp2"
    mesh: tuple[int, ...] = (2,)
    dtype: str = "float32"
    optimizer: str = "adamw"
    seed: int = 0
    tied: bool = False
    frozen: bool = False
    mixed: bool = False
    offload: bool = False
    columns: bool = False
    tensor_parallel: bool = False
    compiled: bool = False
    checkpointed: bool = False
    nested: bool = True
    narrow: bool = False
    original: bool = True
    unused: bool = False
    golden: bool = False
    pauses: bool = False

    def other(self, **changes: Any) -> Wrapped:
        """Another layout of the same model, with other weights to begin with."""
        return replace(self, seed=self.seed + 7, **changes)

    @property
    def world(self) -> int:
        """Number of processes."""
        return torch.Size(self.mesh).numel()


class TinyCritic(nn.Module):
    """An embedding of 11 words, two layers, a head and a value head of one row: uneven on any number of ranks."""

    def __init__(self, tied: bool = False, narrow: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.value_head = nn.Linear(8, 1)
        if unused:
            self.unused = nn.Linear(8, 3)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("passing", torch.ones(8), persistent=False)
        if tied:
            self.head.weight = self.embed.weight
        if narrow:
            self.embed = nn.Embedding(12, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words).to(self.layers[0].weight.dtype) * self.scale.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        hidden = self.norm(hidden)
        logits, value = self.head(hidden), self.value_head(hidden)
        return logits.float().logsumexp(-1).mean() + value.float().pow(2).mean()


class GoldenModel(nn.Module):
    """What the checkpoints in ``tests/goldens/dcp`` hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 5, bias=False)
        self.value_head = nn.Linear(8, 1)
        self.register_buffer("steps", torch.tensor(0))


@dataclass
class Trainer:
    """A wrapped model and what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    rank: int
    pauses: bool = False

    def train(self, first: int, count: int) -> list[float]:
        """Train on words that depend on step and rank, and on the random state."""
        losses = []
        for step in range(first, first + count):
            words = (torch.arange(6) * (step + 2) + self.rank + torch.randint(0, 3, (6,))) % 11
            loss = self.model(words)
            loss.backward()
            assert self.optimizer is not None
            assert self.scheduler is not None
            if self.pauses and step % 2:
                for name, param in self.model.named_parameters():
                    param.grad = None if "value_head" in name else param.grad
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def build(how: Wrapped, rank: int) -> Trainer:
    """Make a model, wrap it, and make its optimizer and schedule."""
    torch.manual_seed(how.seed)
    made = GoldenModel() if how.golden else TinyCritic(how.tied, how.narrow, how.unused)
    model = made.to(getattr(torch, how.dtype))
    if how.frozen:
        model.layers[0].requires_grad_(False)
    model = _wrapped(model, how)
    shard = rank // how.mesh[-1] if how.tensor_parallel else rank  # tensor-parallel ranks see the same words
    torch.manual_seed(100 + shard + how.seed)
    optimizer = _optimizer(model, how.optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay) if optimizer is not None else None
    return Trainer(model, optimizer, schedule, shard, how.pauses)


def _decay(step: int) -> float:
    return 1.0 / (step + 1)


def _wrapped(model: Any, how: Wrapped) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard", "tp")[2 - len(how.mesh) :][: len(how.mesh)]
    names = ("dp", "tp") if how.tensor_parallel else names
    mesh = init_device_mesh("cpu", how.mesh, mesh_dim_names=names)
    return _fsdp1(model, mesh, how) if how.kind == "fsdp1" else _fsdp2(model, mesh, how)


def _fsdp1(model: Any, mesh: Any, how: Wrapped) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    strategy = ShardingStrategy.HYBRID_SHARD if len(how.mesh) > 1 else ShardingStrategy.FULL_SHARD
    options: dict[str, Any] = {
        "use_orig_params": how.original, "device_mesh": mesh, "device_id": torch.device("cpu"),
        "sharding_strategy": strategy,
    }  # fmt: skip
    if how.nested:
        model.layers[1] = FullyShardedDataParallel(model.layers[1], **options)
    return FullyShardedDataParallel(model, **options)


def _fsdp2(model: Any, mesh: Any, how: Wrapped) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    options: dict[str, Any] = {"mesh": mesh["dp"] if how.tensor_parallel else mesh}
    if how.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how.columns:
        options["shard_placement_fn"] = lambda param: Shard(1) if param.shape == (8, 8) else None
    if how.tensor_parallel:
        parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    for number, layer in enumerate(model.layers if how.nested else ()):
        if how.checkpointed:
            model.layers[number] = layer = checkpoint_wrapper(layer)
        fully_shard(layer, **options)
    wrapped: nn.Module = fully_shard(model, **options)
    return torch.compile(wrapped, backend="eager") if how.compiled else wrapped  # type: ignore[return-value]


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer | None:
    if kind == "none":
        return None
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    ending = ("bias", "norm.weight")
    matrices = [param for name, param in trained.items() if not name.endswith(ending)]
    vectors = [param for name, param in trained.items() if name.endswith(ending)]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, amsgrad=kind == "amsgrad")
