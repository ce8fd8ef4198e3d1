"""Live state: what of it can be saved and overwritten in place, and how it is put back where a later part of a load refuses; and what
files hold of torch's, as a live trainer takes it: the one place where it becomes torch's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.dcp.state import DcpState
from mcore_rlhf.storage.stored import NAMESPACES, Namespace, Stub
from mcore_rlhf.storage.torch_values import SmallTensor, TorchDevice, TorchDtype, TorchSize


@runtime_checkable
class Stateful(Protocol):
    """Anything that says what it holds, and takes it back: a scheduler, a scaler, a whole trainer."""

    def state_dict(self) -> dict[str, object]:
        """What it holds."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take it back."""
        ...


T = TypeVar("T")


def no_bytes(tensor: torch.Tensor) -> str:
    """Why a tensor has no bytes of its own that could be saved; empty where it has."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet (a lazy module's)"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.layout is not torch.strided:
        return f"is not dense ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.is_quantized:
        return "is quantized"
    return "is a DTensor, a part of another" if hasattr(tensor, "device_mesh") else ""


def not_writable(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be overwritten in place; empty where it can."""
    if why := no_bytes(tensor):
        return why
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: several of its elements are one in memory"
    return "was made in inference mode" if tensor.is_inference() and not torch.is_inference_mode_enabled() else ""


def refuse_unsavable(parts: Mapping[str, object]) -> None:
    """See that everything of a nest can be saved.

    Args:
        parts: Name → nest of dictionaries, lists and tuples.

    Raises:
        Unsupported: Some tensors cannot; all are named.
    """
    problems = Problems()
    for name, tensor in tensors_in(parts):
        if why := no_bytes(tensor):
            problems.add(
                Unsupported, f"{name} {why}; it cannot be saved", "Save when the model has all its weights in memory."
            )
    problems.raise_if_any()


def refuse_unwritable(live: Mapping[str, object], where: str, problems: Problems) -> None:
    """Note the tensors of a module that a checkpoint cannot be copied into.

    Args:
        live: Name → tensor; other values are passed over.
        where: The file that is loaded.
        problems: Takes one note per tensor.
    """
    for name, tensor in live.items():
        if isinstance(tensor, torch.Tensor) and (why := not_writable(tensor)):
            advice = "Give the model tensors of its own before loading: tensor.clone(), module.to_empty(device=...)."
            problems.add(LayoutMismatch, f"{where}: the model's {name} {why}; it cannot be loaded into", advice)


def copied(value: T) -> T:
    """A copy of a nest of containers in which no tensor shares memory with the live one."""
    return _copied(value)  # type: ignore[return-value]


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        # A shallow copy first: subclasses keep their type, their order and, for modules, their ``_metadata``.
        again = copy(value)
        again.update((key, _copied(item)) for key, item in value.items())
        return again
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return type(value)(_copied(item) for item in value)
    try:
        return deepcopy(value)
    except Exception:  # what cannot be copied is put back as it is
        return value


def tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested dict, with where they stand: ``state.0.exp_avg``."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """What is no dict, list or tuple in a nest of those, with its path: ``state.0.exp_avg``, ``groups[1].lr``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")
    else:
        yield path, value


@dataclass(slots=True)
class Undo:
    """Runs what was noted, last first, if its ``with`` block is left by an error; otherwise forgets it."""

    _steps: list[Callable[[], object]] = field(default_factory=list)

    def note(self, step: Callable[[], object]) -> None:
        """Say how something is put back that is about to change."""
        self._steps.append(step)

    def attributes(self, owner: object, names: Iterable[str]) -> None:
        """Attributes that are about to be set are put back, as far as there are any."""
        for name in names:
            if hasattr(owner, name):
                self.note(partial(setattr, owner, name, getattr(owner, name)))

    def state(self, owner: Stateful) -> None:
        """Something is about to take a state: if it, or anything later, refuses, it is given a copy of its former one."""
        self.note(partial(owner.load_state_dict, copied(owner.state_dict())))

    def handed(self, owner: Stateful, state: dict[str, object]) -> None:
        """Hand something a state, to be taken back like that."""
        self.state(owner)
        owner.load_state_dict(state)

    def optimizer(self, optimizer: Any) -> None:
        """Groups and states of a torch optimizer are about to be replaced: they will be the same objects again.

        Tensors in them are not copied: what is installed are other ones, or these, which are filled only once nothing can
        refuse any more.

        Args:
            optimizer: Has ``param_groups`` and ``state``, as torch's have.
        """
        groups, state = optimizer.param_groups, optimizer.state
        fields = [
            {key: list(value) if isinstance(value, list) else value for key, value in one.items()} for one in groups
        ]
        values = {held: dict(value) if isinstance(value, dict) else value for held, value in state.items()}

        def put_back() -> None:
            for group, kept in zip(groups, fields, strict=True):
                group.clear()
                group.update(kept)
            state.clear()
            state.update(values)
            optimizer.param_groups, optimizer.state = groups, state

        self.note(put_back)

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._steps:
            self._put_back()

    def _put_back(self) -> None:
        # Others' code: what refuses even its own former state refused the new one before it changed anything, as far
        # as anybody can tell, and the rest must be put back all the same.
        try:
            with suppress(Exception):
                self._steps.pop()()
        finally:
            if self._steps:
                self._put_back()


def torch_values(value: Any) -> Any:
    """A nest as a live trainer wants it: torch's own tensors, sizes, element types and devices for what stands for them in files.

    Args:
        value: Containers, and what :mod:`mcore_rlhf.storage.torch_values` has; a source's state and a group of its optimizer too.
    """
    made = _MADE.get(type(value))
    if made is not None:
        return made(value)
    if type(value) in (dict, OrderedDict):
        mapping = type(value)((torch_values(key), torch_values(item)) for key, item in value.items())
        getattr(mapping, "__dict__", {}).update(getattr(value, "__dict__", {}))  # a state dict's _metadata
        return mapping
    if type(value) in (list, tuple):
        return type(value)(map(torch_values, value))
    if type(value) in NAMESPACES:
        return Namespace({key: torch_values(item) for key, item in vars(value).items()})
    if isinstance(value, Stub):
        return value.mapped(torch_values)
    if isinstance(value, ParamGroup | TrainingState | DcpState):
        return replace(value, **{one.name: torch_values(getattr(value, one.name)) for one in fields(value)})
    return value


def _tensor(value: SmallTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, value.dtype.name)
    if not value.data:
        return torch.empty_strided(value.shape, value.strides, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).as_strided(value.shape, value.strides)


_MADE: dict[type, Callable[[Any], Any]] = {
    SmallTensor: _tensor,
    TorchDtype: lambda value: getattr(torch, value.name),
    TorchSize: torch.Size,
    TorchDevice: lambda value: torch.device(*value.args),
}


def live_source(source: Source) -> Source:
    """A source whose values that are no tensors of the model are torch's own, for a live trainer to take."""
    return replace(source, state=torch_values(source.state), family=torch_values(source.family))
