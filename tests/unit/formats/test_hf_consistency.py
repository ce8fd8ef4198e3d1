"""Reading Hugging Face folders: ties, configs that fit the tensors or do not, and what checking can and cannot see."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate, Kind
from mcore_rlhf.errors import Corrupt, LayoutMismatch, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import options
from tests.helpers.dcp_by_torch import save
from tests.unit.formats.hf_by_hand import CONFIG, llama, write
from tests.unit.formats.refusal import refused
from tests.unit.formats.test_hf_reading import EMBEDDING, HEAD, TIED, native, opened, unequal


class TestTies:
    def test_a_head_that_is_not_stored(self, tmp_path: Path) -> None:
        source = opened(write(tmp_path / "hf", llama(tied=True), TIED))
        assert native(source).shared == {HEAD: EMBEDDING}
        assert source.model.tied

    def test_a_head_that_is_stored_as_well_must_be_equal(self, tmp_path: Path) -> None:
        tensors = llama(tied=True)
        folder = write(tmp_path / "hf", {**tensors, HEAD: tensors[EMBEDDING].clone()}, TIED)
        source = opened(folder)
        assert unequal(source, tensors) == []
        assert "stored a second time" in source.notes.lines[0][1]
        assert verify(folder, ReadOptions(), Depth.DEEP).intact
        save_file({**tensors, HEAD: tensors[EMBEDDING] + 1}, folder / "model.safetensors")
        verdict = verify(folder, ReadOptions(), Depth.DEEP)
        assert "differ between the copies" in verdict.problems.describe()
        refused(folder, Corrupt, "differ between the copies", EMBEDDING)

    def test_a_head_of_its_own_beside_a_config_that_says_nothing(self, tmp_path: Path) -> None:
        config = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
        assert not opened(write(tmp_path / "a", llama(), config)).model.tied
        assert opened(write(tmp_path / "b", llama(tied=True), config)).model.tied
        assert opened(write(tmp_path / "c", llama(tied=True))).model.tied

    def test_a_head_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(LayoutMismatch, match=f"tie_word_embeddings is false, but {HEAD} is not among"):
            opened(write(tmp_path / "hf", llama(tied=True), CONFIG))

    def test_another_head(self, tmp_path: Path) -> None:
        tensors = {**llama(tied=True), "score.weight": torch.ones(1, 8)}
        config = {**CONFIG, "architectures": ["LlamaForSequenceClassification"]}
        source = opened(write(tmp_path / "hf", tensors, config))
        assert not source.model.tied
        assert native(source).shared == {}


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("vocab_size", 21, "vocab_size is 21, but model.embed_tokens.weight is [20, 8]"),
        ("hidden_size", 16, "hidden_size is 16, but model.embed_tokens.weight is [20, 8]"),
        ("num_hidden_layers", 3, "num_hidden_layers is 3, but the tensors have 2 layers, 0 to 1"),
    ],
)
def test_a_config_that_contradicts_the_tensors(key: str, value: int, found: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", llama(), {**CONFIG, key: value})
    assert str(folder / "config.json") in refused(folder, LayoutMismatch, found)


def test_what_a_class_that_nobody_has_looked_at_calls_otherwise(tmp_path: Path) -> None:
    """As transformers writes DeepSeek-V4's output layer, Moshi's embedding of one row that is no word, Llama 4's norms of no weight."""
    own = {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    tensors = llama()
    elsewhere = {"head.weight" if name == HEAD else name: tensor for name, tensor in tensors.items()}
    assert not opened(write(tmp_path / "head", elsewhere, CONFIG | own)).model.tied
    refused(write(tmp_path / "known", elsewhere, CONFIG), LayoutMismatch, f"{HEAD} is not among the tensors")
    longer = tensors | {EMBEDDING: torch.ones(21, 8)}
    opened(write(tmp_path / "row", longer, CONFIG | own))
    refused(write(tmp_path / "rows", longer, CONFIG), LayoutMismatch, "vocab_size is 20, but")
    opened(write(tmp_path / "norms", tensors, CONFIG | own | {"use_qk_norm": True, "attention_bias": True}))
    biased = tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)}
    refused(
        write(tmp_path / "biased", biased, CONFIG | own | {"attention_bias": False}),
        LayoutMismatch,
        "attention_bias is false",
    )


def test_a_number_of_layers_costs_nothing_however_large(tmp_path: Path) -> None:
    """Listing them once took all memory of the machine."""
    folder = write(tmp_path / "hf", llama(), {**CONFIG, "num_hidden_layers": 2_000_000})
    tracemalloc.start()
    try:
        refused(folder, LayoutMismatch, "num_hidden_layers is 2000000, but the tensors have 2 layers")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_layers_that_predict_further_tokens_are_counted_apart(tmp_path: Path) -> None:
    config = {**CONFIG, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert opened(write(tmp_path / "hf", llama(), config)).model.num_layers == 2


def test_a_config_of_a_model_with_images_has_a_section_for_the_text(tmp_path: Path) -> None:
    opened(write(tmp_path / "a", llama(), {"model_type": "x", "text_config": CONFIG}))
    with pytest.raises(LayoutMismatch, match="vocab_size is 5"):
        opened(write(tmp_path / "b", llama(), {"text_config": {**CONFIG, "vocab_size": 5}}))


def test_rotary_frequencies_are_no_weights(tmp_path: Path) -> None:
    """Llama 2's own folder has them in every layer."""
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in (0, 1)}
    folder = write(tmp_path / "hf", llama() | more, config)
    job = convert(folder, tmp_path / "out", options())
    assert job.lossless
    items = {
        item.name.removesuffix(" (param)") for item in job.account.of_fate(Fate.DERIVED) if item.kind is Kind.TENSOR
    }
    assert items == set(more)
    assert not {spec.name for spec in opened(folder).model.params if spec.trainable} & set(more)


def test_a_config_of_a_tensor_more_or_less(tmp_path: Path) -> None:
    """Whatever class of the table the config names, it must be able to hold these tensors, and want no others."""
    wrong = {
        "intermediate_size": (16, "gate_proj.weight is [12, 8], but its sizes make [16, 8]"),
        "num_key_value_heads": (2, "k_proj.weight is [4, 8], but its sizes make [8, 8]"),
        "head_dim": (8, "q_proj.weight is [8, 8], but its sizes make [16, 8]"),
        "model_type": ("qwen2", "Qwen2ForCausalLM lacks model.layers.0.self_attn.q_proj.bias"),
    }
    for key, (value, text) in wrong.items():
        refused(write(tmp_path / key / "hf", llama(), {**CONFIG, key: value}), LayoutMismatch, text)
    norms = {f"model.layers.{i}.self_attn.{part}_norm.weight": torch.ones(4) for i in (0, 1) for part in "qk"}
    refused(
        write(tmp_path / "a" / "hf", llama() | norms, CONFIG),
        LayoutMismatch,
        "LlamaForCausalLM has no place for",
        "q_norm",
    )
    opened(
        write(tmp_path / "b", llama() | norms, {**CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )
    biases = {
        f"model.layers.{i}.self_attn.{p}_proj.bias": torch.ones(n)
        for i in (0, 1)
        for p, n in (("q", 8), ("k", 4), ("v", 4))
    }
    refused(
        write(tmp_path / "c" / "hf", llama() | biases, CONFIG),
        LayoutMismatch,
        "attention_bias is not said, which means false",
        "q_proj.bias",
    )
    biases |= {f"model.layers.{i}.self_attn.o_proj.bias": torch.ones(8) for i in (0, 1)}
    opened(write(tmp_path / "d", llama() | biases, {**CONFIG, "attention_bias": True}))


def test_a_fine_tuners_own_tensors_are_no_contradiction(tmp_path: Path) -> None:
    opened(
        write(tmp_path / "a", {**llama(), "model.layers.0.mine.weight": torch.ones(3), "mine": torch.ones(2)}, CONFIG)
    )
    opened(
        write(
            tmp_path / "b",
            llama(),
            {**CONFIG, "model_type": "mine", "architectures": ["Mine"], "intermediate_size": 99},
        )
    )


OTHER_FILES = {
    "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096},
    "generation_config": {"_from_model_config": True, "bos_token_id": 1, "transformers_version": "5.23.0"},
    "tokenizer": {"version": "1.0", "added_tokens": [], "model": {"vocab": {}}},
    "index": {"metadata": {}, "weight_map": {"a": "b"}},
    "adapter_config": {"peft_type": "LORA", "r": 8},
    "special_tokens_map": {"bos_token": "<s>"},
    "deepspeed": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_config_that_is_another_files_content(name: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "hf", llama(), OTHER_FILES[name]), LayoutMismatch, "config.json: describes no model")
    with pytest.raises(LayoutMismatch, match="describes no model"):
        convert(
            write(tmp_path / "plain", llama()),
            tmp_path / "out",
            replace(options(reference_config=str(tmp_path / "hf")), to="hf"),
        )


TITAN = {"model.embed_tokens": "tok_embeddings", "model.layers": "layers", "model.norm": "norm", "lm_head": "output"}


@pytest.mark.parametrize("names", [TITAN, {"model": "module.model", "lm_head": "module.lm_head"}])
def test_a_model_under_other_names_than_its_config_has_is_not_written(names: dict[str, str], tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if name.startswith(old)), name)

    tensors = {renamed(name): tensor for name, tensor in llama().items()}
    save({"model": tensors}, tmp_path / "dcp")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = replace(options(reference_config=str(tmp_path)), to="hf")
    with pytest.raises(LayoutMismatch, match="no tensor has a name of"):
        convert(tmp_path / "dcp", tmp_path / "hf", asked)
    convert(
        tmp_path / "dcp", tmp_path / "hf", replace(options(), to="hf")
    )  # without a class nobody looks for its names


def test_a_critic_of_deepspeed_chats_is_intact_and_no_hugging_face_folder(tmp_path: Path) -> None:
    """``RewardModel`` under its own names, with the base model's description (``save_hf_format``); 45b4b71."""
    tensors = {name.replace("model.", "rwtransformer.", 1): tensor for name, tensor in llama().items() if name != HEAD}
    folder = write(tmp_path / "critic", {**tensors, "v_head.weight": torch.ones(1, 8)}, CONFIG)
    assert verify(folder, ReadOptions()).intact
    assert any("all but its head lies below rwtransformer" in text for _, text in opened(folder).notes.lines)
    with pytest.raises(LayoutMismatch, match="no tensor has a name of"):
        convert(folder, tmp_path / "hf", replace(options(), to="hf"))


def test_a_config_without_a_model_type_is_told(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    source = opened(write(tmp_path / "hf", llama(), config))
    assert any("names no model_type" in text for _, text in source.notes.lines)


def test_what_changed_since_another_version_of_the_weights_is_no_model(tmp_path: Path) -> None:
    """As slime writes ``weight_v000002/``: compressed bytes under the weights' names."""
    folder = write(tmp_path / "hf", {name: torch.ones(9, dtype=torch.uint8) for name in llama()}, CONFIG, shards=2)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["metadata"] = {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
    }
    index.write_text(json.dumps(listed))
    refused(folder, Unsupported, "what changed since another version", "delta_encoding")


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", llama(), CONFIG)
    (folder / "config.json").write_text("{]")
    refused(folder, Corrupt, "config.json: is no JSON")


class TestVerify:
    def test_it_does_not_claim_checksums_that_nobody_stored(self, tmp_path: Path) -> None:
        verdict = verify(write(tmp_path / "hf", llama(), CONFIG), ReadOptions())
        assert verdict.intact
        said = " ".join(verdict.checked)
        assert "no checksum (2 files store none" in said
        assert "model.safetensors" in said
        assert verdict.nbytes == 0

    def test_our_own_folders_have_them_in_the_manifest(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "hf", llama(), CONFIG)
        convert(folder, tmp_path / "out", replace(options(), to="hf"))
        verdict = verify(tmp_path / "out", ReadOptions())
        assert verdict.intact
        assert "every record's CRC-32" in " ".join(verdict.checked)
        path = tmp_path / "out" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
        assert "whole file" in verify(tmp_path / "out", ReadOptions()).problems.describe()
        refused(tmp_path / "out", Corrupt, "model.safetensors: whole file", "damaged")

    def test_a_folder_that_was_changed_afterwards_needs_its_manifest_removed(self, tmp_path: Path) -> None:
        convert(write(tmp_path / "hf", llama(), CONFIG), tmp_path / "out", replace(options(), to="hf"))
        (tmp_path / "out" / "config.json").write_text(json.dumps({**CONFIG, "use_cache": False}))
        refused(tmp_path / "out", Corrupt, "config.json: has", "remove", "mcore_rlhf.json")
        (tmp_path / "out" / "mcore_rlhf.json").unlink()
        assert opened(tmp_path / "out").model.params
