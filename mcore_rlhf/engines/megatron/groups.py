"""Which stored param group each live one continues: found by what identifies a group, not by its position.

Sources: megatron-core 0.16.1 and 0.19.2, ``optimizer/optimizer.py`` (``param_group_identifier_keys``,
``_filter_and_reorder_param_groups``); 0.19.2, ``optimizer_param_scheduler.py`` (``ParamGroupOverride``). NeMo calls two of the
keys ``pre_wd_mult`` and ``pre_lr_mult``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.source import ParamGroup

_IDENTIFIERS = (("wd_mult", 1.0), ("lr_mult", 1.0), ("is_decoupled_lr", False))
_LIMITS = ("max_lr", "min_lr")
_FURTHER = ("start_wd", "end_wd", "eps")
"""What else a group may override since 0.19."""
_OPTIMIZER = "optimizer"
"""Which of several optimizers trains the group, since 0.18; those of the first have none."""
_OF_THE_RUN = frozenset(
    {
        "params", "is_expert_parallel", "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32",
        "pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
    }
)  # fmt: skip
"""What says how this run trains, and not what: who has the parameters, and how an offloaded optimizer works."""
Fields = Mapping[str, object]


def continued(live: Sequence[Fields], stored: Sequence[ParamGroup], problems: Problems) -> list[dict[str, object]]:
    """The fields that each live group takes from the stored groups.

    What depends on the layout (the parameters, whether they are experts dealt over ranks) or the device stays the live run's; fields
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
    return [{key: value for key, value in one.items() if key not in _OF_THE_RUN} for one in found]


def _found(group: Fields, live: Sequence[Fields], stored: Sequence[ParamGroup], problems: Problems) -> Fields:
    same = [one for one in stored if alike(one.fields, group)]
    own = [one for one in same if one.expert == bool(group.get("is_expert_parallel"))] or same
    twins = [one for one in live if _place(one) == _place(group)]
    chosen = _narrowed(group, own) if max(len(twins), len(own)) > 1 else own
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
    """Where several are alike, stored or live (``--decoupled-lr``, Muon beside Adam), the one with the same overrides."""
    kind = [one for one in candidates if ("betas" in one.fields) == ("betas" in group)]  # 0.16.1 names no optimizer
    found = [one for one in kind if all(one.fields.get(key) == group.get(key) for key in _LIMITS)]
    for key in _FURTHER if len(found) > 1 else ():
        found = [one for one in found if one.fields.get(key) == group.get(key)]
    return found


def _check_twins(stored: Sequence[ParamGroup], problems: Problems) -> None:
    """Where experts share a group with dense parameters now, and had one of their own, the two must have been equal."""
    dense = {all_that_tells(one.fields): one for one in stored if not one.expert}
    for expert in (one for one in stored if one.expert):
        twin = dense.get(all_that_tells(expert.fields), expert)
        different = [
            f"{key} {twin.fields.get(key)} and {value}"
            for key, value in expert.fields.items()
            if key not in _OF_THE_RUN and twin.fields.get(key) != value
        ]
        if different:
            problems.add(
                Lossy,
                f"param group with {describe(expert.fields)}: dense parameters and experts differ ({', '.join(different)}), and "
                "share one group in this run",
                "Load it with an expert-parallel size above 1.",
            )


def alike(one: Fields, other: Fields) -> bool:
    """Whether two groups, live or stored, can be the same; one that does not say which optimizer trains it may be any's."""
    said = {fields.get(_OPTIMIZER) for fields in (one, other)} - {None}
    return identity(one) == identity(other) and len(said) < 2


def identity(fields: Fields) -> tuple[object, ...]:
    """What identifies a group, apart from whether it holds experts."""
    return tuple(fields.get(key, fields.get(f"pre_{key}", default)) for key, default in _IDENTIFIERS)


def _place(fields: Fields) -> tuple[object, ...]:
    return (*identity(fields), bool(fields.get("is_expert_parallel")), fields.get(_OPTIMIZER))


def all_that_tells(fields: Fields) -> tuple[object, ...]:
    """Where groups stand beside one another in a checkpoint, what tells each from the others."""
    kept = (fields.get(key) for key in (_OPTIMIZER, *_LIMITS, *_FURTHER))
    return (*identity(fields), "betas" in fields, *kept)


def describe(fields: Fields) -> str:
    """A group in words."""
    named = dict(zip((key for key, _ in _IDENTIFIERS), identity(fields), strict=True))
    named.update((key, fields[key]) for key in (_OPTIMIZER, *_LIMITS, *_FURTHER) if key in fields)
    return ", ".join(f"{key} {value}" for key, value in named.items())
