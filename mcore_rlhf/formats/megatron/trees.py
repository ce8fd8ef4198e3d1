"""The dictionaries of a rank's two files, built as Megatron builds them, with places instead of tensors.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``); megatron-core 0.16.1,
``optimizer/distrib_optimizer.py``, ``optimizer/optimizer.py`` (``state_dict``, ``ChainedOptimizer``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.dtype import FLOAT32, DType
from mcore_rlhf.core.names import MASTER
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.buffers import LocalParam, Member
from mcore_rlhf.families.megatron.groups import Membership, groups_for
from mcore_rlhf.families.megatron.rank_layout import LocalItem, RankLayout
from mcore_rlhf.families.source import ParamGroup, TrainingState
from mcore_rlhf.storage.stubs import Namespace

Tree = dict[object, object]


@dataclass(frozen=True, slots=True)
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
    """

    rank: RankLayout
    state: TrainingState
    args: Mapping[str, object]
    opaque: Callable[[LocalItem], object]
    rng: Sequence[Mapping[str, object]] | None
    per_rank: Mapping[str, object]
    membership: Membership
    scalars: Mapping[str, object]

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
            tree["optimizer"] = self._optimizer()
        if state.scheduler is not None:
            tree["opt_param_scheduler"] = state.scheduler
        if self.rng is not None:
            tree["rng_state"] = list(self.rng)
        tree.update((key, value) for key, value in state.other.items() if key not in tree)
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

    def _optimizer(self) -> object:
        chained = self.rank.chained
        blueprint = self.rank.blueprint
        dense, expert = groups_for(
            self.state.groups, blueprint.choices.parallel.ep, blueprint.model.params, self.membership
        )
        built = [self._member(member, expert if member.expert else dense) for member in chained]
        return built if len(built) > 1 else built[0]

    def _member(self, member: Member, groups: Sequence[ParamGroup]) -> Tree:
        if self.rank.blueprint.choices.optimizer == DISTRIBUTED:
            inner: Tree = {"param_groups": [dict(group.fields) for group in groups]}
            return self._with_scaler({"optimizer": inner})
        return self._plain_member(member, groups)

    def _with_scaler(self, tree: Tree) -> Tree:
        if self.state.grad_scaler is not None:
            tree["grad_scaler"] = self.state.grad_scaler
        return tree

    def _plain_member(self, member: Member, groups: Sequence[ParamGroup]) -> Tree:
        ep = self.rank.blueprint.choices.parallel.ep
        dealt: list[list[LocalParam]] = [[] for _ in groups]
        for param in self.rank.trained():
            if member.owns(param, ep):
                dealt[self.membership.index(param.name, len(param.shape), groups)].append(param)
        states: Tree = {}
        stored_groups, masters = [], []
        for group, params in zip(groups, dealt, strict=True):
            indices = list(range(len(states), len(states) + len(params)))
            for index, param in zip(indices, params, strict=True):
                places = self.rank.states[param.vpp_rank, param.name]
                states[index] = {**self.scalars, **{name: place for name, place in places.items() if name != MASTER}}
            stored_groups.append({**group.fields, "params": indices})
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
                tree[index] = {(_torch_dtype(buffer.dtype), self._grad_dtype(buffer.dtype)): states}
            members.append(tree)
        return members if len(members) > 1 else members[0]

    def _grad_dtype(self, param_dtype: DType) -> object:
        """Gradients are reduced in fp32 where ``--accumulate-allreduce-grads-in-fp32`` says so."""
        fp32 = self.args.get("accumulate_allreduce_grads_in_fp32", True)
        return _torch_dtype(FLOAT32 if fp32 else param_dtype)


def needs_distrib_file(rank: RankLayout) -> bool:
    """Whether a rank writes ``distrib_optim.pt`` at all."""
    return rank.blueprint.choices.optimizer == DISTRIBUTED and any(map(rank.holds_member, rank.chained))


def _torch_dtype(dtype: DType) -> object:
    import torch

    return getattr(torch, dtype.name)
