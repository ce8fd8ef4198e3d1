"""Megatron-Bridge's iterations: no args, and a ``run_config.yaml`` that says what they would."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import CheckpointError, Corrupt, LayoutMismatch
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.checkpoint import verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.conversions import options
from tests.helpers.damage import edited

DIST = Path(__file__).parents[2] / "goldens" / "megatron_dist"
_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "transformer_impl",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "bf16", "normalization",
)  # fmt: skip


def bridged(name: str, folder: Path) -> Path:
    """megatron-core's own folder, with arguments and counters of the run as Bridge writes them."""
    root = Path(shutil.copytree(DIST / name, folder))
    (iteration,) = root.glob("iter_*")
    with edited(iteration / "common.pt") as common:
        args = common.pop("args")
    model: dict[str, Any] = {key: getattr(args, key) for key in _MODEL}
    model |= {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
        "gated_linear_unit": args.swiglu,
        "num_moe_experts": args.num_experts,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
    }
    ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": args.overlap_grad_reduce}
    (iteration / "run_config.yaml").write_text(yaml.safe_dump({"model": model, "ddp": ddp, "dataset": None}))
    return counted(root)


@pytest.mark.parametrize("name", ["tp2pp2dp2_dp_reshardable", "tp2pp2dp2_fully_reshardable", "experts_ep2"])
def test_local_layers_are_said_by_the_configuration(name: str, tmp_path: Path) -> None:
    root = bridged(name, tmp_path / "run")
    source, whole = open_checkpoint(root, ReadOptions()), open_checkpoint(DIST / name, ReadOptions())
    with OpenFiles(source.root) as files, OpenFiles(whole.root) as others:
        found = Differ(source, whole, files, others).compare().differences
    assert [one.name for one in found if one.tensor is not None] == []
    assert source.model.params == whole.model.params
    assert verify(root, ReadOptions()).intact


@pytest.mark.parametrize("text", ["model: [", "[" * 100_000])
def test_a_configuration_that_cannot_be_read_is_damaged(tmp_path: Path, text: str) -> None:
    root = bridged("experts_ep2", tmp_path / "run")
    (root / "iter_0000002" / "run_config.yaml").write_text(text)
    with pytest.raises(Corrupt, match=r"run_config\.yaml: cannot be read"):
        open_checkpoint(root, ReadOptions())


def counted(root: Path, **changes: Any) -> Path:
    """``train_state.pt`` as Bridge's ``TrainState.state_dict`` fills it, at 0.3.1."""
    state: dict[str, Any] = {
        "step": torch.tensor(2, dtype=torch.int32),
        "consumed_train_samples": torch.tensor(12, dtype=torch.int32),
        "skipped_train_samples": torch.tensor(1, dtype=torch.int32),
        "consumed_valid_samples": torch.tensor(4, dtype=torch.int32),
        "floating_point_operations_so_far": torch.tensor(2.5e9, dtype=torch.float64),
        **{name: torch.tensor(True) for name in ("do_train", "do_valid", "do_test")},
    }
    torch.save({**state, **changes}, root / "iter_0000002" / "train_state.pt")
    return root


def test_counters_are_those_of_the_train_state(tmp_path: Path) -> None:
    root = bridged("tp2pp2dp2_fully_reshardable", tmp_path / "run")
    source = open_checkpoint(root, ReadOptions())
    counters = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    assert [source.state.args[name] for name in counters] == [12, 1, 4]
    assert source.state.other["num_floating_point_operations_so_far"] == 2_500_000_000
    assert "iter_0000002/train_state.pt" in {file.path for file in source.files}
    assert verify(root, ReadOptions()).intact
    convert(root, tmp_path / "out", replace(options(tp=1, padded_vocab_size=160), to="megatron"))
    moved = open_checkpoint(tmp_path / "out", ReadOptions())
    assert [moved.state.args[name] for name in counters] == [12, 1, 4]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"step": torch.tensor(3)}, LayoutMismatch, "is of step 3, its folder of iteration 2"),
        ({"step": None}, Corrupt, "step should be a number"),
        ({"consumed_train_samples": torch.ones(3)}, Corrupt, "consumed_train_samples should be a number"),
        ({"consumed_train_samples": torch.tensor(-1)}, Corrupt, "not negative"),
        ({"floating_point_operations_so_far": torch.tensor(float("nan"))}, Corrupt, "not negative"),
        ({"floating_point_operations_so_far": torch.tensor(float("inf"))}, Corrupt, "not negative"),
    ],
)
def test_counters_that_are_none(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], match: str
) -> None:
    root = counted(bridged("experts_ep2", tmp_path / "run"), **changes)
    with pytest.raises(error, match=match):
        open_checkpoint(root, ReadOptions())
