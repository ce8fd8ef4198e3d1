"""Folders that went through another format and came back, as real transformers loads them: nothing missing, every weight equal."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from mcore_rlhf.convert import convert
from mcore_rlhf.formats.carried import FOLDER
from mcore_rlhf.formats.hf import FORMAT
from tests.helpers.conversions import options

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True, eos_token_id=[3, 5]),
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
GOLDENS = Path(__file__).parents[1] / "goldens"
DEEPSPEED, HUGGING_FACE = (
    GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3",
    GOLDENS / "huggingface" / "llama_tied_bf16_sharded",
)
OTHERS = ("hf", "deepspeed", "universal", "dcp", "megatron", "megatron-dist")


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``save_pretrained`` wrote."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("saved") / request.param
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("middle", OTHERS)
def test_transformers_loads_what_came_back(saved: Path, tmp_path: Path, middle: str) -> None:
    convert(saved, tmp_path / "there", replace(options(), to=middle))
    convert(tmp_path / "there", tmp_path / "back", replace(options(), to="hf"))
    before = AutoModelForCausalLM.from_pretrained(saved)
    after, told = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told.values()), told
    expected, found = before.state_dict(), after.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert {name: t.dtype for name, t in expected.items()} == {name: t.dtype for name, t in found.items()}
    assert before.config.to_dict() == {**after.config.to_dict(), "_name_or_path": before.config._name_or_path}
    assert before.generation_config.to_dict() == after.generation_config.to_dict()
    names = {path.name for path in saved.iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*names, "mcore_rlhf.json"}
    assert "from_pretrained" in FORMAT.load_hint(tmp_path / "back")


def test_the_load_line_is_what_transformers_can_do(saved: Path, tmp_path: Path) -> None:
    """Without a model_type nobody knows which class it is, and transformers refuses."""
    convert(saved, tmp_path / "out", replace(options(), to="hf"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert FORMAT.load_hint(tmp_path / "out") == ""


def test_torch_and_deepspeed_do_not_mind_the_files_beside_theirs(tmp_path: Path) -> None:
    """DeepSpeed looks for patterns in a tag's folder and in all below it."""
    from deepspeed.checkpoint import DeepSpeedCheckpoint
    from torch.distributed.checkpoint import FileSystemReader

    plain = DeepSpeedCheckpoint(str(DEEPSPEED))
    tag = Path(shutil.copytree(DEEPSPEED, tmp_path / "tag"))
    for file in HUGGING_FACE.iterdir():
        if file.suffix == ".json":
            (tag / FOLDER).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tag / FOLDER / file.name)
    beside = DeepSpeedCheckpoint(str(tag))
    assert (beside.tp_degree, beside.pp_degree, beside.dp_degree) == (plain.tp_degree, plain.pp_degree, plain.dp_degree)
    assert len(beside.file_list) == len(plain.file_list) + 5
    assert beside.zero_checkpoint.num_files == plain.zero_checkpoint.num_files
    convert(HUGGING_FACE, tmp_path / "dcp", replace(options(), to="dcp"))
    assert (tmp_path / "dcp" / FOLDER / "config.json").is_file()
    assert FileSystemReader(tmp_path / "dcp" / "dcp_checkpoint").read_metadata().state_dict_metadata
