"""What goes along with weights into a Hugging Face folder: the tokenizer, code that never runs, how the model generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import LayoutMismatch, UsageError
from tests.unit.formats.hf_by_hand import CONFIG, WORDS, config_in, llama, write
from tests.unit.formats.test_hf_writing import EMBEDDING, GOLDEN, HEAD, to_hf


class TestTokenizer:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        """A model with room for every word of the golden's tokenizer."""
        tensors = {**llama(), EMBEDDING: torch.randn(72, 8), HEAD: torch.randn(72, 8)}
        return write(tmp_path / "hf", tensors, {**CONFIG, "vocab_size": 72})

    def test_its_files_are_carried(self, model: Path, tmp_path: Path) -> None:
        to_hf(model, tmp_path / "out", tokenizer=str(GOLDEN))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (GOLDEN / name).read_bytes()
        assert config_in(tmp_path / "out")["model_type"] == "llama"

    def test_code_is_carried_and_not_run(self, model: Path, tmp_path: Path) -> None:
        mine = Path(shutil.copytree(GOLDEN, tmp_path / "mine"))
        (mine / "tokenization_mine.py").write_text("raise SystemExit(3)\n")
        (mine / "imported_by_it.py").write_text("raise SystemExit(3)\n")
        auto = {
            "AutoTokenizer": ["tokenization_mine.Slow", None],
            "AutoModel": "them/there--modeling.Model",
            "x": "../../up.Y",
        }
        (mine / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto}))
        to_hf(model, tmp_path / "out", tokenizer=str(mine))
        assert {path.name for path in (tmp_path / "out").glob("*.py")} == {"tokenization_mine.py", "imported_by_it.py"}

    def test_more_words_than_rows(self, tmp_path: Path) -> None:
        source = write(tmp_path / "hf", llama(), CONFIG)
        with pytest.raises(
            LayoutMismatch, match=f"ids up to 68, so it needs 69 rows, but the model's embedding has {WORDS}"
        ):
            to_hf(source, tmp_path / "out", tokenizer=str(GOLDEN))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("name", "content", "fits"),
        [
            ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 72}}, True),
            ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 73}}, False),
            ("tokenizer.json", {"model": {"vocab": {"a": 71}}, "added_tokens": [{"id": 72}]}, False),
            ("vocab.json", {"a": 71}, True),
            ("vocab.json", {"a": 72}, False),
            ("added_tokens.json", {"<x>": 72}, False),
        ],
    )
    def test_every_kind_of_vocabulary(self, name: str, content: Any, fits: bool, model: Path, tmp_path: Path) -> None:
        (tmp_path / "tok").mkdir()
        (tmp_path / "tok" / name).write_text(json.dumps(content))
        if fits:
            to_hf(model, tmp_path / "out", tokenizer=str(tmp_path / "tok"))
            return
        with pytest.raises(LayoutMismatch, match="needs 73 rows, but the model's embedding has 72"):
            to_hf(model, tmp_path / "out", tokenizer=str(tmp_path / "tok"))

    def test_no_tokenizer_there(self, model: Path, tmp_path: Path) -> None:
        for folder, said in (
            (tmp_path / "nowhere", "there is no such folder"),
            (tmp_path, "there is no tokenizer in it"),
        ):
            with pytest.raises(UsageError, match=said):
                to_hf(model, tmp_path / "out", tokenizer=str(folder))


class TestGeneration:
    def test_several_ids_end_a_text(self, tmp_path: Path) -> None:
        to_hf(GOLDEN, tmp_path / "out", eos_token_ids=(5, 7))
        assert config_in(tmp_path / "out")["eos_token_id"] == [5, 7]
        generates = config_in(tmp_path / "out", "generation_config.json")
        assert generates == {**config_in(GOLDEN, "generation_config.json"), "eos_token_id": [5, 7]}

    def test_one_id_is_a_number(self, tmp_path: Path) -> None:
        to_hf(write(tmp_path / "hf", llama(), CONFIG), tmp_path / "out", eos_token_ids=(5,))
        assert config_in(tmp_path / "out")["eos_token_id"] == 5
        assert config_in(tmp_path / "out", "generation_config.json") == {"eos_token_id": 5}

    @pytest.mark.parametrize("as_folder", [True, False])
    def test_a_file_that_is_given(self, as_folder: bool, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"top_k":  3}')
        given = tmp_path if as_folder else tmp_path / "generation_config.json"
        to_hf(GOLDEN, tmp_path / "out", generation_config=str(given))
        assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_k":  3}'

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--generation-config: .*no such file"):
            to_hf(GOLDEN, tmp_path / "out", generation_config=str(tmp_path / "x.json"))
