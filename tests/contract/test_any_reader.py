"""``dcp.load`` through :class:`mcore_rlhf.dcp.AnyReader`, one rank: every format fills what torch's own reader fills out of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_rlhf.dcp import AnyReader, Writer
from tests.helpers.every_format import EVERY, Zoo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def wanted(zoo: Zoo) -> Tensors:
    """Every tensor of the model and of its optimizer, as torch's own reader finds it in the DCP folder."""
    folder = next(zoo.base("dcp").rglob(".metadata")).parent
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(of.size, dtype=of.properties.dtype)
        for key, of in there.items()
        if isinstance(of, TensorStorageMetadata) and ("_checkpoint.model." in key or ".exp_avg" in key)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {
        key.removeprefix("fsdp_checkpoint.").replace("optimizers.", "optimizer.", 1): one
        for key, one in tensors.items()
    }


def filled(state: dict[str, Any], path: Path, **named: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=AnyReader(path), no_dist=True, **named)
    return state


@pytest.mark.parametrize("name", EVERY)
def test_every_format_fills_the_same(zoo: Zoo, wanted: Tensors, name: str) -> None:
    found = filled({key: torch.full_like(one, 7) for key, one in wanted.items()}, zoo.base(name))
    assert [key for key, one in wanted.items() if not torch.equal(found[key], one)] == []
    assert len(wanted) > 100


def test_what_is_filled_may_lie_as_it_likes(zoo: Zoo, wanted: Tensors) -> None:
    """Transposed, with gaps, of another type, a parameter, in nests of dictionaries and lists."""
    key = next(one for one in wanted if one.endswith("layers.1.mlp.gate_proj.weight") and one.startswith("model."))
    value, run = wanted[key], zoo.base("megatron")
    rows, columns = value.shape
    for target in (
        torch.zeros(columns, rows).t(), torch.zeros(rows, 2 * columns)[:, ::2], torch.zeros(rows, columns, dtype=torch.float64),
        torch.nn.Parameter(torch.zeros(rows, columns)),
    ):  # fmt: skip
        filled({key: target}, run)
        assert torch.equal(target.detach().to(value.dtype), value)
    layers = [{"mlp": {"gate_proj": {"weight": torch.zeros(rows, columns)}}} for _ in range(2)]
    filled({"model": {"model": {"layers": layers}}}, run)
    assert torch.equal(layers[1]["mlp"]["gate_proj"]["weight"], value)
    half = torch.zeros(rows, columns, dtype=torch.bfloat16)
    filled({key: half}, run)
    assert torch.equal(half, value.bfloat16())


def test_what_does_not_fit_is_refused_by_name(zoo: Zoo, wanted: Tensors) -> None:
    key, run = next(iter(wanted)), zoo.base("megatron")
    shape = tuple(wanted[key].shape)
    for other in ((shape[0] + 1, *shape[1:]), (shape[0] - 1, *shape[1:]), (wanted[key].numel(),), ()):
        with pytest.raises(BaseException, match=key):
            filled({key: torch.zeros(other)}, run)
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(BaseException, match=rf"{key}: is asked for as {dtype}, and there as torch.float32"):
            filled({key: torch.zeros(shape, dtype=dtype)}, run)
    with pytest.raises(BaseException, match=r"model\.nowhere"):
        filled({"model": {"nowhere": torch.zeros(2)}}, run)
    kept = filled(
        {"model.nowhere": torch.ones(2), key: torch.zeros(shape)},
        run,
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    assert torch.equal(kept["model.nowhere"], torch.ones(2))
    assert torch.equal(kept[key], wanted[key].float())


ODD = {
    "plain": torch.randn(4, 3), "empty": torch.zeros(0, 3), "nothing": torch.zeros(0), "scalar": torch.tensor(2.5),
    "count": torch.arange(5), "flags": torch.tensor([True, False]), "half": torch.randn(3).half(), "turned": torch.randn(4, 6).t(),
    "gaps": torch.randn(10)[::3],
}  # fmt: skip


@pytest.mark.parametrize("by", ["folder", "file"])
def test_empty_tensors_scalars_and_views_come_back(tmp_path: Path, by: str) -> None:
    path = tmp_path / "there"
    if by == "folder":
        dcp.save({"model": ODD}, storage_writer=Writer(path), no_dist=True)
    else:
        path.mkdir()
        torch.save({"model": ODD}, path / "state.pt")
    readers: list[Any] = [AnyReader(path), *([dcp.FileSystemReader(path)] if by == "folder" else [])]
    for reader in readers:
        found = {"model": {name: torch.ones_like(one) for name, one in ODD.items()}}
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert [name for name, one in ODD.items() if not torch.equal(found["model"][name], one)] == []
