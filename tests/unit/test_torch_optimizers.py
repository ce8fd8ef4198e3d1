"""What a file of an optimizer lacks is what torch's own optimizers stop at, or begin anew, from which one key was taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim

from mcore_rlhf.manager.will_resume import _paths
from mcore_rlhf.trainers.torch_optimizers import lacking
from tests.helpers.one_key import without_key

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], optim.Optimizer]] = {
    **{kind.__name__: kind for kind in (
        optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
        optim.Adagrad, optim.Adafactor,
    )},
    "AMSGrad": lambda params: optim.AdamW(params, amsgrad=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "RMSprop with all": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "Muon": lambda params: optim.Muon(params, momentum=0.9),
}  # fmt: skip
_GIVEN_BY_DEFAULT = ("nesterov", "momentum", "centered", "amsgrad", "maximize", "decoupled_weight_decay")
"""What ``__setstate__`` gives a group that lacks it, whatever it was."""


def _params(seed: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]


def _step(optimizer: optim.Optimizer, seed: int) -> list[torch.Tensor]:
    params, torch_seed = optimizer.param_groups[0]["params"], torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=torch_seed)
    optimizer.step()
    return [param.detach().clone() for param in params]


def _copies(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state dict with one thing taken: a state of one parameter or of all, a parameter's state, a group's field."""
    for key in tree["state"].get(0, {}):
        yield f"{key} of 0", without_key(copy.deepcopy(tree), ("state", 0, key))
        whole = copy.deepcopy(tree)
        for held in whole["state"].values():
            del held[key]
        yield f"{key} of all", whole
    if tree["state"].get(0):
        yield "the state of 0", without_key(copy.deepcopy(tree), ("state", 0))
        yield "every state", {**copy.deepcopy(tree), "state": {}}
    for name in tree["param_groups"][0]:
        yield f"field {name}", without_key(copy.deepcopy(tree), ("param_groups", 0, name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_lacking_is_what_its_own_step_says(name: str) -> None:
    first = OPTIMIZERS[name](params := _params(1))
    for seed in (1, 2):
        _step(first, seed)
    saved, at = copy.deepcopy(first.state_dict()), [param.detach().clone() for param in params]
    wanted, wrong = _step(first, 3), []
    for what, tree in (("nothing", copy.deepcopy(saved)), *_copies(saved)):
        again = OPTIMIZERS[name]([torch.nn.Parameter(value.clone()) for value in at])
        keys = dict(_paths(copy.deepcopy(tree), "", 6))
        found = lacking(keys.keys(), {key for key, on in keys.items() if on})
        try:
            again.load_state_dict(tree)
            live = "same" if all(map(torch.equal, _step(again, 3), wanted)) else "anew"
        except (KeyError, AssertionError, AttributeError):
            live = "fails"
        taken = what.removeprefix("field ")
        if taken in ("lr", "params") or (taken in _GIVEN_BY_DEFAULT and live == "anew"):
            continue  # what any of them asks for is looked for elsewhere
        if found is None:
            assert what == "field foreach", what
            continue
        said = "fails" if found.field or found.fails else "anew" if found.anew else "same"
        wrong += [] if said == live else [(what, said, live)]
    assert not wrong
