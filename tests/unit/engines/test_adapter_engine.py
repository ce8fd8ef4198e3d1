"""The engine of a LoRA: the adapter alone is saved, and comes back bit for bit, on its own base or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rlhf import CheckpointManager
from mcore_rlhf.engines.adapter import AdapterEngine
from mcore_rlhf.engines.base import LoadRequest, apply
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.live_lora import CONFIG, Adapted, Base, optimizer_of, train


def engine(model: Adapted, optimizer: torch.optim.Optimizer | None = None, **more: object) -> AdapterEngine:
    return AdapterEngine(model, optimizer or optimizer_of(model), **more)  # type: ignore[arg-type]


def saved(folder: Path, model: Adapted, step: int = 3, optimizer: torch.optim.Optimizer | None = None) -> Path:
    """The role's folder, as the manager writes it."""
    with CheckpointManager(folder, {"actor": engine(model, optimizer)}) as manager:
        manager.save(step, blocking=True)
    return folder / f"global_step_{step}" / "actor"


@pytest.mark.parametrize("head", [False, True], ids=["adapter", "adapter and head"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, head: bool) -> None:
    model = Adapted(1, head=head)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    saved(tmp_path, model, optimizer=optimizer)
    expected = train(model, optimizer, range(3, 6))
    again = Adapted(2, head=head)
    fresh = optimizer_of(again)
    train(again, fresh, range(10, 11))  # states that are to be overwritten
    places = [parameter.data_ptr() for parameter in again.parameters()]
    with CheckpointManager(tmp_path, {"actor": engine(again, fresh)}) as manager:
        assert manager.load() is not None
    assert train(again, fresh, range(3, 6)) == expected
    assert [parameter.data_ptr() for parameter in again.parameters()] == places


def test_nothing_of_the_base_is_written(tmp_path: Path) -> None:
    model = Adapted(1)
    folder = saved(tmp_path, model)
    names = {"adapter_config.json", "adapter_model.safetensors", "mcore_rlhf", "state.pt"}
    assert {path.name for path in folder.iterdir()} == names
    found = load_file(folder / "adapter_model.safetensors")
    live = {key.replace(".default", ""): value for key, value in model.state_dict().items() if ".lora_" in key}
    assert found.keys() == live.keys()
    assert all(torch.equal(found[name], live[name]) for name in live)
    assert json.loads((folder / "adapter_config.json").read_text()) == {
        **CONFIG, "target_modules": ["down", "up"], "inference_mode": True
    }  # fmt: skip
    origin = json.loads((folder / "mcore_rlhf" / "state.json").read_text())
    base = Base()
    assert (origin["iteration"], origin["base"]["path"]) == (3, "models/base")
    assert origin["base"]["fingerprint"]["tensors"] == len(base.state_dict())
    assert origin["base"]["fingerprint"]["elements"] == sum(t.numel() for t in base.state_dict().values())


def test_a_step_is_a_checkpoint_like_others(tmp_path: Path) -> None:
    source = open_checkpoint(saved(tmp_path, Adapted(1), step=40), ReadOptions())
    assert (source.format, source.state.iteration) == ("peft", 40)


def test_a_trained_head_lies_with_the_optimizer(tmp_path: Path) -> None:
    model = Adapted(1, head=True)
    folder = saved(tmp_path, model)
    found = torch.load(folder / "state.pt", weights_only=True)
    assert found["model"].keys() == {"head.weight", "head.bias"}
    assert "head" not in "".join(load_file(folder / "adapter_model.safetensors"))


def change_of_base(model: Adapted, how: str) -> None:
    base = model.base_model.model
    with torch.no_grad():
        if how == "one element":
            base.up.base_layer.weight[3, 5] += 1e-3  # type: ignore[union-attr, operator, index]
        elif how == "buffer":
            base.scale[0] = 2.0  # type: ignore[index, operator]
        elif how == "dtype":
            base.norm.double()  # type: ignore[union-attr, operator]
        else:
            base.norm.register_parameter("more", torch.nn.Parameter(torch.zeros(1), requires_grad=False))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("how", ["one element", "buffer", "dtype", "one more"])
def test_another_base_is_refused_and_nothing_changes(tmp_path: Path, how: str) -> None:
    saved(tmp_path, Adapted(1))
    other = Adapted(2)
    change_of_base(other, how)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with (
        CheckpointManager(tmp_path, {"actor": engine(other)}) as manager,
        pytest.raises(CheckpointError, match="not the model on which the adapter was trained"),
    ):
        manager.load()
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in before.items())


def test_training_does_not_change_the_base(tmp_path: Path) -> None:
    model = Adapted(1)
    optimizer = optimizer_of(model)
    first = engine(model, optimizer).adapter.base()
    train(model, optimizer, range(3))
    assert engine(model, optimizer).adapter.base() == first
    assert engine(Adapted(5)).adapter.base() == first
    assert engine(Adapted(1, base_seed=1)).adapter.base() != first


def test_a_merged_adapter_is_not_saved() -> None:
    model = Adapted(1)
    model.base_model.model.up.merged_adapters = ["default"]  # type: ignore[union-attr, assignment]
    with pytest.raises(Unsupported, match="unmerge_adapter"):
        engine(model).live(1)


def test_all_differences_are_listed(tmp_path: Path) -> None:
    folder = saved(tmp_path, Adapted(1))
    with pytest.raises(LayoutMismatch) as caught:
        engine(Adapted(1, rank=5)).prepare_load(LoadRequest(folder, "actor"))
    text = str(caught.value)
    assert "up.lora_A.weight is float32 (3, 40), the run's is float32 (5, 40)" in text
    assert "down.lora_B.weight" in text


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    folder = saved(tmp_path, Adapted(1))
    weights = folder / "adapter_model.safetensors"
    kept = weights.read_bytes()
    fresh = engine(Adapted(1))
    weights.write_bytes(kept[:-8])
    with pytest.raises(Incomplete, match="cut off"):
        fresh.prepare_load(LoadRequest(folder, "actor"))
    save_file({"x": torch.zeros(1)}, weights)
    with pytest.raises(LayoutMismatch, match="x is not a tensor of the run's adapter"):
        fresh.prepare_load(LoadRequest(folder, "actor"))
    weights.write_bytes(kept)
    (folder / "mcore_rlhf" / "state.json").write_text("{}")
    with pytest.raises(Unsupported, match="was not written by mcore_rlhf"):
        fresh.prepare_load(LoadRequest(folder, "actor"))


def test_an_adapter_that_others_saved(tmp_path: Path) -> None:
    """Without the state of a training, its weights can be loaded alone."""
    folder, model = saved(tmp_path, Adapted(1)), Adapted(2)
    for name in ("state.pt", "mcore_rlhf/state.json"):
        (folder / name).unlink()
    with pytest.raises(Incomplete, match=r"load\(optimizer=False\)"):
        engine(model).prepare_load(LoadRequest(folder, "actor"))
    prepared = engine(model).prepare_load(LoadRequest(folder, "actor", optimizer=False))
    assert any("was not checked" in text for _, text in prepared.report.lines)
    apply(prepared)
    want = Adapted(1).state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items() if "lora" in name)


def test_a_bit_that_flipped_is_found_before_anything_changes(tmp_path: Path) -> None:
    folder, model = saved(tmp_path, Adapted(1)), Adapted(2)
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CheckpointManager(tmp_path, {"actor": engine(model)}) as manager, pytest.raises(CheckpointError):
        manager.load(3)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_a_model_without_an_adapter_is_refused() -> None:
    with pytest.raises(UsageError, match="no peft_config of an adapter 'default'"):
        AdapterEngine(Base())
    with pytest.raises(UsageError, match="belongs to an adapter 'other'"):
        AdapterEngine(Adapted(1), config=CONFIG, adapter="other")


@pytest.mark.parametrize(("bias", "count"), [("none", 4), ("lora_only", 6), ("all", 7)])
def test_biases_go_with_the_adapter_as_pefts_option_says(bias: str, count: int) -> None:
    found = engine(Adapted(1, bias=bias)).adapter.tensors()
    assert len(found) == count
    assert ("base_model.model.up.base_layer.bias" in found) == (bias != "none")
