"""The optimizer of a sharded module: its param groups under the parameters' names, and every state with this rank's part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from mcore_rlhf.errors import Problems, Unsupported

from ..optimizer_record import is_stock
from .geometry import Everywhere, FlatSplit, Split
from .held import Held, HeldModule, unfit
from .meshes import Meshes

_STEP = "step"
_ADVICE = "Save when the optimizer has all its states in memory, or give this role no optimizer."


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A tensor of the optimizer.

    Args:
        param: The parameter's name.
        key: Its name: ``exp_avg``, ``step``.
        split: Which rank holds what; that of the parameter, or of a tensor that all have.
        local: This rank's memory of it; empty where it has none.
        wide: Whether it has one value per element of the parameter.
    """

    param: str
    key: str
    split: Split
    local: torch.Tensor
    wide: bool


@dataclass(slots=True)
class HeldOptimizer:
    """What an optimizer keeps.

    Args:
        optimizer: The live one.
        groups: For every param group its fields without ``params``, and the parameters.
        states: Its tensors, in the order of its state dict.
        values: What it keeps per parameter and is no tensor: parameter → key → value.
    """

    optimizer: torch.optim.Optimizer
    groups: list[tuple[dict[str, object], tuple[Held, ...]]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    values: dict[str, dict[str, object]] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, module: HeldModule, meshes: Meshes) -> HeldOptimizer:
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

    def _add(self, param: Held, meshes: Meshes, problems: Problems) -> None:
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
                problems.add(Unsupported, f"{key} of {param.name} {why}; it cannot be saved", _ADVICE)
            wide = key != _STEP and split.global_shape == param.split.global_shape
            self.states.append(State(param.name, str(key), split, local, wide))


def _known(params: list[torch.Tensor], named: Mapping[int, Held], problems: Problems) -> Iterator[Held]:
    for number, param in enumerate(params):
        if id(param) in named:
            yield named[id(param)]
        else:
            problems.add(
                Unsupported,
                f"the optimizer trains a tensor {tuple(param.shape)} (number {number} of its group) that is not the module's",
                "Make the optimizer after the module is wrapped, of module.parameters().",
            )


def _place(param: Held, key: str, value: torch.Tensor, meshes: Meshes) -> tuple[Split, torch.Tensor]:
    """Where a state lies: beside its parameter, or on all ranks."""
    if meshes.has(value):
        return meshes.place(f"{key} of {param.name}", value)
    split = param.split
    if isinstance(split, FlatSplit) and value.dim() and value.shape == param.local.shape:
        return split, value.detach()
    if isinstance(split, Everywhere) and tuple(value.shape) == split.global_shape:
        return split, value.detach()
    if value.numel() != 1 and not isinstance(split, Everywhere):
        raise Unsupported(
            f"{key} of {param.name}: has the shape {tuple(value.shape)}; the parameter is cut into parts, and this is neither "
            f"a part of it nor one number\n{_ADVICE}"
        )
    return Everywhere(tuple(value.shape), split.first), value.detach()
