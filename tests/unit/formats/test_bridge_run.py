"""Megatron-Bridge's iterations: no args, and a ``run_config.yaml`` that says what they would."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.checkpoint import verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.damage import edited

DIST = Path(__file__).parents[2] / "goldens" / "megatron_dist"
_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "transformer_impl",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "bf16", "normalization",
)  # fmt: skip


def bridged(name: str, folder: Path) -> Path:
    """megatron-core's own folder, with the arguments of the run as Bridge writes them."""
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
    return root


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
