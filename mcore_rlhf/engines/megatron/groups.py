"""Which stored param group each live one continues: found by what identifies a group, not by its position.

Source: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``param_group_identifier_keys``,
``_filter_and_reorder_param_groups``); NeMo calls two of the keys ``pre_wd_mult`` and ``pre_lr_mult``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.source import ParamGroup

_IDENTIFIERS = (("wd_mult", 1.0), ("lr_mult", 1.0), ("is_decoupled_lr", False))
_LIMITS = ("max_lr", "min_lr")
_OF_THE_LAYOUT = frozenset({"params", "is_expert_parallel"})
Fields = Mapping[str, object]


def continued(live: Sequence[Fields], stored: Sequence[ParamGroup], problems: Problems) -> list[dict[str, object]]:
    """The fields that each live group takes from the stored groups.

    What depends on the layout (the parameters, whether they are experts dealt over ranks) stays the live run's; fields
    that nothing was stored for do too.

    Args:
        live: The live param groups of all members, in order.
        stored: Those of the checkpoint.
        problems: Hears of groups that nothing, or more than one, continues.

    Returns:
        For each live group, what to set; empty where there was a problem.
    """
    apart = any(group.get("is_expert_parallel") for group in live)
    found = [_found(group, live, stored, problems) for group in live]
    if not apart:
        _check_twins(stored, problems)
    return [{key: value for key, value in one.items() if key not in _OF_THE_LAYOUT} for one in found]


def _found(group: Fields, live: Sequence[Fields], stored: Sequence[ParamGroup], problems: Problems) -> Fields:
    alike = [one for one in stored if identity(one.fields) == identity(group)]
    own = [one for one in alike if one.expert == bool(group.get("is_expert_parallel"))]
    twins = [one for one in live if _place(one) == _place(group)]
    chosen = _narrowed(group, own or alike) if max(len(twins), len(own or alike)) > 1 else own or alike
    if len(chosen) != 1:
        known = "; ".join(describe(one.fields) for one in stored) or "none"
        problems.add(
            LayoutMismatch,
            f"param group with {describe(group)}: {len(chosen)} groups of the checkpoint fit, expected one (it has: {known})",
            "Give the optimizer the weight-decay and learning-rate rules of the run that was saved.",
        )
        return {}
    return chosen[0].fields


def _narrowed(group: Fields, candidates: Sequence[ParamGroup]) -> Sequence[ParamGroup]:
    """Where several are alike, stored or live (``--decoupled-lr``), the one with the same limits of the learning rate."""
    return [one for one in candidates if all(one.fields.get(key) == group.get(key) for key in _LIMITS)]


def _check_twins(stored: Sequence[ParamGroup], problems: Problems) -> None:
    """Where experts share a group with dense parameters now, and had one of their own, the two must have been equal."""
    dense = {identity(one.fields): one for one in stored if not one.expert}
    for expert in (one for one in stored if one.expert):
        twin = dense.get(identity(expert.fields), expert)
        different = [
            f"{key} {twin.fields.get(key)} and {value}"
            for key, value in expert.fields.items()
            if key not in _OF_THE_LAYOUT and twin.fields.get(key) != value
        ]
        if different:
            problems.add(
                Lossy,
                f"param group with {describe(expert.fields)}: dense parameters and experts differ ({', '.join(different)}), and "
                "share one group in this run",
                "Load it with an expert-parallel size above 1.",
            )


def identity(fields: Fields) -> tuple[object, ...]:
    """What identifies a group, apart from whether it holds experts."""
    return tuple(fields.get(key, fields.get(f"pre_{key}", default)) for key, default in _IDENTIFIERS)


def _place(fields: Fields) -> tuple[object, ...]:
    return (*identity(fields), bool(fields.get("is_expert_parallel")))


def describe(fields: Fields) -> str:
    """A group in words."""
    named = dict(zip((key for key, _ in _IDENTIFIERS), identity(fields), strict=True))
    named.update((key, fields[key]) for key in _LIMITS if key in fields)
    return ", ".join(f"{key} {value}" for key, value in named.items())
