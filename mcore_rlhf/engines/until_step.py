"""What of a live model nothing changes before its optimizer's next step, and where that step waits for whoever still reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .save import torch_optimizers
from .stateful import leaves

_Place = tuple[torch.device, int]


@dataclass(frozen=True, slots=True, eq=False)
class UntilStep:
    """Parameters, masters and states of a model's optimizers: forward and backward passes leave them alone.

    What a forward pass may change (buffers: counts of routed tokens, scales of fp8; random states) is none of them.

    Args:
        optimizers: The torch optimizers at the bottom; each calls its hooks before it changes anything.
        still: By name, the tensors that are left alone; of those that are dealt out, this rank's memory.
        moving: Memory that anything may change at any time, also where it lies in one piece with what is left alone.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    still: tuple[tuple[str, torch.Tensor], ...]
    moving: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, modules: Iterable[torch.nn.Module], optimizer: object, besides: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> UntilStep | None:
        """What of a model that is.

        Args:
            modules: The model, or its chunks.
            optimizer: What trains it: a torch optimizer, or a nest of wrappers and chains round some.
            besides: Further memory that only the optimizer's step changes, by name.

        Returns:
            None where it is not known when an optimizer steps, or there is none: all is to be copied at once.
        """
        optimizers = tuple(torch_optimizers(optimizer)) if optimizer is not None else ()
        if not optimizers or not all(map(_calls_hooks, optimizers)):
            return None
        modules = tuple(modules)
        named = [pair for module in modules for pair in module.named_parameters()]
        kept = [pair for one in optimizers for pair in _kept(one)]
        return cls(
            optimizers,
            (*named, *kept, *besides),
            tuple(_local(buffer) for module in modules for buffer in module.buffers()),
        )

    def places(self) -> frozenset[_Place]:
        """The storages that are left alone as a whole."""
        moving = {_place(tensor) for tensor in self.moving}
        return frozenset(_place(_local(tensor)) for _, tensor in self.still) - moving

    def versions(self) -> list[tuple[int, int]]:
        """How often each was written to: torch counts what is done in place, though not what goes through ``.data`` or a fused kernel.

        What is done to a tensor that is dealt out is counted at the tensor, and not at this rank's memory of it; what is done to that
        memory is counted there alone.
        """
        return [(_written(tensor), _written(_local(tensor))) for _, tensor in self.still]

    def changed(self, since: Sequence[tuple[int, int]]) -> str | None:
        """The first that was written to since its :meth:`versions` were asked for; None where none was."""
        now = self.versions()
        return next((name for (name, _), old, new in zip(self.still, since, now, strict=True) if old != new), None)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's next step may change any of it, though it is none of :attr:`optimizers`."""
        still = self.places()
        return any(_place(_local(param)) in still for group in optimizer.param_groups for param in group["params"])


@runtime_checkable
class Steps(Protocol):
    """An engine that knows what its optimizer's next step changes, and that nothing else does."""

    def until_step(self) -> UntilStep | None:
        """It, as it is now; None where it is not known when that step is."""
        ...


def is_at(tensor: torch.Tensor, places: frozenset[_Place]) -> bool:
    """Whether a tensor's memory is in one of some storages."""
    return _place(tensor) in places


def hook(optimizer: torch.optim.Optimizer, fence: Callable[[], None]) -> Callable[[], None]:
    """Have a function called before each step of an optimizer.

    Returns:
        What takes it away again.
    """

    def before(*args: object) -> None:
        del args
        fence()

    return optimizer.register_step_pre_hook(before).remove


def hook_all(fence: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Have a function called with each optimizer of this process before it steps.

    Returns:
        What takes it away again.
    """

    def before(optimizer: torch.optim.Optimizer, *args: object) -> None:
        del args
        fence(optimizer)

    return register_optimizer_step_pre_hook(before).remove


def _calls_hooks(optimizer: object) -> bool:
    """Whether its ``step`` is one that torch has wrapped, as it does when an optimizer is made, and is called whenever it steps.

    One that is made for CUDA graphs may step by the replay of a graph, which calls nothing.

    Sources: torch 2.13.0, ``torch/optim/optimizer.py`` (``Optimizer._patch_step_function``), ``torch/optim/adamw.py``; megatron-core
    0.19.2, ``optimizer/__init__.py`` (``optimizer_cuda_graph``); Transformer Engine 2.9, ``pytorch/optimizers/fused_adam.py``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(type(optimizer).step, "hooked", False):
        return False
    groups: list[dict[str, Any]] = optimizer.param_groups
    return not (getattr(optimizer, "capturable", False) or any(group.get("capturable") for group in groups))


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """What it trains, and what it keeps of each. Some wrappers empty the groups between steps, so that keys are asked as well."""
    for group in optimizer.param_groups:
        yield from (("what an optimizer trains", param) for param in group["params"])
    state: Any = optimizer.state
    for param, values in state.items():
        if isinstance(param, torch.Tensor):
            yield "what an optimizer trains", param
        for name, value in leaves(values):
            if isinstance(value, torch.Tensor):
                yield f"{name} of an optimizer", value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that is dealt out."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _written(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.device, tensor.untyped_storage().data_ptr()
