"""The plain PyTorch engine: in place, bit for bit, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rlhf.engines.base import LoadRequest, apply
from mcore_rlhf.engines.plain import FILE, TorchEngine
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, NotACheckpoint

HIDDEN = 160


def trained(steps: int = 3, hidden: int = HIDDEN) -> TorchEngine:
    torch.manual_seed(7)
    module = torch.nn.Sequential(
        torch.nn.Linear(hidden, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 3)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, hidden)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
    return TorchEngine(module, optimizer, scheduler)


def written_by_torch(engine: TorchEngine, folder: Path) -> Path:
    """An independent author: torch writes what the engine would."""
    assert engine.module is not None
    assert engine.optimizer is not None
    parts = {name: other.state_dict() for name, other in engine.others.items()}
    torch.save(
        {"model": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict(), **parts}, folder / FILE
    )
    return folder


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors(item)]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def state(engine: TorchEngine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(engine._parts())]


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh optimizer", "optimizer with state"])
def test_what_torch_saved_is_restored_bit_for_bit(tmp_path: Path, steps: int) -> None:
    source, target = trained(5), trained(steps)
    apply(target.prepare_load(LoadRequest(written_by_torch(source, tmp_path), "actor")))
    assert equal(state(source), state(target))
    assert source.optimizer is not None
    assert target.optimizer is not None
    assert target.optimizer.param_groups[0]["lr"] == source.optimizer.param_groups[0]["lr"]
    assert target.others["scheduler"].state_dict() == source.others["scheduler"].state_dict()


def test_existing_tensors_are_filled_and_not_replaced(tmp_path: Path) -> None:
    source, target = trained(5), trained(2)
    before = [tensor.data_ptr() for tensor in tensors(target._parts())]
    apply(target.prepare_load(LoadRequest(written_by_torch(source, tmp_path), "actor")))
    assert [tensor.data_ptr() for tensor in tensors(target._parts())] == before


def test_weights_alone(tmp_path: Path) -> None:
    source, target = trained(5), trained(2)
    assert target.optimizer is not None
    moments = [tensor.clone() for tensor in tensors(target.optimizer.state_dict())]
    apply(target.prepare_load(LoadRequest(written_by_torch(source, tmp_path), "actor", optimizer=False)))
    assert equal(moments, tensors(target.optimizer.state_dict()))
    assert source.module is not None
    assert target.module is not None
    assert torch.equal(source.module.state_dict()["0.weight"], target.module.state_dict()["0.weight"])


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    target = trained(1)
    before = state(target)
    with pytest.raises(LayoutMismatch) as caught:
        target.prepare_load(LoadRequest(written_by_torch(trained(1, hidden=HIDDEN + 1), tmp_path), "actor"))
    text = str(caught.value)
    assert "0.weight has shape (161, 161), the model's has (160, 160)" in text
    assert "2.weight" in text
    assert equal(before, state(target))


def test_missing_and_unexpected_names_and_types(tmp_path: Path) -> None:
    source, target = trained(1), trained(1)
    assert source.module is not None
    weights = source.module.state_dict()
    weights["0.weight"] = weights["0.weight"].double()
    weights["extra.weight"] = weights.pop("2.bias")
    torch.save({"model": weights, "optimizer": {}, "scheduler": {}}, tmp_path / FILE)
    with pytest.raises(LayoutMismatch) as caught:
        target.prepare_load(LoadRequest(tmp_path, "actor"))
    for part in ("0.weight is float64", "2.bias is missing", "extra.weight"):
        assert part in str(caught.value)


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="has no 'optimizer'"):
        trained(1).prepare_load(LoadRequest(tmp_path, "actor"))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        trained(1).prepare_load(LoadRequest(tmp_path, "actor"))


def test_a_load_can_be_applied_again(tmp_path: Path) -> None:
    source, target = trained(5), trained(2)
    prepared = target.prepare_load(LoadRequest(written_by_torch(source, tmp_path), "actor"))
    for _ in range(2):
        apply(prepared)
        assert equal(state(source), state(target))


def test_a_model_of_no_layers(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / FILE)
    apply(TorchEngine(torch.nn.Sequential()).prepare_load(LoadRequest(tmp_path, "actor")))
