"""Giving a stored state back to an optimizer, bit for bit.

torch's ``load_state_dict`` casts every tensor to its parameter's type: fp32 moments of bf16 parameters lose half their
bits, and the resumed run is another one. Here every tensor keeps the type in which it was saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from mcore_rlhf.storage.mapped import MappedFiles
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor
from mcore_rlhf.storage.stored import map_tensors

from .copying import copy_into
from .optimizer_record import SavedOptimizer
from .stateful import Stateful
from .undoing import Undo
from .writable import not_writable


class OptimizerLoad(Protocol):
    """A load of an optimizer in three steps, of which only the last cannot be taken back."""

    def read(self) -> None:
        """Read what is small or new; nothing live changes."""
        ...

    def install(self, undo: Undo) -> None:
        """Hand the optimizer its state, and say how that is undone."""
        ...

    def fill(self) -> None:
        """Overwrite the live tensors that were there already."""
        ...


@dataclass(slots=True)
class OwnLoad:
    """An optimizer whose ``load_state_dict`` is its own, or has hooks: it is given the file's state, and decides.

    Args:
        optimizer: The live one.
        pt: The file.
        stored: Its state dictionary, with places.
    """

    optimizer: Stateful
    pt: PtFile
    stored: object
    _state: dict[str, object] = field(default_factory=dict)

    def read(self) -> None:
        """Read all of it."""
        self._state = self.pt.materialize(self.stored)

    def install(self, undo: Undo) -> None:
        """Call its ``load_state_dict``."""
        undo.handed(self.optimizer, self._state)

    def fill(self) -> None:
        """Nothing is left to do."""


@dataclass(slots=True)
class StockLoad:
    """An optimizer that is loaded as torch does: its state is replaced, and live tensors that fit are kept and filled.

    Args:
        optimizer: The live one.
        pt: The file.
        saved: What it holds.
        order: Which stored parameter every live one is, by group.
    """

    optimizer: torch.optim.Optimizer
    pt: PtFile
    saved: SavedOptimizer
    order: Sequence[Sequence[int]]
    _state: defaultdict[object, object] = field(default_factory=lambda: defaultdict(dict))
    _groups: list[dict[str, object]] = field(default_factory=list)
    _fills: list[tuple[StoredTensor, torch.Tensor]] = field(default_factory=list)

    def read(self) -> None:
        """Make the groups and the state anew, from the file and from live tensors that will be filled."""
        self._state, self._groups, self._fills = defaultdict(dict), [], []
        known: set[object] = set()
        first = 0
        for group, live, order in zip(self.saved.groups, self.optimizer.param_groups, self.order, strict=True):
            ids = cast("list[object]", group["params"])
            known.update(ids)
            self._groups.append(self._group(group, live, range(first, first + len(ids))))
            first += len(ids)
            for parameter, at in zip(live["params"], order, strict=True):
                if ids[at] in self.saved.state:
                    self._state[parameter] = self._values(parameter, self.saved.state[ids[at]], group)
        for key, value in self.saved.state.items():
            if key not in known:
                self._state[key] = self.pt.materialize(value)

    def _group(self, saved: Mapping[str, object], live: Mapping[str, object], params: range) -> dict[str, object]:
        group: dict[str, object] = {"params": list(params)}
        for key, value in saved.items():
            beside = live.get(key)
            if key == "param_names":
                group |= {key: beside} if beside is not None else {}
            elif key != "params":
                device = beside.device if isinstance(beside, torch.Tensor) else torch.device("cpu")
                group[key] = map_tensors(value, self._loader(device))
        return group

    def _values(self, parameter: torch.Tensor, values: object, group: Mapping[str, object]) -> object:
        if not isinstance(values, Mapping):
            return map_tensors(values, self._loader(parameter.device))
        live = self.optimizer.state.get(parameter, {})
        return {key: self._value(parameter, key, place, live.get(key), group) for key, place in values.items()}

    def _value(
        self, parameter: torch.Tensor, key: str, place: object, live: object, group: Mapping[str, object]
    ) -> object:
        # Where torch puts the counter: torch/optim/optimizer.py 2.13, note [special device hosting for step].
        on_device = bool(group.get("capturable") or group.get("fused"))
        stays = key != "step" or not on_device or (isinstance(live, torch.Tensor) and live.device == parameter.device)
        if stays and isinstance(place, StoredTensor) and isinstance(live, torch.Tensor) and _fits(place, live):
            self._fills.append((place, live))
            return live
        device = parameter.device if key != "step" or on_device else torch.device("cpu")
        return map_tensors(place, self._loader(device))

    def _loader(self, device: torch.device) -> Callable[[StoredTensor], torch.Tensor]:
        return lambda place: self.pt.load(place).to(device)

    def install(self, undo: Undo) -> None:
        """Hand it over."""
        install_state(self.optimizer, self._state, self._groups, undo)

    def fill(self) -> None:
        """Copy the file's bytes into the live tensors that were kept."""
        with MappedFiles(self.pt.root) as files, torch.no_grad():
            for place, target in self._fills:
                copy_into(files, place, target)


def install_state(
    optimizer: torch.optim.Optimizer,
    state: defaultdict[object, object],
    groups: list[dict[str, object]],
    undo: Undo,
) -> None:
    """Call ``load_state_dict`` for the groups and the hooks, and slip the state in before anyone looks.

    Args:
        optimizer: The live one.
        state: Its state by parameter, as it will be.
        groups: Its groups; ``params`` are numbers, counted through all of them.
        undo: Told how it is put back.
    """
    undo.optimizer(optimizer)
    before = optimizer.param_groups

    def slip_in(optimizer: torch.optim.Optimizer) -> None:
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})

    hook = optimizer.register_load_state_dict_post_hook(slip_in, prepend=True)
    try:
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
    finally:
        hook.remove()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for key, value in old.items():
            group.setdefault(key, value)


def _fits(place: StoredTensor, live: torch.Tensor) -> bool:
    same = place.shape == tuple(live.shape) and f"torch.{place.record.dtype.name}" == str(live.dtype)
    return same and not not_writable(live)
