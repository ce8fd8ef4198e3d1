"""What cannot be saved or loaded is refused by name, and a load that is refused leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.engines.plain import FILE, Stateful, TorchEngine
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Unsupported, UsageError
from tests.unit.engines.plain_files import load, same, save, stored


class Part:
    """Counts; refuses what ``refuses`` says, after it has begun."""

    def __init__(self, count: int = 0, refuses: Callable[[int], bool] = lambda count: False) -> None:
        self.count, self.moments, self.refuses = count, torch.full((2,), float(count)), refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "moments": self.moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        self.moments.copy_(state_dict["moments"])
        if self.refuses(self.count):
            raise KeyError("old format")


class Extra(torch.nn.Linear):
    """A layer whose extra state is a tensor, of a size that changes."""

    def __init__(self, size: int = 1, refuses: bool = False) -> None:
        super().__init__(2, 2)
        self.extra, self.refuses = torch.full((size,), float(size)), refuses

    def get_extra_state(self) -> torch.Tensor:
        return self.extra.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state
        if self.refuses and len(state) == 3:
            raise ValueError("three")


def run(*, seed: int, module: torch.nn.Module | None = None, steps: int = 1, **others: Stateful) -> TorchEngine:
    torch.manual_seed(seed)
    module = module if module is not None else torch.nn.Linear(2, 2)
    torch.nn.init.normal_(module.weight)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(module.parameters(), lr=seed / 10)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        module(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return TorchEngine(module, optimizer, scheduler, **others)


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "trained"])
def test_a_part_that_refuses_leaves_everything_as_it_was(steps: int, tmp_path: Path) -> None:
    save(run(seed=1, first=Part(1), second=Part(2)), tmp_path)
    first = Part(7)
    target = run(seed=2, steps=steps, first=first, second=Part(8, refuses=lambda count: count == 2))
    before, groups = copy.deepcopy(target._parts()), target.optimizer and target.optimizer.param_groups
    with pytest.raises(CheckpointError, match=r"state.pt: second refused its state: KeyError: 'old format'") as caught:
        load(target, tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)
    assert same(before, target._parts())
    assert target.optimizer is not None
    assert target.optimizer.param_groups is groups


def test_a_part_that_refuses_even_its_own_state_does_not_keep_the_others_from_being_put_back(tmp_path: Path) -> None:
    save(run(seed=1, first=Part(1), second=Part(2)), tmp_path)
    target = run(seed=2, first=Part(7), second=Part(8, refuses=lambda count: True))
    before = copy.deepcopy({name: part for name, part in target._parts().items() if name != "second"})
    with pytest.raises(CheckpointError, match="second refused"):
        load(target, tmp_path)
    assert same(before, {name: part for name, part in target._parts().items() if name != "second"})


def test_a_key_pressed_meanwhile_puts_everything_back_and_stays_what_it_is(tmp_path: Path) -> None:
    class Interrupted(Part):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    save(run(seed=1, part=Part(1)), tmp_path)
    target = run(seed=2, part=Interrupted(7))
    before = copy.deepcopy(target._parts())
    with pytest.raises(KeyboardInterrupt):
        load(target, tmp_path)
    assert same(before, target._parts())


def test_extra_state_that_is_a_tensor_reaches_the_module(tmp_path: Path) -> None:
    save(run(seed=1, module=Extra(3)), tmp_path)
    module = Extra(1)
    target = run(seed=2, module=module)
    load(target, tmp_path)
    assert torch.equal(module.extra, torch.full((3,), 3.0))
    assert torch.equal(module.weight, stored(tmp_path)["model"]["weight"])


def test_extra_state_that_is_refused(tmp_path: Path) -> None:
    save(run(seed=1, module=Extra(3)), tmp_path)
    target = run(seed=2, module=Extra(1, refuses=True))
    before = copy.deepcopy(target._parts())
    with pytest.raises(CheckpointError, match="model refused its state: ValueError: three"):
        load(target, tmp_path)
    assert same(before, target._parts())


def buffered(buffer: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("table", buffer)
    return module


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 3)


UNWRITABLE: dict[str, Callable[[], torch.nn.Module]] = {
    "expanded": lambda: buffered(torch.zeros(1, 3).expand(4, 3)),
    "meta device": lambda: buffered(torch.zeros(4, 3, device="meta")),
    "not dense (sparse_coo)": lambda: buffered(torch.zeros(4, 3).to_sparse()),
    "inference mode": lambda: buffered(inference()),
    "not initialised": lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)),
}


@pytest.mark.parametrize("why", UNWRITABLE)
def test_live_tensors_that_cannot_be_overwritten_are_named_before_anything_changes(why: str, tmp_path: Path) -> None:
    good = torch.nn.Sequential(torch.nn.Linear(3, 3)) if "init" in why else buffered(torch.ones(4, 3))
    save(TorchEngine(good), tmp_path)
    module = UNWRITABLE[why]()
    weight = module.weight.detach().clone() if isinstance(module, torch.nn.Linear) else None
    with pytest.raises(LayoutMismatch) as caught:
        load(TorchEngine(module), tmp_path)
    assert "0.weight" in str(caught.value) or "the model's table" in str(caught.value)
    assert why in str(caught.value)
    assert weight is None or torch.equal(weight, module.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["meta device", "not dense (sparse_coo)", "not initialised"])
def test_tensors_without_bytes_cannot_be_saved(why: str) -> None:
    with pytest.raises(Unsupported) as caught:
        TorchEngine(UNWRITABLE[why]()).live(1)
    assert "model.table" in str(caught.value) or "model.0.weight" in str(caught.value)
    assert why in str(caught.value)


def test_an_expanded_tensor_can_be_saved(tmp_path: Path) -> None:
    save(TorchEngine(buffered(torch.ones(1, 3).expand(4, 3))), tmp_path)
    assert torch.equal(torch.load(tmp_path / FILE, weights_only=True)["model"]["table"], torch.ones(4, 3))


@pytest.mark.parametrize("model", [3, {"weight": "x", "bias": torch.zeros(2)}])
def test_a_model_that_is_none(model: object, tmp_path: Path) -> None:
    torch.save({"model": model}, tmp_path / FILE)
    with pytest.raises(LayoutMismatch, match=r"is a (int|str)"):
        load(TorchEngine(torch.nn.Linear(2, 2)), tmp_path)


def test_further_parts_cannot_take_the_files_own_names() -> None:
    with pytest.raises(UsageError, match="optimizer_params"):
        TorchEngine(None, optimizer_params=Part())


def test_tied_and_renamed_entries_are_filled_where_they_lie(tmp_path: Path) -> None:
    class Renamed(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {f"core.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    source, target = Renamed(2, 2), Renamed(2, 2)
    save(TorchEngine(source), tmp_path)
    load(TorchEngine(target), tmp_path)
    assert torch.equal(source.weight, target.weight)
