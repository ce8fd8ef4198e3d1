"""The tensors of a wrapped module, each with this rank's part of it, under the names that the bare module would give them.

Nothing is gathered. FSDP2 keeps every parameter as a ``DTensor``; FSDP1 with ``use_orig_params`` keeps a range of a flat
parameter, of which every original one is a range as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mcore_rlhf.core.catalog import PARAM
from mcore_rlhf.errors import Problems, Unsupported

from ..base import LiveState, StateTensor
from ..optimizers import is_elementwise, is_stock
from ..save import BUFFER, Alive, MemoryRanges, of_optimizer
from ..stateful import no_bytes
from .geometry import FlatParams, FlatSplit, Meshes, MeshSplit, Replicated, Split

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and ``torch.compile`` put into names; torch's own checkpoints leave them out
(torch 2.13.0, ``distributed/checkpoint/state_dict.py``, ``_get_fqns``)."""

_ADVICE = "Save when the model has all its weights in memory, each in a plain dense tensor."


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """A tensor of the whole model, and this rank's part.

    Args:
        name: Its name, the first where it has several.
        split: Which rank holds what.
        local: This rank's memory of it, contiguous; empty where it has none.
        whole: The object in the module, by which an optimizer knows it.
        trained: Whether it is a parameter that takes gradients.
    """

    name: str
    split: Split
    local: torch.Tensor
    whole: torch.Tensor
    trained: bool = False


@dataclass(slots=True)
class ShardedModule:
    """What a module keeps.

    Args:
        tensors: Parameters and persistent buffers, each once, in the order of the module's state dict.
        shared: Second names of tied tensors: ``{alias: name}``.
        extra: Modules that have an extra state, by its name in the state dict: ``layers.0._extra_state``.
    """

    tensors: list[LocalShard] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    extra: dict[str, torch.nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, meshes: Meshes) -> ShardedModule:
        """Look at a module; whatever is whole between steps is put back into its parts first, which moves no byte.

        Args:
            module: The wrapped one.
            meshes: Its meshes.

        Raises:
            Unsupported: Tensors that cannot be saved; all are named.
        """
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return _ModuleWalk(FlatParams.of(module), meshes).of(module)

    def named(self) -> dict[int, LocalShard]:
        """By the identity of the object in the module."""
        return {id(one.whole): one for one in self.tensors}


@dataclass(slots=True)
class _ModuleWalk:
    flat: FlatParams
    meshes: Meshes
    problems: Problems = field(default_factory=Problems)
    found: ShardedModule = field(default_factory=ShardedModule)
    _known: dict[int, str] = field(default_factory=dict)

    def of(self, module: torch.nn.Module) -> ShardedModule:
        for name, tensor in _stored(module):
            self._add(_plain(name), tensor)
        for name, part in module.named_modules(remove_duplicate=False):
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
                self.found.extra[_plain(f"{name}._extra_state" if name else "_extra_state")] = part
        self.problems.raise_if_any()
        return self.found

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        known = self._known.setdefault(id(tensor), name)
        if known != name:
            self.found.shared[name] = known
            return
        trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        try:
            split, local = self._place(name, tensor)
        except Unsupported as error:
            self.problems.add_error(error)
            return
        if why := unfit(local):
            self.problems.add(Unsupported, f"{name} {why}; it cannot be saved or loaded in place", _ADVICE)
        self.found.tensors.append(LocalShard(name, split, local, tensor, trained))

    def _place(self, name: str, tensor: torch.Tensor) -> tuple[Split, torch.Tensor]:
        if self.flat.has(tensor):
            return self.flat.place(tensor)
        if self.meshes.has(tensor):
            return self.meshes.place(name, tensor)
        return Replicated(tuple(tensor.shape), self.meshes.first), tensor.detach()


def unfit(local: torch.Tensor) -> str:
    """Why a part of a tensor cannot be copied byte by byte; empty where it can."""
    if why := no_bytes(local):
        return why
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(local).__name__}, whose bytes are not its own"
    return "" if local.is_contiguous() else f"is not contiguous here ({tuple(local.shape)}, {local.stride()})"


def _stored(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under all their names, in the order of ``state_dict``, without its hooks."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        transient = part._non_persistent_buffers_set
        named = [*part._parameters.items(), *((k, v) for k, v in part._buffers.items() if k not in transient)]
        for name, tensor in named:
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


_OPTIMIZER_ADVICE = "Save when the optimizer has all its states in memory, or give this role no optimizer."


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """A tensor of the optimizer.

    Args:
        param: The parameter's name.
        key: Its name: ``exp_avg``, ``step``.
        split: Which rank holds what; that of the parameter, or of a tensor that all have.
        local: This rank's memory of it; empty where it has none.
        elementwise: Whether it has one value per element of the parameter.
    """

    param: str
    key: str
    split: Split
    local: torch.Tensor
    elementwise: bool


@dataclass(slots=True)
class ShardedOptimizer:
    """What an optimizer keeps.

    Args:
        optimizer: The live one.
        groups: For every param group its fields without ``params``, and the parameters.
        states: Its tensors, in the order of its state dict.
        values: What it keeps per parameter and is no tensor: parameter → key → value.
    """

    optimizer: torch.optim.Optimizer
    groups: list[tuple[dict[str, object], tuple[LocalShard, ...]]] = field(default_factory=list)
    states: list[OptimizerState] = field(default_factory=list)
    values: dict[str, dict[str, object]] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, module: ShardedModule, meshes: Meshes) -> ShardedOptimizer:
        """Look at an optimizer.

        Raises:
            Unsupported: It trains what is not the module's, or keeps what cannot be saved; all is named.
        """
        if not is_stock(optimizer):
            raise Unsupported(
                f"the optimizer {type(optimizer).__qualname__} saves and loads its state in its own way\n"
                "Only optimizers with torch's own state_dict and load_state_dict, and no hooks on them, can be sharded."
            )
        found, problems, named = cls(optimizer), Problems(), module.named()
        for group in optimizer.param_groups:
            fields = {key: value for key, value in group.items() if key != "params"}
            found.groups.append((fields, tuple(_known(group["params"], named, problems))))
        problems.raise_if_any()
        for _, params in found.groups:
            for param in params:
                found._add(param, meshes, problems)
        problems.raise_if_any()
        return found

    def _add(self, param: LocalShard, meshes: Meshes, problems: Problems) -> None:
        values = self.optimizer.state.get(param.whole, {})
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                self.values.setdefault(param.name, {})[str(key)] = value
                continue
            try:
                split, local = _place(param, str(key), value, meshes)
            except Unsupported as error:
                problems.add_error(error)
                continue
            if why := unfit(local):
                problems.add(Unsupported, f"{key} of {param.name} {why}; it cannot be saved", _OPTIMIZER_ADVICE)
            elementwise = is_elementwise(str(key), split.global_shape, param.split.global_shape)
            self.states.append(OptimizerState(param.name, str(key), split, local, elementwise))


def _known(params: list[torch.Tensor], named: Mapping[int, LocalShard], problems: Problems) -> Iterator[LocalShard]:
    for number, param in enumerate(params):
        if id(param) in named:
            yield named[id(param)]
        else:
            problems.add(
                Unsupported,
                f"the optimizer trains a tensor {tuple(param.shape)} (number {number} of its group) that is not the module's",
                "Make the optimizer after the module is wrapped, of module.parameters().",
            )


def _place(param: LocalShard, key: str, value: torch.Tensor, meshes: Meshes) -> tuple[Split, torch.Tensor]:
    """Where a state lies: beside its parameter, or on all ranks."""
    if meshes.has(value):
        return meshes.place(f"{key} of {param.name}", value)
    split = param.split
    if isinstance(split, FlatSplit) and value.dim() and value.shape == param.local.shape:
        return split, value.detach()
    if isinstance(split, Replicated) and tuple(value.shape) == split.global_shape:
        return split, value.detach()
    if value.numel() != 1 and not isinstance(split, Replicated):
        raise Unsupported(
            f"{key} of {param.name}: has the shape {tuple(value.shape)}; the parameter is cut into parts, and this is neither "
            f"a part of it nor one number\n{_OPTIMIZER_ADVICE}"
        )
    return Replicated(tuple(value.shape), split.first), value.detach()


def state_tensors(
    state: LiveState, module: ShardedModule, optimizer: ShardedOptimizer | None, rank: int, ranks: Sequence[int]
) -> Iterator[StateTensor]:
    """All that is alive on this rank, apart from what others write, as every rank knows of every other.

    Args:
        state: What is described of the step.
        module: The live module.
        optimizer: Its optimizer, or None.
        rank: This global rank.
        ranks: All that write.
    """
    memory, splits = MemoryRanges.of(state.files), dict[tuple[str, str], Split]()
    alive = list[Alive]()
    for one in module.tensors:
        kind = PARAM if isinstance(one.whole, torch.nn.Parameter) else BUFFER
        splits[one.name, kind] = one.split
        alive.append(Alive(one.name, kind, one.local))
    if optimizer is not None:
        splits |= {(kept.param, kept.key): kept.split for kept in optimizer.states}
        whole = {
            param.name for _, params in optimizer.groups for param in params if isinstance(param.split, Replicated)
        }
        splits |= {(name, ""): Replicated((1,), ranks[0]) for name in whole}
        alive += _states(optimizer)
    for found in memory.counted(alive):
        split = splits.get((found.name, found.state)) or splits.get((found.name, ""))
        if found.here or split is None or not _is_written(split, rank, ranks):
            yield replace(found, among=_among(split, rank))


def _states(optimizer: ShardedOptimizer) -> Iterator[Alive]:
    """What torch's optimizer itself has, whatever was described of it."""
    names = {id(param.whole): param.name for _, params in optimizer.groups for param in params}
    for one in of_optimizer(optimizer.optimizer, lambda held: names.get(id(held), f"{held!s:.40}")):
        tensor = one.tensor.to_local() if isinstance(one.tensor, DTensor) else one.tensor
        yield Alive(one.name, one.state, tensor)


def _among(split: Split | None, rank: int) -> str | None:
    """Under tensor parallelism, what is not cut by it lies on several meshes with equal parts: the ranks at one place are alike."""
    if not isinstance(split, MeshSplit) or rank not in split.mesh.at:
        return None
    return f"place {split.mesh.at[rank]} of a mesh {split.mesh.lengths}"


def _is_written(split: Split, rank: int, ranks: Sequence[int]) -> bool:
    """Whether other ranks write all that this one holds of a tensor."""
    if isinstance(split, Replicated):
        return split.first in ranks
    written = {box for other in ranks for box in split.written(other)}
    return all(box in written for box in split.boxes(rank))
