"""Converting and comparing between families of formats on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Cli


def test_convert_proves_what_it_wrote_under_the_targets_names(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    there = cli(
        "convert", tp2pp2, tmp_path / "ds", "--to", "deepspeed", "--zero-stage", 3, "--dp", 2, "--verify", "--json"
    )
    assert (there.code, there.json["proved"]) == (0, True)
    assert there.json["diff"]["tensors"] == 39 * 4  # stage 3 has no weights, but masters that round to them
    back = cli("convert", tmp_path / "ds", tmp_path / "back", "--tp", 2, "--pp", 2, "--verify", "--json")
    assert (back.code, back.json["proved"]) == (0, True)
    assert back.json["diff"]["tensors"] == 27 * 4


def test_diff_compares_across_families(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    cli("convert", tp2pp2, tmp_path / "uni", "--to", "universal")
    for pair in ((tp2pp2, tmp_path / "uni"), (tmp_path / "uni", tp2pp2)):
        same = cli("diff", *pair, "--json")
        assert (same.code, same.json["equal"], same.json["tensors"]) == (0, True, 39 * 4)


def test_diff_across_families_sees_what_differs(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    other = tp2pp2.parent / "tp1_bf16_do"
    cli("convert", other, tmp_path / "uni", "--to", "universal")
    found = cli("diff", tp2pp2, tmp_path / "uni", "--states", "master", "--json")
    assert found.code == 1
    assert "model.layers.0.self_attn.k_proj.weight (master)" in {line["name"] for line in found.json["differences"]}


def test_the_options_reach_the_conversion(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "vocab_size": 132,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = cli("plan", tp2pp2, "--to", "universal", "--reference-config", tmp_path)
    assert refused.code != 0
    assert "the sizes of the model make" in refused.stderr
    cli("convert", tp2pp2, tmp_path / "uni", "--to", "universal")
    back = cli("convert", tmp_path / "uni", tmp_path / "te", "--transformer-impl", "transformer_engine")
    assert "--transformer-impl transformer_engine" in back.words()
    bad = cli("convert", tmp_path / "uni", tmp_path / "x", "--transformer-impl", "apex")
    assert (bad.code, (tmp_path / "x").exists()) == (2, False)


def test_convert_proves_weights_that_it_rounded_from_another_type(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    """A DCP folder of FSDP holds fp32 parameters of a model that computes in bf16."""
    cli("convert", tp2pp2, tmp_path / "fsdp", "--to", "dcp", "--dp", 2)
    folder = ("convert", tmp_path / "fsdp", tmp_path / "model", "--to", "hf", "--dtype", "bf16", "--no-optimizer")
    made = cli(*folder, "--verify", "--json")
    assert (made.code, made.json["proved"]) == (0, True), made.json
    assert made.json["diff"]["tensors"] == 39


def test_words_of_the_run_are_not_called_padding(cli: Cli, tp2pp2: Path) -> None:
    """Its ``args`` say 132 words; a smaller number cuts some of them, which is a loss."""

    def said(words: int) -> list[tuple[str, str]]:
        report = cli("plan", tp2pp2, "--to", "hf", "--vocab-size", words, "--json").json["report"]
        return [(line["fate"], line["text"]) for line in report if line["text"].startswith("vocabulary rows")]

    fewer, padding = said(130)
    assert fewer[0] == "lost"
    assert fewer[1].startswith("vocabulary rows 130–131: words of the run, which has 132 as its args say")
    assert padding == ("changed", "vocabulary rows 132–159 are Megatron's padding, and are cut")
    assert said(132) == [padding]
    assert said(140) == [("changed", "vocabulary rows 140–159 are Megatron's padding, and are cut")]


def test_what_the_target_cannot_compute_needs_a_word(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    cli("convert", tp2pp2, tmp_path / "hf", "--to", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    (tmp_path / "hf" / "mcore_rlhf.json").unlink()
    refused = cli("plan", tmp_path / "hf", "--to", "megatron")
    assert refused.code == 2
    assert "hidden_act gelu" in refused.stderr
    assert "--ignore-field" in refused.stderr
    told = cli("plan", tmp_path / "hf", "--to", "megatron", "--ignore-field", "hidden_act")
    assert told.code == 0
    assert "hidden_act 'gelu': passed over, as --ignore-field asks" in told.words()
    assert cli("plan", tmp_path / "hf", "--to", "megatron", "--ignore-field", "hidden_act", "--strict").code == 1
    job = tmp_path / "job.yaml"
    job.write_text(f"source: {tmp_path / 'hf'}\nto: megatron\nignore_field: [hidden_act]\n")
    assert cli("plan", "--config", job).code == 0
