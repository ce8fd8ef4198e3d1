"""Torch's optimizers: what a file says of one, whether that is the live one's, and how it is given back, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard, cast

import torch
from torch import optim

from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import LayoutMismatch, Problems, log_of
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.stored import StoredTensor, map_tensors

from .load import Pair
from .stateful import Stateful, Undo, not_writable

LOG = log_of("mcore_rlhf")
_KNOWN = ("torch.", "deepspeed.", "apex.", "transformer_engine.", "bitsandbytes.", "megatron.", "emerging_optimizers.")
STEP = "step"
RECORD = "optimizer_params"
"""Name of the part of the file that says whose state the part ``optimizer`` is."""

Names = list[list[str | None]]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """A stored optimizer.

    Args:
        groups: Its parameter groups; ``params`` of each are keys of ``state``.
        state: Per parameter, by its key; tensors are places in the file.
        kind: Its class's name, where the file says.
        names: The parameters' names per group, where the file says; None for one that is not the module's.
        shapes: The parameters' shapes per group, where the file says.
    """

    groups: Sequence[Mapping[str, object]]
    state: Mapping[object, object]
    kind: str | None
    names: Names | None
    shapes: list[list[tuple[int, ...]]] | None

    @classmethod
    def parse(cls, stored: object, record: object, where: str) -> SavedOptimizer:
        """Understand what the file holds.

        Args:
            stored: ``Optimizer.state_dict()``, with places for tensors.
            record: What :func:`described` gave; None in a file that torch wrote.
            where: The file.

        Raises:
            LayoutMismatch: It is no such dictionary.
        """
        if not isinstance(stored, Mapping) or not _is_state_dict(stored):
            raise LayoutMismatch(f"{where}: 'optimizer' is not the state dictionary of a torch.optim optimizer")
        said: Mapping[str, object] = record if isinstance(record, Mapping) else {}
        sizes = [len(group["params"]) for group in stored["param_groups"]]
        kind, names, shapes = said.get("class"), said.get("names"), said.get("shapes")
        if record is not None and not (isinstance(kind, str) and (names is None or _nested(names, shapes, sizes))):
            raise LayoutMismatch(f"{where}: {RECORD!r} does not describe the parameters of 'optimizer'")
        tuples = [[tuple(shape) for shape in group] for group in cast("list[list[list[int]]]", shapes or [])]
        known = cast("Names | None", names)
        shaped = tuples if known is not None else None
        return cls(stored["param_groups"], stored["state"], cast("str | None", kind), known, shaped)


def described(optimizer: object, module: torch.nn.Module | None) -> dict[str, object]:
    """What torch's state dictionary does not say: the optimizer's class, and its parameters' names and shapes by group."""
    record: dict[str, object] = {"class": type(optimizer).__qualname__}
    if is_stock(optimizer):
        record["names"] = names_of(optimizer, module)
        record["shapes"] = [[list(parameter.shape) for parameter in params] for params in params_of(optimizer)]
    return record


def is_elementwise(key: str, shape: Sequence[int] | None, trained: Sequence[int] | None = None) -> bool:
    """Whether a state has one value per element of what the optimizer trains, whatever it is called: then it is cut, moved and
    reshaped as that is. A number is one of each parameter; all else is kept whole.

    Args:
        key: Its name; ``step`` is a count, even of a parameter that is one number.
        shape: Its shape; None for what is no tensor.
        trained: Shape of what is trained; None where that is flat, so that only numbers are otherwise.
    """
    if key == STEP or shape is None:
        return False
    return len(shape) > 0 if trained is None else tuple(shape) == tuple(trained)


def is_known(optimizer: object) -> bool:
    """Whether it is one of those whose states are known."""
    return type(optimizer).__module__.startswith(_KNOWN)


def is_stock(optimizer: object) -> TypeGuard[optim.Optimizer]:
    """Whether saving and loading are torch's own; another's ``load_state_dict`` or hook knows best what it accepts."""
    if not isinstance(optimizer, optim.Optimizer):  # one that only behaves like it
        return False
    kind = type(optimizer)
    own = (kind.state_dict, kind.load_state_dict) != (optim.Optimizer.state_dict, optim.Optimizer.load_state_dict)
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return not own and not any(getattr(optimizer, name, None) for name in hooks)


def say_what_is_unknown(engine: str, optimizer: object, trained: Iterable[torch.Tensor] | None = None) -> None:
    """Tell, when an engine is made, what cannot be checked later: another's optimizer, tensors that are not the model's.

    Args:
        engine: The engine's name.
        optimizer: The live one.
        trained: The parameters of the model, where the optimizer should train nothing else.
    """
    kind = type(optimizer)
    if not is_known(optimizer):
        LOG.warning(
            "%s: optimizer %s.%s is not known: its states are saved and given back as they are, and not checked against what it "
            "needs", engine, kind.__module__, kind.__qualname__,
        )  # fmt: skip
    if trained is not None and isinstance(optimizer, optim.Optimizer):
        own = {id(parameter) for parameter in trained}
        if others := [one for params in params_of(optimizer) for one in params if id(one) not in own]:
            LOG.warning(
                "%s: the optimizer trains %d tensors that are not the model's (the first: %s): they are not saved with it",
                engine, len(others), tuple(others[0].shape),
            )  # fmt: skip


def names_of(optimizer: optim.Optimizer, module: torch.nn.Module | None) -> Names:
    """The names of an optimizer's parameters, by group; None for one that is not the module's."""
    known = {id(parameter): name for name, parameter in module.named_parameters()} if module is not None else {}
    return [[known.get(id(parameter)) for parameter in params] for params in params_of(optimizer)]


def params_of(optimizer: optim.Optimizer) -> list[list[torch.Tensor]]:
    """An optimizer's parameters, by group."""
    return [group["params"] for group in optimizer.param_groups]


def ids_of(group: Mapping[str, object]) -> list[object]:
    """Keys of a stored group's parameters in the stored state."""
    return cast("list[object]", group["params"])


def _is_state_dict(stored: Mapping[str, object]) -> bool:
    groups = stored.get("param_groups")
    if not isinstance(groups, list) or not isinstance(stored.get("state"), Mapping):
        return False
    return all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(isinstance(key, int | str) for key in group["params"])
        for group in groups
    )


def _nested(names: object, shapes: object, sizes: Sequence[int]) -> bool:
    """Whether names and shapes are lists per group of as many as the group has, and no name comes twice."""
    both = [names, shapes]
    if not all(isinstance(value, list) and all(isinstance(group, list) for group in value) for value in both):
        return False
    if not all([len(group) for group in value] == list(sizes) for value in cast("list[list[list[object]]]", both)):
        return False
    given = [name for group in cast("Names", names) for name in group if name is not None]
    lists = [shape for group in cast("list[list[object]]", shapes) for shape in group]
    return (
        all(isinstance(name, str) for name in given)
        and len(set(given)) == len(given)
        and all(isinstance(shape, list | tuple) for shape in lists)
    )


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


class OptimizerLoad(Protocol):
    """A load of an optimizer."""

    def install(self, undo: Undo) -> Sequence[Pair]:
        """Hand the optimizer its state, and say how that is undone.

        Returns:
            What is to be overwritten in place, once nothing can refuse any more.
        """
        ...

    def states(self) -> set[str]:
        """The names of the states that are stored, as far as is known."""
        ...


@dataclass(slots=True)
class OwnLoad:
    """An optimizer whose ``load_state_dict`` is its own, or has hooks: it is given the file's state, and decides.

    Args:
        optimizer: The live one.
        pt: The file.
        stored: Its state dictionary, with places.
    """

    optimizer: Stateful
    pt: PtFile
    stored: object

    def install(self, undo: Undo) -> Sequence[Pair]:
        """Call its ``load_state_dict``."""
        undo.handed(self.optimizer, torch_values(self.pt.materialize(self.stored)))
        return ()

    def states(self) -> set[str]:
        """Its own affair."""
        return set()


@dataclass(slots=True)
class StockLoad:
    """An optimizer that is loaded as torch does: its state is replaced, and live tensors that fit are kept and filled.

    Args:
        optimizer: The live one.
        pt: The file.
        saved: What it holds.
        order: Which stored parameter every live one is, by group.
    """

    optimizer: torch.optim.Optimizer
    pt: PtFile
    saved: SavedOptimizer
    order: Sequence[Sequence[int]]
    _fills: list[Pair] = field(default_factory=list)

    def install(self, undo: Undo) -> Sequence[Pair]:
        """Make the groups and the state anew, from the file and from live tensors that will be filled, and hand them over."""
        state: defaultdict[object, object] = defaultdict(dict)
        groups: list[dict[str, object]] = []
        known: set[object] = set()
        first = 0
        self._fills = []
        for group, live, order in zip(self.saved.groups, self.optimizer.param_groups, self.order, strict=True):
            ids = ids_of(group)
            known.update(ids)
            groups.append(self._group(group, live, range(first, first + len(ids))))
            first += len(ids)
            for parameter, at in zip(live["params"], order, strict=True):
                if ids[at] in self.saved.state:
                    state[parameter] = self._values(parameter, self.saved.state[ids[at]], group)
        for key, value in self.saved.state.items():
            if key not in known:
                state[key] = torch_values(self.pt.materialize(value))
        install_state(self.optimizer, state, groups, undo)
        return self._fills

    def states(self) -> set[str]:
        """The names of all states."""
        return {str(key) for one in self.saved.state.values() if isinstance(one, Mapping) for key in one}

    def _group(self, saved: Mapping[str, object], live: Mapping[str, object], params: range) -> dict[str, object]:
        group: dict[str, object] = {"params": list(params)}
        for key, value in saved.items():
            beside = live.get(key)
            if key == "param_names":
                group |= {key: beside} if beside is not None else {}
            elif key != "params":
                device = beside.device if isinstance(beside, torch.Tensor) else torch.device("cpu")
                group[key] = torch_values(map_tensors(value, self._loader(device)))
        return group

    def _values(self, parameter: torch.Tensor, values: object, group: Mapping[str, object]) -> object:
        if not isinstance(values, Mapping):
            return map_tensors(values, self._loader(parameter.device))
        live = self.optimizer.state.get(parameter, {})
        return {key: self._value(parameter, key, place, live.get(key), group) for key, place in values.items()}

    def _value(
        self, parameter: torch.Tensor, key: str, place: object, live: object, group: Mapping[str, object]
    ) -> object:
        # Where torch puts the counter: torch/optim/optimizer.py 2.13, note [special device hosting for step].
        on_device = bool(group.get("capturable") or group.get("fused"))
        stays = key != "step" or not on_device or (isinstance(live, torch.Tensor) and live.device == parameter.device)
        if stays and isinstance(place, StoredTensor) and isinstance(live, torch.Tensor) and _fits(place, live):
            self._fills.append((place, live))
            return live
        device = parameter.device if key != "step" or on_device else torch.device("cpu")
        return map_tensors(place, self._loader(device))

    def _loader(self, device: torch.device) -> Callable[[StoredTensor], torch.Tensor]:
        return lambda place: torch_values(self.pt.load(place)).to(device)


def install_state(
    optimizer: torch.optim.Optimizer,
    state: defaultdict[object, object],
    groups: list[dict[str, object]],
    undo: Undo,
) -> None:
    """Call ``load_state_dict`` for the groups and the hooks, and slip the state in before anyone looks.

    Args:
        optimizer: The live one.
        state: Its state by parameter, as it will be.
        groups: Its groups; ``params`` are numbers, counted through all of them.
        undo: Told how it is put back.
    """
    undo.optimizer(optimizer)
    before = optimizer.param_groups

    def slip_in(optimizer: torch.optim.Optimizer) -> None:
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})

    hook = optimizer.register_load_state_dict_post_hook(slip_in, prepend=True)
    try:
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
    finally:
        hook.remove()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for key, value in old.items():
            group.setdefault(key, value)


def _fits(place: StoredTensor, live: torch.Tensor) -> bool:
    same = place.shape == tuple(live.shape) and f"torch.{place.record.dtype.name}" == str(live.dtype)
    return same and not not_writable(live)
