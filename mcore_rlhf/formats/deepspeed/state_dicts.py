"""What the files of a new native checkpoint hold around their tensors: the dictionaries, as DeepSpeed saves them.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_save_zero_checkpoint``),
``runtime/pipe/module.py`` (``save_state_dict``), ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/bf16_optimizer.py``, ``runtime/fp16/unfused_optimizer.py``, ``runtime/fp16/fused_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rlhf.core.names import MASTER, PARAM
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.scaler import is_dynamic, loose_values, static_scaler
from mcore_rlhf.families.source import ParamGroup, TrainingState
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup
from mcore_rlhf.storage.ptfile import StoredTensor
from mcore_rlhf.storage.stubs import new_stub, stub_class

from .layout import Blueprint, Choices, Member, NewGroup, Records, flat_part, frozen_slice, whole_tensor

Tree = dict[str, Any]
_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
VERSION = "0.19.8"


@dataclass(slots=True)
class OptimizerTrees:
    """Makes an optimizer's state dict of any stage, and notes in a file's records what it holds.

    Args:
        blueprint: The checkpoint.
        state: What is not a tensor.
        native: What DeepSpeed's formats keep besides.
    """

    blueprint: Blueprint
    state: TrainingState
    native: ModuleState

    @property
    def choices(self) -> Choices:
        """Stage and degrees."""
        return self.blueprint.choices

    def partitioned(self, records: Records, dp_rank: int, mp_rank: int) -> Tree:
        """The state dict of one rank in stages 1 to 3.

        Args:
            records: Takes down its records.
            dp_rank, mp_rank: The rank.
        """
        make = self._sliced_state if self.choices.stage == 3 else self._flat_state
        return make(records, self.blueprint.flat_groups(mp_rank), dp_rank)

    def version(self) -> object:
        """The version of DeepSpeed that the run had."""
        return self.state.other.get("ds_version", VERSION)

    def _param_groups(self, members: Sequence[Sequence[int]]) -> list[Tree]:
        return [
            {**settings(group), "params": list(numbers)}
            for group, numbers in zip(self.blueprint.groups, members, strict=True)
        ]

    def _state_of(self, parts: Mapping[str, StoredTensor], number: int) -> Tree:
        """The entry of a flat group in the optimizer's state: scalars first, as torch has them."""
        return {**scalars(self.blueprint.groups[number]), **{k: v for k, v in parts.items() if k != MASTER}}

    def _parts(
        self, records: Records, groups: Sequence[NewGroup], rank: int, *, lean: bool
    ) -> list[dict[str, StoredTensor]]:
        return [
            {
                state: flat_part(self.blueprint, records, group, state, rank, lean=lean and state == MASTER)
                for state in self._states_of(group, rank)
            }
            for group in groups
        ]

    def _states_of(self, group: NewGroup, rank: int) -> list[str]:
        """A group trained without momentum, say, has no state of that name; nor has a rank that has nothing to keep in it."""
        has, states = self.blueprint.has, self.blueprint.states
        own = [s for s in states if s == MASTER or any(has(member.spec, s) for member in group.members)]
        places = {state: self.blueprint.geometry_of(group, state) for state in own}
        return [state for state, at in places.items() if not isinstance(at, BorderGroup) or at.held(rank)]

    def _wrapper(self) -> Tree:
        scaler = self.state.grad_scaler if self.state.grad_scaler is not None else static_scaler()
        overflow = self.native.optimizer.get("overflow", False)
        return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic(scaler), "overflow": overflow}

    def _clip_grad(self) -> object:
        return self.native.optimizer.get("clip_grad", self.state.args.get("gradient_clipping"))

    def _flat_state(self, records: Records, groups: Sequence[NewGroup], rank: int) -> Tree:
        own = self.choices.bf16_optimizer
        parts = self._parts(records, groups, rank, lean=not own)
        tree: Tree = {} if own else self._wrapper()
        if (clip_grad := self._clip_grad()) is not None:  # without it, the engine keeps its own configuration's
            tree["clip_grad"] = clip_grad
        tree["base_optimizer_state"] = {
            "state": {index: self._state_of(part, groups[index].number) for index, part in enumerate(parts)},
            "param_groups": self._param_groups([[index] for index in range(len(groups))]),
        }
        tree["single_partition_of_fp32_groups"] = [part[MASTER] for part in parts]
        if not own:
            tree["zero_stage"] = stub_class(_STAGE)(self.choices.stage)
        tree["group_paddings"] = [group.geometry.padding(rank) for group in groups]
        if not own:
            tree["param_alignment_paddings"] = [_gaps(group) for group in groups]
        tree["partition_count"] = [self.choices.dp] * len(groups)
        tree["ds_version"] = self.version()
        tree["param_slice_mappings"] = [_addresses(group, rank) for group in groups]
        return tree

    def _sliced_state(self, records: Records, groups: Sequence[NewGroup], rank: int) -> Tree:
        parts = self._parts(records, groups, rank, lean=False)
        members = [
            [i for i, group in enumerate(groups) if group.number == n] for n in range(len(self.blueprint.groups))
        ]
        return {
            "zero_stage": stub_class(_STAGE)(3), **self._wrapper(), "partition_count": self.choices.dp,
            "optimizer_state_dict": {
                "state": {index: self._state_of(part, groups[index].number) for index, part in enumerate(parts)},
                "param_groups": self._param_groups(members),
            },
            "fp32_flat_groups": [part[MASTER] for part in parts],
        }  # fmt: skip

    def plain(self, records: Records, mp_rank: int) -> Tree:
        """Stage 0: torch's own state dict, wrapped where there are masters."""
        if self.choices.fused:
            return self._fused_optimizer(records, mp_rank)
        states: dict[int, Tree] = {}
        masters: list[list[StoredTensor]] = []
        numbers: list[list[int]] = []
        for number, members in enumerate(self.blueprint.params_of(mp_rank)):
            numbers.append(list(range(len(states), len(states) + len(members))))
            masters.append([])
            for index, member in zip(numbers[-1], members, strict=True):
                own = self._whole_states(records, member)
                states[index] = {**scalars(self.blueprint.groups[number]), **own}
                if self.choices.half:
                    masters[-1].append(whole_tensor(records, member, MASTER, self.blueprint.state_dtype(MASTER)))
        inner: Tree = {"state": states, "param_groups": self._param_groups(numbers)}
        return {**self._loose(), "optimizer_state_dict": inner, "fp32_groups": masters} if self.choices.half else inner

    def _whole_states(self, records: Records, member: Member) -> dict[str, StoredTensor]:
        states = [s for s in self.blueprint.states if s != MASTER and self.blueprint.has(member.spec, s)]
        return {s: whole_tensor(records, member, s, self.blueprint.state_dtype(s)) for s in states}

    def _fused_optimizer(self, records: Records, mp_rank: int) -> Tree:
        groups = self.blueprint.flat_groups(mp_rank)
        parts = self._parts(records, groups, 0, lean=False)
        inner: Tree = {
            "state": {index: self._state_of(part, groups[index].number) for index, part in enumerate(parts)},
            "param_groups": self._param_groups([[index] for index in range(len(groups))]),
        }
        flat = [part[MASTER] for part in parts]
        return {
            **self._loose(),
            "optimizer_state_dict": inner,
            "fp32_groups_flat": flat,
            "clip_grad": self._clip_grad() or 0.0,
        }

    def _loose(self) -> Tree:
        values = loose_values(self.state.grad_scaler)
        if not is_dynamic(self.state.grad_scaler):
            values["cur_iter"] = self.native.optimizer.get("cur_iter", self.state.iteration)
        return values


def settings(group: ParamGroup) -> Tree:
    """What a param group stores of itself."""
    return copy.deepcopy({key: value for key, value in group.fields.items() if key not in group.scalars})


def scalars(group: ParamGroup) -> Tree:
    """What the optimizer keeps beside a parameter's tensors: objects of its own, since ``step`` is counted in place."""
    return copy.deepcopy({key: group.fields[key] for key in group.scalars})


def _gaps(group: NewGroup) -> list[int]:
    gaps = group.geometry.gaps if isinstance(group.geometry, FlatGroup) else ()
    return list(gaps or (0,) * len(group.members))


def _addresses(group: NewGroup, rank: int) -> Tree:
    """``param_slice_mappings``: where a rank has what; starts count in its own partition."""
    found: Tree = OrderedDict()
    for index in group.geometry.indices(rank):
        run = group.geometry.run(index, rank)
        if run is not None:
            found[group.members[index].spec.name] = new_stub(_ADDRESS, {"numel": run.numel, "start": run.at})
    return found


@dataclass(slots=True)
class Trees:
    """Makes the content of files, and notes in their records what they hold.

    Args:
        blueprint: The checkpoint.
        state: What is not a tensor.
        native: What DeepSpeed's formats keep besides.
        opaque: Values of the state dict that are no tensors, by model-parallel rank.
    """

    blueprint: Blueprint
    state: TrainingState
    native: ModuleState
    opaque: Sequence[Mapping[str, object]] = ()

    @property
    def optimizer(self) -> OptimizerTrees:
        """The same for the optimizer."""
        return OptimizerTrees(self.blueprint, self.state, self.native)

    @property
    def choices(self) -> Choices:
        """Stage and degrees."""
        return self.blueprint.choices

    def model_tree(self, records: Records, dp_rank: int, mp_rank: int, other: Mapping[str, object]) -> Tree:
        """The content of a ``…model_states.pt``.

        Args:
            records: Takes down its records.
            dp_rank: Data-parallel rank; 0 outside of stage 3.
            mp_rank: Model-parallel rank.
            other: Its counters and client state.
        """
        stage, local = self.choices.stage, self.blueprint.local(mp_rank)
        tensors = {} if self.native.pipeline else self._module_tensors(records, local)
        frozen = [m for m in local if not m.spec.trainable and m.spec.name not in self.native.buffers]
        fragments = self._fragments(records, frozen, tensors, dp_rank)
        shapes = OrderedDict((m.spec.name, _size(m)) for m in frozen)
        stored = stage >= 2 and not self.native.without_frozen  # DeepSpeed looks for each in a dictionary that is there
        first = stage > 0 and dp_rank == 0 and mp_rank == 0
        tree: Tree = {
            "module": None if self.native.pipeline else self._module(tensors, mp_rank),
            "buffer_names": [m.spec.name for m in local if m.spec.name in self.native.buffers],
            "optimizer": self.optimizer.plain(records, mp_rank) if self.choices.optimizer and stage == 0 else None,
            "param_shapes": self._param_shapes(mp_rank) if self.choices.optimizer else None,
            "frozen_param_shapes": shapes if stored else None,
            "shared_params": (dict(self.native.shared) if first else {}) if stage > 0 else None,
            "frozen_param_fragments": fragments if stored else None,
            "lr_scheduler": copy.deepcopy(self.state.scheduler),
            "data_sampler": None, "random_ltd": None, "skipped_steps": 0,
            "global_steps": self.state.iteration, "global_samples": other.get("global_samples", 0),
            "dp_world_size": self.choices.dp, "mp_world_size": self.choices.mp,
            "checkpoint_parallel_dimensions": {"pp_degree": self.choices.pp, "tp_degree": self.choices.tp},
            "ds_config": self.config(), "ds_version": VERSION,
        }  # fmt: skip
        tree.update(other)
        return tree

    def config(self) -> Tree:
        """The run's own ``ds_config``, with the stage that is written."""
        config = copy.deepcopy(dict(self.state.args))
        zero = config.get("zero_optimization")
        config["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), "stage": self.choices.stage}
        return config

    def optim_tree(self, records: Records, dp_rank: int, mp_rank: int) -> Tree:
        """The content of an ``…optim_states.pt``."""
        return {
            "optimizer_state_dict": self.optimizer.partitioned(records, dp_rank, mp_rank),
            "ds_config": self.config(),
            "ds_version": self.optimizer.version(),
        }

    def layer_tree(self, records: Records, keys: Mapping[str, str], mp_rank: int) -> Tree:
        """The content of a ``layer_XX-model_states.pt``.

        Args:
            records: Takes down its records.
            keys: Global name by key.
            mp_rank: A model-parallel rank that has the layer.
        """
        local = {member.spec.name: member for member in self.blueprint.local(mp_rank)}
        opaque = self.opaque[mp_rank] if self.opaque else {}
        return OrderedDict(
            (key, self._tensor(records, local[name]) if name in local else opaque[name]) for key, name in keys.items()
        )

    def _tensor(self, records: Records, member: Member) -> StoredTensor:
        return whole_tensor(records, member, PARAM, member.spec.dtype)

    def _module_tensors(self, records: Records, local: Iterable[Member]) -> dict[str, object]:
        """Stage 3 has buffers only; its parameters are empty."""
        tensors: dict[str, object] = {}
        for member in local:
            kept = self.choices.stage < 3 or member.spec.name in self.native.buffers
            tensors[member.spec.name] = self._tensor(records, member) if kept else _empty(member)
        return tensors

    def _module(self, tensors: Mapping[str, object], mp_rank: int) -> Tree:
        """The state dict, in the module's own order where that is known."""
        opaque = self.opaque[mp_rank] if self.opaque else {}
        shared = {alias: tensors[owner] for alias, owner in self.native.shared.items() if owner in tensors}
        values = {**tensors, **shared, **opaque}
        return OrderedDict(
            (name, values[name]) for name in dict.fromkeys([*self.native.order, *values]) if name in values
        )

    def _fragments(
        self, records: Records, frozen: Sequence[Member], tensors: Mapping[str, object], dp_rank: int
    ) -> Tree | None:
        if self.choices.stage < 3:
            return OrderedDict((m.spec.name, tensors.get(m.spec.name)) for m in frozen)
        dp = self.choices.dp
        return OrderedDict((m.spec.name, frozen_slice(records, m, dp_rank, dp)) for m in frozen)

    def _param_shapes(self, mp_rank: int) -> list[Tree]:
        return [
            OrderedDict((member.spec.name, _size(member)) for member in group.members)
            for group in self.blueprint.flat_groups(mp_rank)
        ]


def _size(member: Member) -> object:
    import torch

    return torch.Size(member.layout.shape)


def _empty(member: Member) -> object:
    import torch

    return torch.empty(0, dtype=getattr(torch, member.spec.dtype.name))
