"""Real megatron-core on a machine without a GPU: import it through here.

Megatron takes CUDA, NCCL and apex for granted. :func:`import_megatron` puts stand-ins in their places, imports
megatron-core and finishes the few that need it imported. No file of Megatron is changed, and what it computes,
saves and loads is its own; each stand-in is one named function that says why it is needed: those for the CUDA device (Megatron
names it everywhere, without asking whether it is there) and for NCCL (the same collectives over gloo) stand here, those for
compiled kernels and optimizers in :mod:`.cpu_kernels`.

The stand-ins last as long as the process. On a machine with a GPU nothing happens unless it is forced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from mcore_rlhf.demo import cpu_kernels

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

_COALESCED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")

_RENAMED = {"reduce_scatter_tensor": "reduce_scatter_single", "all_gather_into_tensor": "all_gather_single"}

_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.transformer.moe.experts",
)

_done = {"install": False, "finish": False}


class CudaMeansCpu(TorchFunctionMode):
    """While it is entered, every tensor that is asked for on ``cuda`` lies on the CPU.

    ``Tensor.type()`` keeps answering ``torch.cuda.…Tensor``: Megatron's optimizers sort parameters by that string.
    The mode belongs to the thread that entered it (and to the children forked from it).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if not kwargs:  # most calls: every operator passes here
            return func(*args)
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


def stand_in_for_equal_groups() -> None:
    """Give groups of the same ranks one gloo group: Megatron makes two dozen, and each has connections and threads that wake all the time.

    What belongs to a world that is gone, or was there before ``destroy_model_parallel``, is not given out again.
    """
    from megatron.core import parallel_state

    create, destroy = parallel_state.create_group, parallel_state.destroy_model_parallel
    made: dict[tuple[int, ...], Any] = {}
    world: list[weakref.ref[Any]] = []

    @functools.wraps(create)
    def create_group(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        if not world or world[0]() is not dist.group.WORLD:
            made.clear()
            world[:] = [weakref.ref(dist.group.WORLD)]
        if tuple(ranks) not in made:
            made[tuple(ranks)] = create(ranks, *args, **kwargs)
        return made[tuple(ranks)]

    @functools.wraps(destroy)
    def destroy_model_parallel() -> None:
        made.clear()
        destroy()

    _patch(parallel_state, create_group=create_group, destroy_model_parallel=destroy_model_parallel)


def _install_device() -> None:
    """Everything that has to be in place before megatron is imported."""
    stand_in_for_queries()
    stand_in_for_streams()
    stand_in_for_random_numbers()
    stand_in_for_tensors()


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Bind a function under both names by which callers reach it."""
    setattr(dist, name, function)
    setattr(c10d, name, function)


def stand_in_for_groups() -> None:
    """Make every process group a gloo group: Megatron asks for NCCL, with options that a CPU build of torch lacks."""
    initialize, create = dist.init_process_group, dist.new_group

    @functools.wraps(initialize)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        initialize(backend if backend == "fake" else "gloo", *args, **kwargs)

    @functools.wraps(create)
    def new_group(
        ranks: list[int] | None = None,
        timeout: object = None,
        backend: object = None,
        pg_options: object = None,
        **kwargs: Any,
    ) -> Any:
        return create(ranks=ranks, timeout=timeout, backend="gloo", **kwargs)

    _replace("init_process_group", init_process_group)
    _replace("new_group", new_group)


def stand_in_for_renamed_collectives() -> None:
    """Let the old names of two collectives mean the new ones: newer versions of torch warn at each call of the old."""
    for old, new in _RENAMED.items():
        if hasattr(dist, new):
            _replace(old, getattr(dist, new))


def stand_in_for_coalescing() -> None:
    """Run the collectives of a coalescing block one by one, at once: gloo cannot coalesce."""
    depth = 0

    @contextlib.contextmanager
    def coalescing_manager(*_: object, **__: object) -> Iterator[types.SimpleNamespace]:
        nonlocal depth
        depth += 1
        try:
            yield types.SimpleNamespace(wait=lambda: None)
        finally:
            depth -= 1

    def synchronous_inside(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            if depth:
                kwargs["async_op"] = False
            return collective(*args, **kwargs)

        return call

    _replace("_coalescing_manager", coalescing_manager)
    for name in _COALESCED:
        setattr(dist, name, synchronous_inside(getattr(dist, name)))


def stand_in_for_sends() -> None:
    """Send a detached alias. gloo sends without copying, and Megatron swaps ``.data`` of a sent activation right away:
    with an interleaved schedule freed memory would go over the wire.
    """
    send = c10d.isend

    @functools.wraps(send)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach(), *args, **kwargs)

    _replace("isend", isend)


def stand_in_for_all_to_all() -> None:
    """Turn split sizes into lists: Megatron's expert dispatcher does so only for tensors on CUDA."""
    exchange = dist.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return exchange(output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs)

    _replace("all_to_all_single", all_to_all_single)


def stand_in_for_uneven_gathers() -> None:
    """Gather pieces of different lengths one by one: experts' ranks hold unequal numbers of tokens, gloo wants equal."""
    gather = dist.all_gather

    @functools.wraps(gather)
    def all_gather(pieces: list[torch.Tensor], piece: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({other.shape for other in pieces}) == 1:
            return gather(pieces, piece, group=group, async_op=async_op)
        pieces[dist.get_rank(group)].copy_(piece)
        for number, other in enumerate(pieces):
            dist.broadcast(other, group=group, group_src=number)
        return None

    _replace("all_gather", all_gather)


def stand_in_for_uneven_scatters() -> None:
    """Reduce everything and keep one's own piece, for the way back of :func:`stand_in_for_uneven_gathers`."""
    scatter = dist.reduce_scatter

    @functools.wraps(scatter)
    def reduce_scatter(output: torch.Tensor, pieces: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if len({piece.shape for piece in pieces}) == 1:
            return scatter(output, pieces, *args, **kwargs)
        group = kwargs.get("group")
        whole = torch.cat(pieces)
        dist.all_reduce(whole, group=group)
        output.copy_(whole.split([len(piece) for piece in pieces])[dist.get_rank(group)])
        return None

    _replace("reduce_scatter", reduce_scatter)


def _install_communication() -> None:
    """Everything that has to be in place before megatron is imported: it binds some of these names at import."""
    stand_in_for_groups()
    stand_in_for_renamed_collectives()
    stand_in_for_coalescing()
    stand_in_for_sends()
    stand_in_for_all_to_all()
    stand_in_for_uneven_gathers()
    stand_in_for_uneven_scatters()


def needed() -> bool:
    """Whether this machine lacks the GPU that Megatron takes for granted."""
    return not torch.cuda.is_available()


def installed() -> bool:
    """Whether the stand-ins are in place in this process."""
    return _done["install"]


def install(force: bool = False) -> bool:
    """Put the stand-ins in place that must precede the import of megatron; a second call does nothing.

    Args:
        force: Also on a machine with a GPU.

    Returns:
        Whether the stand-ins are in place.
    """
    if not _done["install"] and (force or needed()):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it, GPU or not
        _install_device()
        _install_communication()
        cpu_kernels.install()
        _done["install"] = True
    return _done["install"]


@contextlib.contextmanager
def _pickled_tensors_for_torch() -> Iterator[None]:
    """Let a pickled tensor go on naming torch's function: since 0.18 Megatron binds its own in that place, and whoever reads what
    a worker answers would have to import Megatron.
    """
    load = torch.storage._load_from_bytes
    try:
        yield
    finally:
        setattr(torch.storage, "_load_from_bytes", load)  # noqa: B010 - mypy guards functions against being replaced


def import_megatron(force: bool = False) -> None:
    """Import megatron-core, with stand-ins where there is no GPU; a second call does nothing.

    Args:
        force: Use the stand-ins also on a machine with a GPU.

    Raises:
        ModuleNotFoundError: If megatron-core is not installed.
    """
    stand_in = install(force)
    with warnings.catch_warnings(), _pickled_tensors_for_torch():
        warnings.filterwarnings("ignore", module=r"megatron\.")  # it complains of every optional package
        for name in _MODULES:
            importlib.import_module(name)
    warnings.filterwarnings(
        "ignore", ".* is experimental and still under active development"
    )  # 0.19, of what it imports late
    if stand_in and not _done["finish"]:
        stand_in_for_tracker_states()
        stand_in_for_equal_groups()
        cpu_kernels.finish()
        _done["finish"] = True
