"""What the files of a new native checkpoint hold: its local tensors and flat groups, and the records in which they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.core.catalog import Catalog, Record, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, DType
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.families.module import MOMENTUM, USE_MUON
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.tensor import LocalLayout, Piece
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup, Group, SlicedGroup, alignment_gaps, dealt, sub_groups
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.ptfile import StoredTensor

from .catalog import Cut, Holder, Place, place_chunks
from .choices import Choices


def whole_layout(shape: Shape) -> LocalLayout:
    """The layout of a rank that has a whole tensor."""
    return LocalLayout(shape, shape, (Piece(Box.whole(shape), (0,) * len(shape)),))


@dataclass(slots=True)
class Records:
    """The records of one file, and the entries that lie in them.

    Args:
        file: Path relative to the root.
        role: Role of the tensors.
    """

    file: str
    role: str
    records: list[Record] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    def tensor(self, dtype: DType, shape: Shape) -> StoredTensor:
        """A tensor in a further record of its own."""
        record = Record(self.file, f"data/{len(self.records)}", dtype, prod(shape), 0)
        self.records.append(record)
        return StoredTensor(record, 0, shape, row_major(shape))

    def hold(self, spec: ParamSpec, state: str, place: Place, layout: LocalLayout) -> None:
        """Say that a place of this file holds a part of a tensor."""
        chunks = tuple(place_chunks(place, layout))
        if chunks:
            name = TensorName(self.role, spec.name, state)
            self.entries.append(TensorEntry(name, spec.global_shape, chunks[0].record.dtype, chunks))


@dataclass(frozen=True, slots=True)
class Member:
    """A trained parameter of a flat group."""

    spec: ParamSpec
    layout: LocalLayout

    @property
    def numel(self) -> int:
        """Elements of the local parameter."""
        return prod(self.layout.shape)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A flat group of a model-parallel rank.

    Args:
        number: The optimizer's param group.
        members: Its parameters, in the order in which they lie.
        geometry: Where they lie.
    """

    number: int
    members: tuple[Member, ...]
    geometry: Group


@dataclass(slots=True)
class Blueprint:
    """A whole new checkpoint, before its files.

    Args:
        role: Role of its tensors.
        model: What the model is, with the target's dtypes.
        choices: Stage and degrees.
        groups: The optimizer's param groups.
        states: Names of its tensor states, masters first.
        source: Where tensors come from; says which states there are, and their dtypes.
        holders: How model-parallel ranks cut the parameters; None where there is one.
    """

    role: str
    model: ModelSpec
    choices: Choices
    groups: Sequence[ParamGroup]
    states: tuple[str, ...]
    source: Catalog
    holders: Mapping[str, Mapping[int, Holder]] | None = None
    _available: frozenset[TensorName] = frozenset()
    _dtypes: dict[str, DType] = field(default_factory=dict)
    _flat: dict[int, list[NewGroup]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._available = frozenset(self.source)

    def layout_of(self, spec: ParamSpec, mp_rank: int) -> LocalLayout | None:
        """The part of a tensor that a model-parallel rank has, or None."""
        if self.holders is None:
            return whole_layout(spec.global_shape)
        holder = self.holders[spec.name].get(mp_rank)
        return holder.layout if holder is not None else None

    def local(self, mp_rank: int) -> list[Member]:
        """The tensors of a rank's module, in order."""
        found = ((spec, self.layout_of(spec, mp_rank)) for spec in self.model.params)
        return [Member(spec, layout) for spec, layout in found if layout is not None]

    def params_of(self, mp_rank: int) -> list[list[Member]]:
        """The parameters of every param group that a rank has, in the optimizer's order; none of them empty."""
        local = {member.spec.name: member for member in self.local(mp_rank)}
        return [[local[n] for n in group.params if n in local and local[n].numel] for group in self.groups]

    def flat_groups(self, mp_rank: int) -> list[NewGroup]:
        """The flat groups of a rank; worked out once, since every data-parallel rank's file asks."""
        if mp_rank not in self._flat:
            cut = (self._cut(number, members) for number, members in enumerate(self.params_of(mp_rank)))
            self._flat[mp_rank] = [group for groups in cut for group in groups]
        return self._flat[mp_rank]

    def _cut(self, number: int, members: list[Member]) -> list[NewGroup]:
        choices = self.choices
        if choices.stage == 3:
            parts = sub_groups([member.numel for member in members], choices.dp, choices.sub_group_size)
            chosen = [tuple(members[index] for index in part) for part in parts]
            return [
                NewGroup(number, part, SlicedGroup(tuple(member.numel for member in part), choices.dp))
                for part in chosen
            ]
        ordered = dealt(members, choices.dp) if choices.dealt else members
        numels = tuple(member.numel for member in ordered)
        if choices.stage == 0:
            return [NewGroup(number, tuple(ordered), FlatGroup(numels, 1, alignment=1))]
        multiple = 16 // gcd(16, members[0].spec.dtype.itemsize) if choices.aligned and members else 1
        return [NewGroup(number, tuple(ordered), FlatGroup(numels, choices.dp, alignment_gaps(numels, multiple)))]

    def geometry_of(self, group: NewGroup, state: str) -> Group | BorderGroup:
        """Where a group's parameters lie in a state."""
        flat, muon = group.geometry, self.groups[group.number].fields.get(USE_MUON) is True
        whole = muon and state == MOMENTUM and not self.choices.flat_momentum
        return BorderGroup(flat) if whole and isinstance(flat, FlatGroup) else flat

    def has(self, spec: ParamSpec, state: str) -> bool:
        """Whether the source has a state of a parameter; its masters can always be made."""
        return state == MASTER or TensorName(self.role, spec.name, state) in self._available

    def state_dtype(self, state: str) -> DType:
        """The element type of a state, as the source stores it."""
        if state == MASTER:
            return FLOAT32
        if state not in self._dtypes:
            name = next(name for name in self.source if name.state == state)
            entry = self.source.get(name)
            self._dtypes[state] = entry.dtype if entry is not None else FLOAT32
        return self._dtypes[state]


def flat_part(
    blueprint: Blueprint, records: Records, group: NewGroup, state: str, rank: int, *, lean: bool
) -> StoredTensor:
    """One rank's part of a flat group in one state, with everything that lies in it.

    Args:
        blueprint: The checkpoint.
        records: The file.
        group: The group.
        state: The state.
        rank: The data-parallel rank.
        lean: Whether the padding at its end is left out.
    """
    geometry = blueprint.geometry_of(group, state)
    if isinstance(geometry, BorderGroup):
        length, indices = geometry.length_of(rank), geometry.held(rank)
    else:
        length, indices = geometry.length() - (geometry.padding(rank) if lean else 0), geometry.indices(rank)
    stored = records.tensor(blueprint.state_dtype(state), (length,))
    for index in indices:
        member = group.members[index]
        if blueprint.has(member.spec, state):
            records.hold(member.spec, state, Cut(geometry, index, {rank: stored}), member.layout)
    return stored


def whole_tensor(records: Records, member: Member, state: str, dtype: DType) -> StoredTensor:
    """A local tensor in one piece."""
    stored = records.tensor(dtype, member.layout.shape)
    records.hold(member.spec, state, stored, member.layout)
    return stored


def frozen_slice(records: Records, member: Member, rank: int, dp: int) -> StoredTensor:
    """A rank's slice of a frozen parameter in stage 3, padded with zeros."""
    geometry = SlicedGroup((member.numel,), dp)
    stored = records.tensor(member.spec.dtype, (geometry.length(),))
    records.hold(member.spec, PARAM, Cut(geometry, 0, {rank: stored}), member.layout)
    return stored
