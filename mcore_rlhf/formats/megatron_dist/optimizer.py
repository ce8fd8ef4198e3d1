"""The optimizer of a checkpoint: what kind wrote it, its groups, and the names of its states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mcore_rlhf.core.dtype import FLOAT32
from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, PLAIN
from mcore_rlhf.families.megatron.groups import inner_state, merged_groups
from mcore_rlhf.families.source import ParamGroup

from .flat import states_in
from .opened import DistFolder

DP_RESHARDABLE = "dp_reshardable"
FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
SHARDING = "param_state_sharding_type"
CONTENT = "content_metadata"
CONTENT_SHARDING = "distrib_optim_sharding_type"
_COMMON_STEP = "common_step"


@dataclass(slots=True)
class OptimizerValues:
    """What a checkpoint keeps of an optimizer besides where its tensors lie.

    Args:
        kind: ``distributed``, ``plain``, or None.
        sharding: How the distributed optimizer's states are stored.
        groups: Its param groups.
        scaler: The loss scaler's state.
        states: Names of its tensor states.
        scalars: Values that a plain optimizer keeps per parameter, equal for all.
    """

    kind: str | None = None
    sharding: str | None = None
    groups: tuple[ParamGroup, ...] = ()
    scaler: object | None = None
    states: tuple[str, ...] = ()
    scalars: dict[str, object] = field(default_factory=dict)


def read_optimizer(folder: DistFolder) -> OptimizerValues:
    """What a checkpoint has of an optimizer.

    Raises:
        Unsupported: It is stored in a way of which only Megatron itself can make something.
        CheckpointError: Parts of it are missing.
    """
    found = states_in(list(folder.flat)) | (folder.tensors.keys() - {PARAM})
    members = list(_members(folder))
    sharding = _sharding(folder, members)
    if not found:
        if any(inner_state(member).get("param_groups") for member in members):
            raise Unsupported(
                f"{folder.common.file} has param groups, but no tensor of the folder is a state of the optimizer\n"
                "Convert the weights alone with --no-optimizer."
            )
        return OptimizerValues()
    usual = [state for state in (MASTER, EXP_AVG, EXP_AVG_SQ) if state in found]
    listed = [_tree(folder, objects) for objects in folder.groups.values()] or members
    groups = merged_groups([_groups(folder, member) for member in listed])
    if not groups:
        raise Unsupported(
            f"{folder.common.file}: the optimizer's states are there, its param groups are not\n"
            "Convert the weights alone with --no-optimizer."
        )
    return OptimizerValues(
        PLAIN if sharding is None else DISTRIBUTED, sharding, groups,
        next((member["grad_scaler"] for member in listed if "grad_scaler" in member), None),
        (*usual, *sorted(found - set(usual))), _scalars(folder, members),
    )  # fmt: skip


def _members(folder: DistFolder) -> Iterable[Mapping[str, object]]:
    """The chained optimizers as ``common.pt`` has them: one dictionary, or one for each number."""
    stored = folder.top.get("optimizer")
    if stored is None:
        return
    if not isinstance(stored, dict):
        raise Unsupported(f"{folder.common.file}: 'optimizer' should be a dictionary, found {type(stored).__name__}")
    numbered = all(isinstance(key, int) for key in stored)
    for member in [stored[key] for key in sorted(stored)] if numbered else [stored]:
        if not isinstance(member, dict):
            raise Unsupported(
                f"{folder.common.file}: 'optimizer' should hold dictionaries, found {type(member).__name__}"
            )
        yield folder.common.materialize(member)


def _tree(folder: DistFolder, objects: Mapping[str, object]) -> Mapping[str, object]:
    """What one data-parallel group stores under keys of its own, as one dictionary."""
    wanted = ("optimizer", "grad_scaler")
    return {key: folder.value(item) for key, item in objects.items() if key in wanted}  # type: ignore[arg-type]


def _groups(folder: DistFolder, member: Mapping[str, object]) -> list[ParamGroup]:
    stored = inner_state(member).get("param_groups", [])
    if not isinstance(stored, list) or not all(isinstance(group, dict) for group in stored):
        raise Unsupported(f"{folder.common.file}: the optimizer's param_groups should be a list of dictionaries")
    return [
        ParamGroup({k: v for k, v in group.items() if k != "params"}, bool(group.get("is_expert_parallel")))
        for group in stored
    ]


def _sharding(folder: DistFolder, members: list[Mapping[str, object]]) -> str | None:
    """How the distributed optimizer's states are stored; None for the plain optimizer.

    Raises:
        Unsupported: As one pickle per rank, or as another framework's tensors.
    """
    content = folder.top.get(CONTENT)
    kinds = {member[SHARDING] for member in members if SHARDING in member}
    if isinstance(content, dict) and content.get(CONTENT_SHARDING) is not None:
        kinds.add(content[CONTENT_SHARDING])
    if len(kinds) > 1:
        raise LayoutMismatch(
            f"{folder.common.file}: says two kinds of sharding of one optimizer: {', '.join(map(str, kinds))}"
        )
    kind = next(iter(kinds), None)
    if kind in (None, DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE):
        return None if kind is None else str(kind)
    raise Unsupported(
        f"{folder.common.file}: the optimizer is stored as {kind!r}; known: {FULLY_RESHARDABLE}, {DP_RESHARDABLE}, {MODEL_SPACE}\n"
        "Save it once with --dist-ckpt-optim-fully-reshardable, or convert the weights alone with --no-optimizer."
    )


def _scalars(folder: DistFolder, members: list[Mapping[str, object]]) -> dict[str, object]:
    """The step that torch's own Adam counts per parameter, and Megatron stores once."""
    for member in members:
        state = inner_state(member).get("state")
        if isinstance(state, dict) and _COMMON_STEP in state:
            return {"step": state[_COMMON_STEP]}
    return {}


def trained_names(folder: DistFolder, values: OptimizerValues, keys: Mapping[str, frozenset[str]]) -> set[str]:
    """The parameters that have all states.

    Args:
        folder: The checkpoint.
        values: What was read of the optimizer.
        keys: For each parameter, the keys of the tensors that hold it.

    Raises:
        Unsupported: Some have a part of the states.
        LayoutMismatch: A state is not shaped like its parameter.
    """
    problems = Problems()
    tensors = {state: folder.tensors.get(state, {}) for state in values.states}
    for key, param in folder.model.items():
        there = [state for state in values.states if key in tensors[state]]
        for state in there:
            shape = tensors[state][key].global_shape
            if shape != param.global_shape and len(shape) != len(param.global_shape) + 1:
                problems.add(LayoutMismatch, f"{key}: has shape {param.global_shape}, but its {state} has {shape}")
        if there and len(there) < len(values.states):
            lacking = [s for s in values.states if s not in there and (s, param.dtype) != (MASTER, FLOAT32)]
            if lacking:  # a plain optimizer has no copy of what is fp32 itself
                text = f"{key}: has {', '.join(there)}, but no {', '.join(lacking)}"
                problems.add(
                    Unsupported, text, "It may be another optimizer's. --no-optimizer converts the weights alone."
                )
    problems.raise_if_any()
    stored = frozenset(tensors[values.states[-1]]) if values.states else frozenset()
    return {name for name, held in keys.items() if held <= stored}
