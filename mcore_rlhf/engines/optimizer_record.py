"""What a file says of an optimizer: torch's own state dictionary, and beside it what that leaves out.

torch's dictionary numbers the parameters and does not name them, and does not say of which optimizer it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import optim

from mcore_rlhf.errors import LayoutMismatch

LOG = logging.getLogger("mcore_rlhf")
_KNOWN = ("torch.optim.", "deepspeed.", "apex.", "transformer_engine.", "bitsandbytes.")
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
        return cls(
            stored["param_groups"],
            stored["state"],
            cast("str | None", kind),
            known,
            tuples if known is not None else None,
        )


def described(optimizer: object, module: torch.nn.Module | None) -> dict[str, object]:
    """What torch's state dictionary does not say: the optimizer's class, and its parameters' names and shapes by group."""
    record: dict[str, object] = {"class": type(optimizer).__qualname__}
    if is_stock(optimizer):
        record["names"] = names_of(optimizer, module)
        record["shapes"] = [[list(parameter.shape) for parameter in params] for params in params_of(optimizer)]
    return record


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
    if not kind.__module__.startswith(_KNOWN):
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
