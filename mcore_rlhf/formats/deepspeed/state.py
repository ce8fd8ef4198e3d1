"""What a native checkpoint holds besides tensors: counters, scheduler, loss scaler, param groups, client state.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mcore_rlhf.core.account import Fate, Report, same
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.families.inventory import state_dict_of
from mcore_rlhf.families.module import LAYOUT_KEYS, SHARDED_KEYS, ModuleState
from mcore_rlhf.families.scaler import scaler_of
from mcore_rlhf.families.source import ParamGroup, TrainingState
from mcore_rlhf.storage.stored import StoredTensor, map_tensors

from .modules import ModuleReading
from .opened import Opened

State = TypeVar("State", bound=ModuleState)


@dataclass(slots=True)
class Members:
    """The optimizer's param groups, on their way into a TrainingState.

    Args:
        fields: What each stores, without members.
        names: Each one's parameters, in the optimizer's own order.
        scalars: What the optimizer keeps once for each one's parameters.
    """

    fields: list[dict[str, object]] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)
    scalars: list[dict[str, object]] = field(default_factory=list)

    def add_scalars(self, number: int, scalars: Mapping[str, object], where: Path) -> None:
        """Note the scalars of one more part of a group.

        Raises:
            LayoutMismatch: They are not those of the others.
        """
        for key, value in scalars.items():
            if not same(self.scalars[number].setdefault(key, value), value):
                raise LayoutMismatch(f"{where}: {key} of param group {number} differs between parts of the group")

    def groups(self) -> tuple[ParamGroup, ...]:
        """The groups as every format takes them."""
        return tuple(
            ParamGroup({**fields, **scalars}, params=tuple(names), scalars=tuple(scalars))
            for fields, names, scalars in zip(self.fields, self.names, self.scalars, strict=True)
        )


def other_values(opened: Opened, dp_rank: int, mp_rank: int) -> dict[str, object]:
    """What a rank's model file has at the top that neither has a place of its own nor follows from the layout."""
    pt = opened.model[dp_rank if opened.sliced else 0, mp_rank]
    return {key: pt.materialize(value) for key, value in pt.tree.items() if key not in LAYOUT_KEYS}


def _outline(opened: Opened, dp_rank: int, mp_rank: int) -> dict[str, object]:
    """The same with every tensor's shape and checksum in its place: to compare hundreds of ranks without reading them."""
    pt = opened.model[dp_rank, mp_rank]

    def stand_in(stored: StoredTensor) -> object:
        if not pt.directory.checksummed:
            return pt.load(stored)
        return stored.shape, stored.start, str(stored.record.dtype), pt.directory.members[stored.record.key].crc32

    return {key: map_tensors(value, stand_in) for key, value in pt.tree.items() if key not in LAYOUT_KEYS}


def differing_keys(opened: Opened) -> list[str]:
    """Which of these values are not the same on all ranks."""
    first = _outline(opened, 0, 0)
    outlines = [_outline(opened, *at) for at in opened.model]
    return sorted({key for outline in outlines for key, v in outline.items() if not same(v, first.get(key))})


def training_state(opened: Opened, members: Members, notes: Report) -> TrainingState:
    """The state that all ranks share, taken from the first.

    Args:
        opened: The files.
        members: The optimizer's param groups.
        notes: Told of values that differ between ranks.
    """
    top, pt = opened.first, opened.model[0, 0]
    other = other_values(opened, 0, 0)
    differing = differing_keys(opened)
    if differing:
        notes.add(
            Fate.NOTE, f"differs between ranks, and goes with them only into the same layout: {', '.join(differing)}"
        )
    scheduler, config = state_dict_of(top.get("lr_scheduler"), "lr_scheduler", notes), top.get("ds_config")
    return TrainingState(
        iteration=int(top.get("global_steps") or 0),
        args=pt.materialize(dict(config)) if isinstance(config, Mapping) else {},
        groups=members.groups(),
        scheduler=pt.materialize(dict(scheduler)) if scheduler is not None else None,
        grad_scaler=scaler_of(_optimizer_values(opened)),
        other=other,
    )


def _optimizer_values(opened: Opened) -> Mapping[str, Any]:
    """The state dict of the optimizer of rank 0."""
    if opened.optim:
        return opened.optimizer(0, 0)
    stored = opened.first.get("optimizer")
    return stored if isinstance(stored, Mapping) else {}


def native_state(opened: Opened, modules: list[ModuleReading], kind: type[State]) -> State:
    """What DeepSpeed's two formats share beside the training state."""
    values = _optimizer_values(opened)
    pt = opened.optim[0, 0] if opened.optim else opened.model[0, 0]
    plain = {key: pt.materialize(value) for key, value in values.items() if key not in SHARDED_KEYS and key != "state"}
    plain.pop("fp32_groups_flat", None)
    ranks = [other_values(opened, 0, mp_rank) for mp_rank in range(opened.mp)] if opened.mp > 1 else []
    return kind(
        tag=opened.files.tag,
        order=tuple(dict.fromkeys(name for module in modules for name in module.order)),
        buffers=tuple(dict.fromkeys(name for module in modules for name in module.buffers)),
        shared={alias: owner for module in modules for alias, owner in module.shared.items()},
        optimizer=plain,
        per_rank=tuple(ranks),
        pipeline=opened.first["module"] is None,
        without_frozen=opened.first.get("frozen_param_shapes") is None and not any(module.frozen for module in modules),
    )
