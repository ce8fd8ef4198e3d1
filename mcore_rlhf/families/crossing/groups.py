"""Param groups from one family to another: matched by what they hold, since neither family's numbers mean anything to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mcore_rlhf.core.catalog import EXP_AVG_SQ, FLOAT32, Shape
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values
from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.fsdp.groups import torch_class
from mcore_rlhf.families.megatron.groups import CLASSES, Membership, is_matrix, of_matrices, without_classes
from mcore_rlhf.families.module import USE_MUON, is_for_muon
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.models.huggingface.relation import Relation
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.torch_values import SmallTensor

LR_LIMITS = ("max_lr", "min_lr")
_EXPERT = "is_expert_parallel"
_STEP = "step"
_WEIGHT_DECAY = "weight_decay"
_KINDS: dict[str, object] = {
    _EXPERT: False, "default_config": True, "wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False,
}  # fmt: skip
"""What Megatron finds a group by, where nothing has a learning rate of its own.

Source: megatron-core 0.16.1, ``optimizer/__init__.py`` (``_get_param_groups``), ``optimizer/optimizer.py``
(``param_group_identifier_keys``).
"""
_Key = tuple[bool, float, bool]
"""Whether experts are in a group, its weight-decay multiplier, and whether an optimizer of matrices has it, where there is one."""


class DealtGroups(NamedTuple):
    """Param groups as they were, as they are dealt, and what is to be said of the second."""

    before: Sequence[ParamGroup]
    groups: tuple[ParamGroup, ...] = ()
    told: Sequence[Values] = ()


def _limits(dealt: DealtGroups) -> list[Values]:
    return [{"missing": " and ".join(missing)} for group in dealt.groups if (missing := _unlimited(group))]


def _lions_beside_adam(dealt: DealtGroups) -> int:
    """How many param groups Lion has, which knows no epsilon, where Adam has others."""
    of_betas = [group.fields for group in dealt.before if "betas" in group.fields]
    lions = sum("eps" not in fields for fields in of_betas)
    return lions if lions < len(of_betas) else 0


OF_HUGGINGFACE: tuple[Rule[DealtGroups], ...] = (
    *(rule.of_part(lambda dealt: dealt.before) for rule in CLASSES),
    # Source: megatron-core 0.19.2, ``optimizer/__init__.py`` (``_get_megatron_emerging_optimizer``)
    Rule(Fate.LOST, "Lion of {found} param groups beside Adam of the others: no optimizer of DeepSpeed's or torch's trains so. The states "
         "are there, but a run goes on with one class for all", _lions_beside_adam),
    Rule(Fate.NOTE, "{others}: Megatron's Muon {does} train it, DeepSpeed's {would}: these states load where its use_muon is {mark}",
         lambda dealt: dealt.told),
    Rule(Fate.DERIVED, "param group {number}: {count} parameters ({first}, …), as Megatron's rule for weight decay deals them",
         lambda d: [{"number": n, "count": len(g.params), "first": g.params[0]} for n, g in enumerate(d.groups)], [Item(Kind.GROUP)]),
)  # fmt: skip
"""Who is where; see :func:`with_members`."""


def _of_class(*kinds: str) -> Callable[[DealtGroups], list[Values]]:
    """Param groups of classes of torch's."""
    return lambda d: [{"kind": kind} for kind in kinds if any(torch_class(group.fields) == kind for group in d.before)]


def _coupled(dealt: DealtGroups) -> list[object]:
    """Weight decays that Adam adds to the gradients."""
    groups = [group.fields for group in dealt.before if torch_class(group.fields) == "Adam"]
    coupled = [of for of in groups if of.get("decoupled_weight_decay") is False]
    return list({repr(decay): decay for of in coupled if (decay := of.get(_WEIGHT_DECAY))}.values())


OF_MEGATRON: tuple[Rule[DealtGroups], ...] = (
    # Source: megatron-core 0.19.2, ``optimizer/__init__.py`` (``_get_megatron_optimizer_based_on_param_groups``)
    Rule(Fate.LOST, "{kind}: none of Megatron's optimizers steps so. It goes on as Adam, from the same moments",
         _of_class("RAdam", "NAdam")),
    Rule(Fate.LOST, "maximize: Megatron's run goes up, too, where it has torch's own optimizer; Transformer Engine's and Apex's, which it "
         "takes where they are installed, go down", lambda dealt: any(group.fields.get("maximize") for group in dealt.before)),
    Rule(Fate.LOST, "weight decay {found}, which Adam adds to the gradients: Megatron's Adam takes it from the weights (AdamW) unless its "
         "OptimizerConfig has decoupled_weight_decay=False, for which Megatron-LM has no argument", _coupled),
    Rule(Fate.CHANGED, "weight decay of vectors such as {name}: {had} → 0, as Megatron has it; --rules (wd_mult: 1) keeps it",
         lambda dealt: [one for one in dealt.told if one["changed"]]),
    Rule(Fate.DERIVED, "param group {experts}with weight-decay multiplier {wd_mult:g}: of group {numbers} of the source",
         lambda dealt: dealt.told),
    Rule(Fate.NOTE, "param groups have no {missing}, by which megatron-core 0.19 finds them: --lr-limits MAX,MIN writes those of the run "
         "that goes on", _limits),
)  # fmt: skip
"""What changes; see :func:`as_megatron`."""


def with_members(
    source: Source, relation: Relation, membership: Membership, scalars: Mapping[str, object]
) -> DealtGroups:
    """Megatron's groups with Hugging Face's names in them, in the order of ``model.parameters()``.

    Args:
        source: Megatron's.
        relation: Its tensors under both names.
        membership: Which parameter Megatron puts in which group.
        scalars: What its plain optimizer keeps per parameter, equal for all.

    Raises:
        LayoutMismatch: A parameter fits no group, or several.
    """
    groups = _with_marks(without_classes(source.state.groups), membership)
    if not groups:
        return DealtGroups(source.state.groups)
    into = _merged_with(groups)
    members: list[list[str]] = [[] for _ in groups]
    for name, shares in relation.of_huggingface().items():
        spec = source.model.get(shares[0].name)
        if spec is not None and spec.trainable:
            members[into[_position(spec, groups, membership)]].append(name)
    otherwise = [
        one
        for group, names in zip(groups, members, strict=True)
        if (one := _otherwise(group, names, relation.huggingface))
    ]
    for group, names in zip(groups, members, strict=True):
        if group.fields.get(USE_MUON) is True:  # DeepSpeed sorts what its Muon trains, and loads by position
            names.sort(key=relation.huggingface.__getitem__, reverse=True)
    made = [_with_step(group, names, scalars) for group, names in zip(groups, members, strict=True) if names]
    made.sort(key=_place)
    return DealtGroups(source.state.groups, tuple(made), otherwise)


def _place(group: ParamGroup) -> tuple[bool, bool]:
    """Where a group stands, which DeepSpeed and torch find by its place: trainers put what decays first, and DeepSpeed its Muon.

    Sources: transformers 5.23.0, ``trainer.py`` (``create_optimizer``); OpenRLHF 0.11.2, ``utils/deepspeed/deepspeed_utils.py``
    (``get_optimizer_grouped_parameters``); DeepSpeed 0.19.8, ``runtime/engine.py`` (``_configure_basic_optimizer``).
    """
    return group.fields.get(USE_MUON) is False, group.fields.get("wd_mult", 1) == 0


def _with_marks(groups: Sequence[ParamGroup], membership: Membership) -> Sequence[ParamGroup]:
    """Megatron's Muon beside Adam with the marks by which DeepSpeed's finds its groups; any other optimizer's as they are."""
    muon = of_matrices(groups)
    adam = all(
        "betas" in one.fields and one.fields.get("optimizer") in (None, "adam")
        for one, of in zip(groups, muon, strict=True)
        if not of
    )
    if str(membership.args.values.get("optimizer")).removeprefix("dist_") != "muon" or not adam:
        return groups
    found = []
    for group, of in zip(groups, muon, strict=True):
        beta = group.fields.get("momentum_beta")  # as it was called before 0.18
        momentum = {"momentum": beta} if of and beta is not None else {}
        found.append(replace(group, fields={USE_MUON: of, **momentum, **group.fields}))
    return found


def _otherwise(group: ParamGroup, names: Sequence[str], shapes: Mapping[str, Shape]) -> Values | None:
    """What a group trains otherwise than DeepSpeed would."""
    mark = group.fields.get(USE_MUON)
    others = [name for name in names if mark is not None and is_for_muon(name, shapes[name]) != mark]
    does, would = ("does", "would not") if mark else ("does not", "would")
    return {"others": others, "does": does, "would": would, "mark": mark} if others else None


def _position(spec: ParamSpec, groups: Sequence[ParamGroup], membership: Membership) -> int:
    """The position of a parameter's group: routed experts have groups of their own where they are dealt over ranks."""
    expert = is_routed_expert(spec.name) and any(group.expert for group in groups)
    own = [number for number, group in enumerate(groups) if group.expert == expert]
    return own[membership.index(spec.name, len(spec.global_shape), [groups[number] for number in own])]


def _merged_with(groups: Sequence[ParamGroup]) -> list[int]:
    """For every group, the one that its parameters go to: experts join the others where both are trained alike."""
    into = list(range(len(groups)))
    for number, group in enumerate(groups):
        for other, candidate in enumerate(groups) if group.expert else ():
            if not candidate.expert and _alike(group.fields, candidate.fields):
                into[number] = other
                break
    return into


def _alike(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    return all(a.get(key) == b.get(key) for key in {*a, *b} - {_EXPERT})


def _with_step(group: ParamGroup, names: Sequence[str], scalars: Mapping[str, object]) -> ParamGroup:
    """The group with its step as torch's optimizers keep it: a number for each parameter, as a tensor."""
    fields = {**group.fields, **scalars}
    if _STEP in fields:
        fields[_STEP] = SmallTensor.of(float(fields[_STEP]), FLOAT32)  # type: ignore[arg-type]
    kept = tuple(name for name in dict.fromkeys([*scalars, _STEP]) if name in fields)
    return ParamGroup(fields, params=tuple(names), scalars=kept)


def as_megatron(
    source: Source,
    relation: Relation,
    membership: Membership,
    lr_limits: tuple[float, float] | None = None,
) -> DealtGroups:
    """Groups of Hugging Face's names as Megatron makes them: one for each weight-decay multiplier.

    Args:
        source: Whose groups say which parameters are in them.
        relation: Its tensors under both names.
        membership: The multiplier that Megatron, or the user's rules, give a parameter.
        lr_limits: ``max_lr`` and ``min_lr`` of groups that have none.

    Raises:
        LayoutMismatch: The members of a group are not known.
        Lossy: Parameters that Megatron has in one group are trained differently; all of them.
    """
    groups = source.state.groups
    if not groups:
        return DealtGroups(groups)
    where = {name: number for number, group in enumerate(groups) for name in group.params}
    if not where:
        raise LayoutMismatch(f"{source.root}: does not say which parameters are in which param group")
    found: dict[_Key, dict[int, str]] = {}
    for name, shares in relation.of_megatron().items():
        ndim = len(relation.megatron[name])
        matrix = membership.args.has_matrix_optimizer and is_matrix(name, ndim)
        for number in {where[share.name]: None for share in shares if share.name in where}:
            key = (is_routed_expert(name), membership.wd_mult(name, ndim), matrix)
            found.setdefault(key, {}).setdefault(number, name)
    problems = Problems()
    plain = [_plain(group, has_variance=EXP_AVG_SQ in source.states) for group in groups]
    # Muon is the first of Megatron's chain, and in each optimizer what has its defaults
    chained = sorted(found, key=lambda key: (not key[2], key[1] != 1))
    made = {key: _merged(plain, key, found[key], problems) for key in chained}
    _check_muon(groups, found, problems)
    problems.raise_if_any()
    kept = _without_twins(made)
    told = [_merged_of(groups, key, found[key], group) for key, group in kept.items()]
    return DealtGroups(groups, tuple(_with_limits(group, lr_limits) for group in kept.values()), told)


def _with_limits(group: ParamGroup, limits: tuple[float, float] | None) -> ParamGroup:
    """The group with the learning rates between which its schedule runs: only the run that goes on knows them.

    Source: megatron-core 0.19.2, ``optimizer/optimizer.py`` (``param_group_identifier_keys``): a group is looked for by both; before,
    one that lacks them had those of the run.
    """
    missing = _unlimited(group)
    if not missing or limits is None:
        return group
    given = dict(zip(LR_LIMITS, limits, strict=True))
    return replace(group, fields={**group.fields, **{key: given[key] for key in missing}})


def _unlimited(group: ParamGroup) -> list[str]:
    return [key for key in LR_LIMITS if group.fields.get(key) is None]


def _without_twins(made: Mapping[_Key, ParamGroup]) -> dict[_Key, ParamGroup]:
    """Without the experts' groups where all of them are trained as other parameters are; a writer makes them when it deals experts."""
    experts = {key: group for key, group in made.items() if group.expert}
    others = [group.fields for group in made.values() if not group.expert]
    twins = all(any(_alike(group.fields, fields) for fields in others) for group in experts.values())
    return {key: group for key, group in made.items() if not (twins and group.expert)}


def _check_muon(groups: Sequence[ParamGroup], found: Mapping[_Key, Mapping[int, str]], problems: Problems) -> None:
    """Both have every matrix trained by Muon but those that stand for words, and call those differently."""
    for (_, _, matrix), numbers in found.items():
        others = [name for n, name in numbers.items() if groups[n].fields.get(USE_MUON) not in (None, matrix)]
        if others:
            ours, theirs = ("Muon", "Adam") if matrix else ("Adam", "Muon")
            text = (
                f"{', '.join(others)}: trained by {theirs} in DeepSpeed, whose states Megatron's {ours} has no use for"
            )
            problems.add(Lossy, text, "--no-optimizer converts the weights alone.")


def _merged(
    plain: Sequence[dict[str, object]], key: _Key, numbers: Mapping[int, str], problems: Problems
) -> ParamGroup:
    """Megatron's group of a multiplier, of all groups that have parameters in it."""
    expert, wd_mult, _ = key
    first, *others = (plain[number] for number in numbers)
    for other in others:
        different = sorted(key for key in {*first, *other} if key not in _KINDS and first.get(key) != other.get(key))
        if different:
            problems.add(
                Lossy,
                f"Megatron has {' and '.join(numbers.values())} in one param group (weight-decay multiplier {wd_mult:g}), but they are "
                f"trained with different {', '.join(f'{key} ({first.get(key)}, {other.get(key)})' for key in different)}",
                "Say with --rules (wd_mult: 0 or 1) which parameters are decayed.",
            )
            break
    if wd_mult == 0 and first.get(_WEIGHT_DECAY):
        first = {**first, _WEIGHT_DECAY: 0.0}
    return ParamGroup({**_KINDS, **first, "wd_mult": wd_mult, _EXPERT: expert}, expert)


def _merged_of(groups: Sequence[ParamGroup], key: _Key, numbers: Mapping[int, str], made: ParamGroup) -> Values:
    """Of which groups one is made, and what of them it changes."""
    expert, wd_mult, _ = key
    had = groups[next(iter(numbers))].fields.get(_WEIGHT_DECAY)
    return {
        "experts": "of experts " if expert else "", "wd_mult": wd_mult, "numbers": [*numbers], "had": had,
        "name": next(iter(numbers.values())), "changed": had != made.fields.get(_WEIGHT_DECAY),
    }  # fmt: skip


def _plain(group: ParamGroup, *, has_variance: bool) -> dict[str, object]:
    """The fields as Megatron's optimizers keep them: the step is the group's, and a whole number.

    Args:
        group: Of the source.
        has_variance: Whether what has betas is Adam: Lion has them too, and corrects no bias.
    """
    marks = {USE_MUON, *(["momentum"] if "momentum_beta" in group.fields else [])}  # see :func:`_with_marks`
    marks |= {*group.scalars} - {_STEP}
    fields = {key: value for key, value in group.fields.items() if key not in marks}
    if _STEP in fields:
        fields[_STEP] = int(float(fields[_STEP]))  # type: ignore[arg-type]
    if "betas" in fields and has_variance:
        fields.setdefault("bias_correction", True)
    if group.fields.get(USE_MUON) is False:
        fields.setdefault("optimizer", "adam")
    return fields
