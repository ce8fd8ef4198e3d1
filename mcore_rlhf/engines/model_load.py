"""A module's own part of a load: comparing its state with the stored one, and overwriting it in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

from .copying import fill
from .undoing import Undo
from .writable import copied, no_bytes, refuse_unwritable


@dataclass(slots=True)
class ModelLoad:
    """A load of a module: what its own code takes back first, then the tensors.

    Args:
        module: The live one.
        pt: The file.
    """

    module: torch.nn.Module
    pt: PtFile
    _tensors: dict[str, torch.Tensor] = field(init=False)
    _handed: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        stored = self.pt.tree["model"]
        own = _own_tensors(self.module, self.module.state_dict())
        self._tensors = {name: own[name] for name in own if isinstance(stored[name], StoredTensor)}
        handed = {name: value for name, value in stored.items() if name not in self._tensors}
        self._handed = self.pt.materialize(handed)

    def install(self, undo: Undo) -> None:
        """Hand the module what is no tensor of its own: extra state, and what its hooks made for saving."""
        if self._handed:
            before = {name: value for name, value in self.module.state_dict().items() if name in self._handed}
            undo.note(partial(self.module.load_state_dict, copied(before), strict=False))
            self.module.load_state_dict(self._handed, strict=False)

    def fill(self) -> None:
        """Copy the file's bytes into the live tensors."""
        fill(self.pt.root, self.pt.tree["model"], self._tensors)


def compare_model(module: torch.nn.Module, stored: object, where: str, problems: Problems) -> None:
    """Compare a stored module with the live one, name by name.

    Args:
        module: The live one.
        stored: Name → place or value, as the file holds it.
        where: The file.
        problems: Takes every difference, and every live tensor that cannot be overwritten.
    """
    if not isinstance(stored, Mapping):
        problems.add(LayoutMismatch, f"{where}: 'model' is a {type(stored).__name__}, not a dictionary of tensors")
        return
    live = module.state_dict()
    refuse_unwritable(_own_tensors(module, live), where, problems)
    _compare(stored, live, where, problems)


def _own_tensors(module: torch.nn.Module, live: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Those of a state dictionary that lie in the module's own memory, and are no copies that its code has made."""
    tensors = {name: value for name, value in live.items() if isinstance(value, torch.Tensor)}
    held = {_address(tensor) for tensor in (*module.parameters(), *module.buffers()) if not no_bytes(tensor)}
    return {name: tensor for name, tensor in tensors.items() if no_bytes(tensor) or _address(tensor) in held}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compare(stored: Mapping[str, object], live: Mapping[str, object], where: str, problems: Problems) -> None:
    for name, target in live.items():
        if name not in stored:
            problems.add(LayoutMismatch, f"{where}: {name} is missing; the model has it with shape {_shape(target)}")
        elif isinstance(target, torch.Tensor) and not _is_extra(name) and not no_bytes(target):
            _compare_one(name, stored[name], target, where, problems)
    for name in stored:
        if name not in live:
            problems.add(LayoutMismatch, f"{where}: {name} {_shape(stored[name])} is not a parameter of the model")


def _compare_one(name: str, place: object, target: torch.Tensor, where: str, problems: Problems) -> None:
    if not isinstance(place, StoredTensor):
        problems.add(LayoutMismatch, f"{where}: {name} is a {type(place).__name__}, the model's is a tensor")
    elif place.shape != tuple(target.shape):
        problems.add(LayoutMismatch, f"{where}: {name} has shape {place.shape}, the model's has {_shape(target)}")
    elif place.record.dtype.name != str(target.dtype).removeprefix("torch."):
        problems.add(LayoutMismatch, f"{where}: {name} is {place.record.dtype.name}, the model's is {target.dtype}")


def _is_extra(name: str) -> bool:
    """Whether it is what ``get_extra_state`` gave, which may be anything, at any time."""
    return name.rpartition(".")[2] == "_extra_state"


def _shape(value: object) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape) if isinstance(value, torch.Tensor | StoredTensor) else None
