"""Reading a plain optimizer's states, which lie in the file of its param groups: numbered through the groups, each group's parameters in
an order of its own; fp32 copies stand in a list of lists.

A layer-wise optimizer has whole parameters too, dealt to data-parallel ranks: every rank writes a file of its own with what a plain
optimizer of its parameters would have. The model file repeats that of one rank, and looks complete.

Sources: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params.state_dict``,
``FP32Optimizer.state_dict``), ``optimizer/layer_wise_optimizer.py`` (``save_state_dict_to_file``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rlhf.core.catalog import FLOAT32, MASTER
from mcore_rlhf.errors import Incomplete, Lossy, Unsupported
from mcore_rlhf.families.megatron.groups import LocalParam, inner_state
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.stored import StoredTensor

FACTORS = frozenset({"L", "R", "Q_L", "Q_R"})
"""Of a square matrix they are shaped like it. Source: emerging_optimizers 0.3.0, ``soap/soap.py`` (``_init_group``)."""
States = dict[str, StoredTensor]
Scalars = dict[str, object]
LEFT = "Restore the file, or convert the weights alone with --no-optimizer."


def masters_of(member: Mapping[str, object]) -> Sequence[Sequence[StoredTensor]] | None:
    """The fp32 copies by group, or None in an fp32 run."""
    value = member.get("fp32_from_fp16_params", member.get("fp32_from_fp16"))
    return value if isinstance(value, list) else None


def has_plain_state(member: Mapping[str, object]) -> bool:
    """Whether a member of the optimizer holds tensors of its own."""
    return bool(inner_state(member).get("state"))


def members_of(stored: object, file: str) -> list[Mapping[str, object]]:
    """The chained optimizers of a file: one dictionary, or a list of them.

    Raises:
        Unsupported: It is something else.
    """
    if stored is None:
        return []
    listed: list[Mapping[str, object]] = stored if isinstance(stored, list) else [stored]  # type: ignore[list-item]
    if not all(isinstance(member, dict) for member in listed):
        raise Unsupported(f"{file}: 'optimizer' should hold dictionaries, found {type(listed[0]).__name__}")
    return listed


def groups_of(member: Mapping[str, object], pt: PtFile) -> list[ParamGroup]:
    """The param groups of a chained optimizer.

    Raises:
        Unsupported: There are none, in the shape that torch gives them.
    """
    stored = inner_state(member).get("param_groups", [])
    if not isinstance(stored, list) or not all(isinstance(group, dict) for group in stored):
        raise Unsupported(f"{pt.file}: the optimizer's param_groups should be a list of dictionaries")
    return [
        ParamGroup(
            pt.materialize({key: value for key, value in group.items() if key != "params"}),
            expert=bool(group.get("is_expert_parallel")),
        )
        for group in stored
    ]


def plain_states(
    member: Mapping[str, object], pt: PtFile, dealt: Sequence[Sequence[LocalParam]]
) -> tuple[dict[tuple[int, str], States], Scalars]:
    """Where the states of one chained optimizer's parameters lie.

    Args:
        member: Its dictionary.
        pt: The file.
        dealt: Its parameters on this rank by param group, in the optimizer's order.

    Returns:
        By (chunk, name): state name → where it lies; and values that all parameters share, such as ``step``.

    Raises:
        Unsupported: Groups, states and parameters do not fit together as they do in the optimizers that are known.
        Incomplete: A parameter lacks states or a master that others have.
    """
    file, inner = pt.file, inner_state(member)
    states = inner.get("state")
    stored_groups = inner.get("param_groups")
    if not isinstance(states, dict) or not isinstance(stored_groups, list):
        raise Unsupported(f"{file}: the optimizer has no 'state' and 'param_groups'")
    found: dict[tuple[int, str], States] = {}
    scalars: Scalars = {}
    for number, (inside, stored) in enumerate(zip(dealt, stored_groups, strict=True)):
        indices = stored.get("params", [])
        if len(indices) != len(inside):
            some = f" ({', '.join(p.name for p in inside[:3])}, …)" if inside else ""
            raise Unsupported(
                f"{file}: param group {number} has {len(indices)} parameters, {len(inside)} expected from the names and shapes{some}\n"
                "Say with --rules which group parameters belong to (wd_mult), and which are frozen (trainable: false)."
            )
        for index, param in zip(indices, inside, strict=True):
            found[param.vpp_rank, param.name] = _tensors(states.get(index, {}), scalars, param, pt)
    _require_alike(found, file)
    copies = masters_of(member) or [[] for _ in dealt]
    if len(copies) != len(dealt):
        raise Incomplete(f"{file}: fp32 masters of {len(copies)} param groups, but there are {len(dealt)}\n{LEFT}")
    for number, (inside, masters) in enumerate(zip(dealt, copies, strict=True)):
        half = [param for param in inside if param.dtype != FLOAT32]
        if len(half) != len(masters):
            raise Incomplete(
                f"{file}: param group {number} has {len(masters)} fp32 masters, {len(half)} expected\n{LEFT}"
            )
        for param, master in zip(half, masters, strict=True):
            found[param.vpp_rank, param.name][MASTER] = _same_shape(master, param, file, MASTER)
    return found, scalars


def _require_alike(found: Mapping[tuple[int, str], States], file: str) -> None:
    """One optimizer keeps the same states of each of its parameters: where one lacks some, they are lost.

    Raises:
        Incomplete: A parameter lacks states that others have.
    """
    names = {name for states in found.values() for name in states}
    lacking = [(param, sorted(names - states.keys())) for (_, param), states in found.items() if names - states.keys()]
    if lacking:
        param, missing = lacking[0]
        more = f", and of {len(lacking) - 1} more parameters" if len(lacking) > 1 else ""
        raise Incomplete(
            f"{file}: {', '.join(missing)} of {param}{more} is missing, which other parameters have\n{LEFT}"
        )


def _tensors(state: Mapping[str, object], scalars: Scalars, param: LocalParam, pt: PtFile) -> States:
    tensors: States = {}
    _require_elements(state, param, pt.file)
    for name, value in state.items():
        if isinstance(value, StoredTensor) and value.shape:
            tensors[name] = _same_shape(value, param, pt.file, name)
            continue
        scalar = pt.materialize(value)
        if scalars.setdefault(name, scalar) != scalar:
            raise Lossy(
                f"{pt.file}: {param.name}: {name} is {scalar}, but {scalars[name]} for other parameters; one {name} for all is "
                "what a Megatron checkpoint of another layout can hold"
            )
    return tensors


def _require_elements(state: Mapping[str, object], param: LocalParam, file: str) -> None:
    """Where some states are shaped like a parameter and some are not, the optimizer is of a kind that works on whole matrices: what has the
    right shape need not be of elements either (soap's moments lie in the basis that its factors give).

    Raises:
        Lossy: It is; names all that cannot be reshaped.
    """
    shapes = {name: one.shape for name, one in state.items() if isinstance(one, StoredTensor) and one.shape}
    others = [f"{name} {shape}" for name, shape in shapes.items() if shape != param.shape or name in FACTORS]
    if others and len(others) < len(shapes):
        raise Lossy(
            f"{file}: {', '.join(others)} of {param.name} {param.shape} belong to the whole matrix, as its rank has it, and not to its "
            "elements: no other layout or format can hold the states of this optimizer\n"
            "The engine resumes them at the layout that was saved."
        )


def _same_shape(value: StoredTensor, param: LocalParam, file: str, state: str) -> StoredTensor:
    if value.shape != param.shape:
        raise Unsupported(
            f"{file}: {state} of {param.name} has shape {value.shape}, its parameter {param.shape}; only states shaped like "
            "their parameter can be reshaped\nIf the parameter is in another param group, say so with --rules (wd_mult); "
            "--no-optimizer converts the weights alone."
        )
    return value
