"""Whether a stored ``torch.optim`` state is the live optimizer's: its class, its groups, its parameters and their shapes.

torch's own ``load_state_dict`` compares the numbers of parameters and nothing else: moments of another optimizer, or of
parameters in another order, are taken without a word. What it would need to know lies beside its state dictionary in the
file, as :func:`~.optimizer_record.described` makes it; files without that are compared as far as they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import optim

from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.storage.ptfile import StoredTensor

from .optimizer_record import Names, SavedOptimizer, ids_of, names_of, params_of

_ADVICE = "Build the optimizer as it was saved, or load the weights alone: load(optimizer=False)."
_DEFAULTED = {"foreach", "maximize", "differentiable", "capturable", "fused", "decoupled_weight_decay"}
"""Torch's optimizers supply these themselves to a state that lacks them (``__setstate__``, torch 2.13)."""

_TELLING = {
    "betas", "eps", "amsgrad", "momentum", "dampening", "nesterov", "alpha", "centered", "rho", "lr_decay", "lambd", "t0",
    "initial_accumulator_value", "etas", "step_sizes", "momentum_decay", "beta2_decay", "d", "history_size", "ns_steps",
}  # fmt: skip
"""Hyperparameters by which torch's optimizers differ; other keys in a group are the user's or a scheduler's."""

_KEYS: dict[type[optim.Optimizer], tuple[str, ...]] = {
    optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
    optim.Adamax: ("step", "exp_avg", "exp_inf"),
    optim.Adagrad: ("step", "sum"),
    optim.Adadelta: ("step", "square_avg", "acc_delta"),
    optim.RMSprop: ("step", "square_avg"),
    optim.Rprop: ("step", "prev", "step_size"),
    optim.ASGD: ("step", "eta", "mu", "ax"),
    optim.Adafactor: ("step",),
    optim.SGD: (),
}
"""State that ``step()`` reads of every parameter that has any (``_init_group`` of torch 2.13's ``torch/optim/*.py``)."""

_OPTIONAL = {"momentum_buffer", "max_exp_avg_sq", "grad_avg", "variance"}
_SCALARS = {"step", "mu_product", "eta", "mu"}


def matched(
    optimizer: optim.Optimizer, module: torch.nn.Module | None, saved: SavedOptimizer, where: str, problems: Problems
) -> list[list[int]]:
    """Compare a stored optimizer with the live one.

    Args:
        optimizer: The live one; nothing of it is changed.
        module: Whose parameters it trains, for their names.
        saved: The stored one.
        where: The file.
        problems: Takes every difference.

    Returns:
        For every parameter of every live group, which one of the stored group it is. Of use only without problems.
    """
    found = list(_other_kind(optimizer, saved))
    ours, theirs = len(optimizer.param_groups), len(saved.groups)
    if ours != theirs:
        found.append(f"has {theirs} parameter groups, the run's has {ours}")
    live, stored = _both_names(optimizer, module, saved)
    order: list[list[int]] = []
    for index in range(min(ours, theirs)):
        pairs, wrong = _group(optimizer, saved, index, live[index], stored[index])
        order.append(pairs)
        found += wrong
    for text in found:
        problems.add(LayoutMismatch, f"{where}: the optimizer {text}", _ADVICE)
    return order


def _group(
    optimizer: optim.Optimizer,
    saved: SavedOptimizer,
    index: int,
    live: Sequence[str | None],
    stored: Sequence[str | None],
) -> tuple[list[int], list[str]]:
    """Which stored parameters a group's are, and what is wrong with them."""
    if len(live) != len(stored):
        return [], [f"group {index} has {len(stored)} parameters, the run's has {len(live)}"]
    pairs, wrong = _paired(live, stored)
    if wrong:
        return [], [f"group {index} {text}" for text in wrong]
    if isinstance(optimizer, optim.LBFGS) and pairs != sorted(pairs):  # its state is of all of them, end to end
        return [], [f"group {index} has its parameters in another order: {', '.join(map(str, stored))}"]
    return pairs, list(_misshapen(optimizer, saved, index, pairs, live))


def _other_kind(optimizer: optim.Optimizer, saved: SavedOptimizer) -> Iterator[str]:
    ours = type(optimizer).__qualname__
    if saved.kind is not None:
        if saved.kind != ours:
            yield f"is of class {saved.kind}, the run's is {ours}"
        return
    for index, group in enumerate(saved.groups):
        known = index < len(optimizer.param_groups)
        said = unlike(optimizer, optimizer.param_groups[index] if known else optimizer.defaults, group)
        if said:
            yield f"is of another class than the run's {ours}: group {index} {said}"


def unlike(optimizer: optim.Optimizer, live: Mapping[str, object], stored: Mapping[str, object]) -> str:
    """How a stored group shows that it is of another class of torch's optimizers; empty where it does not.

    Args:
        optimizer: The live one.
        live: The live group.
        stored: Fields of the stored one.
    """
    missing = sorted(optimizer.defaults.keys() - stored.keys() - _DEFAULTED)
    extra = sorted((stored.keys() - live.keys()) & _TELLING)
    said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra)}"] * bool(extra)
    return " and ".join(said)


def needed_keys(optimizer: optim.Optimizer) -> tuple[str, ...]:
    """The states that an optimizer of torch's reads of every parameter that has any; empty for another's."""
    return next((keys for kind, keys in _KEYS.items() if isinstance(optimizer, kind)), ())


def _paired(live: Sequence[str | None], stored: Sequence[str | None]) -> tuple[list[int], list[str]]:
    """Which stored parameter every live one is: by name, and in order among those that have none."""
    named = ({name for name in live if name}, {name for name in stored if name})
    if not named[0] or not named[1]:
        return list(range(len(live))), []
    if named[0] != named[1]:
        gone, new = sorted(named[1] - named[0]), sorted(named[0] - named[1])
        words = (("has", gone, "which the run's group lacks"), ("lacks", new, "which the run's group has"))
        return [], [f"{verb} {', '.join(found)}, {which}" for verb, found, which in words if found]
    place = {name: index for index, name in enumerate(stored) if name}
    rest = iter([index for index, name in enumerate(stored) if not name])
    return [place[name] if name else next(rest) for name in live], []


def _misshapen(
    optimizer: optim.Optimizer, saved: SavedOptimizer, index: int, order: Sequence[int], names: Sequence[str | None]
) -> Iterator[str]:
    ids = ids_of(saved.groups[index])
    for position, (parameter, at) in enumerate(zip(params_of(optimizer)[index], order, strict=True)):
        name = names[position] or f"parameter {position} of group {index}"
        shape = tuple(parameter.shape)
        if saved.shapes is not None and saved.shapes[index][at] != shape:
            yield f"was made for {name} of shape {saved.shapes[index][at]}, the run's has {shape}"
        elif saved.kind in (None, type(optimizer).__qualname__):
            values = saved.state.get(ids[at])
            yield from _unfit(optimizer, parameter, values if isinstance(values, Mapping) else {}, name)


def _unfit(
    optimizer: optim.Optimizer, parameter: torch.Tensor, values: Mapping[str, object], name: str
) -> Iterator[str]:
    """State of one parameter that this optimizer could not go on with."""
    needed = needed_keys(optimizer)
    if values and (missing := [key for key in needed if key not in values]):
        yield f"has no {', '.join(missing)} of {name}; the run's {type(optimizer).__qualname__} needs it"
    shape, live = tuple(parameter.shape), optimizer.state.get(parameter, {})
    shaped = {key for key, tensor in live.items() if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape}
    if any(isinstance(optimizer, kind) for kind in _KEYS):
        shaped |= ({*needed} - _SCALARS) | _OPTIONAL
    for key, place in values.items():
        if key in shaped and isinstance(place, StoredTensor) and place.shape != shape:
            yield f"has {key} of {name} with shape {place.shape}, the parameter has {shape}"


def _both_names(
    optimizer: optim.Optimizer, module: torch.nn.Module | None, saved: SavedOptimizer
) -> tuple[Names, Names]:
    """The parameters' names, live and stored; torch's own (``param_names`` in a group) where the file has no others."""
    if saved.names is not None:
        return names_of(optimizer, module), saved.names
    live, stored = _torchs_names(optimizer.param_groups), _torchs_names(saved.groups)
    if live is not None and stored is not None:
        return live, stored
    return names_of(optimizer, module), [[None] * len(ids_of(group)) for group in saved.groups]


def _torchs_names(groups: Sequence[Mapping[str, object]]) -> Names | None:
    lists = [group.get("param_names") for group in groups]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        return None
    found = cast("Names", lists)
    return found if all(len(names) == len(ids_of(group)) for names, group in zip(found, groups, strict=True)) else None
