"""Stand-ins for NCCL: the same collectives over gloo."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_COALESCED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
_RENAMED = {"reduce_scatter_tensor": "reduce_scatter_single", "all_gather_into_tensor": "all_gather_single"}


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
        initialize("gloo", *args, **kwargs)

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


def install() -> None:
    """Everything that has to be in place before megatron is imported: it binds some of these names at import."""
    stand_in_for_groups()
    stand_in_for_renamed_collectives()
    stand_in_for_coalescing()
    stand_in_for_sends()
    stand_in_for_all_to_all()
    stand_in_for_uneven_gathers()
    stand_in_for_uneven_scatters()
