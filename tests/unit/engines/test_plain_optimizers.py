"""Every optimizer goes on as if nothing had happened, and takes no state that is not its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from mcore_rlhf.engines.plain import FILE, RECORD, TorchEngine
from mcore_rlhf.errors import CheckpointError, LayoutMismatch
from tests.unit.engines.plain_files import load, same, save, save_without_names, stored

Make = Callable[[Any], optim.Optimizer]


class MasterAdam(optim.Optimizer):
    """Keeps fp32 moments and master weights of bf16 parameters, and more than tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            state = self.state[parameter]
            if not state:
                state |= {
                    "m": torch.zeros_like(parameter, dtype=torch.float32),
                    "n": 0,
                    "tag": "x",
                    "past": [torch.ones(1)],
                }
                state["master"] = parameter.float().clone()
            state["n"] += 1
            state["m"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
            parameter.copy_(state["master"].sub_(state["m"], alpha=0.01))


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda params: optim.SGD(params, lr=0.01),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.01, momentum=0.9),
    "Adam": optim.Adam,
    "Adam amsgrad": lambda params: optim.Adam(params, amsgrad=True),
    "Adam fused": lambda params: optim.Adam(params, fused=True),
    "Adam tensor lr": lambda params: optim.Adam(params, lr=torch.tensor(0.01)),
    "AdamW": optim.AdamW,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "ASGD": optim.ASGD,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "RMSprop": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "Adamax": optim.Adamax,
    "Adafactor": optim.Adafactor,
    "LBFGS": lambda params: optim.LBFGS(params, lr=0.1, max_iter=3),
    "fp32 masters": MasterAdam,
}


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)


def train(module: torch.nn.Module, optimizer: optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(4, 6, generator=generator).to(next(module.parameters()).dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = module(batch).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("before", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    make: Make, dtype: torch.dtype, before: int, tmp_path: Path
) -> None:
    module, again = net(dtype), net(dtype)
    optimizer, resumed = make(module.parameters()), make(again.parameters())
    train(module, optimizer, 3, seed=1)
    train(again, resumed, before, seed=9)
    save(TorchEngine(module, optimizer), tmp_path)
    then = copy.deepcopy(optimizer.state_dict())
    load(TorchEngine(again, resumed), tmp_path)
    assert same(then, resumed.state_dict())
    assert same(then, stored(tmp_path)["optimizer"])
    train(module, optimizer, 2, seed=2)
    train(again, resumed, 2, seed=2)
    assert same(module.state_dict(), again.state_dict())
    assert same(optimizer.state_dict(), resumed.state_dict())


KINDS = [
    optim.SGD,
    *(OPTIMIZERS[name] for name in ("Adam", "NAdam", "RAdam", "ASGD", "Adagrad", "Adadelta", "RMSprop")),
]
KINDS += [OPTIMIZERS[name] for name in ("Rprop", "Adamax", "Adafactor", "LBFGS")]


@pytest.mark.parametrize("index", range(len(KINDS)))
def test_no_optimizer_takes_anothers_state_even_of_a_file_that_does_not_name_it(index: int, tmp_path: Path) -> None:
    module = net()
    optimizer = KINDS[index](module.parameters())
    train(module, optimizer, 1, seed=1)
    save_without_names(TorchEngine(module, optimizer), tmp_path)
    for other in KINDS[:index] + KINDS[index + 1 :]:
        target = net()
        with pytest.raises(LayoutMismatch, match=r"class|needs it"):
            load(TorchEngine(target, other(target.parameters())), tmp_path)


class Twins(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))


def twins(*names: str, make: Make = optim.Adam, more: tuple[torch.nn.Parameter, ...] = ()) -> TorchEngine:
    module = Twins()
    optimizer = make([*(getattr(module, name) for name in names), *more])
    return TorchEngine(module, optimizer)


def stepped(engine: TorchEngine, factor: float = 5.0) -> TorchEngine:
    assert isinstance(engine.module, Twins)
    assert engine.optimizer is not None
    (engine.module.a.sum() + factor * engine.module.b.sum()).backward()
    engine.optimizer.step()
    return engine


def moment(engine: TorchEngine, name: str) -> float:
    assert engine.optimizer is not None
    return float(engine.optimizer.state[getattr(engine.module, name)]["exp_avg"][0])


def test_parameters_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    save(stepped(twins("a", "b")), tmp_path)
    assert stored(tmp_path)[RECORD] == {"class": "Adam", "names": [["a", "b"]], "shapes": [[[3], [3]]]}
    target = twins("b", "a")
    report = load(target, tmp_path)
    assert moment(target, "a") == pytest.approx(0.1)
    assert moment(target, "b") == pytest.approx(0.5)
    assert any("another order" in text for _, text in report.lines)


def test_torchs_own_names_serve_where_the_file_has_no_others(tmp_path: Path) -> None:
    def named(*names: str) -> TorchEngine:
        module = Twins()
        return TorchEngine(module, optim.Adam([(name, getattr(module, name)) for name in names]))

    save_without_names(stepped(named("a", "b")), tmp_path)
    target = named("b", "a")
    load(target, tmp_path)
    assert moment(target, "b") == pytest.approx(0.5)
    assert target.optimizer is not None
    assert target.optimizer.param_groups[0]["param_names"] == ["b", "a"]


def test_without_names_the_order_counts(tmp_path: Path) -> None:
    save_without_names(stepped(twins("a", "b")), tmp_path)
    target = twins("a", "b")
    load(target, tmp_path)
    assert moment(target, "b") == pytest.approx(0.5)


def test_parameters_that_are_not_the_modules_are_taken_by_position(tmp_path: Path) -> None:
    own = torch.nn.Parameter(torch.zeros(2))
    source = twins("a", "b", more=(own,))
    own.grad = torch.full((2,), 9.0)
    save(stepped(source), tmp_path)
    fresh = torch.nn.Parameter(torch.zeros(2))
    target = twins("b", "a", more=(fresh,))
    load(target, tmp_path)
    assert target.optimizer is not None
    assert float(target.optimizer.state[fresh]["exp_avg"][0]) == pytest.approx(0.9)
    assert moment(target, "b") == pytest.approx(0.5)


def test_lbfgs_keeps_one_state_of_all_parameters_end_to_end_so_that_they_cannot_be_reordered(tmp_path: Path) -> None:
    save(twins("a", "b", make=optim.LBFGS), tmp_path)
    with pytest.raises(LayoutMismatch, match="another order: a, b"):
        load(twins("b", "a", make=optim.LBFGS), tmp_path)


def test_all_differences_of_groups_are_named_and_nothing_changes(tmp_path: Path) -> None:
    save(stepped(twins("a", "b")), tmp_path)
    module = Twins()
    target = TorchEngine(module, optim.AdamW([{"params": [module.a]}, {"params": [module.b]}]))
    before = copy.deepcopy(target._parts())
    with pytest.raises(LayoutMismatch) as caught:
        load(target, tmp_path)
    for text in ("class Adam, the run's is AdamW", "1 parameter groups, the run's has 2", "group 0 has 2 parameters"):
        assert text in str(caught.value)
    assert same(before, target._parts())


def test_parameters_that_changed_groups_are_named(tmp_path: Path) -> None:
    def grouped(first: str, second: str) -> TorchEngine:
        module = Twins()
        return TorchEngine(module, optim.Adam([{"params": [getattr(module, name)]} for name in (first, second)]))

    save(grouped("a", "b"), tmp_path)
    with pytest.raises(LayoutMismatch) as caught:
        load(grouped("b", "a"), tmp_path)
    assert "group 0 has a, which the run's group lacks" in str(caught.value)
    assert "group 1 lacks a, which the run's group has" in str(caught.value)


@pytest.mark.parametrize("make", [optim.Adam, MasterAdam])
def test_shapes_of_parameters_outside_the_module(make: Make, tmp_path: Path) -> None:
    save(twins("a", make=make, more=(torch.nn.Parameter(torch.zeros(5, 4)),)), tmp_path)
    with pytest.raises(LayoutMismatch, match=r"parameter 1 of group 0 of shape \(5, 4\), the run's has \(2,\)"):
        load(twins("a", make=make, more=(torch.nn.Parameter(torch.zeros(2)),)), tmp_path)


def test_shapes_of_moments_where_the_file_has_no_names(tmp_path: Path) -> None:
    wide, narrow = torch.nn.Parameter(torch.zeros(5, 4)), torch.nn.Parameter(torch.zeros(2))
    source = TorchEngine(None, optim.Adam([wide]))
    wide.grad = torch.ones_like(wide)
    assert source.optimizer is not None
    source.optimizer.step()
    save_without_names(source, tmp_path)
    with pytest.raises(LayoutMismatch) as caught:
        load(TorchEngine(None, optim.Adam([narrow])), tmp_path)
    assert "exp_avg of parameter 0 of group 0 with shape (5, 4), the parameter has (2,)" in str(caught.value)
    assert "exp_avg_sq" in str(caught.value)


def test_hyperparameters_come_from_the_file_and_what_it_lacks_stays(tmp_path: Path) -> None:
    source = stepped(twins("a", "b"))
    assert source.optimizer is not None
    source.optimizer.param_groups[0]["lr"] = 0.5
    save(source, tmp_path)
    target = twins("a", "b")
    assert target.optimizer is not None
    target.optimizer.param_groups[0]["scale"] = 3
    seen: list[int] = []
    target.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    load(target, tmp_path)
    assert (target.optimizer.param_groups[0]["lr"], target.optimizer.param_groups[0]["scale"]) == (0.5, 3)
    assert seen == [2], "hooks see the state that was loaded"


def test_an_optimizer_that_loads_in_its_own_way_is_left_to_it(tmp_path: Path) -> None:
    class Own(optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            if self.param_groups[0]["lr"] == 7:
                super().load_state_dict({**state_dict, "state": {}})
                raise RuntimeError("half way")
            super().load_state_dict(state_dict)

    save(stepped(twins("a", "b", make=Own)), tmp_path)
    target = twins("a", "b", make=Own)
    load(target, tmp_path)
    assert moment(target, "b") == pytest.approx(0.5)
    assert target.optimizer is not None
    target.optimizer.param_groups[0]["lr"] = 7
    with pytest.raises(CheckpointError, match="optimizer refused its state: RuntimeError: half way"):
        load(target, tmp_path)
    assert moment(target, "b") == pytest.approx(0.5), "its own load_state_dict put it back"


@pytest.mark.parametrize(
    "damage",
    [
        {"optimizer": None},
        {"optimizer": [1]},
        {"optimizer": {"state": {}, "param_groups": [{"params": 3}]}},
        {RECORD: 5},
        {RECORD: {"class": 3}},
        {RECORD: {"class": "Adam", "names": [["a"]], "shapes": [[[3], [3]]]}},
        {RECORD: {"class": "Adam", "names": [["a", "a"]], "shapes": [[[3], [3]]]}},
        {RECORD: {"class": "Adam", "names": [["a", ["b"]]], "shapes": [[[3], [3]]]}},
        {RECORD: {"class": "Adam", "names": [["a", "b"]], "shapes": [[3, 3]]}},
    ],
)
def test_what_is_no_optimizer_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    save(stepped(twins("a", "b")), tmp_path)
    torch.save({**stored(tmp_path), **damage}, tmp_path / FILE)
    with pytest.raises(LayoutMismatch, match="optimizer"):
        load(twins("a", "b"), tmp_path)
