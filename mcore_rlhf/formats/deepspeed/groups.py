"""The flat groups of stages 1, 2 and 3: which parameters, in which order, and where every rank keeps its part.

Source: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` and ``runtime/zero/stage3.py`` (``state_dict``),
``runtime/bf16_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.names import MASTER
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Problems
from mcore_rlhf.layouts.zero import FlatGroup, Group, SlicedGroup
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

from .opened import Opened
from .values import same

_STEP = "step"


@dataclass(slots=True)
class FlatReading:
    """One flat group of one model-parallel rank: a param group, or a sub-group of stage 3.

    Args:
        names: Its parameters, in the order in which they lie.
        shapes: Their local shapes.
        geometry: Where they lie.
        param_group: Number of the optimizer's param group.
        number: Its own number in the files.
        ranks: The data-parallel ranks that share it, in the order of its parts.
        stored: Its parameters' names in the files; an expert's number is local there.
        parts: For every state, each data-parallel rank's part.
        scalars: What the optimizer keeps once for all of them: ``step``.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    geometry: Group
    param_group: int
    number: int
    ranks: range
    stored: tuple[str, ...]
    parts: dict[str, dict[int, StoredTensor]] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _RankPart:
    """What one rank's file has for one flat group."""

    pt: PtFile
    master: StoredTensor | None
    state: Mapping[str, Any]


def read_groups(opened: Opened, mp_rank: int, problems: Problems) -> list[FlatReading]:
    """The flat groups of one model-parallel rank.

    Args:
        opened: The files.
        mp_rank: Which rank.
        problems: Told of everything that is wrong.
    """
    shapes = opened.top(0, mp_rank).get("param_shapes")
    if not isinstance(shapes, list):
        where = opened.model[0, mp_rank].directory.path
        raise Corrupt(f"{where}: has no 'param_shapes', and without them the flat groups cannot be told apart")
    owners = _param_group_of(opened.optimizer(0, mp_rank), len(shapes))
    groups = []
    for number, members in enumerate(shapes):
        local, names = tuple(tuple(map(int, shape)) for shape in members.values()), tuple(members)
        for ep_rank, ranks in enumerate(opened.experts.owners(names)):
            known = tuple(opened.experts.global_name(name, ep_rank) for name in names)
            geometry = _geometry(opened, mp_rank, number, [prod(shape) for shape in local], len(ranks))
            reading = FlatReading(known, local, geometry, owners[number], number, ranks, names)
            _read_ranks(opened, mp_rank, reading, problems)
            groups.append(reading)
    return groups


def param_group_fields(opened: Opened, mp_rank: int) -> list[dict[str, object]]:
    """What the optimizer keeps per param group, without the members; an elastic checkpoint does not store it."""
    stored = _inner(opened.optimizer(0, mp_rank))
    pt = opened.optim[0, mp_rank]
    listed = stored.get("param_groups", []) if isinstance(stored, Mapping) else [{} for _ in stored]
    return [{key: pt.materialize(value) for key, value in group.items() if key != "params"} for group in listed]


def _inner(state: Mapping[str, Any]) -> Any:
    """The state dict of the torch optimizer inside."""
    return state["optimizer_state_dict"] if "optimizer_state_dict" in state else state.get("base_optimizer_state", [])


def _param_group_of(state: Mapping[str, Any], count: int) -> list[int]:
    """For every flat group, its param group: in stage 3 a param group has several."""
    inner = _inner(state)
    listed = inner.get("param_groups") if isinstance(inner, Mapping) else None
    if not listed:
        return list(range(count))
    owner = {flat: number for number, group in enumerate(listed) for flat in group["params"]}
    if sorted(owner) != list(range(count)):
        raise LayoutMismatch(
            f"'param_shapes' has {count} flat groups, but the optimizer's param groups name {sorted(owner)[:20]}"
        )
    return [owner[flat] for flat in range(count)]


def _geometry(opened: Opened, mp_rank: int, number: int, numels: Sequence[int], dp: int) -> Group:
    if opened.sliced:
        return SlicedGroup(tuple(numels), dp)
    gaps = opened.optimizer(0, mp_rank).get("param_alignment_paddings") or ()
    of_group = tuple(gaps[number]) if len(gaps) > number else ()
    return FlatGroup(tuple(numels), dp, of_group if len(of_group) == len(numels) else ())


def _read_ranks(opened: Opened, mp_rank: int, reading: FlatReading, problems: Problems) -> None:
    for at, dp_rank in enumerate(reading.ranks):
        part = _rank_part(opened, dp_rank, mp_rank, reading.number)
        stored = {MASTER: part.master, **part.state}
        for key, value in stored.items():
            if _is_flat(key, value):
                _check_length(reading, at, key, value, part.pt, problems)
                reading.parts.setdefault(key, {})[at] = value
            elif value is not None:
                _keep_scalar(reading, key, part.pt.materialize(value), part.pt, problems)
    _check_all_there(opened, mp_rank, reading, problems)


def _rank_part(opened: Opened, dp_rank: int, mp_rank: int, number: int) -> _RankPart:
    pt, state = opened.optim[dp_rank, mp_rank], opened.optimizer(dp_rank, mp_rank)
    masters = state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups", []))
    inner = _inner(state)
    if isinstance(inner, list):  # elastic_checkpoint
        found = dict(inner[number]) if number < len(inner) else {}
        if "base_optimizer_state_step" in state:
            found[_STEP] = state["base_optimizer_state_step"]
    else:
        found = dict(inner.get("state", {}).get(number, {}))
    return _RankPart(pt, masters[number] if number < len(masters) else None, found)


def _is_flat(key: str, value: object) -> bool:
    return key != _STEP and isinstance(value, StoredTensor) and len(value.shape) == 1


def _check_length(
    reading: FlatReading, rank: int, key: str, value: StoredTensor, pt: PtFile, problems: Problems
) -> None:
    """A part has its whole length, or is lean: without the padding at its end."""
    whole = reading.geometry.length()
    lean = whole - reading.geometry.padding(rank)
    if value.shape[0] not in (whole, lean):
        wanted = f"{whole}" if whole == lean else f"{lean} or, with padding, {whole}"
        problems.add(
            LayoutMismatch,
            f"{pt.directory.path}: {key} of the flat group with {reading.names[0]} has {value.shape[0]} elements; "
            f"its {len(reading.names)} parameters over {reading.geometry.dp} ranks make {wanted}",
            "The model files and the optimizer files are of different runs, or the optimizer's state is not one value per element.",
        )


def _keep_scalar(reading: FlatReading, key: str, value: object, pt: PtFile, problems: Problems) -> None:
    known = reading.scalars.setdefault(key, value)
    if not same(known, value):
        problems.add(
            LayoutMismatch,
            f"{pt.directory.path}: {key} of the flat group with {reading.names[0]} is {value!r}, but {known!r} on rank 0",
            "Files of different steps are mixed in one tag: copy the checkpoint again from where it came from.",
        )


def _check_all_there(opened: Opened, mp_rank: int, reading: FlatReading, problems: Problems) -> None:
    for key, parts in reading.parts.items():
        for rank in range(reading.geometry.dp):
            if rank not in parts and reading.geometry.indices(rank):
                path = opened.optim[reading.ranks[rank], mp_rank].directory.path
                text = f"{path}: has no {key} of the flat group with {reading.names[0]}, which other ranks have"
                problems.add(Incomplete, text)
    if MASTER not in reading.parts:
        path = opened.optim[0, mp_rank].directory.path
        problems.add(Incomplete, f"{path}: has no fp32 masters of the flat group with {reading.names[0]}")


def mappings(opened: Opened, mp_rank: int, dp_rank: int) -> Iterator[tuple[int, str, int, int]]:
    """What ``param_slice_mappings`` says, as (group, parameter, start in the partition, elements)."""
    for number, group in enumerate(opened.optimizer(dp_rank, mp_rank).get("param_slice_mappings") or ()):
        for name, address in group.items():
            yield number, name, int(address.start), int(address.numel)
