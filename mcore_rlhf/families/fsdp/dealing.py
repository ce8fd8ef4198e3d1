"""Which param group of the target each parameter is in: the trainer builds its groups by names, and loads by position.

Source: transformers 5.23.0, ``trainer.py`` (``create_optimizer``, ``get_decay_parameter_names``): biases, and whatever has a norm's
name, are not decayed, whatever their shapes are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import Lossy, Problems
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.storage.torch_values import SmallTensor

from .groups import STEP, completed, is_decayed

_DECAY = "weight_decay"
_OF_MEMBERS = ("wd_mult", "is_expert_parallel", "default_config", "lr_mult", "is_decoupled_lr")
"""What Megatron finds a group by, which says nothing of how it is trained."""
OF_MEGATRON = (*_OF_MEMBERS, "max_lr", "min_lr", "bias_correction")
"""What its groups have and torch's have not; it stays in what we keep beside the files."""


def dealt(
    source: Source, order: Sequence[str], like: Sequence[ParamGroup], report: Report, own: Sequence[ParamGroup]
) -> tuple[ParamGroup, ...]:  # fmt: skip
    """The target's groups.

    Args:
        source: Whose groups say how each parameter is trained.
        order: Its trained parameters, as the module has them.
        like: The groups of the run that goes on; empty where nobody gave them.
        report: Told what changes.
        own: The groups of the source's own files, where it is such a trainer's already.

    Raises:
        Lossy: Parameters that the run has in one group are trained differently; all of them.
    """
    if like:
        deal = [(list(group.params), group.fields) for group in like]
    elif own:
        still = {spec.name for spec in source.model.params if not spec.trainable}  # given to the optimizer all the same
        return tuple(replace(group, params=tuple(_in_order(group.params, order, still))) for group in own)
    else:
        decayed = [name for name in order if is_decayed(name)]
        deal = [(decayed, {}), ([name for name in order if name not in set(decayed)], {})]
        text = "param groups: decayed parameters, then biases and norms, as transformers' Trainer has them; --like FOLDER takes a run's own"
        report.add(Fate.DERIVED, text, Item(Kind.GROUP))
    problems = Problems()
    made = tuple(_group(source, names, fields, report, problems) for names, fields in deal)
    problems.raise_if_any()
    return made


def _in_order(names: Sequence[str], order: Sequence[str], still: Collection[str]) -> Sequence[str]:
    """Names in the module's order; where some of them are not in it, as they are."""
    wanted = set(names)
    return names if wanted.intersection(still) else [name for name in order if name in wanted]


def _group(
    source: Source, names: Sequence[str], like: Mapping[str, object], report: Report, problems: Problems
) -> ParamGroup:  # fmt: skip
    """One group, trained as its members were; what the source does not say of it is the run's, or torch's own."""
    wanted = set(names)
    held = [(group, [name for name in group.params if name in wanted]) for group in source.state.groups]
    held = sorted((pair for pair in held if pair[1]), key=lambda pair: -len(pair[1]))
    if not held:  # a group without members still has settings
        first = source.state.groups[0] if source.state.groups else ParamGroup({})
        return ParamGroup({**like, **completed({**first.fields, _DECAY: 0.0}, (*first.scalars, STEP))}, params=())
    first, _ = held[0]
    for other, members in held[1:]:
        _compare(first, other, members, report, problems)
    said = completed(first.fields, (*first.scalars, STEP))
    missing = {key: value for key, value in like.items() if key not in first.fields}
    return ParamGroup({**said, **missing}, first.expert, tuple(names), ())


def _compare(
    first: ParamGroup, other: ParamGroup, members: Sequence[str], report: Report, problems: Problems
) -> None:  # fmt: skip
    ours, theirs = (
        {k: v for k, v in g.fields.items() if k not in (*g.scalars, STEP, *_OF_MEMBERS)} for g in (first, other)
    )
    different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    if not different:
        return
    said = ", ".join(f"{key} ({ours.get(key)}, {theirs.get(key)})" for key in different)
    if different == [_DECAY]:
        text = f"weight decay of {', '.join(members[:3])}{', …' if len(members) > 3 else ''}: {theirs.get(_DECAY)} → {ours.get(_DECAY)}"
        report.add(Fate.CHANGED, f"{text}, since the trainer has them in one param group with others")
        return
    problems.add(
        Lossy,
        f"the trainer has {members[0]} in one param group with others, and it is trained with different {said}",
        "--like FOLDER takes the groups of a checkpoint that the run itself wrote; --no-optimizer converts the weights alone.",
    )


def agree(groups: Sequence[ParamGroup], known: Sequence[ParamGroup]) -> bool:
    """Whether groups that were kept beside a file say of every parameter what the file says: it may have dealt them otherwise.

    Args:
        groups: The file's.
        known: Those that were kept.
    """
    here, there = ({name: group.fields for group in of for name in group.params} for of in (groups, known))
    return here.keys() == there.keys() and all(
        _plain(value) == _plain(there[name][key])
        for name in here
        for key, value in here[name].items()
        if key in there[name]
    )


def _plain(value: object) -> object:
    """A list and a tuple are one; so are a number and a tensor of one."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, SmallTensor) and value.numel() == 1 else value
