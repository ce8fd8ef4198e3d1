"""What DeepSpeed's optimizer files, and further ranks, have beside what is read of them.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_zero_checkpoint``, ``_save_checkpoint``), ``runtime/zero/stage_1_and_2.py``,
``runtime/zero/stage3.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rlhf.families.module import SHARDED_KEYS
from mcore_rlhf.families.unplaced import Known, Unplaced, of_torch
from mcore_rlhf.storage.ptfile import PtFile

from .opened import Opened

_TOP: Known = {"optimizer_state_dict": None, "ds_config": None, "ds_version": None}
_WRAPPED = ("optimizer_state_dict", "base_optimizer_state")
_OF_RANKS = SHARDED_KEYS - {"loss_scaler"} | {"state", "fp32_groups_flat"}
"""Keys that each rank has its own value of, or that are compared where they are read."""


def unplaced_of(opened: Opened, *, with_optimizer: bool) -> tuple[str, ...]:
    """What is found in the files of all ranks.

    Args:
        opened: The files.
        with_optimizer: Whether the optimizer is read at all.
    """
    found, first = Unplaced(), opened.model[0, 0]
    for pt in opened.model.values():
        found.compare(pt.file, _scheduler(pt), _scheduler(first))
    if not with_optimizer:
        return found.names
    for pt in opened.optim.values():
        found.look(pt.file, pt.tree, _TOP)
    holders = [*opened.optim.values()] or [*opened.model.values()]
    for pt in holders:
        _look_inside(found, pt, holders[0], "optimizer_state_dict" if opened.optim else "optimizer")
    return found.names


def _scheduler(pt: PtFile) -> dict[str, object]:
    return {"lr_scheduler": pt.materialize(pt.tree.get("lr_scheduler"))}


def _look_inside(found: Unplaced, pt: PtFile, first: PtFile, key: str) -> None:
    """The optimizer's own state dict: its settings are taken from the first rank, its states by the numbers of its groups."""
    mine, others = (_mapping(file.tree.get(key)) for file in (pt, first))
    found.compare(pt.file, _settings(pt, mine), _settings(first, others), key)
    for name in _WRAPPED:
        inner = _mapping(mine.get(name))
        found.look(pt.file, inner, of_torch(inner), f"{key}.{name}")
        groups = inner.get("param_groups") or []
        _compare_groups(found, pt, groups, _mapping(others.get(name)).get("param_groups") or [], f"{key}.{name}")


def _compare_groups(found: Unplaced, pt: PtFile, mine: list[Any], others: list[Any], inside: str) -> None:
    for number, (group, other) in enumerate(zip(mine, others, strict=False)):
        fields, known = ({k: v for k, v in of.items() if k != "params"} for of in (group, other))
        found.compare(pt.file, fields, known, f"{inside}.param_groups.{number}")


def _settings(pt: PtFile, state: Mapping[str, Any]) -> dict[str, object]:
    return {key: pt.materialize(value) for key, value in state.items() if key not in _OF_RANKS}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
