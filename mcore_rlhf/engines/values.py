"""What files hold of torch's, as a live trainer takes it: the one place where it becomes torch's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.dcp.state import DcpState
from mcore_rlhf.storage.stored import NAMESPACES, Namespace, Stub
from mcore_rlhf.storage.torch_values import SmallTensor, TorchDevice, TorchDtype, TorchSize


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
