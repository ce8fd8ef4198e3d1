"""A LoRA under real DeepSpeed: its adapter leaves the checkpoint as peft would have saved it, and frozen weights can stay out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions

PROJECT = Path(__file__).parents[2]
BASE = PROJECT / "tests" / "goldens" / "peft" / "base"
pytestmark = pytest.mark.reference


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="stage 2"), pytest.param(3, id="stage 3", marks=pytest.mark.slow)]
)
def run(request: pytest.FixtureRequest, deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the worker leaves."""
    for package in ("peft", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("lora")
    deepspeed_pool.run("tests.reference.lora_worker:run", folder, request.param, world_size=1, timeout=200)
    return folder


def test_the_adapter_is_what_peft_saves(run: Path, tmp_path: Path) -> None:
    chosen = WriteOptions(reference_config=str(run / "adapter"))
    convert(run / "run", tmp_path / "out", ConvertOptions("peft", write=chosen, fsync=False))
    ours, own = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "out", run / "adapter"))
    assert ours.keys() == own.keys()
    assert all(torch.equal(ours[name], own[name]) for name in own)
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path / "out", run / "adapter")]
    assert configs[0] == configs[1]


def test_it_merges_without_another_base(run: Path, tmp_path: Path) -> None:
    """Base and adapter are both in DeepSpeed's checkpoint; the base is as it was."""
    chosen = WriteOptions(merge_adapter=True, reference_config=str(run / "adapter"))
    convert(run / "run", tmp_path / "a", ConvertOptions("hf", write=chosen, fsync=False))
    chosen = WriteOptions(merge_adapter=True, base_model=str(BASE))
    convert(run / "adapter", tmp_path / "b", ConvertOptions("hf", write=chosen, fsync=False))
    ours, own = (load_file(path / "model.safetensors") for path in (tmp_path / "a", tmp_path / "b"))
    assert ours.keys() == own.keys()
    assert all(torch.equal(ours[name], own[name]) for name in own)


def test_it_goes_on_without_the_frozen_parameters(run: Path) -> None:
    seen = json.loads((run / "seen.json").read_text())
    assert seen["found"] == pytest.approx(seen["expected"], rel=1e-6)
    stored = torch.load(run / "lean" / "step3" / "mp_rank_00_model_states.pt", weights_only=False)
    assert stored["module"]
    assert all("lora" in name or "modules_to_save" in name for name in stored["module"])
