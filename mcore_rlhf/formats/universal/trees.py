"""What the other files hold: ``…model_states.pt`` in both flavours, and ``zero/optimizer_state.pt``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from mcore_rlhf.core.catalog import Record, TensorEntry
from mcore_rlhf.core.names import PARAM, TensorName
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.formats.base import FileLayout
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.stored import StoredTensor

from .names import STEP
from .state_files import create, placed

if TYPE_CHECKING:
    import torch

VERSION = "0.19.8"
"""The DeepSpeed whose files these are like; written where the source does not say its own."""


@dataclass
class ModelFile:
    """One ``…model_states.pt``.

    DeepSpeed restores only counters, scheduler and client state from it. The module is there for people, for the way back to
    native files, and because DeepSpeed's own restore leaves out frozen parameters and buffers.

    Args:
        source: The checkpoint.
        native: DeepSpeed's own view of it.
        file: The file's path, relative to the target's root.
        mp_rank: Which model-parallel rank's client state it has.
        whole: Whether it has the module: that of the first rank has, whole; all others, and stage 3's, only its buffers and
            names.
    """

    source: Source
    native: ModuleState
    file: str
    mp_rank: int
    whole: bool
    records: list[Record] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    def layout(self) -> FileLayout:
        """What the file will hold."""
        module = self._module()
        tree = self._tree(module)
        return FileLayout(self.entries, self.records, partial(create, self.file, tree))

    def _module(self) -> OrderedDict[str, object]:
        """The module in the order of its own state dict; aliases share the storage of their owners."""
        specs = {spec.name: spec for spec in self.source.model.params}
        values = {name: self._value(spec) for name, spec in specs.items()}
        shared = self.native.shared
        order = dict.fromkeys([*self.native.order, *specs])
        found = ((name, values.get(shared.get(name, name))) for name in order)
        return OrderedDict((name, value) for name, value in found if value is not None)

    def _value(self, spec: ParamSpec) -> StoredTensor | torch.Tensor:
        """Where the tensor will lie, or an empty placeholder of its type, as stage 3 has it."""
        import torch

        name = TensorName(self.source.role, spec.name, PARAM)
        stored = self.source.catalog.get(name) if self.whole or spec.name in self.native.buffers else None
        if stored is None:
            return torch.empty(0, dtype=getattr(torch, spec.dtype.name))
        record = Record(self.file, f"data/{len(self.records)}", stored.dtype, prod(stored.global_shape), 0)
        entry, value = placed(name, stored.global_shape, stored.global_shape, record)
        self.records.append(record)
        self.entries.append(entry)
        return value

    def _tree(self, module: Mapping[str, object]) -> dict[str, object]:
        frozen = [s for s in self.source.model.params if not s.trainable and s.name not in self.native.buffers]
        stored = not self.native.without_frozen
        state, parallel = self.source.state, self.source.parallel
        per_rank = self.native.per_rank
        other = dict(per_rank[self.mp_rank] if self.mp_rank < len(per_rank) else state.other)
        return {
            "module": module,
            "buffer_names": list(self.native.buffers),
            "optimizer": None,
            "param_shapes": self._param_shapes(),
            "frozen_param_shapes": OrderedDict((spec.name, _size(spec)) for spec in frozen) if stored else None,
            "shared_params": dict(self.native.shared),
            "frozen_param_fragments": OrderedDict((s.name, module[s.name]) for s in frozen)
            if stored and self.whole
            else None,
            "lr_scheduler": state.scheduler,
            "data_sampler": other.pop("data_sampler", None),
            "random_ltd": other.pop("random_ltd", None),
            "skipped_steps": other.pop("skipped_steps", 0),
            "global_steps": state.iteration,
            **{key: other.pop(key) for key in ("global_samples",) if key in other},
            "dp_world_size": parallel.dp,
            "mp_world_size": parallel.tp * parallel.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": parallel.pp, "tp_degree": parallel.tp},
            "ds_config": state.args,
            "ds_version": other.pop("ds_version", VERSION),
            **other,
        }

    def _param_shapes(self) -> list[OrderedDict[str, object]]:
        """Members of the param groups with their shapes, in flat order."""
        specs = {spec.name: spec for spec in self.source.model.params}
        groups = [[specs[name] for name in group.params if name in specs] for group in self.source.state.groups]
        if not any(groups):
            groups = [[spec for spec in specs.values() if spec.trainable]]
        return [OrderedDict((spec.name, _size(spec)) for spec in group) for group in groups]


def _size(spec: ParamSpec) -> torch.Size:
    import torch

    return torch.Size(spec.global_shape)


def optimizer_tree(source: Source, native: ModuleState) -> dict[str, object]:
    """What stages 1 and 2 read under ``param_groups``, stage 3 under ``optimizer_state_dict``.

    Stage 3 copies its first group over every other. So it gets only the fields in which all groups agree: the engine keeps
    its own values of the others. Source: DeepSpeed 0.19.8, ``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py``
    (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
    """
    groups = [_stored_fields(group) | {"params": [number]} for number, group in enumerate(source.state.groups)]
    step = group_step(source.state.groups[0]) if source.state.groups else None
    first = (
        {key: value for key, value in groups[0].items() if key not in differing_fields(source.state.groups)}
        if groups
        else {}
    )
    scaler = {} if source.state.grad_scaler is None else {"loss_scaler": source.state.grad_scaler}
    return {
        **scaler,
        **native.optimizer,
        "ds_version": native.optimizer.get("ds_version") or source.state.other.get("ds_version") or VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {} if step is None else {STEP: step}}, "param_groups": [first]},
    }


def _stored_fields(group: ParamGroup) -> dict[str, object]:
    return {key: value for key, value in group.fields.items() if key not in group.scalars}


def differing_fields(groups: Sequence[ParamGroup]) -> list[str]:
    """The fields in which the groups are not all equal."""
    fields = [_stored_fields(group) for group in groups]
    return [key for key in fields[0] if any(other.get(key) != fields[0][key] for other in fields[1:])] if fields else []


def group_step(group: ParamGroup) -> object | None:
    """The group's step as it is stored: a tensor where the source has a float, since torch's optimizers count in one."""
    import torch

    step = group.fields.get(STEP) if STEP in group.scalars else None
    return torch.tensor(step, dtype=torch.float32) if isinstance(step, float) else step
