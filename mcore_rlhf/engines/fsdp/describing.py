"""From the live trainer to the table of what is saved: weights, then the optimizer's states and groups, as RLinf nests them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.formats.dcp.keys import PARAMS

from .files import KEYS, LiveTable
from .geometry import Everywhere, Split
from .held import Held, HeldModule
from .optimizers import HeldOptimizer, State


def add_module(table: LiveTable, module: HeldModule) -> None:
    """Add weights and buffers under all their names, and extra state.

    A tied tensor is stored once for every name, as torch does: who loads it asks for all of them.
    """
    named = {one.name: one for one in module.tensors}
    for name, one in [*named.items(), *((alias, named[owner]) for alias, owner in module.shared.items())]:
        table.add(KEYS.model_path(name), one.split, one.local)
    for name, part in module.extra.items():
        table.add_tree(KEYS.model_path(name), part.get_extra_state())


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells of a state.

    Args:
        dtype: Of a tensor; None for a value that is none.
        shape: Of a tensor that is not cut.
        wide: Whether it is cut as its parameter is.
        value: Of what is no tensor.
    """

    dtype: DType | None
    shape: tuple[int, ...] = ()
    wide: bool = False
    value: object = None

    def split(self, param: Held) -> Split:
        """Which rank holds what of it."""
        return param.split if self.wide else Everywhere(self.shape, param.split.first)


States = dict[tuple[str, str], Told]
"""By parameter and key."""


def states_of(optimizer: HeldOptimizer | None) -> States:
    """What this rank has of the optimizer."""
    if optimizer is None:
        return {}
    told = {(state.param, state.key): _tell(state) for state in optimizer.states}
    for param, values in optimizer.values.items():
        told |= {(param, key): Told(None, value=value) for key, value in values.items()}
    return told


def _tell(state: State) -> Told:
    return Told(dtype_of(state.local.dtype), state.split.global_shape, state.wide)


def add_optimizer(table: LiveTable, optimizer: HeldOptimizer, everyone: Sequence[States]) -> None:
    """Add states and param groups.

    Args:
        table: Takes them.
        optimizer: The live optimizer.
        everyone: What each rank has of it, where they differ: on FSDP1 a rank has no state of a parameter that it has no part
            of. Empty where they do not.
    """
    mine = {(state.param, state.key): state for state in optimizer.states}
    params = {param.name: param for _, params in optimizer.groups for param in params}
    told: States = {}
    for states in everyone or [states_of(optimizer)]:
        told |= states
    order = {name: number for number, name in enumerate(params)}
    for (param, key), one in sorted(told.items(), key=lambda item: order[item[0][0]]):
        path, state = KEYS.state_path(param, key), mine.get((param, key))
        if state is not None:
            table.add(path, state.split, state.local)
        elif one.dtype is not None:
            table.add_elsewhere(path, one.split(params[param]), one.dtype)
        else:
            table.add_tree(path, one.value)
    for number, (fields, members) in enumerate(optimizer.groups):
        for key, value in {**fields, PARAMS: [param.name for param in members]}.items():
            table.add_tree(KEYS.group_path(number, key), value)
