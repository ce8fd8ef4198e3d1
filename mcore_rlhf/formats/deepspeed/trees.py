"""What the files of a new native checkpoint hold around their tensors: the dictionaries, as DeepSpeed saves them.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_save_zero_checkpoint``),
``runtime/pipe/module.py`` (``save_state_dict``).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.names import PARAM
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import TrainingState
from mcore_rlhf.storage.ptfile import StoredTensor

from .choices import Choices
from .layout import Blueprint, Member, Records, frozen_slice, whole_tensor
from .optimizer_trees import VERSION, OptimizerTrees, Tree


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
