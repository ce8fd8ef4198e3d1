"""The flat groups of stages 1, 2 and 3: which parameters, in which order, and where every rank keeps its part.

Source: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` and ``runtime/zero/stage3.py`` (``state_dict``),
``runtime/bf16_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mcore_rlhf.core.catalog import ADAMS, MASTER, Shape
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import MOMENTUM, USE_MUON
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup, Group, SlicedGroup
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.stored import StoredTensor

from .files import momentum_is_flat, momentum_is_unreduced
from .tag import OpenedTag

_STEP = "step"
"""States that have one value per element, whoever trains."""


@dataclass(slots=True)
class StoredFlatGroup:
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
        whole: The states that every rank keeps in whole parameters: see :class:`~mcore_rlhf.layouts.zero.BorderGroup`.
        unreduced: Whether of those only each rank's own elements count.
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
    whole: frozenset[str] = frozenset()
    unreduced: bool = False

    def __str__(self) -> str:
        return (
            f"flat group with {self.names[0]}" if self.names else f"flat group {self.number}, which has no parameters"
        )

    def geometry_of(self, state: str) -> Group | BorderGroup:
        """Where the parameters lie in a state."""
        flat = self.geometry
        return BorderGroup(flat, self.unreduced) if state in self.whole and isinstance(flat, FlatGroup) else flat

    def at_borders(self) -> list[str]:
        """The parameters that lie on more than one rank."""
        return [name for index, name in enumerate(self.names) if len(list(self.geometry.runs(index))) > 1]


def read_groups(opened: OpenedTag, mp_rank: int, problems: Problems) -> list[StoredFlatGroup]:
    """The flat groups of one model-parallel rank.

    Args:
        opened: The files.
        mp_rank: Which rank.
        problems: Told of everything that is wrong.
    """
    shapes = opened.top(0, mp_rank).get("param_shapes")
    if not isinstance(shapes, list):
        where = opened.model[0, mp_rank].directory.path
        raise Unsupported(f"{where}: has no 'param_shapes', and without them the flat groups cannot be told apart")
    _check_groups(opened, mp_rank, len(shapes))
    owners = _param_group_of(opened.optimizer(0, mp_rank), len(shapes))
    groups = []
    for number, members in enumerate(shapes):
        local, names = tuple(tuple(map(int, shape)) for shape in members.values()), tuple(members)
        for ep_rank, ranks in enumerate(opened.experts.owners(names)):
            known = tuple(opened.experts.global_name(name, ep_rank) for name in names)
            geometry = _geometry(opened, mp_rank, number, [prod(shape) for shape in local], len(ranks), problems)
            group = StoredFlatGroup(known, local, geometry, owners[number], number, ranks, names)
            _read_ranks(opened, mp_rank, group, problems)
            groups.append(group)
    return groups


def param_group_fields(opened: OpenedTag, mp_rank: int) -> list[dict[str, object]]:
    """What the optimizer keeps per param group, without the members; an elastic checkpoint does not store it."""
    stored = _inner(opened.optimizer(0, mp_rank))
    pt = opened.optim[0, mp_rank]
    listed = stored.get("param_groups", []) if isinstance(stored, Mapping) else [{} for _ in stored]
    return [{key: pt.materialize(value) for key, value in group.items() if key != "params"} for group in listed]


def _inner(state: Mapping[str, Any]) -> Any:
    """The state dict of the torch optimizer inside; of an elastic checkpoint a list of states."""
    return state["optimizer_state_dict"] if "optimizer_state_dict" in state else state.get("base_optimizer_state", [])


def _check_groups(opened: OpenedTag, mp_rank: int, count: int) -> None:
    """Every flat group has states, and a param group that they are of.

    Raises:
        Unsupported: It has not.
    """
    for dp_rank in range(opened.dp):
        inner = _inner(opened.optimizer(dp_rank, mp_rank))
        listed = (
            [flat for group in inner["param_groups"] for flat in group["params"]]
            if isinstance(inner, Mapping)
            else inner
        )
        if len(listed) != count:
            where = opened.optim[dp_rank, mp_rank].directory.path
            raise Unsupported(
                f"{where}: 'param_shapes' has {count} flat groups, but its optimizer has {len(listed)}"
                + ("" if listed else ": neither base_optimizer_state nor optimizer_state_dict is there")
            )


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


def _geometry(
    opened: OpenedTag, mp_rank: int, number: int, numels: Sequence[int], dp: int, problems: Problems
) -> Group:
    if opened.sliced:
        return SlicedGroup(tuple(numels), dp)
    gaps = opened.optimizer(0, mp_rank).get("param_alignment_paddings") or ()
    of_group = tuple(gaps[number]) if len(gaps) > number else ()
    if gaps and len(of_group) != len(numels):
        where = opened.optim[0, mp_rank].directory.path
        text = f"{where}: param_alignment_paddings are not those of the {len(numels)} parameters of flat group {number}"
        problems.add(LayoutMismatch, text, "The model files and the optimizer files are of different runs.")
        of_group = ()
    return FlatGroup(tuple(numels), dp, of_group)


def _read_ranks(opened: OpenedTag, mp_rank: int, group: StoredFlatGroup, problems: Problems) -> None:
    files = [opened.optim[dp_rank, mp_rank] for dp_rank in group.ranks]
    for at, (dp_rank, pt) in enumerate(zip(group.ranks, files, strict=True)):
        for key, value in _of_rank(opened, dp_rank, mp_rank, group.number).items():
            if _is_flat(key, value):
                group.parts.setdefault(key, {})[at] = value
            elif value is not None:
                _keep_scalar(group, key, pt.materialize(value), pt, problems)
    if MOMENTUM in group.parts and _keeps_whole(opened, mp_rank, group):
        group.whole = frozenset({MOMENTUM})
        group.unreduced = momentum_is_unreduced(opened.first.get("ds_config"), opened.first.get("ds_version"))
    for key, parts in group.parts.items():
        for at, value in parts.items():
            _check_length(group, at, key, value, files[at], problems)
    _check_all_there(opened, mp_rank, group, problems)


def _keeps_whole(opened: OpenedTag, mp_rank: int, group: StoredFlatGroup) -> bool:
    """Whether a momentum of Muon's is kept in whole parameters, on every rank of whose partition they have elements.

    ``BF16_Optimizer``, optimizers that are offloaded and stage 3 keep it as all other states. Where lengths fit both ways,
    the configuration decides.
    """
    flat, state = group.geometry, opened.optimizer(0, mp_rank)
    inner = _inner(state)
    groups = inner.get("param_groups", []) if isinstance(inner, Mapping) else []
    muon = group.param_group < len(groups) and groups[group.param_group].get(USE_MUON) is True
    if not muon or not isinstance(flat, FlatGroup):
        return False
    whole, parts = BorderGroup(flat), group.parts[MOMENTUM]
    if any(value.shape[0] != whole.length_of(rank) for rank, value in parts.items()):
        return False
    fits = all(value.shape[0] in (flat.length(), flat.length() - flat.padding(rank)) for rank, value in parts.items())
    return not (fits and momentum_is_flat(opened.first.get("ds_config"), bf16_optimizer="zero_stage" not in state))


def _of_rank(opened: OpenedTag, dp_rank: int, mp_rank: int, number: int) -> dict[str, Any]:
    """What one rank's file has for one flat group, masters first."""
    state = opened.optimizer(dp_rank, mp_rank)
    masters = state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups", []))
    found = {MASTER: masters[number] if number < len(masters) else None}
    inner = _inner(state)
    if isinstance(inner, list):  # elastic_checkpoint
        found.update(inner[number] if number < len(inner) else {})
        if "base_optimizer_state_step" in state:
            found[_STEP] = state["base_optimizer_state_step"]
    else:
        found.update(inner.get("state", {}).get(number, {}))
    return found


def _is_flat(key: str, value: object) -> bool:
    return key != _STEP and isinstance(value, StoredTensor) and len(value.shape) == 1


def _check_length(
    group: StoredFlatGroup, rank: int, key: str, value: StoredTensor, pt: PtFile, problems: Problems
) -> None:
    """A part has its whole length, or is lean: without the padding at its end."""
    if key in group.whole:
        return
    whole = group.geometry.length()
    lean, numel = whole - group.geometry.padding(rank), prod(value.shape)
    if len(value.shape) == 1 and numel in (whole, lean):
        return
    wanted = f"{whole}" if whole == lean else f"{lean} or, with padding, {whole}"
    text = (
        f"{pt.directory.path}: {key} of the {group} has {numel} elements; "
        f"its {len(group.names)} parameters over {group.geometry.dp} ranks make {wanted}"
    )
    if key in ADAMS:
        problems.add(LayoutMismatch, text, "The model files and the optimizer files are of different runs.")
    else:
        advice = "This optimizer keeps a state that is not one value per element; --no-optimizer converts the weights."
        problems.add(Unsupported, text, advice)


def _keep_scalar(group: StoredFlatGroup, key: str, value: object, pt: PtFile, problems: Problems) -> None:
    known = group.scalars.setdefault(key, value)
    if not same(known, value):
        problems.add(
            LayoutMismatch,
            f"{pt.directory.path}: {key} of the {group} is {value!r}, but {known!r} on rank 0",
            "Files of different steps are mixed in one tag: copy the checkpoint again from where it came from.",
        )


def _check_all_there(opened: OpenedTag, mp_rank: int, group: StoredFlatGroup, problems: Problems) -> None:
    for key, parts in group.parts.items():
        for rank in range(group.geometry.dp):
            if rank not in parts and group.geometry.indices(rank):
                path = opened.optim[group.ranks[rank], mp_rank].directory.path
                text = f"{path}: has no {key} of the {group}, which other ranks have"
                problems.add(Incomplete, text)
    if MASTER not in group.parts:
        path = opened.optim[0, mp_rank].directory.path
        problems.add(Unsupported, f"{path}: has no fp32 masters of the {group}")


def mappings(opened: OpenedTag, mp_rank: int, dp_rank: int) -> Iterator[tuple[int, str, int, int]]:
    """What ``param_slice_mappings`` says, as (group, parameter, start in the partition, elements).

    Raises:
        Unsupported: It is not what DeepSpeed writes: for every group a dictionary of ``fragment_address(numel, start)``.
    """
    for number, group in enumerate(opened.optimizer(dp_rank, mp_rank).get("param_slice_mappings") or ()):
        for name, address in group.items() if isinstance(group, Mapping) else [("", None)]:
            start, numel = (getattr(address, field, None) for field in ("start", "numel"))
            if type(start) is not int or type(numel) is not int:
                where = f"{opened.optim[dp_rank, mp_rank].directory.path}: param_slice_mappings of group {number}"
                raise Unsupported(f"{where}: expected the start and the length of {name!r}, found {address!r}")
            yield number, name, start, numel
