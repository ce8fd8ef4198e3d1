"""Param groups of torch's optimizers: fields per group or per parameter, members by name or by number, steps per parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, Shape, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Kind, same
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unportable, Unsupported
from mcore_rlhf.families.lora.names import OF_ADAPTER
from mcore_rlhf.families.source import FROZEN, ParamGroup, Source
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.torch_values import SmallTensor

STEP, PARAMS = "step", "params"


@dataclass(slots=True)
class Collected:
    """What a folder says about param groups, on its way into :class:`ParamGroup`.

    Args:
        fields: Of every group, by its number.
        own: Of every parameter, in the flat style.
        scalars: What the optimizer keeps per parameter that is no tensor of its shape, by parameter.
    """

    fields: dict[int, dict[str, object]] = field(default_factory=dict)
    own: dict[str, dict[str, object]] = field(default_factory=dict)
    scalars: dict[str, dict[str, object]] = field(default_factory=dict)

    def members(self) -> list[str]:
        """Every parameter that is in a group, by name, in the groups' order; empty in the numbered style."""
        listed = [name for fields in self._ordered() for name in _params(fields)]
        return list(self.own) if self.own else [name for name in listed if isinstance(name, str)]

    def _ordered(self) -> list[dict[str, object]]:
        return [self.fields[number] for number in sorted(self.fields)]

    def groups(
        self, folder: ReadablePath, order: Sequence[str], notes: Report, stepped: Mapping[str, Collection[str]]
    ) -> tuple[ParamGroup, ...]:
        """The groups.

        Args:
            folder: For messages.
            order: The parameters in the model's order.
            notes: Told what was derived.
            stepped: Those of which there are states, with these.

        Raises:
            Unsupported: A group does not say what is in it.
            Unportable: What is kept of a parameter is neither a state of its shape nor a number.
            Incomplete: One does not say at which step its states are, and others of its group with the same states do.
        """
        groups = self._dealt(folder, order, notes) if self.own else self._listed(folder, notes)
        for number, group in enumerate(groups):
            counted = {
                frozenset(stepped[name]) - {STEP}: name
                for name in group.params
                if name in stepped and STEP in self.scalars.get(name, {})
            }  # of a Muon with Adam beside it, those of one kind have no step
            astray = [
                (name, counted[kind])
                for name in group.params
                if name in stepped and STEP not in self.scalars.get(name, {})
                and (kind := frozenset(stepped[name]) - {STEP}) in counted
            ]  # fmt: skip
            if astray:
                raise Incomplete(
                    f"{folder}: param group {number}: {astray[0][0]} has states and no {STEP!r}, which {astray[0][1]} has\n"
                    "The file is damaged or was edited: copy it again."
                )
        return groups

    def _listed(self, folder: ReadablePath, notes: Report) -> tuple[ParamGroup, ...]:
        made = []
        for number, fields in enumerate(self._ordered()):
            names = _params(fields)
            if not isinstance(fields.get(PARAMS), list) or not all(isinstance(name, str) for name in names):
                raise Unsupported(f"{folder}: param group {number} does not list its parameters by name: {names[:3]}")
            rest = {key: value for key, value in fields.items() if key != PARAMS}
            made.append(self._group(folder, number, rest, cast(list[str], names), notes))
        return tuple(made)

    def _dealt(self, folder: ReadablePath, order: Sequence[str], notes: Report) -> tuple[ParamGroup, ...]:
        """The flat style forgets groups: parameters with equal fields were in one, or might as well have been."""
        found: dict[str, tuple[dict[str, object], list[str]]] = {}
        for name in [name for name in order if name in self.own]:
            fields = self.own[name]
            found.setdefault(repr(sorted(fields.items())), (fields, []))[1].append(name)
        notes.add(
            Fate.DERIVED,
            f"{len(found)} param groups: each is of parameters with the same settings, since the folder stores them per parameter",
        )
        return tuple(self._group(folder, n, fields, names, notes) for n, (fields, names) in enumerate(found.values()))

    def _group(
        self, folder: ReadablePath, number: int, fields: Mapping[str, object], names: Sequence[str], notes: Report
    ) -> ParamGroup:
        scalars: dict[str, object] = {}
        for key in dict.fromkeys(key for name in names for key in self.scalars.get(name, {})):
            of = {name: self.scalars[name][key] for name in names if key in self.scalars.get(name, {})}
            held = {name: value for name, value in of.items() if value is not None}  # a momentum that has not begun
            if not held:
                continue
            first = next(iter(held))
            if strange := [name for name, value in held.items() if not _is_number(value)]:
                raise _no_number(f"{folder}: ", key, strange[0])
            apart = next((name for name, value in held.items() if not same(_number(value), _number(held[first]))), None)
            scalars[key] = held[max(held, key=lambda name: _number(held[name]))]
            if apart is not None:
                notes.add(Fate.LOST, differing(number, key, first, held[first], apart, held[apart]))
        return ParamGroup({**fields, **scalars}, params=tuple(names), scalars=tuple(scalars))


_OF_EXPERT, _ANY = re.compile(r"\.experts\.\d{1,18}\."), ".experts.*."


def without_empty_groups(source: Source) -> Source:
    """A source without the param groups that train nothing: DeepSpeed's engine drops them from any optimizer that it is given.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_configure_optimizer``); transformers 5.23.0, ``trainer.py`` (``create_optimizer``),
    whose second group, of biases and norms, is empty where an adapter is trained.

    Args:
        source: Of another format; where none of its groups says what it trains, they stay, and DeepSpeed's own stay as its run has them.
    """
    groups, notes = tuple(group for group in source.state.groups if group.params), source.notes.copy()
    if not groups or len(groups) == len(source.state.groups):
        return source
    text = f"param groups: {len(groups)} of {len(source.state.groups)}, as DeepSpeed drops those that train nothing"
    notes.add(Fate.DERIVED, text, Item(Kind.GROUP))
    return replace(source, notes=notes, state=replace(source.state, groups=groups))


def without_frozen(source: Source) -> Source:
    """A source whose optimizer trains what it has states of, and nothing else: one that is given all of a model has none of what is frozen.

    Args:
        source: A source under a module's names, where that counts as trained which is in a param group.
    """
    role, kept = source.role, [state for state in source.states if state != MASTER]
    listed = dict.fromkeys(name for group in source.state.groups for name in group.params)
    still = {n for n in listed if not any(TensorName(role, n, state) in source.catalog for state in kept)}
    if not still or len(still) == len(listed):
        return source
    there, notes = source.catalog, source.notes.copy()
    names = [name._replace(state=PARAM) if name.param in still else name for name in there.names]
    notes.through([FROZEN], [name for name in listed if name in still])
    trained = {_OF_EXPERT.sub(_ANY, name) for name in listed if name not in still}
    if idle := [
        name for name in listed if name in still and _OF_EXPERT.search(name) and _OF_EXPERT.sub(_ANY, name) in trained
    ]:
        notes.add(
            Fate.LOST,
            f"{len(idle)} of these are of experts that no token has reached, since others of their layer have states: {idle[0]}, …; a run "
            "that trains all experts does not load them as frozen ones: take a later step, or --no-optimizer",
        )
    specs = (replace(spec, trainable=spec.trainable and spec.name not in still) for spec in source.model.params)
    groups = (replace(group, params=tuple(n for n in group.params if n not in still)) for group in source.state.groups)
    return replace(
        source, model=source.model.having(specs), catalog=Chunks(there.tensors, names, there.numbers), notes=notes,
        state=replace(source.state, groups=tuple(group for group in groups if group.params)),
    )  # fmt: skip


def left_frozen(source: Source) -> frozenset[str]:
    """Those of an optimizer's parameters without a state that a run seems to have frozen, by name, and by number as torch counts them.

    A script may give its optimizer all parameters; of a frozen one there is no state. It is meant where a whole layer has none, or what is
    called alike in all layers, or all but adapters; then also of what is in no layer. A single one may have been lost.
    """
    listed = [name for group in source.state.groups for name in group.params]
    kept = [state for state in source.states if state != MASTER]
    trained = {name for name in listed if any(TensorName(source.role, name, state) in source.catalog for state in kept)}
    parts: dict[str, set[str]] = {}
    for name in listed:
        if layer := _LAYER.match(name):
            for part in (layer[0], f"*.{name[layer.end() :]}"):
                parts.setdefault(part, set()).add(name)
    found = set[str]().union(*(part for part in parts.values() if len(part) > 1 and part.isdisjoint(trained)))
    if trained and all(map(OF_ADAPTER.fullmatch, trained)):
        found = {name for name in listed if not OF_ADAPTER.fullmatch(name)}
    elif found:
        found.update(name for name in listed if name not in trained and not _LAYER.match(name))
    numbers = (str(number) for number, name in enumerate(listed) if name in found)
    return frozenset((*found, *numbers)) if trained else frozenset()


_LAYER = re.compile(r".*?\.\d{1,18}\.")


def differing(number: int, key: str, first: str, one: object, second: str, other: object) -> str:
    """The line of the report about a group whose parameters do not agree."""
    return (
        f"param group {number}: {first} is at {key} {_number(one):g}, {second} at {_number(other):g}; "
        "one for the group is kept, the largest"
    )


def _no_number(where: str, key: str, param: str) -> Unportable:
    return Unportable(
        f"{where}the optimizer keeps {key} of {param}, which is no number; only states with one value per element, and numbers, "
        "can be converted\n--no-optimizer takes the weights alone."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, SmallTensor) and value.numel() == 1)


def _number(value: object) -> float:
    return float(cast(float, value))


def _params(fields: Mapping[str, object]) -> list[object]:
    params = fields.get(PARAMS)
    return list(params) if isinstance(params, list | tuple) else []


def name_numbers(
    collected: Collected, shapes: Mapping[str, Shape], states: Mapping[str, Shape], folder: ReadablePath, notes: Report,
    *, flat: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Names for the numbers that a plain ``optimizer.state_dict()`` has instead.

    The optimizer counts its parameters group by group; which parameter that is only the program knew that built the groups.
    So the two usual ways are tried, and taken where every shape agrees.

    Args:
        collected: The groups; their members are replaced by names.
        shapes: Of the model's floating-point tensors, in its order.
        states: Shape of one state of every number.
        folder: For messages.
        notes: Told what was found.
        flat: Whether states are flattened, and only their number of elements tells.

    Raises:
        Unportable: Several orders fit; or there are as many groups as in no usual way, and nobody knows whether one would.
        Unsupported: None does; or the members of the groups are not numbers.
    """
    ordered = [collected.fields[number] for number in sorted(collected.fields)]
    numbers = [str(number) for fields in ordered for number in _params(fields)]
    if sorted(numbers, key=int) != [str(n) for n in range(len(numbers))]:
        raise Unsupported(f"{folder}: the optimizer's state is numbered, but its param groups list {numbers[:5]}")
    if strange := sorted(states.keys() - {*numbers}):
        raise Unsupported(
            f"{folder}: the optimizer has states of the numbers {strange[:5]}, which no param group lists"
        )
    if shapes and all(map(OF_ADAPTER.fullmatch, shapes)):  # its base is listed, too, and was not saved
        for fields in ordered:
            fields[PARAMS] = [number for number in _params(fields) if str(number) in states]
    deals = [(how, deal) for how, deal in _deals(shapes) if len(deal) == len(ordered)]
    known = {name: (prod(shape),) for name, shape in shapes.items()} if flat else shapes
    fitting = [(how, named) for how, deal in deals if (named := _named(ordered, deal, known, states)) is not None]
    if len({tuple(sorted(named.items())) for _, named in fitting}) != 1 or not all(named for _, named in fitting):
        raise (Unportable if fitting or not deals else Unsupported)(
            f"{folder}: the optimizer's state is numbered (0 to {len(numbers) - 1}), and neither the model's order nor the usual split "
            f"by weight decay says which of its {len(shapes)} tensors are meant: their shapes fit in no way, or in several\n"
            "Say with --rules which are frozen (trainable: false); or save it again with "
            "torch.distributed.checkpoint.state_dict.get_state_dict, which has names."
        )
    how, names = fitting[0]  # several ways of dealing may come to the same
    agree = "numbers of elements" if flat else "shapes"
    notes.add(Fate.DERIVED, f"names of the optimizer's numbered parameters: {how}; all {agree} agree")
    return _renamed(collected, names)


def _deals(shapes: Mapping[str, Shape]) -> list[tuple[str, list[list[str]]]]:
    """How programs deal parameters to groups: candidates of every group, in the model's order."""
    names = list(shapes)
    matrices, vectors = [n for n in names if len(shapes[n]) > 1], [n for n in names if len(shapes[n]) < 2]
    biases = [name for name in names if name.endswith("bias")]
    others = [name for name in names if not name.endswith("bias")]
    decayed, not_decayed = [n for n in names if is_decayed(n)], [n for n in names if not is_decayed(n)]
    return [
        ("the model's order", [names]),
        ("biases and norms are in group 1, all else in group 0", [decayed, not_decayed]),
        ("matrices are in group 0, vectors in group 1", [matrices, vectors]),
        ("vectors are in group 0, matrices in group 1", [vectors, matrices]),
        ("biases are in group 1, all else in group 0", [others, biases]),
        ("biases are in group 0, all else in group 1", [biases, others]),
    ]


_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def is_decayed(name: str) -> bool:
    """Whether transformers' Trainer has a parameter in its first group, with weight decay.

    Source: transformers 5.23.0, ``trainer.py`` (``get_decay_parameter_names``).
    """
    return _NOT_DECAYED.search(name.lower()) is None


def _named(
    groups: Sequence[Mapping[str, object]], deal: Sequence[Sequence[str]], shapes: Mapping[str, Shape], states: Mapping[str, Shape]
) -> dict[str, str] | None:  # fmt: skip
    """Names of all numbers, where every group fits in one way; None where one fits in none, else empty where one fits in several."""
    found: dict[str, str] = {}
    ways = []
    for fields, candidates in zip(groups, deal, strict=True):
        numbers = [str(number) for number in _params(fields)]
        count, chosen = choices([shapes[name] for name in candidates], [states.get(number) for number in numbers])
        ways.append(count)
        found |= {number: candidates[at] for number, at in zip(numbers, chosen, strict=False)}
    return None if 0 in ways else found if max(ways) == 1 else {}


def choices(shapes: Sequence[Shape], wanted: Sequence[Shape | None]) -> tuple[int, list[int]]:
    """Which of the tensors, in their order, have the wanted shapes.

    Buffers and frozen parameters are among the tensors and not in the optimizer.

    Args:
        shapes: Of all tensors.
        wanted: Of the chosen ones; None fits all.

    Returns:
        How many ways there are to choose, 2 standing for more; and the first of them.
    """
    first, last = _one_by_one(shapes, wanted), _one_by_one(shapes[::-1], wanted[::-1])
    if first is None or last is None:
        return 0, []
    unique = all(one + other == len(shapes) - 1 for one, other in zip(first, reversed(last), strict=True))
    return 1 if unique else 2, first  # whatever fits lies between the earliest that fit and the latest


def _one_by_one(shapes: Sequence[Shape], wanted: Sequence[Shape | None]) -> list[int] | None:
    """Of each that is wanted the earliest that fits, behind the one before; None where one fits nowhere."""
    found, at = list[int](), 0
    for one in wanted:
        while at < len(shapes) and one not in (None, shapes[at]):
            at += 1
        if at == len(shapes):
            return None
        found.append(at)
        at += 1
    return found


def _renamed(collected: Collected, names: dict[str, str]) -> dict[str, str]:
    for fields in collected.fields.values():
        fields[PARAMS] = [names[str(number)] for number in _params(fields)]
    collected.scalars = {names[number]: scalars for number, scalars in collected.scalars.items() if number in names}
    return names


ADAMW: dict[str, Any] = {
    "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False, "foreach": None,
    "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
"""What ``torch.optim.AdamW`` asks a param group for; ``dcp.load`` stops at a field that is missing.

Source: torch 2.13.0, ``optim/adamw.py``, ``optim/adam.py``.
"""


_SHOWN_BY = {
    "amsgrad": "Adam", "dampening": "SGD", "lr_decay": "Adagrad", "centered": "RMSprop", "rho": "Adadelta", "etas": "Rprop",
    "lambd": "ASGD", "beta2_decay": "Adafactor", "ns_steps": "Muon", "momentum_decay": "NAdam", "decoupled_weight_decay": "RAdam",
}  # fmt: skip
"""Fields that param groups of one class alone have; RAdam's is Adam's and NAdam's, too. Source: torch 2.13.0, ``optim/*.py``."""


def torch_class(fields: Mapping[str, object]) -> str:
    """Which of torch's optimizers a param group is of, as its fields show it: AdamW counts as Adam. Empty where they do not.

    Args:
        fields: Of the group.
    """
    return next((kind for field, kind in _SHOWN_BY.items() if field in fields), "")


def completed(fields: Mapping[str, object], scalars: Sequence[str]) -> dict[str, object]:
    """The fields of a group as torch's AdamW and a scheduler have them: what is missing has torch's own value.

    A group of another class of torch's has all that this one asks for.

    Args:
        fields: Of another framework's group.
        scalars: Which of them live in the optimizer's state.
    """
    own = {key: value for key, value in fields.items() if key not in scalars}
    betas = own.get("betas")
    more = {"betas": tuple(betas)} if isinstance(betas, list) else {}
    lr = own.get("lr", 0.0)
    asked = ADAMW if torch_class(own) in ("", "Adam") else {}
    return {**asked, "initial_lr": own.get("max_lr") or lr, **own, **more, "lr": lr}


def check_groups(source: Source) -> None:
    """Every trained parameter is in one group; others may be, of a run that gave its optimizer all of a model.

    Args:
        source: A source under a module's names.

    Raises:
        Incomplete: Nobody knows the members of the param groups.
        LayoutMismatch: A trained parameter is in none or several, or one is that the model does not have.
    """
    problems = Problems()
    listed = [name for group in source.state.groups for name in group.params]
    trained = [spec.name for spec in source.model.params if spec.trainable]
    still = {spec.name for spec in source.model.params if not spec.trainable}
    if not listed and trained:
        problems.add(
            Incomplete,
            f"{source.root}: does not say which parameters are in which param group",
            "--no-optimizer converts the weights alone.",
        )
    elif sorted(name for name in listed if name not in still) != sorted(trained):
        some = ", ".join(sorted(set(listed) - still ^ set(trained))[:5]) or "some twice"
        problems.add(
            LayoutMismatch, f"{source.root}: the param groups do not hold the trained parameters exactly: {some}"
        )
    problems.raise_if_any()


def own_scalars(group: ParamGroup) -> dict[str, object]:
    """A group's step as a float32 tensor, which torch's Adam wants for each parameter.

    Args:
        group: The group.

    Raises:
        Unportable: What the optimizer keeps of its parameters is no number.
    """
    names = group.scalars or tuple(key for key in (STEP,) if key in group.fields)
    if strange := [name for name in names if not _is_number(group.fields[name])]:
        raise _no_number("", strange[0], next(iter(group.params), "a parameter"))
    return {name: SmallTensor.of(float(cast(float, group.fields[name])), FLOAT32) for name in names}


def counted_of_each(source: Source) -> dict[str, Sequence[object]] | None:
    """What torch's optimizers count of each parameter besides its steps, such as NAdam's ``mu_product``, for rules.

    Args:
        source: That has them.
    """
    names = sorted({key for group in source.state.groups for key in group.scalars} - {STEP})
    return {"names": names, "of": [Item(Kind.GROUP, name) for name in names]} if names else None
