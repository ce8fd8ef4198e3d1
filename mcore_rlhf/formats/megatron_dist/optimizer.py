"""The optimizer of a checkpoint: what kind wrote it, its groups, and the names of its states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import ADAMS, FLOAT32, MASTER, PARAM, Shape
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, LAYER_WISE, PLAIN, Arguments
from mcore_rlhf.families.megatron.groups import by_adam, inner_state, is_matrix, keeps_nothing, merged_groups
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.models.spec import ParamSpec

from .folders import MASTERS, DistFolder, FlatKey
from .fsdp import FSDP_DTENSOR

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
        kind: ``distributed``, ``plain``, ``layer_wise``, or None.
        sharding: How the distributed optimizer's states are stored.
        groups: Its param groups.
        scaler: The loss scaler's state.
        states: Names of its tensor states.
        flat: Those of them that lie in flat buffers.
        odd: Names of tensors that are a state, but not shaped like their parameter, by state.
        scalars: Values that a plain optimizer keeps per parameter, equal for all.
        by_size: Whether a layer-wise optimizer has all parameters, which then are dealt by their size; by a layout, it has matrices only.
    """

    kind: str | None = None
    sharding: str | None = None
    groups: tuple[ParamGroup, ...] = ()
    scaler: object | None = None
    states: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    odd: dict[str, list[str]] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)
    by_size: bool = False


def read_optimizer(folder: DistFolder, args: Arguments) -> OptimizerValues:
    """What a checkpoint has of an optimizer.

    Args:
        folder: The checkpoint.
        args: The run's arguments.

    Raises:
        Unsupported: It is stored in a way of which only Megatron itself can make something.
        Incomplete: Parts of it are missing.
    """
    odd = _odd_states(folder)
    flat, found = states_in(list(folder.flat)), folder.tensors.keys() - {PARAM, *odd}
    found |= flat
    members = list(_members(folder))
    sharding = _sharding(folder, members)
    if not found and not keeps_nothing(args.values):
        if any(inner_state(member).get("param_groups") for member in members):
            raise Unsupported(
                f"{folder.common_file} has param groups, but no tensor of the folder is a state of the optimizer\n"
                "Convert the weights alone with --no-optimizer."
            )
        return OptimizerValues()
    usual = [state for state in ADAMS if state in found]
    flatly = [_tree(folder, objects) for objects in folder.groups.values()]
    listed = [member for member in members if not flatly or "param_groups" in inner_state(member)] + flatly
    groups = merged_groups([_groups(folder, member) for member in listed])
    if not groups:
        raise Incomplete(
            f"{folder.common_file}: the optimizer's states are there, its param groups are not\n"
            "Convert the weights alone with --no-optimizer."
        )
    kind = LAYER_WISE if args.layer_wise else PLAIN if sharding is None else DISTRIBUTED
    states = (*usual, *sorted(found - set(usual)))
    return OptimizerValues(
        kind, sharding, groups, next((member["grad_scaler"] for member in listed if "grad_scaler" in member), None),
        states, tuple(state for state in states if state in flat), odd, _scalars(folder, members),
        by_size=kind == LAYER_WISE and not flat and not _has_distributed(folder),
    )  # fmt: skip


_STEP = "step"


def with_steps(
    values: OptimizerValues,
    args: Arguments,
    iteration: int,
    scheduler: Mapping[str, object] | None,
    notes: Report,
    *,
    by_steps: bool,
) -> tuple[ParamGroup, ...]:
    """The param groups, with the number of steps in those that lack it: they are the first rank's, and a group of which that trains no
    parameter takes no step there. Of such a folder Megatron itself goes on with Adam's bias correction begun anew, and says nothing.

    Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py`` (``sharded_state_dict``, ``load_state_dict``); Transformer Engine,
    ``pytorch/optimizers/fused_adam.py`` (``step``: groups without parameters are left out).

    Args:
        values: What was read of the optimizer.
        args: The run's arguments.
        iteration: The checkpoint's.
        scheduler: The schedule's state, which counts the samples of all updates.
        notes: Told where the number is from.
        by_steps: Whether it counts the updates.
    """
    lacking = [group for group in values.groups if group.fields.get(_STEP) is None]
    if not (iteration and lacking and by_adam(args.values)) or _STEP in values.scalars:
        return values.groups
    said, text = {group.fields.get(_STEP) for group in values.groups} - {None}, "the others"
    if not said and (batch := 1 if by_steps else args.optional("global_batch_size")) and scheduler:
        said, text = (
            ({iteration} if scheduler.get("num_steps") == iteration * batch else set()),
            "the iteration and the schedule",
        )
    step = next(iter(said)) if len(said) == 1 else None
    become = f"are at step {step}, as {text} say" if step else "have no step, and Adam's bias correction begins anew"
    notes.add(
        Fate.NOTE,
        f"{len(lacking)} of {len(values.groups)} param groups {become}: the first rank, whose they are, trains no parameter of theirs; "
        "from the source itself Megatron begins the bias correction anew",
    )
    fill = {} if step is None else {_STEP: step}
    return tuple(
        replace(group, fields={**group.fields, **fill}) if group in lacking else group for group in values.groups
    )


def _has_distributed(folder: DistFolder) -> bool:
    """Whether some masters are called as a distributed optimizer calls them, beside those of a layer-wise one."""
    return any(f".state.{MASTERS[FULLY_RESHARDABLE]}." in one.fqn for one in folder.tensors.get(MASTER, {}).values())


def _odd_states(folder: DistFolder) -> dict[str, list[str]]:
    """States of an optimizer for matrices that do not move with the elements of a weight: factors, rows of it, numbers."""
    found: dict[str, list[str]] = {}
    for state in folder.tensors.keys() - {PARAM, *ADAMS}:
        for key, tensor in folder.tensors[state].items():
            param = folder.model.get(key)
            if param is None or not _alike(tensor.global_shape, param.global_shape):
                found.setdefault(state, []).append(tensor.fqn)
    return found


def _alike(state: Shape, param: Shape) -> bool:
    """Whether a state moves with the elements of a parameter: of its shape, or in flattened ranges (see ``reader._cells``)."""
    return state == param or len(state) == len(param) + 1


def _members(folder: DistFolder) -> Iterable[Mapping[str, object]]:
    """The chained optimizers as ``common.pt`` has them: one dictionary, or one for each number."""
    stored = folder.top.get("optimizer")
    if stored is None:
        return
    if not isinstance(stored, dict):
        raise Unsupported(f"{folder.common_file}: 'optimizer' should be a dictionary, found {type(stored).__name__}")
    numbered = all(isinstance(key, int) for key in stored)
    for member in [stored[key] for key in sorted(stored)] if numbered else [stored]:
        if not isinstance(member, dict):
            raise Unsupported(
                f"{folder.common_file}: 'optimizer' should hold dictionaries, found {type(member).__name__}"
            )
        yield member


def _tree(folder: DistFolder, objects: Mapping[str, object]) -> Mapping[str, object]:
    """What one data-parallel group stores under keys of its own, as one dictionary."""
    wanted = ("optimizer", "grad_scaler")
    return {key: folder.value(item) for key, item in objects.items() if key in wanted}  # type: ignore[arg-type]


def _groups(folder: DistFolder, member: Mapping[str, object]) -> list[ParamGroup]:
    stored = inner_state(member).get("param_groups", [])
    if not isinstance(stored, list) or not all(isinstance(group, dict) for group in stored):
        raise Unsupported(f"{folder.common_file}: the optimizer's param_groups should be a list of dictionaries")
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
            f"{folder.common_file}: says two kinds of sharding of one optimizer: {', '.join(map(str, kinds))}"
        )
    kind = next(iter(kinds), None)
    if kind in (None, DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE, FSDP_DTENSOR):
        return None if kind is None else str(kind)
    raise Unsupported(
        f"{folder.common_file}: the optimizer is stored as {kind!r}; known: {FULLY_RESHARDABLE}, {DP_RESHARDABLE}, {MODEL_SPACE}\n"
        "Save it once with --dist-ckpt-optim-fully-reshardable, or convert the weights alone with --no-optimizer."
    )


def _scalars(folder: DistFolder, members: list[Mapping[str, object]]) -> dict[str, object]:
    """The step that torch's own Adam counts per parameter, and Megatron stores once."""
    for member in members:
        state = inner_state(member).get("state")
        if isinstance(state, dict) and _COMMON_STEP in state:
            return {"step": state[_COMMON_STEP]}
    return {}


def trained_states(
    folder: DistFolder,
    values: OptimizerValues,
    specs: Sequence[ParamSpec],
    keys: Mapping[str, frozenset[str]],
    matrices: bool,
) -> dict[str, tuple[str, ...]]:
    """The states of every parameter that has some, in tensors like its own.

    Args:
        folder: The checkpoint.
        values: What was read of the optimizer.
        specs: The model's parameters.
        keys: For each parameter, the keys of the tensors that hold it.
        matrices: Whether matrices are trained by an optimizer of their own.

    Raises:
        Incomplete: Some have a part of Adam's states that others of their kind have.
        Unsupported: The same of another optimizer's.
        LayoutMismatch: A state is not shaped like its parameter.
    """
    problems = Problems()
    tensors = {state: folder.tensors.get(state, {}) for state in values.states}
    for key, param in folder.model.items():
        for state in values.states:
            shape = tensors[state][key].global_shape if key in tensors[state] else param.global_shape
            if not _alike(shape, param.global_shape):
                problems.add(LayoutMismatch, f"{key}: has shape {param.global_shape}, but its {state} has {shape}")
    found = {s.name: tuple(state for state in values.states if keys[s.name] <= tensors[state].keys()) for s in specs}
    usual: dict[bool, dict[str, None]] = {}
    kinds = {s.name: matrices and is_matrix(s.name, len(s.global_shape)) for s in specs}
    for name, states in found.items():
        usual.setdefault(kinds[name], {}).update(dict.fromkeys(states))
    for spec in specs:
        there = found[spec.name]
        lacking = [state for state in usual[kinds[spec.name]] if state not in there]
        if there and [state for state in lacking if (state, spec.dtype) != (MASTER, FLOAT32)]:
            text = f"{spec.name}: has {', '.join(there)}, but no {', '.join(lacking)}"
            kind = Unsupported if matrices or set(lacking) - {*ADAMS} else Incomplete
            problems.add(kind, text, "It may be another optimizer's. --no-optimizer converts the weights alone.")
    problems.raise_if_any()
    return {name: states for name, states in found.items() if states}


def states_in(keys: Sequence[FlatKey]) -> set[str]:
    """Names of the states that are stored in buckets."""
    return {MASTER if key.state == "param" else key.state for key in keys}
