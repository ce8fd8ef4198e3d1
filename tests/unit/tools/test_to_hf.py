"""``tools/to_hf.py``: slime's flags, and the folder that comes out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

from tests.helpers.conversions import golden
from tests.unit.formats.test_crossing_values import WORDS, split_by_hand

PROJECT = Path(__file__).resolve().parents[3]
GOLDENS = PROJECT / "tests" / "goldens"
LLAMA = "tp2pp2dp2_bf16_do"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("to_hf", PROJECT / "mcore_rlhf" / "cli" / "tools" / "to_hf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """The model that was trained: a config and a tokenizer of its own."""
    folder = tmp_path / "origin"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": WORDS,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "of": "the publisher's own",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"last": WORDS - 1}}}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return folder


def argv(source: Path, target: Path, *more: str) -> list[str]:
    return ["--input-dir", str(source), "--output-dir", str(target), *more]


def test_a_run_of_megatrons(tool: ModuleType, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    chunks = ("--origin-hf-dir", str(origin), "--chunk-size", "50KB")
    assert tool.main(argv(GOLDENS / "megatron" / LLAMA, target, *chunks)) == 0
    found = {name: t for file in target.glob("*.safetensors") for name, t in load_file(file).items()}
    expected = {name: t for (name, state), t in split_by_hand(golden(LLAMA).tensors).items() if state == "param"}
    assert set(found) == set(expected)
    assert all(found[name].equal(expected[name]) for name in expected)
    assert json.loads((target / "config.json").read_text())["of"] == "the publisher's own"
    for name in ("tokenizer.json", "generation_config.json"):
        assert (target / name).read_bytes() == (origin / name).read_bytes()
    out = capsys.readouterr().out
    assert f"written: {target / 'model-00001-of-00006.safetensors'}" in out
    assert "padding, and are cut" in out


def test_what_goes_wrong_is_a_message_and_a_code(
    tool: ModuleType, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = GOLDENS / "megatron" / LLAMA, tmp_path / "out"
    cases = {
        "no such file or folder": (argv(tmp_path / "none", target), 2),
        "--chunk-size": (argv(source, target, "--chunk-size", "many"), 2),
        "cannot read the model's config": (argv(source, target, "--origin-hf-dir", str(tmp_path)), 2),
    }
    (origin / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"last": WORDS}}}))
    cases["so it needs 133 rows"] = (argv(source, target, "--origin-hf-dir", str(origin)), 1)
    for text, (arguments, code) in cases.items():
        assert tool.main(arguments) == code
        assert text in capsys.readouterr().err
        assert not target.exists()


def test_force_replaces_only_a_checkpoint(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = GOLDENS / "megatron" / LLAMA, tmp_path / "out"
    assert tool.main(argv(source, target)) == 0
    assert tool.main(argv(source, target)) == 2
    assert "exists" in capsys.readouterr().err
    assert tool.main(argv(source, target, "--force", "--dtype", "fp32")) == 0
    assert {str(t.dtype) for t in load_file(target / "model.safetensors").values()} == {"torch.float32"}
