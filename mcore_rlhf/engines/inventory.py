"""What is alive, counted from the objects themselves: parameters and buffers of modules, states of optimizers, and which of it
lies in memory that goes into a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore_rlhf.core.names import MASTER, PARAM
from mcore_rlhf.errors import Problems, Unsupported

from .account import HeldTensor
from .base import LiveFile
from .live import LiveTree

BUFFER = "buffer"
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True, slots=True)
class Alive:
    """A tensor that is alive.

    Args:
        name: See :class:`~.account.HeldTensor`.
        state: See there.
        tensor: This rank's memory of it.
    """

    name: str
    state: str
    tensor: torch.Tensor


def of_module(module: torch.nn.Module, prefix: str = "") -> Iterator[Alive]:
    """Parameters and persistent buffers, each once, whatever ``state_dict`` makes of them.

    Args:
        module: The model.
        prefix: Stands before its names.
    """
    seen: set[int] = set()
    for path, part in module.named_modules():
        transient = part._non_persistent_buffers_set
        kept = {name: buffer for name, buffer in part._buffers.items() if name not in transient}
        for state, tensors in ((PARAM, part._parameters), (BUFFER, kept)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Alive(f"{prefix}{path}.{name}" if path else f"{prefix}{name}", state, tensor)


def makes_its_state(module: torch.nn.Module) -> bool:
    """Whether a part of a module has code of its own that says what its state is."""
    own = torch.nn.Module
    return any(
        (type(part).state_dict, type(part)._save_to_state_dict) != (own.state_dict, own._save_to_state_dict)
        or part._state_dict_hooks
        or part._state_dict_pre_hooks
        for part in module.modules()
    )


def of_optimizer(optimizer: Any, name_of: Callable[[object], str], masters: Iterable[object] = ()) -> Iterator[Alive]:
    """All tensors that a torch optimizer keeps, at any depth.

    Args:
        optimizer: Has ``state``, as torch's have.
        name_of: Names a tensor that it trains.
        masters: Those that it trains and that are no parameters of the model.

    Raises:
        Unsupported: It keeps objects that no file can hold; they are named.
    """
    problems = Problems()
    for held in masters:
        if isinstance(held, torch.Tensor):
            yield Alive(name_of(held), MASTER, held)
    for held, values in optimizer.state.items():
        for state, value in _leaves(values):
            if isinstance(value, torch.Tensor):
                yield Alive(name_of(held), state, value)
            elif not isinstance(value, _PLAIN):
                text = f"{type(optimizer).__qualname__}: {state} of {name_of(held)} is a {type(value).__qualname__}"
                problems.add(Unsupported, f"{text}; only tensors and plain values can be saved")
    problems.raise_if_any()


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    else:
        yield path, value


@dataclass(slots=True)
class Memory:
    """The live memory that goes into files, as ranges of addresses by device."""

    _ranges: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict)
    _merged: dict[torch.device, tuple[list[int], list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[LiveFile], trees: Iterable[LiveTree] = ()) -> Memory:
        """What files are filled from.

        Args:
            files: Their segments are live tensors.
            trees: What their small tensors were copied from.
        """
        found = cls()
        for tensor in (segment.tensor for file in files for segment in file.segments):
            found.put(tensor)
        for storage in (storage for tree in trees for storage in tree.storages):
            found._add(storage.device, storage.data_ptr(), storage.nbytes())
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """A tensor goes into a file, as it is or in another form."""
        self._add(tensor.device, tensor.data_ptr(), _extent(tensor))

    def _add(self, device: torch.device, start: int, nbytes: int) -> None:
        if nbytes:
            self._ranges.setdefault(device, []).append((start, start + nbytes))
            self._merged.clear()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes of a tensor are among them."""
        if not tensor.numel():
            return True
        starts, stops = self._ends(tensor.device)
        at = bisect_right(starts, tensor.data_ptr()) - 1
        return at >= 0 and tensor.data_ptr() + _extent(tensor) <= stops[at]

    def _ends(self, device: torch.device) -> tuple[list[int], list[int]]:
        """Starts and ends of the ranges of a device, those that touch being one."""
        if device not in self._merged:
            starts, stops = list[int](), list[int]()
            for start, stop in sorted(self._ranges.get(device, ())):
                if stops and start <= stops[-1]:
                    stops[-1] = max(stops[-1], stop)
                else:
                    starts.append(start)
                    stops.append(stop)
            self._merged[device] = starts, stops
        return self._merged[device]

    def held(self, alive: Iterable[Alive], among: str | None = None) -> Iterator[HeldTensor]:
        """What is alive, and whether this rank writes it.

        Args:
            alive: The tensors.
            among: See :class:`~.account.HeldTensor`.
        """
        for one in alive:
            tensor = one.tensor
            nbytes, what = tensor.numel() * tensor.element_size(), f"{tensor.dtype} {tuple(tensor.shape)}"
            yield HeldTensor(one.name, one.state, what, nbytes, self.has(tensor), among)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
