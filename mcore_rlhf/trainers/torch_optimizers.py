"""What torch's optimizers, transformers' own and the schedule-free ask of a state that they load: values of parameters, fields of groups.

Source: torch 2.13.0, ``optim/*.py`` (``_init_group``, ``__setstate__``, which gives what a group may lack); transformers 5.23.0,
``optimization.py`` (``Adafactor``); schedulefree 1.4.1, ``{adamw,radam,sgd}_schedulefree.py`` (``step``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property

"""Behind a key, with a ``/`` between them: its value is a number, and not zero, or true."""


@dataclass(frozen=True)
class TorchOptimizer:
    """One of them.

    Args:
        sign: A field that its groups have, and that its step does not ask for.
        fields: Those that it asks for besides ``lr`` and ``params``.
        states: What it asks of each parameter that has any state: each one, or several with ``|`` between them.
        more: What it asks for besides where a field is on, by field.
        anew: Those of all these that begin anew where they are not there; elsewhere its step fails. What has no state at all does so.
    """

    sign: str
    fields: tuple[str, ...]
    states: tuple[str, ...]
    more: Mapping[str, str] = field(default_factory=dict)
    anew: tuple[str, ...] = ()

    @cached_property
    def own(self) -> frozenset[str]:
        """By what it is known."""
        return frozenset((self.sign, *self.fields, *(one for names in self.states for one in names.split("|"))))

    def wanted(self, group: Set[str]) -> tuple[str, ...]:
        """What it asks of each parameter of a group.

        Args:
            group: Those of the group's fields that are on.
        """
        return (*self.states, *(state for name, state in self.more.items() if name in group))


_MOMENTUM, _SHARED = "momentum_buffer", ("betas", "eps", "weight_decay")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_FREE = ("r", "k", "train_mode", "weight_sum", "lr_max", "weight_lr_power", "weight_decay", "foreach")
KINDS = {
    "NAdam": TorchOptimizer("decoupled_weight_decay", (*_SHARED, "momentum_decay"), ("step", "mu_product", "exp_avg", "exp_avg_sq")),
    "Adam": TorchOptimizer("amsgrad", _SHARED, _MOMENTS, {"amsgrad": "max_exp_avg_sq"}),
    "RAdam": TorchOptimizer("decoupled_weight_decay", _SHARED, _MOMENTS),
    "Adamax": TorchOptimizer("capturable", _SHARED, ("step", "exp_avg", "exp_inf")),
    "Adagrad": TorchOptimizer("initial_accumulator_value", ("lr_decay", "eps", "weight_decay"), ("step", "sum")),
    "Adadelta": TorchOptimizer("capturable", ("rho", "eps", "weight_decay"), ("step", "square_avg", "acc_delta")),
    "RMSprop": TorchOptimizer(
        "centered", ("alpha", "eps", "weight_decay"), ("step", "square_avg"), {"momentum": _MOMENTUM, "centered": "grad_avg"}
    ),
    "Rprop": TorchOptimizer("capturable", ("etas", "step_sizes"), ("step", "prev", "step_size")),
    "ASGD": TorchOptimizer("t0", ("lambd", "alpha", "t0", "weight_decay"), ("step", "eta", "mu", "ax")),
    "SGD": TorchOptimizer("nesterov", ("momentum", "dampening", "weight_decay"), (), {"momentum": _MOMENTUM}, (_MOMENTUM,)),
    "torch's Adafactor": TorchOptimizer(
        "beta2_decay", ("eps", "d", "weight_decay", "maximize", "beta2_decay"), ("step", "row_var|variance", "col_var|variance")
    ),
    "Muon": TorchOptimizer(
        "adjust_lr_fn", ("momentum", "nesterov", "weight_decay", "eps", "ns_steps", "ns_coefficients", "adjust_lr_fn"), (_MOMENTUM,),
        anew=(_MOMENTUM,),
    ),
    "transformers' Adafactor": TorchOptimizer(
        "warmup_init", ("eps", "clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter", "relative_step"),
        ("step", "exp_avg_sq_row|exp_avg_sq", "exp_avg_sq_col|exp_avg_sq"), {"beta1": "exp_avg"},
    ),
    "AdamWScheduleFree": TorchOptimizer("scheduled_lr", (*_FREE, "betas", "eps", "warmup_steps"), ("z", "exp_avg_sq"), anew=("z",)),
    "RAdamScheduleFree": TorchOptimizer("scheduled_lr", (*_FREE, "betas", "eps", "silent_sgd_phase"), ("z", "exp_avg_sq"), anew=("z",)),
    "SGDScheduleFree": TorchOptimizer("scheduled_lr", (*_FREE, "momentum", "warmup_steps"), ("z",), anew=("z",)),
}  # fmt: skip
"""By name, those first that are meant where as much speaks for others."""
_KNOWN = frozenset().union(*(kind.own for kind in KINDS.values()))
_OF_ANY = {"foreach", "ns_steps", "adjust_lr_fn", "clip_threshold", "warmup_init"}
"""One of them is in each group of such an optimizer; those of Transformer Engine, Apex, bitsandbytes and DeepSpeed have none."""
_GROUP, _PARAM, _STATE = map(
    re.compile,
    (r"param_groups/(\d+)/(?!params/)([^/]+)", r"param_groups/(\d+)/params/(\d+)", r"state/(\d+)/([^/]+)"),
)


@dataclass(frozen=True, slots=True)
class Lacking:
    """What an optimizer's file lacks.

    Args:
        field: A group's number and the field that it lacks, with a ``/`` between them; empty where none does.
        fails: States by which the next step fails, each with how many parameters lack it.
        anew: Parameters that begin anew, without a word.
        count: Parameters in all.
    """

    field: str
    fails: Mapping[str, int]
    anew: frozenset[int]
    count: int


def lacking(keys: Set[str], on: Set[str]) -> Lacking | None:
    """What the state dict of such an optimizer lacks; None where it is of no such optimizer.

    Args:
        keys: All that lies in it, as ``state/0/step`` and ``param_groups/0/lr``.
        on: Those of which the value is a number or a switch, and not 0.
    """
    fields, switched, states = dict[int, set[str]](), dict[int, set[str]](), dict[int, set[str]]()
    for pattern, into, of in ((_GROUP, fields, keys), (_GROUP, switched, on), (_STATE, states, keys)):
        for found in filter(None, map(pattern.fullmatch, of)):
            into.setdefault(int(found[1]), set()).add(found[2])
    places = sorted((int(found[1]), int(found[2])) for found in filter(None, map(_PARAM.fullmatch, keys)))
    members: dict[int, list[int]] = {}
    for number, (group, _) in enumerate(places):
        members.setdefault(group, []).append(number)
    gone, fails, anew, known = "", dict[str, int](), set[int](), False
    for group, there in sorted(fields.items()):
        of_group = {number: states.get(number, set()) for number in members.get(group, ())}
        kind = _kind_of(there, set().union(*of_group.values()))
        if kind is None:
            continue
        known, short = True, sorted({*kind.fields} - there)
        gone = gone or (f"{group}/{short[0]}" if short else "")
        wanted = kind.wanted(switched.get(group, set()))
        for number, held in of_group.items():
            missing = [names.partition("|")[0] for names in wanted if held.isdisjoint(names.split("|"))]
            if missing and (not held or {*missing} <= {*kind.anew}):
                anew.add(number)
            for state in missing if number not in anew else ():
                fails[state] = fails.get(state, 0) + 1
    return Lacking(gone, fails, frozenset(anew), len(places)) if known else None


def _kind_of(fields: Set[str], states: Set[str]) -> TorchOptimizer | None:
    """Which it is: that of whose things fewest are missing, and which leaves fewest of what is there unexplained."""
    if not fields & _OF_ANY:
        return None
    there = (fields | states) & _KNOWN
    return min(KINDS.values(), key=lambda kind: len(kind.own ^ there))
