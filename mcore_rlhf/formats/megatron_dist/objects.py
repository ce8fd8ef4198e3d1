"""What a checkpoint has for each rank, read and written: random states, and values that are no parameters (``_extra_state``).

Random states are one object per (pipeline stage, tensor-parallel rank); up to 0.16, with experts dealt over ranks, one per
(stage, tensor-parallel rank, data-parallel rank). Opaque values are one object per layer (and expert): the copies of all
tensor-parallel ranks count as one; since 0.20 they may be left out (``--ckpt-drop-redundant-extra-state``).

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1,
``transformer/utils.py`` (``make_sharded_object_for_checkpoint``); megatron-core 0.19.2, ``rerun_state_machine.py`` (``state_dict``,
``validate_state_dict``: a machine that was not running is not restored), ``training/checkpointing.py`` (``get_rng_state``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Reason, Rule, Values
from mcore_rlhf.families.megatron.folders import FileRank, folder_name
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.state import (
    COUNTER,
    OF_RANKS,
    MegatronState,
    ModelPart,
    RankValues,
    of_opaque,
)
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.storage.dcp.folder import DcpObject
from mcore_rlhf.storage.dcp.writer import ObjectItem, saved

from .folders import DistFolder, ShardKey, unwrapped
from .names import EXPERT_STATES, Experts, Home, KeySpelling, extents, home_of, name_at, stacked_axes

RNG = "rng_state"
EXTRA = "_extra_state"
RERUN, RERUN_RANKS = "rerun_state_machine", "rerun_state_machine_state"
"""What the machine that repeats doubtful steps has for all ranks, and for each."""
_NOT_RUNNING = 0


def _read(value: object) -> Any:
    """A value that was found, read."""
    return unwrapped(value) if isinstance(value, DcpObject) else value


def rng_index(parallel: ParallelConfig, rank: int) -> tuple[Shape, Shape]:
    """Where a rank's random states stand among those of all ranks, and how many there are.

    Args:
        parallel: The degrees.
        rank: A global rank.
    """
    at = parallel.coordinates(rank)
    if parallel.ep == 1:
        return (at.pp_rank, at.tp_rank), (parallel.pp, parallel.tp)
    data = parallel.dp * parallel.cp
    return (at.pp_rank, at.tp_rank, at.dp_rank * parallel.cp + at.cp_rank), (parallel.pp, parallel.tp, data)


def rng_ranks(parallel: ParallelConfig) -> Iterator[tuple[int, FileRank]]:
    """The ranks whose random states are stored, and where they stand as a rank that writes a legacy file."""
    seen: set[Shape] = set()
    for rank, _ in parallel.ranks():
        index, _ = rng_index(parallel, rank)
        if index not in seen:
            seen.add(index)
            yield rank, file_rank(parallel, rank)


def file_rank(parallel: ParallelConfig, rank: int) -> FileRank:
    """A rank as one that writes a legacy file. That format cannot hold every layout, this one can."""
    at = parallel.coordinates(rank)
    folder = folder_name(at.tp_rank, at.pp_rank, at.ep_rank, parallel)
    dense = rank % parallel.stage_size < parallel.tp
    return FileRank(folder, at.tp_rank, at.pp_rank, at.ep_rank, at.etp_rank, rank, dense)


def model_ranks(parallel: ParallelConfig) -> Iterator[FileRank]:
    """The first rank of every combination of parts of the model: of its dense parameters, and of its experts."""
    for pp_rank in range(parallel.pp):
        for place in range(max(parallel.tp, parallel.etp * parallel.ep)):
            yield file_rank(parallel, pp_rank * parallel.stage_size + place)


def rng_of(objects: Mapping[ShardKey, DcpObject], parallel: ParallelConfig, rank: int) -> DcpObject | None:
    """The random states of a rank. Newer Megatron stores no more than one per (stage, tensor-parallel rank)."""
    index, shape = rng_index(parallel, rank)
    return objects.get(ShardKey(RNG, index, shape)) or objects.get(ShardKey(RNG, index[:2], shape[:2]))


def dist_ranks(folder: DistFolder, parallel: ParallelConfig, opaque: Mapping[str, object]) -> list[RankValues]:
    """What every rank of the run has, one for each folder that the legacy format would write.

    Args:
        folder: The checkpoint.
        parallel: The run's degrees.
        opaque: Values that are no parameters, by name; they are equal on all tensor-parallel ranks.
    """
    ranks, folders = [], dict[str, FileRank]()
    for at in model_ranks(parallel):
        folders.setdefault(at.folder, at)
    for at in folders.values():
        top: dict[str, object] = {key: folder.top[key] for key in (COUNTER,) if key in folder.top}
        stored = rng_of(folder.objects, parallel, at.rank)
        if stored is not None:
            top[RNG] = stored
        else:
            top |= folder.around.of_rank(parallel, at)
        # every value once for each rank that has one of its own
        mine = dict(opaque) if at.pp_rank == 0 and at.ep_rank == 0 else {}
        ranks.append(RankValues(at, top, (ModelPart(0, opaque=mine),), _read))
    return ranks


def opaque_values(folder: DistFolder, spelling: KeySpelling) -> dict[str, object]:
    """Values that are no parameters, under the names that a live model has for them.

    Raises:
        CheckpointError: One is damaged, or asks for code.
    """
    values: dict[str, object] = {}
    for where, item in folder.objects.items():
        if not where.key.endswith(EXTRA):
            continue
        if is_routed_expert(where.key) and spelling.experts is not Experts.SEQUENTIAL:
            continue  # one module holds all experts of a rank
        index = where.index[: stacked_axes(where.key, spelling)]
        values[name_at(where.key, index, spelling)] = folder.value(item)
    return values


def other_objects(folder: DistFolder) -> dict[ShardKey, DcpObject]:
    """Objects that nobody knows; they can go along where no rank changes."""
    return {key: item for key, item in folder.objects.items() if key.key != RNG and not key.key.endswith(EXTRA)}


def _others(own: DistState, *, idle: bool) -> Values | None:
    found = list(dict.fromkeys(key.key for key in own.others if (key.key in own.idle) == idle))
    return {"found": found, "of": [Item(Kind.VALUE, key) for key in found]} if found else None


LEFT_OBJECTS: Sequence[Rule[DistState]] = (
    Rule(Fate.LOST, "objects that belong to ranks of the source: {found:3}", lambda own: _others(own, idle=False)),
    Rule(Reason.OF_LAYOUT, when=lambda own: _others(own, idle=True)),
)
"""What becomes of the other objects where a target has no place for them."""


@dataclass(slots=True)
class DistState(MegatronState):
    """What only a ``torch_dist`` target needs besides what every Megatron target does.

    Args:
        rng: The random states of every rank.
        others: Objects that belong to ranks, or that nobody knows.
        idle: Objects among the others that say nothing, since what they belong to was not running.
    """

    homeless: ClassVar[Sequence[Rule[Any]]] = LEFT_OBJECTS
    rng: Mapping[ShardKey, DcpObject] = field(default_factory=dict)
    others: Mapping[ShardKey, DcpObject] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    @property
    def rng_ranks(self) -> int:
        """Data-parallel ranks that have random states of their own: all where experts are dealt, up to 0.16."""
        return max((key.shape[2] for key in self.rng if len(key.shape) > 2), default=1)

    def inventory(self) -> Inventory:
        """What its ranks have, item by item, beside what all of them share."""
        return {
            **MegatronState.inventory(self),
            **({OF_RANKS[RNG]: tuple(self.rng.values())} if self.rng else {}),
            **{Item(Kind.VALUE, key.key): item for key, item in self.others.items()},
        }


_NOT_STORED = ("output_layer._extra_state", "core_attention._extra_state")
"""Megatron-core leaves these out: ``models/gpt/gpt_model.py``, ``extensions/transformer_engine.py`` (0.16.1). A hybrid model wants the
first (0.19.2, ``models/hybrid/hybrid_model.py``)."""
_NORMS = ("layernorm.weight", "norm.weight")


@dataclass(slots=True)
class Objects:
    """Makes the objects.

    Args:
        run: The checkpoint that is to be written.
        spelling: Which keys its parameters have.
        num_layers: Decoder layers.
    """

    run: NewRun
    spelling: KeySpelling
    num_layers: int
    _saved: dict[object, bytes] = field(default_factory=dict)

    @property
    def own(self) -> DistState:
        """What a source of this very format has; nothing of any other's."""
        nothing = DistState(located=None, args=self.run.family.args, shards=(), order=[], unknown=[])
        return DistState.of(self.run.source) or nothing

    @property
    def left_behind(self) -> DistState:
        """The same where ranks are others, or a trainer has no folder for what is of ranks: nothing where all go along."""
        parts = self.run.options.run_of.parts
        no_place = parts is not None and parts.adapted and not parts.together
        return replace(self.own, others={}) if self.run.same_world and not no_place else self.own

    def items(self) -> Iterator[ObjectItem]:
        """All objects."""
        yield from self.of_model()
        yield from self.of_ranks()

    def of_model(self) -> Iterator[ObjectItem]:
        """Those that belong to modules."""
        for key, value in self.opaque().items():
            yield ObjectItem(_fqn(key), self._data(value, _fqn(key)))

    def of_ranks(self) -> Iterator[ObjectItem]:
        """Those that belong to ranks: random states, and what nobody knows."""
        yield from self._rng()
        if self.run.same_world:
            yield from (ObjectItem(_fqn(key), saved(item.load(), _fqn(key))) for key, item in self.own.others.items())

    def opaque(self) -> dict[ShardKey, object]:
        """``_extra_state`` of all modules: those that the source has, and those that Megatron-core wants to be there."""
        stored = self._stored()
        found: dict[ShardKey, object] = {}
        for name in (*self.run.family.order, *self._norms()):
            if not name.endswith(EXTRA) or name.endswith(self._left_out):
                continue
            home = home_of(name, self.spelling)
            if self._in_one_module(name):
                continue
            shard, value = stored.get(name, (None, None))
            found[self._shard(home)] = shard.materialize(value) if shard else None
        return found | dict.fromkeys(self._packed_experts())

    def lost(self) -> Iterator[Values]:
        """What of the source's values finds no place, and what each is."""
        there = self.run.family.opaque()
        nowhere = [name for name in there if not name.endswith(EXTRA)]
        left_out = [name for name in there if name.endswith(self._left_out)]
        packed = [name for name in there if name.endswith(EXTRA) and self._in_one_module(name)]
        others = {name: values for name, values in there.items() if name not in (*nowhere, *left_out, *packed)}
        unlike = [name for name, values in others.items() if len({value.digest for value in values}) > 1]
        for names, what in (
            (nowhere, "values that are no parameters, for which torch_dist has no place"),
            (left_out, "opaque values that Megatron-core leaves out of torch_dist"),
            (packed, "opaque values of all experts of a rank are set to None, since each expert has one here"),
            (unlike, "opaque values that ranks have each for itself: torch_dist has one for all, that of the first"),
        ):
            if found := of_opaque(names):
                yield {"what": what, **found}

    @property
    def _left_out(self) -> tuple[str, ...]:
        """The ends of names that have no object."""
        return _NOT_STORED if self.run.family.args.pattern is None else _NOT_STORED[1:]

    def _in_one_module(self, name: str) -> bool:
        """Whether a value belongs to a module that holds all experts of a rank."""
        return is_routed_expert(name) and self.spelling.experts is not Experts.SEQUENTIAL

    def _stored(self) -> dict[str, tuple[RankValues, object]]:
        """Opaque values of the source; of several tensor-parallel ranks the first has what Megatron-core keeps."""
        found: dict[str, tuple[RankValues, object]] = {}
        for shard in sorted(self.run.family.shards, key=lambda s: (s.at.tp_rank, s.at.etp_rank)):
            for part in shard.parts:
                for name, value in part.opaque.items():
                    found.setdefault(name, (shard, value))
        return found

    def _norms(self) -> Iterator[str]:
        """Norms of Transformer Engine 2 keep a state of their own: it must be there, and nobody misses it elsewhere."""
        if self.run.family.shards or self.spelling.separate_norms or not self.run.family.args.transformer_engine:
            return
        for spec in self.run.source.model.params:
            if spec.name.endswith(_NORMS):
                yield f"{spec.name.removesuffix('weight')}{EXTRA}"

    def _packed_experts(self) -> Iterator[ShardKey]:
        """Where one module holds all experts of a rank, each has a value all the same."""
        if self.spelling.experts is Experts.SEQUENTIAL:
            return
        experts = range(self.run.source.model.num_experts)
        layers = {
            spec.name.partition("mlp.experts.")[0]: None
            for spec in self.run.source.model.params
            if ".mlp.experts." in spec.name
        }
        for layer in layers:
            for suffix in EXPERT_STATES:
                home = home_of(layer + suffix, self.spelling)
                for expert in experts:
                    own = home.key.replace(".experts.experts.", f".experts.experts.{expert}.")
                    yield self._shard(Home(own) if self.spelling.singleton else Home(home.key, (*home.index, expert)))

    def _shard(self, home: Home) -> ShardKey:
        """Which part of which object lies at a home; an object in one piece is part 0 of 1."""
        stack = extents(home, self.spelling, self.num_layers, self.run.source.model.num_experts)
        return ShardKey(home.key, home.index or (0,), stack or (1,))

    def _rng(self) -> Iterator[ObjectItem]:
        """Random states of every rank, kept as they are where the layout is the source's own."""
        parallel, own = self.run.choices.parallel, {key.index: item for key, item in self.own.rng.items()}
        for rank, at in rng_ranks(parallel):
            index, shape = rng_index(parallel, rank)
            keys = [ShardKey(RNG, index, shape)]
            if not any(index[2:]):  # and of the first expert-parallel rank for all, as 0.17 and later look for it
                keys += [ShardKey(RNG, index[:2], shape[:2])] if len(index) > 2 else []
            kept = own.get(index) or own.get(index[:2])
            states = None if kept is not None and self.run.choices.rng == "keep" else self.run.rng_states(at)
            for key in keys:
                if states is not None:
                    yield ObjectItem(_fqn(key), saved([list(states)], _fqn(key)))
                elif kept is not None and self.run.choices.rng == "keep":
                    yield ObjectItem(_fqn(key), saved(kept.load(), _fqn(key)))

    def _data(self, value: object, fqn: str) -> bytes:
        """A value as Megatron-core saves it: in a list. Nearly all are None."""
        if value is not None:
            return saved([value], fqn)
        if None not in self._saved:
            self._saved[None] = saved([None], fqn)
        return self._saved[None]


def idle_objects(top: Mapping[str, object]) -> frozenset[str]:
    """Objects of ranks that say nothing; see :class:`DistState`.

    Args:
        top: What all ranks share.
    """
    machine = top.get(RERUN)
    state = machine.get("state") if isinstance(machine, dict) else None
    return frozenset({RERUN_RANKS} if getattr(state, "stub_args", None) == (_NOT_RUNNING,) else ())


def _fqn(key: ShardKey) -> str:
    """The name of a part of an object.

    Source: megatron-core 0.16.1, ``dist_checkpointing/mapping.py`` (``ShardedObject.unique_key``).
    """
    if not key.index:
        return key.key
    return f"{key.key}/shard_{_text(key.index)}_{_text(key.shape)}"


def _text(numbers: Shape) -> str:
    return ".".join(map(str, numbers))


RULES: tuple[Rule[Objects], ...] = (
    Rule(Fate.LOST, "{what}: {names}", lambda objects: list(objects.lost())),
    *(rule.of_part(lambda objects: objects.left_behind) for rule in LEFT_OBJECTS),
)
"""What of the source's values and objects finds no place."""
