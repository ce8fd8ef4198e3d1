"""What is said of states that the live optimizer keeps in fewer bits, or in other parts, than they are stored in.

Source: Transformer Engine 2.9, ``pytorch/optimizers/fused_adam.py`` (``_apply_scale``, ``set_scaled_state``).
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.families.megatron.arguments import Arguments

from .optimizers import ChainMember

_FIELDS = {MASTER: "main_params_dtype", EXP_AVG: "exp_avg_dtype", EXP_AVG_SQ: "exp_avg_sq_dtype"}
"""Megatron's argument, and its configuration's field, for the type of a state."""
_WHOLE = "float32"


def note_precision(
    report: Report, chain: Sequence[ChainMember | None], args: Arguments, *, cut: bool, masters: bool
) -> None:
    """Say what the live optimizer cannot keep as it is stored.

    Args:
        report: Told.
        chain: The live optimizers that are given states.
        args: The checkpoint's arguments.
        cut: Whether ranks have other parts of tensors than those that stored them.
        masters: Whether whole masters are stored, of which an optimizer that keeps remainders makes those.
    """
    members = [member for member in chain if member is not None]
    if cut and any(member.rescales for member in members):
        text = "optimizer states in fp16 or fp8: rounded anew, as each part of a tensor has a scale of its own"
        report.add(Fate.CHANGED, text)
    if masters and any(member.keeps_remainders for member in members):
        report.add(
            Fate.DERIVED,
            "fp32 master parameters: kept as what bf16 cuts off of them; one further from its parameter than 16 bits reach becomes the "
            "nearest: half way between two bf16 numbers, and rounded to the lower, it loses the last bit; kept in fp16, more than that",
        )
    narrow = {state: kind for member in members for state, kind in _narrowed(member, args)}
    if narrow:
        kinds = ", ".join(f"{state} in {kind}" for state, kind in narrow.items())
        report.add(Fate.DERIVED, f"optimizer states: rounded to the types in which this run keeps them: {kinds}")


def _narrowed(member: ChainMember, args: Arguments) -> list[tuple[str, str]]:
    """The states that a member keeps in a narrow type in which they were not kept before, and the type."""
    if not member.converts or member.offloaded:
        return []
    precise = args.flag("use_precision_aware_optimizer")
    live = {state: _name(getattr(member.optimizer.config, name, None)) for state, name in _FIELDS.items()}
    stored = {state: _name(args.values.get(name)) if precise else _WHOLE for state, name in _FIELDS.items()}
    return [(state, kind) for state, kind in live.items() if kind not in (_WHOLE, stored[state])]


def _name(dtype: object) -> str:
    """The name of a type of torch's."""
    return _WHOLE if dtype is None else str(dtype).rpartition(".")[2]
