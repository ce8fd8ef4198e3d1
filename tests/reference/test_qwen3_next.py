"""Qwen3-Next against its two authors: transformers writes a folder, megatron-core 0.19 computes the same logits, and it comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.models.huggingface.config import architecture_of, sizes_of_config
from mcore_rlhf.models.huggingface.packing import from_files, from_modules
from mcore_rlhf.models.huggingface.relation import from_huggingface
from mcore_rlhf.models.huggingface.table import TRANSFORMER_ENGINE, Spelling

PROJECT = Path(__file__).parents[2]
WORDS, TOLERANCE = 61, 2e-4  # of logits up to 7, with a recurrence over the whole sequence in another order
TOKENS = torch.randint(WORDS, (1, 17), generator=torch.Generator().manual_seed(3))


def config(**changes: Any) -> Any:
    """Unequal sizes wherever two could be mistaken for one another; one layer has no mixture."""
    same = {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [2],
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return transformers.Qwen3NextConfig(**{**same, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A model of random weights, norms among them, and its logits."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn_like(param)
            param.add_(0.2 * noise) if param.dim() == 1 else param.copy_(0.3 * noise)
        root = tmp_path_factory.mktemp("qwen3_next")
        model.save_pretrained(root)
        return root, model(TOKENS, use_cache=False).logits


def to(source: Path, target: Path, kind: str, **write: Any) -> Any:
    return convert(source, target, ConvertOptions(kind, write=WriteOptions(**write), fsync=False))


def logits(root: Path, tp: int, scratch: Path) -> torch.Tensor:
    """What megatron-core computes."""
    job = {
        "tp": tp,
        "root": str(root),
        "tokens": TOKENS.tolist(),
        "store": str(scratch / "store"),
        "out": str(scratch / "out"),
    }
    (scratch / "job.json").write_text(json.dumps(job))
    worker = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("qwen3_next_worker.py")),
        str(scratch / "job.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
    started = [
        subprocess.Popen(
            [*worker, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(tp)
    ]
    said = [rank.communicate(timeout=250)[0] for rank in started]
    assert [rank.returncode for rank in started] == [0] * tp, said[0][-3000:]
    found: torch.Tensor = torch.load(f"{job['out']}.0")
    return found[..., :WORDS]


def test_the_table_has_what_transformers_has() -> None:
    """Names, shapes and order of parameters in memory, of the real class; only sizes come from its config."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config())
    real = {key: tuple(param.shape) for key, param in model.named_parameters()}
    (known,) = architecture_of(config().to_dict())
    files = from_modules(real, known.packed).files
    sizes = replace(sizes_of_config(config().to_dict()), mtp=0)
    relation = from_huggingface(files, sizes, Spelling(TRANSFORMER_ENGINE, "grouped"), [known])
    assert relation.huggingface.keys() == files.keys()
    assert list(from_files(relation.huggingface, known.packed).modules.items()) == list(real.items())


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_computes_the_same_logits(folder: tuple[Path, torch.Tensor], tmp_path: Path, tp: int) -> None:
    root, expected = folder
    job = to(root, tmp_path / "mcore", "megatron", tp=tp)
    assert any("3 norms such as" in text and "counts from 1" in text for _, text in job.report.lines)
    assert (logits(tmp_path / "mcore", tp, tmp_path) - expected).abs().max() < TOLERANCE
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    first, back = (load_file(path / "model.safetensors") for path in (root, tmp_path / "back"))
    assert first.keys() == back.keys()
    for name, tensor in first.items():  # a shifted norm in fp32 may lose its last bits outside of 0.5 to 2
        assert torch.allclose(tensor, back[name], rtol=0, atol=2e-7 if name.endswith("attn.norm.weight") else 0), name


def test_a_norm_that_was_not_shifted_is_noticed(folder: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """The comparison of logits can fail."""
    root, expected = folder
    to(root, tmp_path / "mcore", "megatron")
    (path,) = tmp_path.glob("mcore/*/mp_rank_00/model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    tree["model"]["decoder.layers.1.self_attention.out_norm.weight"] += 1
    torch.save(tree, path)
    assert (logits(tmp_path / "mcore", 1, tmp_path) - expected).abs().max() > 100 * TOLERANCE


def test_other_layers_than_transformer_engines_are_refused(folder: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported,
        match=r"--transformer-impl local: Megatron builds Qwen3NextForCausalLM with transformer_engine alone",
    ):
        to(folder[0], tmp_path / "mcore", "megatron", transformer_impl="local")
