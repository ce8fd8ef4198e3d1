"""Stand-ins for the CUDA device: Megatron names it everywhere, without asking whether it is there."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float64: "torch.cuda.DoubleTensor",
}
_DO_NOTHING = (
    "set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats", "check_error", "_lazy_init",
)  # fmt: skip
_ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class CudaMeansCpu(TorchFunctionMode):
    """While it is entered, every tensor that is asked for on ``cuda`` lies on the CPU.

    ``Tensor.type()`` keeps answering ``torch.cuda.…Tensor``: Megatron's optimizers sort parameters by that string.
    The mode belongs to the thread that entered it (and to the children forked from it).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> _Event:
        return _Event()


class _Event:
    """An event that has already been reached."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: object) -> float:
        return 0.0


def stand_in_for_tensors() -> None:
    """Enter :class:`CudaMeansCpu` for the life of this thread, because Megatron allocates on ``cuda`` by name."""
    CudaMeansCpu().__enter__()


def _patch(module: types.ModuleType, **replacements: object) -> None:
    """Bind attributes of a module anew, whatever their types were."""
    for name, replacement in replacements.items():
        setattr(module, name, replacement)


def stand_in_for_queries() -> None:
    """Answer what Megatron asks of ``torch.cuda``: one device (else it makes no parallel state), no memory in use."""
    properties = types.SimpleNamespace(name="cpu", major=9, minor=0, total_memory=0, multi_processor_count=1)
    _patch(
        torch.cuda,
        is_available=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: "cpu",
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: properties,
        memory_stats=lambda *_, **__: {},
        **{name: lambda *_, **__: None for name in _DO_NOTHING},
        **{name: lambda *_, **__: 0 for name in _ZERO},
    )


def stand_in_for_streams() -> None:
    """Replace streams, events and profiler ranges: Megatron records and waits on them around every collective."""
    _patch(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda *_: _Stream(),
        default_stream=lambda *_: _Stream(),
        stream=lambda _: contextlib.nullcontext(),
    )
    _patch(torch.cuda.nvtx, range_push=lambda *_: None, range_pop=lambda *_: None)


def stand_in_for_random_numbers() -> None:
    """Let "the CUDA generator" be the CPU's default one, so that Megatron's RNG tracker really steers dropout."""
    _patch(
        torch.cuda,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
    )


def stand_in_for_tracker_states() -> None:
    """Give Megatron's RNG tracker the CPU generator: it reaches past ``torch.cuda`` to the device's own generator.

    The tracker warns when the CPU generator moves while the other one is in use; here they are one.
    """
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def install() -> None:
    """Everything that has to be in place before megatron is imported."""
    stand_in_for_queries()
    stand_in_for_streams()
    stand_in_for_random_numbers()
    stand_in_for_tensors()
