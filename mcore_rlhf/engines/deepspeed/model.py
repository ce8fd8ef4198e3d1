"""The live module and optimizer of any ZeRO stage, seen alike: flat tensors, what lies in each, and torch's optimizer underneath.

Sources: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
``runtime/fp16/unfused_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_rlhf.core.catalog import PARAM, Shape
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.module import MOMENTUM, USE_MUON
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup, Group, SlicedGroup

from ..base import StateTensor
from ..optimizers import is_elementwise
from ..save import BUFFER, Alive, MemoryRanges, of_optimizer

States = Mapping[int, tuple[str, ...]]
"""Of every flat tensor, by number, the names of its states, without the master."""


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A tensor that torch's optimizer trains, and the parameters in it.

    Args:
        number: Its own number; checkpoints count alike.
        param_group: Number of the optimizer's param group.
        names: The parameters, in the order in which they lie.
        shapes: Their whole shapes.
        geometry: Where they lie, over all data-parallel ranks.
        rank: This rank's number among them.
        tensor: What torch's optimizer has; in fp32, unless it is stage 0's parameter itself.
        model: In stage 3, this rank's slices of the weights that the model computes with, laid out alike.
        whole: The states that are kept in whole parameters: see :class:`~mcore_rlhf.layouts.zero.BorderGroup`.
    """

    number: int
    param_group: int
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    geometry: Group
    rank: int
    tensor: torch.Tensor
    model: torch.Tensor | None = None
    whole: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return ", ".join(self.names[:3])

    def geometry_of(self, state: str) -> Group | BorderGroup:
        """Where the parameters lie in a state."""
        flat = self.geometry
        return BorderGroup(flat) if state in self.whole and isinstance(flat, FlatGroup) else flat

    def indices(self, state: str) -> Sequence[int]:
        """The parameters of which this rank has something in a state."""
        geometry = self.geometry_of(state)
        return geometry.held(self.rank) if isinstance(geometry, BorderGroup) else geometry.indices(self.rank)

    def numel(self, state: str) -> int:
        """Elements of this rank's tensor of a state."""
        geometry = self.geometry_of(state)
        return geometry.length_of(self.rank) if isinstance(geometry, BorderGroup) else self.tensor.numel()


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """DeepSpeed's optimizer.

    Args:
        wrapper: DeepSpeed's object; torch's own in stage 0 without masters.
        stage: ZeRO stage.
        flats: The flat tensors, in the order in which checkpoints number them.
        masters: Whether the flat tensors are fp32 masters, apart from the weights.
    """

    wrapper: Any
    stage: int
    flats: tuple[Flat, ...]
    masters: bool

    @property
    def inner(self) -> Any:
        """Torch's optimizer."""
        return getattr(self.wrapper, "optimizer", self.wrapper)

    @property
    def groups(self) -> int:
        """How many param groups there are."""
        return len(self.inner.param_groups)

    def names_of(self, param_group: int) -> list[str]:
        """The parameters of a param group, in the order in which they lie."""
        return [name for flat in self.flats if flat.param_group == param_group for name in flat.names]

    def state_of(self, flat: Flat) -> dict[str, Any]:
        """What torch's optimizer keeps of a flat tensor; empty before the first step."""
        found: dict[str, Any] = self.inner.state.get(flat.tensor, {})
        return found

    def elementwise(self, flat: Flat) -> list[str]:
        """The states that the optimizer, once it has stepped, keeps of every element of a flat tensor."""
        return [key for key, value in self.state_of(flat).items() if is_elementwise(key, getattr(value, "shape", None))]

    @contextmanager
    def with_members(self) -> Iterator[None]:
        """Stage 3 empties the groups' lists of parameters between steps."""
        if self.stage != 3:
            yield
            return
        self.wrapper._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self.wrapper._clear_fp32_optimizer_param_groups()


def live_optimizer(engine: Any) -> LiveOptimizer | None:
    """The optimizer of an engine, or None where it trains nothing.

    Raises:
        Unsupported: An optimizer that is not known.
        LayoutMismatch: It lays its parameters out in a way that is not known.
    """
    wrapper, stage = engine.optimizer, int(engine.zero_optimization_stage())
    if wrapper is None or type(getattr(wrapper, "optimizer", None)).__name__ == "DummyOptim":
        return None
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return LiveOptimizer(wrapper, stage, tuple(_sliced(engine, wrapper)), True)
    if hasattr(wrapper, "single_partition_of_fp32_groups"):
        gaps = getattr(wrapper, "round_robin_bit16_padding", None)
        flats = _flat(engine, wrapper, wrapper.round_robin_bit16_groups, wrapper.single_partition_of_fp32_groups, gaps)
        return LiveOptimizer(wrapper, stage, tuple(flats), True)
    if hasattr(wrapper, "fp32_groups_flat_partition"):
        flats = _flat(engine, wrapper, wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, None)
        return LiveOptimizer(wrapper, stage, tuple(flats), True)
    return _plain(engine, wrapper, stage)


def _plain(engine: Any, wrapper: Any, stage: int) -> LiveOptimizer:
    """Stage 0: every parameter by itself, as a master beside a 16-bit weight or as the weight."""
    if isinstance(wrapper, torch.optim.Optimizer) and not hasattr(wrapper, "fp32_groups_flat"):
        listed = [(group["params"], group["params"]) for group in wrapper.param_groups]
    elif hasattr(wrapper, "fp16_groups") and hasattr(wrapper, "fp32_groups"):
        listed = list(zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True))
    else:
        raise Unsupported(
            f"optimizer {type(wrapper).__name__}: the manager does not know how it keeps its states\n"
            "Train with ZeRO stage 1, 2 or 3, or with a torch optimizer at stage 0."
        )
    flats: list[Flat] = []
    for number, (params, held) in enumerate(listed):
        for param, one in zip(params, held, strict=True):
            geometry = FlatGroup((param.numel(),), 1, alignment=1)
            flats.append(
                Flat(len(flats), number, (engine.param_names[param],), (tuple(param.shape),), geometry, 0, one)
            )
    return LiveOptimizer(wrapper, stage, tuple(flats), not isinstance(wrapper, torch.optim.Optimizer))


def _flat(
    engine: Any, wrapper: Any, members: Sequence[Any], masters: Sequence[torch.Tensor], gaps: Any
) -> Iterator[Flat]:
    """Stages 1 and 2: a rank's partition of every param group."""
    for number, (params, master) in enumerate(zip(members, masters, strict=True)):
        among = wrapper.real_dp_process_group[number]
        free = tuple(gaps[number]) if gaps and any(gaps[number]) else ()
        geometry = FlatGroup(tuple(param.numel() for param in params), dist.get_world_size(among), free)
        if geometry.length() != master.numel():
            raise LayoutMismatch(
                f"param group {number}: {geometry.length()} elements per rank expected, found {master.numel()}"
            )
        names, shapes = _named(engine, params)
        muon = wrapper.optimizer.param_groups[number].get(USE_MUON) is True
        whole = frozenset({MOMENTUM} if muon and getattr(wrapper, "cpu_offload", None) is False else ())
        yield Flat(number, number, names, shapes, geometry, dist.get_rank(among), master, whole=whole)


def _sliced(engine: Any, wrapper: Any) -> Iterator[Flat]:
    """Stage 3: a rank's slices of every sub-group."""
    among = wrapper.dp_process_group
    for number, params in enumerate(wrapper.fp16_groups):
        geometry = SlicedGroup(tuple(int(param.ds_numel) for param in params), dist.get_world_size(among))
        held, model = wrapper.fp32_partitioned_groups_flat[number], wrapper.fp16_partitioned_groups_flat[number]
        if geometry.length() != held.numel() or model is None:
            raise Unsupported(
                f"stage 3, sub-group {number}: {geometry.length()} elements expected, found {held.numel()} in memory\n"
                "NVMe offload and expert-parallel groups are not supported yet."
            )
        names, shapes = _named(engine, params)
        group = int(wrapper.sub_group_to_group_id[number])
        yield Flat(number, group, names, shapes, geometry, dist.get_rank(among), held, model)


def _named(engine: Any, params: Sequence[Any]) -> tuple[tuple[str, ...], tuple[Shape, ...]]:
    names = tuple(engine.param_names[param] for param in params)
    return names, tuple(tuple(getattr(param, "ds_shape", param.shape)) for param in params)


LIVE = "live"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of the module.

    Args:
        name: Its name, the owner's where it is tied.
        shape: Its whole shape.
        tensor: The live one: whole, or this rank's slice in stage 3.
        trained: Whether the optimizer has it.
        sliced: How stage 3 cuts it; None where it is whole.
        rank: This rank's number among the slices.
    """

    name: str
    shape: Shape
    tensor: torch.Tensor
    trained: bool
    sliced: SlicedGroup | None = None
    rank: int = 0

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return self.name


def weights_of(engine: Any, optimizer: LiveOptimizer | None) -> list[Weight]:
    """The tensors of an engine's module that a checkpoint holds: parameters and persistent buffers, each once.

    Raises:
        Unsupported: A tensor that is not contiguous.
    """
    trained = {name for flat in optimizer.flats for name in flat.names} if optimizer is not None else set()
    found = [_weight(engine, name, param, name in trained) for param, name in engine.param_names.items()]
    known = {id(buffer) for buffer in (weight.tensor for weight in found)}
    kept = engine.module.state_dict(keep_vars=True)
    for name, buffer in engine.module.named_buffers():
        if name in kept and id(buffer) not in known:
            found.append(Weight(name, tuple(buffer.shape), buffer, False))
    for weight in found:
        if not weight.tensor.is_contiguous():
            raise Unsupported(
                f"{weight.name}: the live tensor is not contiguous ({weight.shape}, {weight.tensor.stride()})"
            )
    return found


def _weight(engine: Any, name: str, param: Any, trained: bool) -> Weight:
    if not hasattr(param, "ds_id"):
        return Weight(name, tuple(param.shape), param, trained)
    among = param.ds_process_group
    ranks, rank = torch.distributed.get_world_size(among), torch.distributed.get_rank(among)
    geometry = SlicedGroup((int(param.ds_numel),), ranks)
    if geometry.length() != param.ds_tensor.numel():
        raise Unsupported(
            f"{name}: stage 3 keeps {param.ds_tensor.numel()} elements of it here, {geometry.length()} expected\n"
            "NVMe offload and quantized or hierarchical slices are not supported."
        )
    return Weight(name, tuple(param.ds_shape), param.ds_tensor, trained, geometry, rank)


_ASIDE = "muon_momentum_buffer_partitioned_groups_flat"
"""Where stage 3 keeps Muon's momentum, by number of the sub-group, with ``save_muon_momentum_buffer_in_memory``
(deepspeed 0.19.8, ``runtime/zero/stage3.py``)."""


def state_tensors(
    engine: Any, live: LiveOptimizer | None, weights: Sequence[Weight], memory: MemoryRanges, *, frozen: bool
) -> Iterator[StateTensor]:
    """All that is alive on this rank.

    Args:
        engine: DeepSpeed's engine.
        live: Its optimizer, or None.
        weights: The module's tensors.
        memory: What this rank writes.
        frozen: Whether frozen parameters are saved; they are left out on request.
    """
    params = set(engine.param_names.values())
    replicas = f"the module of model-parallel rank {engine.mp_rank if engine.mp_world_size > 1 else 0}"
    for one in weights:
        if one.sliced is not None and one.trained:
            continue  # rounded from its master, which is counted
        if one.trained or frozen or one.name not in params:
            alive = Alive(one.name, PARAM if one.name in params else BUFFER, one.tensor)
            yield from memory.counted([alive], None if one.sliced is not None else replicas)
    if live is not None:
        yield from memory.counted(_kept(live), replicas if _is_whole(live) else None)


def _kept(live: LiveOptimizer) -> Iterator[Alive]:
    names = {id(flat.tensor): _label(flat) for flat in live.flats}
    masters = [flat.tensor for flat in live.flats] if live.masters else []
    yield from of_optimizer(live.inner, lambda held: names.get(id(held), "a tensor of no flat group"), masters)
    for number, tensor in getattr(live.wrapper, _ASIDE, {}).items():
        yield Alive(f"sub-group {number}", "momentum_buffer", tensor)


def _label(flat: Flat) -> str:
    return f"{flat.names[0]} …" if len(flat.names) > 1 else "".join(flat.names)


def _is_whole(live: LiveOptimizer) -> bool:
    """Whether every data-parallel rank has all of the optimizer: stage 0, unless it is dealt out all the same (bf16)."""
    return all(isinstance(flat.geometry, FlatGroup) and flat.geometry.dp == 1 for flat in live.flats)
