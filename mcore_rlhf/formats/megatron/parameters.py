"""The parameters of a legacy checkpoint: how each is cut (the user's rules, then the table, then the files themselves), and the
catalogue of where each lies, whose chunks are computed when asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, PARAM, Shape, TensorName
from mcore_rlhf.core.facts import Fate, Rule, Values
from mcore_rlhf.core.rows import Rows, Strip, Tensor
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import Arguments, is_gated
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.state import UNKNOWN, MegatronTensors
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import LocalLayout, global_shape_of, local_layout
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, Traits, is_buffer, is_routed_expert, partition_of
from mcore_rlhf.models.spec import COLUMN, REPLICATED, ParamSpec, Partition, Rules
from mcore_rlhf.storage.stored import StoredTensor

from .shards import RankShard

_OUT_NORM = re.compile(r"\.self_attention\.out_norm\.weight$")
"""The gated delta net's norm of a head. Without sequence parallelism its gradients are not summed over tensor-parallel ranks, and its
copies drift apart. Source: megatron-core 0.19.2, ``ssm/gated_delta_net/common.py``; seen in checkpoints that it wrote."""

_OWN_COPIES = Partition(0, own_copies=True)
_DIFFER: Rule[Values] = Rule(
    Fate.NOTE,
    "{name}: the copies of the {tp} tensor-parallel ranks differ, as Megatron trains them without sequence parallelism; each is kept as "
    "its rank's own",
    dict,
)


@dataclass(frozen=True, slots=True)
class HoldingRank:
    """A rank that holds a part of a parameter.

    Args:
        at: The rank.
        param: Where the parameter lies, or None where only its states do.
        states: Where its optimizer states lie, by name; empty where another rank's file has them.
    """

    at: FileRank
    param: StoredTensor
    states: dict[str, StoredTensor]


@dataclass(slots=True)
class StoredTensors(MegatronTensors):
    """Where the elements of every tensor lie.

    Args:
        parallel: Degrees of the files.
        holders: For each parameter, the ranks that hold a part of it.
    """

    parallel: ParallelConfig
    holders: Mapping[str, Sequence[HoldingRank]]
    _layouts: dict[tuple[int, Shape, bool, int, int], LocalLayout] = field(default_factory=dict)

    def tensor(self, spec: ParamSpec, name: TensorName) -> Tensor | None:
        """See :class:`MegatronTensors`."""
        held = (
            holder.param if name.state == PARAM else holder.states.get(name.state)
            for holder in self.holders.get(name.param, ())
        )
        first = next((stored for stored in held if stored is not None), None)
        return (
            None
            if first is None
            else Tensor(spec.global_shape, first.record.dtype, partial(self._runs, spec, name.state))
        )

    def _runs(self, spec: ParamSpec, state: str, rows: Rows) -> Iterator[Strip]:
        expert, stacked = is_routed_expert(spec.name), spec.partition.stacked is not None
        how = id(spec.partition), spec.global_shape, expert  # layers and experts share theirs, and so do many ranks
        for holder in self.holders[spec.name]:
            stored = holder.param if state == PARAM else holder.states.get(state)
            if stored is not None:
                at = holder.at
                place = *how, at.etp_rank if expert else at.tp_rank, at.ep_rank if stacked else 0
                layout = self._layouts.get(place)
                if layout is None:
                    layout = self._layouts[place] = self._layout(spec, at)
                yield _strip(stored, layout, rows)

    def _layout(self, spec: ParamSpec, at: FileRank) -> LocalLayout:
        expert = is_routed_expert(spec.name)
        return local_layout(spec.partition, spec.global_shape, at.split(self.parallel, expert), at.stack(self.parallel))


def _strip(stored: StoredTensor, layout: LocalLayout, rows: Rows) -> Strip:
    """What a rank's local tensor has of the whole one."""
    cut = layout.cut
    if stored.strides != cut.strides and layout.view == stored.shape:
        cut = layout.cut_of(stored.strides)
    return Strip(rows.forms_of(cut), stored.record, [stored.start + at for at in cut.starts])


_ADVICE = "Say how such parameters are cut with --rules rules.yaml (pattern → replicated, column, row, …)."


@dataclass(slots=True)
class PartitionFinder:
    """Builds the ParamSpec of every parameter.

    Args:
        args: The run's arguments.
        parallel: Degrees of the files.
        rules: The user's own rules.
        shards: All ranks, to compare copies of parameters that nobody knows.
        notes: Told what was found out by comparing.
        unknown: Collects parameters about which nothing is known, because there is one tensor-parallel rank only.
    """

    args: Arguments
    parallel: ParallelConfig
    rules: Rules
    shards: Sequence[RankShard]
    notes: Report
    unknown: list[str]
    _words: int | None = None
    _gated: bool = False

    def specs(self, names: Sequence[str], holders: dict[str, list[HoldingRank]]) -> list[ParamSpec]:
        """The specs of all parameters, in the given order.

        Raises:
            LayoutMismatch: Shapes disagree between ranks, or parameters need a rule; all problems together.
        """
        problems = Problems()
        specs = []
        if EMBEDDING in holders:
            self._words = holders[EMBEDDING][0].param.shape[0]
        self._gated = is_gated({name: held[0].param.shape for name, held in holders.items()}, self.args)
        for name in names:
            try:
                specs.append(self._spec(name, holders[name]))
            except CheckpointError as error:
                problems.add(type(error), str(error).partition("\n")[0], str(error).partition("\n")[2])
        problems.raise_if_any()
        return specs

    def _spec(self, name: str, holders: list[HoldingRank]) -> ParamSpec:
        shape = _common_shape(name, holders)
        dtype = holders[0].param.record.dtype
        partition = self.rules.partition(name) or self._known(name, shape, holders)
        if partition is None:
            partition = self._compared(name, holders)
        split = self.parallel.etp if is_routed_expert(name) else self.parallel.tp
        if partition.dim is not None and partition.dim >= len(shape) + (partition.stacked is not None):
            raise LayoutMismatch(f"{name}: {partition} does not fit its shape {shape}\n{_ADVICE}")
        try:
            whole = global_shape_of(partition, shape, split, self.parallel.ep, self.args.num_experts)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{name}: {error}\nThe args are not those of this model.") from None
        said = self.rules.trainable(name)
        trainable = (dtype in FLOATING and not is_buffer(name)) if said is None else said
        return ParamSpec(name, whole, dtype, partition, trainable)

    def _known(self, name: str, shape: Shape, holders: list[HoldingRank]) -> Partition | None:
        partition = partition_of(name, Traits(self._gated, self.args.transformer_engine, self.args.values))
        if partition is None:
            return None
        if partition.vocabulary and name != EMBEDDING and not self._counts_words(shape):
            # a value head takes the place of the output layer; of one row on the one rank there is no copy to compare, nor a way to cut it
            return REPLICATED if name == OUTPUT and shape[0] == 1 and self.parallel.tp == 1 else None
        if "_down_proj." in name:
            return self._latent(name, shape, partition)
        if _OUT_NORM.search(name) and not self.args.flag("sequence_parallel") and not self._all_equal(holders):
            self.notes.through([_DIFFER], {"name": name, "tp": self.parallel.tp})
            return _OWN_COPIES
        return partition

    def _counts_words(self, shape: Shape) -> bool:
        if self._words is not None:
            return shape[0] == self._words
        padded = self.args.optional("padded_vocab_size")
        return shape[0] > 1 if padded is None else shape[0] * self.parallel.tp == padded

    def _latent(self, name: str, shape: Shape, otherwise: Partition) -> Partition:
        """Latent down-projections: Transformer Engine's are whole on every rank, the local ones are cut.

        Source: megatron-core 0.16.1, ``transformer/multi_latent_attention.py``.
        """
        if "linear_q_" in name:
            rows = self.args.integer("q_lora_rank")
        else:
            rows = self.args.integer("kv_lora_rank") + self.args.integer("qk_pos_emb_head_dim")
        if self.parallel.tp == 1 or rows not in (shape[0], shape[0] * self.parallel.tp):
            return otherwise
        return REPLICATED if shape[0] == rows else COLUMN

    def _compared(self, name: str, holders: list[HoldingRank]) -> Partition:
        """A parameter that nobody knows is replicated if all tensor-parallel copies are equal; otherwise no guess."""
        by_rank: dict[int, HoldingRank] = {holder.at.tp_rank: holder for holder in holders}
        if len(by_rank) == 1:
            if holders[0].param.shape:  # a single number cannot be cut
                self.unknown.append(name)
            return REPLICATED
        if len({self._bytes(holder.param) for holder in by_rank.values()}) > 1:
            raise LayoutMismatch(
                f"{name}: unknown parameter, and its {len(by_rank)} tensor-parallel copies differ\n{_ADVICE}"
            )
        self.notes.through([UNKNOWN], {"name": name, "how": f"replicated, since all {len(by_rank)} copies are equal"})
        return REPLICATED

    def _all_equal(self, holders: list[HoldingRank]) -> bool:
        """Whether the copies of all ranks are equal, and those of their states."""
        stored = [{"": holder.param, **holder.states} for holder in holders]
        found = {(state, self._bytes(tensor)) for states in stored for state, tensor in states.items()}
        return len(found) == len({state for state, _ in found})

    def _bytes(self, tensor: StoredTensor) -> bytes:
        pt = next(pt for shard in self.shards for pt in shard.files if pt.file == tensor.record.file)
        return pt.load(tensor).contiguous()


def _common_shape(name: str, holders: list[HoldingRank]) -> Shape:
    shapes: dict[Shape, StoredTensor] = {holder.param.shape: holder.param for holder in holders}
    if len(shapes) > 1:
        found = ", ".join(f"{shape} in {tensor.record.file}" for shape, tensor in shapes.items())
        raise LayoutMismatch(f"{name}: ranks hold different shapes: {found}")
    return next(iter(shapes))
