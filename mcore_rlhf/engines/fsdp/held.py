"""The tensors of a wrapped module, each with this rank's part of it, under the names that the bare module would give them.

Nothing is gathered. FSDP2 keeps every parameter as a ``DTensor``; FSDP1 with ``use_orig_params`` keeps a range of a flat
parameter, of which every original one is a range as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import FSDPModule

from mcore_rlhf.errors import Problems, Unsupported

from ..writable import no_bytes
from .flat import FlatParams
from .geometry import Everywhere, Split
from .meshes import Meshes

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and ``torch.compile`` put into names; torch's own checkpoints leave them out
(torch 2.13.0, ``distributed/checkpoint/state_dict.py``, ``_get_fqns``)."""

_ADVICE = "Save when the model has all its weights in memory, each in a plain dense tensor."


@dataclass(frozen=True, slots=True, eq=False)
class Held:
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
class HeldModule:
    """What a module keeps.

    Args:
        tensors: Parameters and persistent buffers, each once, in the order of the module's state dict.
        shared: Second names of tied tensors: ``{alias: name}``.
        extra: Modules that have an extra state, by its name in the state dict: ``layers.0._extra_state``.
    """

    tensors: list[Held] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    extra: dict[str, torch.nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, meshes: Meshes) -> HeldModule:
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
        return _Walk(FlatParams.of(module), meshes).of(module)

    def named(self) -> dict[int, Held]:
        """By the identity of the object in the module."""
        return {id(one.whole): one for one in self.tensors}


@dataclass(slots=True)
class _Walk:
    flat: FlatParams
    meshes: Meshes
    problems: Problems = field(default_factory=Problems)
    found: HeldModule = field(default_factory=HeldModule)
    _known: dict[int, str] = field(default_factory=dict)

    def of(self, module: torch.nn.Module) -> HeldModule:
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
        self.found.tensors.append(Held(name, split, local, tensor, trained))

    def _place(self, name: str, tensor: torch.Tensor) -> tuple[Split, torch.Tensor]:
        if self.flat.has(tensor):
            return self.flat.place(tensor)
        if self.meshes.has(tensor):
            return self.meshes.place(name, tensor)
        return Everywhere(tuple(tensor.shape), self.meshes.first), tensor.detach()


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
