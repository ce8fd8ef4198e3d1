"""Param groups: their fields, their step, and which parameters belong to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import USE_MUON
from mcore_rlhf.families.source import ParamGroup

from .model_states import ModelStates
from .names import STEP
from .param_files import ParamFiles

Fields = dict[str, object]


def param_groups(
    optimizer: Mapping[str, object], states: ModelStates, params: Mapping[str, ParamFiles], notes: Report, folder: Path
) -> tuple[ParamGroup, ...]:
    """The optimizer's groups.

    Args:
        optimizer: What is in ``optimizer_state.pt``.
        states: The model's files, whose ``param_shapes`` name the members.
        params: The parameters' files, which have the steps.
        notes: Told where members are not known.
        folder: The checkpoint, for messages.

    Raises:
        Unsupported: There are no groups.
        LayoutMismatch: The parameters of a group are not at the same step.
    """
    listed = _listed(optimizer, folder)
    members = _members(listed, states, [name for name, files in params.items() if files.step is not None])
    if any(names is None for names in members):
        notes.add(Fate.NOTE, "the files do not say which parameters are in which param group")
    problems = Problems()
    groups = []
    for number, (fields, names) in enumerate(zip(listed, members, strict=True)):
        step = _step(optimizer, fields, names, params, f"{folder}: param group {number}", problems)
        kept = {key: value for key, value in fields.items() if key != "params"}
        scalars = (STEP,) if step is not None else ()
        groups.append(ParamGroup(kept | ({STEP: step} if scalars else {}), params=names or (), scalars=scalars))
    problems.raise_if_any()
    return tuple(groups)


def _listed(optimizer: Mapping[str, object], folder: Path) -> list[Fields]:
    inner = optimizer.get("optimizer_state_dict")
    groups = optimizer.get("param_groups") or (inner.get("param_groups") if isinstance(inner, dict) else None)
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise Unsupported(
            f"{folder}/zero/optimizer_state.pt: expected a list of param groups under 'param_groups', found none"
        )
    return cast(list[Fields], groups)


def _members(listed: Sequence[Fields], states: ModelStates, stepping: list[str]) -> list[tuple[str, ...] | None]:
    """Names per group: a group's ``params`` are numbers of flat groups, which ``param_shapes`` lists (stage 3: sub-groups)."""
    shapes = states.group_shapes
    if not shapes:
        return [tuple(stepping)] if len(listed) == 1 else [None] * len(listed)
    numbers = [_numbers(fields) for fields in listed]
    if sorted(n for group in numbers for n in group) != list(range(len(shapes))):
        numbers = [[n] for n in range(len(shapes))]
    if len(numbers) != len(listed):
        return [None] * len(listed)
    return [tuple(name for n in group for name in shapes[n]) for group in numbers]


def _step(
    optimizer: Mapping[str, object], fields: Fields, names: tuple[str, ...] | None, params: Mapping[str, ParamFiles],
    where: str, problems: Problems,
) -> object | None:  # fmt: skip
    """The step of a group: from its parameters' files, or, in the stage 3 flavour, from the state of its sub-groups."""
    held = params if names is None else {name: params[name] for name in names if name in params}
    steps = {name: files.step for name, files in held.items() if files.step is not None}
    if not steps and fields.get(USE_MUON) is not True:  # which counts none
        steps = _stage3_steps(optimizer, fields)
    first = next(iter(steps.values()), None)
    other = next((name for name, step in steps.items() if _number(step) != _number(first)), None)
    if other is not None:
        problems.add(
            LayoutMismatch,
            f"{where}: {next(iter(steps))} is at step {_number(first)}, {other} at {_number(steps[other])}",
            "DeepSpeed has one step per group: the files are not of one checkpoint.",
        )
    return first


def _stage3_steps(optimizer: Mapping[str, object], fields: Fields) -> dict[str, object]:
    inner = optimizer.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(states, dict):
        return {}
    mine = [n for n in _numbers(fields) if n in states] or list(states)
    return {f"sub-group {n}": states[n][STEP] for n in mine if states[n].get(STEP) is not None}


def _numbers(fields: Fields) -> list[int]:
    """The flat groups of a param group."""
    params = fields.get("params")
    return [n for n in params if type(n) is int] if isinstance(params, list) else []


def _number(step: object) -> float:
    return float(cast(float, step)) if step is not None else -1.0
