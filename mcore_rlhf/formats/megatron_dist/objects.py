"""The objects of a new checkpoint: random states of its ranks, and values that are no parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Fate, Item, Kind
from mcore_rlhf.core.box import Shape
from mcore_rlhf.families.inventory import OPAQUE
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.state import RankValues
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.storage.dcp import ObjectItem, saved

from .names import EXPERT_STATES, Experts, Home, Spelling, extents, home_of
from .opened import ShardKey
from .ranks import EXTRA, RNG, rng_index, rng_of, rng_ranks
from .reader import DistState

_NOT_STORED = ("output_layer._extra_state", "core_attention._extra_state")
"""Megatron-core leaves these out: ``models/gpt/gpt_model.py``, ``extensions/transformer_engine.py`` (0.16.1)."""
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
    spelling: Spelling
    num_layers: int
    _saved: dict[object, bytes] = field(default_factory=dict)

    @property
    def own(self) -> DistState:
        """What a source of this very format has; nothing of any other's."""
        nothing = DistState(located=None, args=self.run.family.args, shards=(), order=[], unknown=[])
        return DistState.of(self.run.source) or nothing

    def items(self) -> Iterator[ObjectItem]:
        """All objects."""
        for key, value in self.opaque().items():
            yield ObjectItem(_fqn(key), self._data(value))
        yield from self._rng()
        if self.run.same_world:
            yield from (ObjectItem(_fqn(key), item.data()) for key, item in self.own.others.items())

    def opaque(self) -> dict[ShardKey, object]:
        """``_extra_state`` of all modules: those that the source has, and those that Megatron-core wants to be there."""
        stored = self._stored()
        found: dict[ShardKey, object] = {}
        for name in (*self.run.family.order, *self._norms()):
            if not name.endswith(EXTRA) or name.endswith(_NOT_STORED):
                continue
            home = home_of(name, self.spelling)
            if self._in_one_module(name):
                continue
            shard, value = stored.get(name, (None, None))
            found[self._shard(home)] = shard.materialize(value) if shard else None
        return found | dict.fromkeys(self._packed_experts())

    def note(self) -> None:
        """Say what of the source's values finds no place."""
        there = [name for name, (_, value) in self._stored().items() if not _is_empty(value)]
        nowhere = next((name for name in there if not name.endswith(EXTRA)), None)
        if nowhere is not None:
            self.run.report.add(Fate.LOST, f"values that are no parameters, such as {nowhere}", OPAQUE)
        packed = [name for name in there if name.endswith(EXTRA) and self._in_one_module(name)]
        if packed:
            text = f"{len(packed)} opaque values of all experts of a rank, such as {packed[0]}, are set to None: each expert has one here"
            self.run.report.add(Fate.CHANGED, text, OPAQUE)
        others = self.own.others
        if others and not self.run.same_world:
            some = ", ".join(key.key for key in list(others)[:3])
            lost = [Item(Kind.VALUE, key.key) for key in others]
            self.run.report.add(Fate.LOST, f"objects that belong to ranks of the source: {some}", *lost)

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
                yield from (self._shard(Home(home.key, (*home.index, expert))) for expert in experts)

    def _shard(self, home: Home) -> ShardKey:
        """Which part of which object lies at a home; an object in one piece is part 0 of 1."""
        stack = extents(home, self.spelling, self.num_layers, self.run.source.model.num_experts)
        return ShardKey(home.key, home.index or (0,), stack or (1,))

    def _rng(self) -> Iterator[ObjectItem]:
        """Random states of every rank, kept as they are where the layout is the source's own."""
        parallel = self.run.choices.parallel
        for rank, at in rng_ranks(parallel):
            key = ShardKey(RNG, *rng_index(parallel, rank))
            kept = rng_of(self.own.rng, parallel, rank)
            if kept is not None and self.run.choices.rng == "keep":
                yield ObjectItem(_fqn(key), kept.data())
                continue
            states = self.run.rng_states(at)
            if states is not None:
                yield ObjectItem(_fqn(key), saved([list(states)]))

    def _data(self, value: object) -> bytes:
        """A value as Megatron-core saves it: in a list. Nearly all are None."""
        if value is not None:
            return saved([value])
        if None not in self._saved:
            self._saved[None] = saved([None])
        return self._saved[None]


def _is_empty(value: object) -> bool:
    """Whether there is nothing in an opaque value: None, or the tensor without elements of a run without fp8."""
    return value is None or 0 in getattr(value, "shape", ())


def _fqn(key: ShardKey) -> str:
    """The name of a part of an object.

    Source: megatron-core 0.16.1, ``dist_checkpointing/mapping.py`` (``ShardedObject.unique_key``).
    """
    if not key.index:
        return key.key
    return f"{key.key}/shard_{_text(key.index)}_{_text(key.shape)}"


def _text(numbers: Shape) -> str:
    return ".".join(map(str, numbers))
