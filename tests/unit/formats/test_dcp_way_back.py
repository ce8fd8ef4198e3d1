"""A DCP folder that went through Megatron comes back under its own keys, in its own place: torchtitan looks nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.dcp_by_torch import load, save
from tests.unit.formats.hf_by_hand import CONFIG, llama


def titan() -> dict[str, Any]:
    """Names at the top, the optimizer flat, a scheduler, counters; see ``torchtitan/components/checkpoint.py``."""
    model, optimizer = llama(), dict[str, Any]()
    for name, tensor in model.items():
        for state in ("exp_avg", "exp_avg_sq"):
            optimizer[f"state.{name}.{state}"] = torch.rand_like(tensor)
        optimizer[f"state.{name}.step"] = torch.tensor(3.0)
        fields = {"lr": 0.1, "initial_lr": 0.2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        optimizer |= {f"param_groups.{name}.{field}": value for field, value in fields.items()}
    scheduler = {"base_lrs": [0.2], "last_epoch": 3, "_last_lr": [0.1], "lr_lambdas": [None]}
    return {**model, "optimizer": optimizer, "lr_scheduler": scheduler, "train_state": {"step": 3, "ntokens_seen": 96}}


def test_a_run_whose_names_are_at_the_top_comes_back_as_it_was(tmp_path: Path) -> None:
    state = titan()
    save(state, tmp_path / "step-3")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    convert(
        tmp_path / "step-3",
        tmp_path / "megatron",
        ConvertOptions(to="megatron", write=WriteOptions(reference_config=str(tmp_path))),
    )
    (sidecar,) = (tmp_path / "megatron").rglob("mcore_rlhf/state.json")
    job = convert(tmp_path / "megatron", tmp_path / "back" / "step-3", ConvertOptions(to="dcp"))
    assert (tmp_path / "back" / "step-3" / ".metadata").is_file()
    assert not (tmp_path / "back" / "step-3" / "dcp_checkpoint").exists()
    assert any(fate is Fate.KEPT and "keys as the DCP folder had them" in text for fate, text in job.report.lines)
    found = load(titan(), tmp_path / "back" / "step-3")  # stops at a key that is not there
    for name in llama():
        assert torch.equal(found[name], state[name]), name
        assert torch.equal(found["optimizer"][f"state.{name}.exp_avg"], state["optimizer"][f"state.{name}.exp_avg"])
    assert found["train_state"] == state["train_state"]
    assert found["lr_scheduler"]["last_epoch"] == 3
    assert found["lr_scheduler"]["base_lrs"] == [0.2], "Megatron deals two groups, and the run has one"
    assert open_checkpoint(tmp_path / "back" / "step-3", ReadOptions()).state.iteration == 3

    noted = sidecar.read_text()
    assert '"groups": 1\n' in noted
    sidecar.write_text(noted.replace('"groups": 1\n', f'"groups": {10**12}\n'))
    (tmp_path / "megatron" / "mcore_rlhf.json").unlink()  # as whoever plants it would
    convert(tmp_path / "megatron", tmp_path / "bomb" / "step-3", ConvertOptions(to="dcp"))
    scheduler = open_checkpoint(tmp_path / "bomb" / "step-3", ReadOptions()).state.scheduler
    assert scheduler is not None
    assert scheduler["base_lrs"] == [0.2, 0.2]
