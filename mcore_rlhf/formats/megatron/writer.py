"""Describing a new legacy Megatron checkpoint from an opened source: its files, and the dictionaries of a rank's two files, built as
Megatron builds them, with places instead of tensors.

Values of a state dict that are no parameters (``_extra_state`` of Transformer Engine, and whatever else is there) are opaque bytes
that belong to a tensor-parallel rank: kept where the tensor-parallel degree stays, otherwise set to None, which Transformer Engine
and megatron-core load as "nothing to restore".

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``); megatron-core 0.16.1,
``optimizer/distrib_optimizer.py``, ``optimizer/optimizer.py`` (``state_dict``, ``ChainedOptimizer``),
``extensions/transformer_engine.py`` (``_get_extra_state``, ``_set_extra_state``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from mcore_rlhf.core.catalog import FLOAT32, MASTER
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.megatron.arguments import BY_LAYOUT, DISTRIBUTED, LAYER_WISE, Arguments
from mcore_rlhf.families.megatron.dealing import Dealing, Dealt, DealtFile, dealt_files
from mcore_rlhf.families.megatron.folders import TRACKER, FileRank, file_ranks, iteration_folder_name
from mcore_rlhf.families.megatron.groups import LocalParam, Membership, groups_by_member, members
from mcore_rlhf.families.megatron.layout import Blueprint, grad_dtype
from mcore_rlhf.families.megatron.modelopt import KEY as MODELOPT
from mcore_rlhf.families.megatron.modelopt import keys as modelopt_keys
from mcore_rlhf.families.megatron.modelopt import of_modules
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.ranks import LocalItem, RankLayout, Records
from mcore_rlhf.families.megatron.rules import RULES
from mcore_rlhf.families.megatron.state import (
    COUNTER,
    PER_RANK_KEYS,
    MegatronState,
    OpaqueValue,
    RankValues,
    of_opaque,
)
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import model_chunks
from mcore_rlhf.models.megatron import expert_of, is_routed_expert
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.stored import Namespace
from mcore_rlhf.storage.torch_values import torch_dtype


def megatron_target(source: Source, options: WriteOptions) -> Target:
    """Describe the legacy Megatron checkpoint that holds what the source has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    run = NewRun.of(source, options, "megatron", "torch")
    writer = _LegacyWriter(run)
    if run.choices.optimizer == LAYER_WISE:
        _check_layer_wise(run)
    run.report.through(RULES, run)
    run.report.through(_RULES, writer)
    files = [file for at in file_ranks(run.choices.parallel) for file in writer.files(at)]
    return Target(
        format="megatron",
        parallel=run.choices.parallel,
        source=run.view,
        files=tuple(files),
        texts={TRACKER: run.tracker},
        report=run.report,
        holds=run.holds(),
        needs=run.needs,
    )


def _check_layer_wise(run: NewRun) -> None:
    """What Megatron's layer-wise optimizer cannot have in this format.

    Source: megatron-core 0.19.2, ``training/checkpointing.py`` (``save_checkpoint``), ``optimizer/layer_wise_optimizer.py``.

    Raises:
        Unsupported: Ranks would overwrite each other's file.
    """
    if run.choices.parallel.cp > 1:
        raise Unsupported(
            f"a layer-wise optimizer at CP {run.choices.parallel.cp}: in Megatron's torch format the ranks of a context-parallel "
            "group write one file, and the states of all but one are lost\n"
            "Write --to megatron-dist, give --optimizer plain, or leave the optimizer out with --no-optimizer."
        )


@dataclass
class _LegacyWriter:
    run: NewRun

    @cached_property
    def blueprint(self) -> Blueprint:
        """The whole new checkpoint."""
        model, parallel = self.run.source.model, self.run.choices.parallel
        chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, self.run.choices.split, model.mtp_layers)
        return Blueprint(
            self.run.source.role, model, Arguments(self.run.arguments(None)), self.run.choices, chunks, self.run.family.order,
            self.run.moments, self.run.state_dtypes, self.run.states_of,
        )  # fmt: skip

    @cached_property
    def opaque(self) -> OpaqueValues:
        """Values of keys that are no parameters."""
        return OpaqueValues(self.run.family.shards, self.run.source.parallel, self.run.choices.parallel)

    def files(self, at: FileRank) -> list[TargetFile]:
        """The files of one rank."""
        folder = iteration_folder_name(self.run.iteration)
        prefix = f"{folder}/{at.folder}"
        files = [TargetFile(f"{prefix}/model_optim_rng.pt", partial(self._model_file, at, folder))]
        if self.run.choices.optimizer == DISTRIBUTED and (at.holds_dense_optimizer or self.experts):
            files.append(TargetFile(f"{prefix}/distrib_optim.pt", partial(self._distrib_file, at, folder)))
        if self.run.choices.optimizer == LAYER_WISE:
            dealt = dealt_files(self.run.choices.parallel, at)
            files += [
                TargetFile(f"{prefix}/{file.name}", partial(self._dealt_file, at, folder, file)) for file in dealt
            ]
        return files

    @cached_property
    def experts(self) -> bool:
        """Whether they have an optimizer of their own."""
        chained = members(self.blueprint.args, self.run.choices.parallel, self.blueprint.model.params)
        return any(member.expert for member in chained)

    def _model_file(self, at: FileRank, folder: str) -> FileLayout:
        rank = RankLayout(self.blueprint, at, folder)
        if self.run.choices.optimizer != LAYER_WISE:
            return _layout(rank.model, lambda: self._trees(rank).model_tree())
        trees = self._dealt(rank, rank.model, dealt_files(self.run.choices.parallel, at)[0])
        return _layout(rank.model, trees.model_tree)

    def _dealt_file(self, at: FileRank, folder: str, file: DealtFile) -> FileLayout:
        """The file of one data-parallel rank of a layer-wise optimizer."""
        rank, records = RankLayout(self.blueprint, at, folder), Records(f"{folder}/{at.folder}/{file.name}")
        return _layout(records, self._dealt(rank, records, file).optimizer)

    def _dealt(self, rank: RankLayout, records: Records, file: DealtFile) -> TreeMaker:
        """The trees of a rank with its own of the parameters that are dealt, whose states are to lie in a file."""
        trees = self._trees(rank)
        trees.dealt = trees.dealing.of_rank(rank.trained(), file.dense, file.expert)
        rank.place_whole_states(records, (param for groups in trees.dealt for inside in groups for param in inside))
        return trees

    def _distrib_file(self, at: FileRank, folder: str) -> FileLayout:
        rank = RankLayout(self.blueprint, at, folder)
        assert needs_distrib_file(rank)
        return _layout(rank.distrib, lambda: self._trees(rank).distrib_tree())

    def _trees(self, rank: RankLayout) -> TreeMaker:
        run = self.run
        return TreeMaker(
            rank, run.source.state, run.arguments(rank.at), self.opaque.value_for(rank), run.rng_states(rank.at),
            self._per_rank(rank.at), run.membership, run.family.scalars, foreign=bool(run.source.origin),
        )  # fmt: skip

    def _per_rank(self, at: FileRank) -> Mapping[str, object]:
        if not self.run.same_ranks:
            return {}
        shard = self.run.shard_of(at)
        keys = (COUNTER, *PER_RANK_KEYS) if self.run.same_world else (COUNTER,)
        return {key: shard.materialize(shard.top[key]) for key in keys if key in shard.top}


_RULES: tuple[Rule[_LegacyWriter], ...] = (
    Rule(Fate.CHANGED, "layer-wise optimizer: parameters are dealt by size, since Megatron's torch format cannot hold its layout; the run "
         "needs --no-use-layer-wise-param-layout to load it",
         lambda w: w.run.choices.optimizer == LAYER_WISE and w.run.family.args.flag(BY_LAYOUT) and not w.run.family.by_size),
    Rule(Fate.LOST, "{count} opaque values belong to tensor-parallel ranks of the source, which are others here, and are set to "
         "None: {names}",
         lambda w: of_opaque(w.opaque.lost(w.run.family))),
    Rule(Fate.LOST, "{count} opaque values are not the same on all expert-parallel ranks of the source, which are others here: all have "
         "those of the first: {names}", lambda w: of_opaque(w.opaque.unlike(w.run.family))),
    Rule(Fate.LOST, MODELOPT + ": {found} names modules of the source's ranks, and is not renamed", of_modules,
         [Item(Kind.VALUE, MODELOPT)]).of_part(lambda w: None if w.run.same_ranks else w.run.source.state.other.get(MODELOPT)),
)  # fmt: skip
"""What only fits one layout, and the values of keys that are no parameters."""


def _layout(records: Records, tree: Callable[[], object]) -> FileLayout:
    return FileLayout(records.holds(), records.records, Pt(tree))


Tree = dict[object, object]
_STEP = "step"
"""A group that is empty on a rank has taken none."""


@dataclass(slots=True)
class TreeMaker:
    """Builds the trees of one rank.

    Args:
        rank: Its layout.
        state: What the checkpoint holds besides tensors.
        args: Its arguments.
        opaque: Gives the value of a key that is no parameter.
        rng: Its RNG states, one per data-parallel rank that stores some; None to store none.
        per_rank: Further top-level values of this rank.
        membership: Decides which param group a parameter is in.
        scalars: Values that a plain optimizer keeps per parameter.
        dealt: Its own of the parameters that are dealt to data-parallel ranks; None where it has all.
        foreign: Whether the run was another family's.
    """

    rank: RankLayout
    state: TrainingState
    args: Mapping[str, object]
    opaque: Callable[[LocalItem], object]
    rng: Sequence[Mapping[str, object]] | None
    per_rank: Mapping[str, object]
    membership: Membership
    scalars: Mapping[str, object]
    dealt: Dealt | None = None
    foreign: bool = False

    def model_tree(self) -> Tree:
        """The content of ``model_optim_rng.pt``."""
        state = self.state
        tree: Tree = {}
        if self.args:
            tree["args"] = Namespace(self.args)
        tree["checkpoint_version"] = state.other.get("checkpoint_version", 3.0)
        tree["iteration"] = state.iteration
        tree.update(self._models())
        if self.rank.blueprint.choices.optimizer is not None:
            tree["optimizer"] = self.optimizer()
        if state.scheduler is not None:
            tree["opt_param_scheduler"] = state.scheduler
        if self.rng is not None:
            tree["rng_state"] = list(self.rng)
        tree.update((key, value) for key, value in state.other.items() if key not in (*tree, MODELOPT))
        if MODELOPT in state.other:
            chunks = self.rank.blueprint.choices.parallel.vpp
            tree.update(dict.fromkeys(modelopt_keys(chunks), state.other[MODELOPT]))
        tree.update(self.per_rank)
        return tree

    def _models(self) -> Tree:
        """``model``, or ``model0``, ``model1``, … with virtual pipeline stages."""
        vpp = self.rank.blueprint.choices.parallel.vpp
        models: Tree = {}
        for vpp_rank in range(vpp):
            items = [item for item in self.rank.items if item.vpp_rank == vpp_rank]
            models[f"model{vpp_rank}" if vpp > 1 else "model"] = OrderedDict(
                (item.key, self.opaque(item) if item.spec is None else self.rank.params[vpp_rank, item.key])
                for item in items
            )
        return models

    @property
    def dealing(self) -> Dealing:
        """Who trains what."""
        chained, blueprint = self.rank.chained, self.rank.blueprint
        apart = blueprint.args.experts_apart(blueprint.choices.parallel)
        groups = groups_by_member(chained, self.state.groups, apart, blueprint.model.params, self.membership)
        any_order = blueprint.choices.optimizer == DISTRIBUTED and self.foreign
        return Dealing(chained, groups, self.membership, apart).as_met(self.rank.trained(), always=any_order)

    def optimizer(self) -> object:
        """One dictionary, or one for each chained optimizer: what ``model_optim_rng.pt`` has of it."""
        dealing = self.dealing
        if self.rank.blueprint.choices.optimizer == DISTRIBUTED:
            flat = ({"param_groups": [dict(group.fields) for group in groups]} for groups in dealing.groups)
            built = [self._with_scaler({"optimizer": inner}) for inner in flat]
        else:
            dealt = dealing.whole(self.rank.trained()) if self.dealt is None else self.dealt
            built = [self._whole_member(*one) for one in zip(dealing.groups, dealt, strict=True)]
        return built if len(built) > 1 else built[0]

    def _with_scaler(self, tree: Tree) -> Tree:
        if self.state.grad_scaler is not None:
            tree["grad_scaler"] = self.state.grad_scaler
        return tree

    def _whole_member(self, groups: Sequence[ParamGroup], dealt: Sequence[Sequence[LocalParam]]) -> Tree:
        """A chained optimizer whose parameters are whole: those of every group in order, numbered from the first on."""
        states: Tree = {}
        stored_groups, masters = [], []
        for group, params in zip(groups, dealt, strict=True):
            indices = list(range(len(states), len(states) + len(params)))
            for index, param in zip(indices, params, strict=True):
                places = self.rank.states.get((param.vpp_rank, param.name), {})  # SGD without momentum keeps nothing
                states[index] = {**self.scalars, **{name: place for name, place in places.items() if name != MASTER}}
            fields = {key: value for key, value in group.fields.items() if indices or key != _STEP}
            stored_groups.append({**fields, "params": indices})
            half = [param for param in params if param.dtype != FLOAT32]
            masters.append([self.rank.states[param.vpp_rank, param.name][MASTER] for param in half])
        inner: Tree = {"state": states, "param_groups": stored_groups}
        if not self._mixed_precision():
            return inner
        tree = self._with_scaler({"optimizer": inner})
        tree["fp32_from_fp16_params"] = masters
        return tree

    def _mixed_precision(self) -> bool:
        """Whether the run keeps fp32 copies: bf16 or fp16 training, whatever this rank happens to hold."""
        return bool(self.args.get("bf16") or self.args.get("fp16")) or any(
            param.dtype != FLOAT32 for param in self.rank.trained()
        )

    def distrib_tree(self) -> object:
        """The content of ``distrib_optim.pt``."""
        members: list[Tree | None] = []
        for number, member in enumerate(self.rank.chained):
            if not self.rank.holds_member(member):
                members.append(None)
                continue
            tree: Tree = {"buckets_coalesced": True}
            for index, buffer in enumerate(self.rank.local_buffers[number]):
                states: Tree = {
                    "param" if name == MASTER else name: place
                    for name, place in self.rank.buffer_states[number, index].items()
                }
                states["numel_unpadded"] = buffer.flat.numel_unpadded
                grads = torch_dtype(grad_dtype(self.rank.blueprint.args, buffer.dtype))
                tree[index] = {(torch_dtype(buffer.dtype), grads): states}
            members.append(tree)
        return members if len(members) > 1 else members[0]


def needs_distrib_file(rank: RankLayout) -> bool:
    """Whether a rank writes ``distrib_optim.pt`` at all."""
    return rank.blueprint.choices.optimizer == DISTRIBUTED and any(map(rank.holds_member, rank.chained))


class OpaqueValues:
    """Finds the opaque values of the source's ranks for the ranks of a new layout.

    Args:
        shards: All ranks of the source.
        old: Its degrees.
        new: The new degrees.
    """

    def __init__(self, shards: Sequence[RankValues], old: ParallelConfig, new: ParallelConfig) -> None:
        self._old, self._new = old, new
        self._values: dict[tuple[str, int, int], tuple[RankValues, object]] = {}
        self._firsts: dict[tuple[str, int], tuple[RankValues, object]] = {}
        for shard in shards:
            for part in shard.parts:
                for name, value in part.opaque.items():
                    name, rank, ep_rank = _place(name, shard.at)
                    self._values.setdefault((name, rank, ep_rank), (shard, value))
                    self._firsts.setdefault((name, rank), (shard, value))

    def value_for(self, rank: RankLayout) -> Callable[[LocalItem], object]:
        """A function that gives the value of an opaque key on a rank of the new layout."""

        def value(item: LocalItem) -> object:
            name, split_rank, ep_rank = _place(item.item.name, rank.at)
            own = self._values.get((name, split_rank, ep_rank)) if self._old.ep == self._new.ep else None
            found = own or self._firsts.get((name, split_rank))
            if found is None or not self._kept(name):
                return None
            shard, stored = found
            return shard.materialize(stored)

        return value

    def lost(self, family: MegatronState) -> list[str]:
        """Values that are set to None, though there is something in them."""
        return [name for name in family.opaque() if not self._kept(name)]

    def unlike(self, family: MegatronState) -> list[str]:
        """Values in whose place another rank's are."""
        there = family.opaque() if self._old.ep != self._new.ep else {}
        return [name for name, values in there.items() if self._kept(name) and _differ(values)]

    def _kept(self, name: str) -> bool:
        """Whether the ranks to which a value belongs are the same in both layouts."""
        if not is_routed_expert(name):
            return self._old.tp == self._new.tp
        same_experts = expert_of(name) is not None or self._old.ep == self._new.ep
        return self._old.etp == self._new.etp and same_experts


def _differ(values: Sequence[OpaqueValue]) -> bool:
    """Whether ranks that hold the same part of a module have another value each."""
    by_rank: dict[int, set[bytes]] = {}
    for value in values:
        by_rank.setdefault(value.shard.at.tp_rank, set()).add(value.digest)
    return any(len(digests) > 1 for digests in by_rank.values())


def _place(name: str, at: FileRank) -> tuple[str, int, int]:
    """A key and the ranks on which it has a value of its own: packed experts have one value for all of a rank, and every
    expert-parallel rank has its own of what is no expert's.
    """
    if not is_routed_expert(name):
        return name, at.tp_rank, at.ep_rank
    return name, at.etp_rank, at.ep_rank if expert_of(name) is None else 0
