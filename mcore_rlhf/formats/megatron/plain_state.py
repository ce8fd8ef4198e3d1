"""Reading the optimizer state of a plain (not distributed) optimizer out of ``model_optim_rng.pt``.

States are numbered through the param groups, each group in registration order over all model chunks; fp32 copies stand
in a list of lists of their own.

Source: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params.state_dict``,
``FP32Optimizer.state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rlhf.core.dtype import FLOAT32
from mcore_rlhf.core.names import MASTER
from mcore_rlhf.errors import Lossy, Unsupported
from mcore_rlhf.families.megatron.buffers import LocalParam
from mcore_rlhf.families.megatron.groups import Membership, inner_state
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

from .flat_state import States

Scalars = dict[str, object]


def masters_of(member: Mapping[str, object]) -> Sequence[Sequence[StoredTensor]] | None:
    """The fp32 copies by group, or None in an fp32 run."""
    value = member.get("fp32_from_fp16_params", member.get("fp32_from_fp16"))
    return value if isinstance(value, list) else None


def has_plain_state(member: Mapping[str, object]) -> bool:
    """Whether a member of the optimizer holds tensors of its own."""
    return bool(inner_state(member).get("state"))


def plain_states(
    member: Mapping[str, object],
    pt: PtFile,
    params: Sequence[LocalParam],
    groups: Sequence[ParamGroup],
    membership: Membership,
) -> tuple[dict[tuple[int, str], States], Scalars]:
    """Where the states of one member's parameters lie.

    Args:
        member: The member's dictionary.
        pt: The file.
        params: The member's trainable parameters on this rank, in registration order.
        groups: Its param groups, in the stored order.
        membership: Decides which group a parameter is in.

    Returns:
        By (chunk, name): state name → where it lies; and values that all parameters share, such as ``step``.

    Raises:
        Unsupported: Groups, states and parameters do not fit together as they do in the optimizers that are known.
    """
    file, inner = pt.file, inner_state(member)
    states = inner.get("state")
    stored_groups = inner.get("param_groups")
    if not isinstance(states, dict) or not isinstance(stored_groups, list):
        raise Unsupported(f"{file}: the optimizer has no 'state' and 'param_groups'")
    dealt: list[list[LocalParam]] = [[] for _ in groups]
    for param in params:
        dealt[membership.index(param.name, len(param.shape), groups)].append(param)
    found: dict[tuple[int, str], States] = {}
    scalars: Scalars = {}
    for number, (inside, stored) in enumerate(zip(dealt, stored_groups, strict=True)):
        indices = stored.get("params", [])
        if len(indices) != len(inside):
            raise Unsupported(
                f"{file}: param group {number} has {len(indices)} parameters, {len(inside)} expected from the names and shapes "
                f"({', '.join(p.name for p in inside[:3])}, …)\nSay which group parameters belong to with --rules (wd_mult)."
            )
        for index, param in zip(indices, inside, strict=True):
            found[param.vpp_rank, param.name] = _tensors(states.get(index, {}), scalars, param, pt)
    for inside, masters in zip(dealt, masters_of(member) or [], strict=False):
        half = [param for param in inside if param.dtype != FLOAT32]
        for param, master in zip(half, masters, strict=True):
            found[param.vpp_rank, param.name][MASTER] = _same_shape(master, param, file, MASTER)
    return found, scalars


def _tensors(state: Mapping[str, object], scalars: Scalars, param: LocalParam, pt: PtFile) -> States:
    tensors: States = {}
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


def _same_shape(value: StoredTensor, param: LocalParam, file: str, state: str) -> StoredTensor:
    if value.shape != param.shape:
        raise Unsupported(
            f"{file}: {state} of {param.name} has shape {value.shape}, its parameter {param.shape}; only states shaped like "
            "their parameter can be reshaped\nIf the parameter is in another param group, say so with --rules (wd_mult)."
        )
    return value
