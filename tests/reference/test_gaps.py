"""A tensor that is gone together with its states, so that no file contradicts another: the class, or the other layers, miss it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mcore_rlhf import ConvertOptions, WriteOptions, convert_checkpoint
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": 4, "num_hidden_layers": 6, "head_dim": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False, "num_experts_per_tok": 2,
    "pad_token_id": 0,
}  # fmt: skip


SAID = (" has no ", " not there, and ", " is not there", " is gone", "no norm of ")


def made(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """A model of transformers' own making, saved by it; each of its tensors under its name on disk."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES)).save_pretrained(folder)
    source = open_checkpoint(folder, ReadOptions())
    assert not notes(folder)
    return {spec.name: torch.zeros(spec.global_shape) for spec in source.model.params}


def notes(folder: Path) -> list[str]:
    """What is said of gaps."""
    texts = [line["text"] for line in open_checkpoint(folder, ReadOptions()).notes.as_json()]
    return [text for text in texts if any(said in text for said in SAID)]


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_every_tensor_of_a_class_that_is_known_is_missed(kind: str, tmp_path: Path) -> None:
    tensors = made(kind, tmp_path)
    for name in tensors:
        write(tmp_path, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(LayoutMismatch, match=name.rpartition(".layers.")[2].replace(".", r"\.")):
            open_checkpoint(tmp_path, ReadOptions())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "stablelm"])
def test_every_tensor_of_a_layer_of_any_other_class_is_said_to_be_gone(kind: str, tmp_path: Path) -> None:
    tensors = made(kind, tmp_path)
    in_layers = [name for name in tensors if ".layers." in name]
    assert len(in_layers) > 50
    for name in in_layers:
        write(tmp_path, {other: tensor for other, tensor in tensors.items() if other != name})
        (said,) = notes(tmp_path)
        assert said.endswith(f"layers.{name.partition('.layers.')[2].replace('.', ' has no ', 1)}, and 5 others have")
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if ".layers.3." not in name})
    with pytest.raises(LayoutMismatch, match="num_hidden_layers is 6"):
        notes(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "another"}')
    assert [text[text.index("model.layers") :] for text in notes(tmp_path)] == [
        "model.layers.3 is not there, and there is model.layers.5"
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "stablelm", "gpt_neox"])
def test_what_is_gone_outside_the_layers_of_any_other_class_is_said(kind: str, tmp_path: Path) -> None:
    """But for a bias beside a norm that is there: nobody knows that it has one."""
    tensors = made(kind, tmp_path)
    outside = [name for name in tensors if ".layers." not in name and not name.endswith("norm.bias")]
    assert len(outside) >= 3
    for name in outside:
        without = {other: tensor for other, tensor in tensors.items() if other != name}
        without.pop(name.replace("norm.weight", "norm.bias"), None)
        write(tmp_path, without)
        if name == "lm_head.weight":
            with pytest.raises(LayoutMismatch, match=r"lm_head\.weight is not among the tensors"):
                notes(tmp_path)
        else:
            assert len(notes(tmp_path)) == 1, name


@pytest.mark.filterwarnings("ignore")
def test_a_critic_has_one_head_and_no_row_for_each_word_in_it(tmp_path: Path) -> None:
    tensors = made("stablelm", tmp_path)
    tensors["score.weight"] = torch.zeros(1, SIZES["hidden_size"])
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    text = (tmp_path / "config.json").read_text().replace("ForCausalLM", "ForTokenClassification")
    (tmp_path / "config.json").write_text(text)
    assert not notes(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_description_beside_another_formats_files_is_held_against_them(tmp_path: Path) -> None:
    made("qwen3", tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", ConvertOptions(to="torch", write=WriteOptions()))
    (file,) = (tmp_path / "out").rglob("*.pt")
    tree = torch.load(file, weights_only=True)
    del tree["model"]["model.layers.2.self_attn.q_norm.weight"]
    torch.save(tree, file)
    (tmp_path / "out/mcore_rlhf.json").unlink(missing_ok=True)
    with pytest.raises(LayoutMismatch, match=r"Qwen3ForCausalLM lacks model\.layers\.2\.self_attn\.q_norm\.weight"):
        open_checkpoint(tmp_path / "out", ReadOptions())
