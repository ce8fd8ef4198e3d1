"""Torch's Muon beside AdamW, in one DCP folder, as other frameworks that have a Muon of their own, or have none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import Lossy
from mcore_rlhf.families.module import MOMENTUM, USE_MUON
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint


def saved(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=False
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    matrices = [value for name, value in module.named_parameters() if value.ndim == 2 and "layers" in name]
    others = [value for value in module.parameters() if not any(value is one for one in matrices)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **settings), torch.optim.AdamW(others)]
    words = torch.randint(0, 64, (2, 8))
    module(input_ids=words, labels=words).loss.backward()
    for one in optimizers:
        one.step()
    model, optimizer = get_state_dict(module, optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process, which torch says
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, {"muon_scale_mode": "shape_scaling"}),
        ({"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
         {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2, "muon_nesterov": False}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_megatron_is_told_of_the_same_muon(
    to: str, settings: dict[str, Any], scale: dict[str, Any], tmp_path: Path
) -> None:
    source = saved(tmp_path / "dcp", **settings)
    job = convert(source, tmp_path / "out", ConvertOptions(to=to, fsync=False))
    assert not job.account.lost
    found = open_checkpoint(tmp_path / "out", ReadOptions())
    assert {**found.state.args, **scale, "optimizer": "muon"} == found.state.args
    assert MOMENTUM in found.states
    convert(tmp_path / "out", tmp_path / "back", ConvertOptions(to="deepspeed", fsync=False))
    marks = {group.fields.get(USE_MUON) for group in open_checkpoint(tmp_path / "back", ReadOptions()).state.groups}
    assert marks == {True, False}


def test_deepspeeds_muon_finds_its_matrices_where_it_looks_and_other_settings_are_lost_by_name(tmp_path: Path) -> None:
    """It sorts them by shape; torch's takes them in any order."""
    job = convert(saved(tmp_path / "dcp"), tmp_path / "out", ConvertOptions(to="deepspeed", fsync=False))
    assert not job.account.lost
    source = open_checkpoint(tmp_path / "out", ReadOptions())
    first = source.state.groups[0]
    shapes = [source.model.shapes[name] for name in first.params]
    assert first.fields[USE_MUON] is True
    assert len(set(shapes)) > 1
    assert shapes == sorted(shapes, reverse=True)
    odd = saved(tmp_path / "odd", adjust_lr_fn="match_rms_adamw", nesterov=False, ns_coefficients=(3.0, -4.0, 2.0))
    lost = convert(odd, tmp_path / "of odd", ConvertOptions(to="deepspeed", fsync=False)).account.lost
    assert [text.partition(" ")[0] for text in lost] == ["adjust_lr_fn", "ns_coefficients", "nesterov"]


def test_a_trainer_with_one_optimizer_is_given_no_mixture_of_two(tmp_path: Path) -> None:
    with pytest.raises(Lossy, match="2 kinds of optimizer train it"):
        convert(saved(tmp_path / "dcp"), tmp_path / "out", ConvertOptions(to="fsdp-ranks", fsync=False))
