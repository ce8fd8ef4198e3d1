"""What goes into a DCP folder: every key with its path, and either where its elements come from or its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import Catalog
from mcore_rlhf.core.dtype import FLOATING, DType, dtype_of
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.errors import Incomplete
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.dcp import Path_, saved

from .choices import Choices, model_dtype
from .groups import STEP, completed
from .keys import PARAMS, Style
from .native import DcpState
from .nest import leaves

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor that is copied from the source.

    Args:
        path: Its path in the nest.
        name: Its name in the view of the source.
        dtype: What it is written in.
        shape: Its whole shape.
        sharded: Whether it is cut; buffers are not.
    """

    path: Path_
    name: TensorName
    dtype: DType
    shape: Shape
    sharded: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor whose bytes are known: a step, a random state."""

    path: Path_
    dtype: DType
    shape: Shape
    data: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Something that is not a tensor, as a zip of ``torch.save``."""

    path: Path_
    data: bytes


Part = Planned | Constant | Stored


@dataclass(frozen=True, slots=True)
class Content:
    """Makes the parts of a target, in the order in which torch lists them: model, optimizer, everything else.

    Args:
        source: The source.
        native: Its own view.
        choices: What the target is to be.
        view: The source's catalogue as FSDP sees it.
        rest: Schedulers, random states, counters: a nest.
    """

    source: Source
    native: ModuleState
    choices: Choices
    view: Catalog
    rest: Mapping[str, object]

    def parts(self) -> Iterator[Part]:
        """Everything that is written."""
        yield from self.model()
        if self.choices.optimizer:
            yield from self._states()
            yield from self._groups()
        layout = self.choices.layout
        for path, value in leaves(self.rest):
            yield _leaf((*layout.rest, *path), value)

    def model(self) -> Iterator[Planned]:
        """The model's tensors, second names of tied ones too.

        Raises:
            Incomplete: The source lacks one.
        """
        for name in self._names():
            owner = self.native.shared.get(name, name)
            spec = self.source.model.get(owner)
            entry = self.view.get(TensorName(self.source.role, owner, PARAM))
            if spec is None or entry is None:
                raise Incomplete(f"{self.source.root}: {name} of the model is nowhere in it")
            dtype = model_dtype(self.source, self.choices, owner, entry)
            sharded = owner not in self.native.buffers and spec.dtype in FLOATING and entry.global_shape != ()
            wanted = TensorName(self.source.role, name, PARAM)
            yield Planned(self.choices.layout.model_path(name), wanted, dtype, entry.global_shape, sharded)

    def _names(self) -> list[str]:
        """In the module's order, where somebody knows it."""
        there = {spec.name for spec in self.source.model.params} | set(self.native.shared)
        known = [name for name in self.native.order if name in there]
        return list(dict.fromkeys([*known, *(spec.name for spec in self.source.model.params), *self.native.shared]))

    def _states(self) -> Iterator[Part]:
        numbers = {name: n for n, name in enumerate(name for g in self.source.state.groups for name in g.params)}
        scalars = self._scalars()
        for spec in self.source.model.params:
            if spec.trainable:
                yield from self._states_of(spec, numbers[spec.name], scalars.get(spec.name, {}))

    def _states_of(self, spec: ParamSpec, number: int, scalars: Mapping[str, object]) -> Iterator[Part]:
        names = [TensorName(self.source.role, spec.name, state) for state in self.source.states if state != MASTER]
        entries = [entry for name in names if (entry := self.view.get(name)) is not None]
        layout = self.choices.layout
        if entries or isinstance(self.native, DcpState):
            for key, value in scalars.items():
                yield _leaf(layout.state_path(spec.name, key, number), value)
        for entry in entries:
            path = layout.state_path(spec.name, entry.name.state, number)
            yield Planned(path, entry.name, entry.dtype, entry.global_shape, entry.global_shape != ())

    def _scalars(self) -> Mapping[str, Mapping[str, object]]:
        """Every parameter's own, as torch's optimizers keep them."""
        if isinstance(self.native, DcpState) and self.native.scalars:
            return self.native.scalars
        return {name: _own_scalars(group) for group in self.source.state.groups for name in group.params}

    def _groups(self) -> Iterator[Part]:
        layout, counted = self.choices.layout, 0
        cache: dict[str, bytes] = {}
        for number, group in enumerate(self._of_torch()):
            fields = {key: value for key, value in group.fields.items() if key not in group.scalars}
            if layout.style is Style.FLAT:
                for name in group.params:
                    for key, value in fields.items():
                        yield _leaf(layout.group_path(number, key, name), value, cache)
                continue
            numbers = list(range(counted, counted + len(group.params)))
            members = numbers if layout.style is Style.NUMBERED else list(group.params)
            counted += len(numbers)
            for key, value in {**fields, PARAMS: members}.items():
                yield _leaf(layout.group_path(number, key), value)

    def _of_torch(self) -> Sequence[ParamGroup]:
        """The groups with all fields that torch's loader asks for."""
        if isinstance(self.native, DcpState):
            return self.native.groups
        groups = self.source.state.groups
        return [ParamGroup(completed(g.fields, g.scalars), g.expert, g.params) for g in groups]


def _own_scalars(group: ParamGroup) -> dict[str, object]:
    """A group's step as a float32 tensor, which torch's Adam wants for each parameter."""
    import torch

    names = group.scalars or tuple(key for key in (STEP,) if key in group.fields)
    return {name: torch.tensor(float(cast(float, group.fields[name])), dtype=torch.float32) for name in names}


def _leaf(path: Path_, value: object, cache: dict[str, bytes] | None = None) -> Part:
    """A value that is known: a tensor among torch's items for tensors, everything else pickled."""
    import torch

    if isinstance(value, torch.Tensor):
        return _constant(path, value)
    if cache is None or not isinstance(value, bool | int | float | str | tuple | None):
        return Stored(path, saved(value))
    key = repr(value)  # a learning rate for each parameter: pickled once
    if key not in cache:
        cache[key] = saved(value)
    return Stored(path, cache[key])


def _constant(path: Path_, tensor: torch.Tensor) -> Constant:
    import torch

    plain = tensor.detach().cpu().contiguous()
    data = bytes(plain.reshape(-1).view(torch.uint8).numpy())
    dtype = dtype_of(plain.dtype)
    return Constant(path, dtype, tuple(plain.shape), data)
