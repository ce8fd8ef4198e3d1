"""Hugging Face folders on the command line: what the options do, what is said, and what is refused with which code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.run.adopt import adopt

from .conftest import Cli

HF = Path(__file__).parents[2] / "goldens" / "huggingface" / "llama_tied_bf16_sharded"


def test_megatron_to_a_folder_and_back_with_optimizer(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    sizes = ("--max-shard-size", "100KB", "--eos-token-ids", "1,2")
    there = cli("convert", tp2pp2, tmp_path / "hf", "--to", "hf", "--with-optimizer", *sizes, "--verify", "--json")
    assert (there.code, there.json["proved"]) == (0, True)
    assert there.json["diff"]["tensors"] == 39 * 4
    assert there.json["load"] == f'AutoModelForCausalLM.from_pretrained("{tmp_path / "hf"}")'
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == [1, 2]
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) == 3
    assert cli("diff", tp2pp2, tmp_path / "hf", "--json").json["tensors"] == 39 * 4
    degrees = ("--tp", 2, "--pp", 2, "--dp", 2, "--transformer-impl", "local")
    back = cli("convert", tmp_path / "hf", tmp_path / "back", *degrees, "--verify", "--json")
    assert (back.code, back.json["proved"]) == (0, True)
    assert back.json["diff"]["tensors"] == 27 * 4


def test_inspect_and_verify_say_what_a_folder_is(cli: Cli) -> None:
    facts = cli("inspect", HF, "--json").json
    assert (facts["format"], facts["release"], facts["optimizer"]) == ("hf", True, None)
    assert (facts["model"]["parameters"], facts["model"]["tied"]) == (17824, True)
    verified = cli("verify", HF, "--deep")
    assert verified.code == 0
    assert "no checksum" in verified.words()


def test_a_whole_step_becomes_one_of_folders(cli: Cli, tp2pp2: Path, tp1: Path, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_2"
    shutil.copytree(tp2pp2, step / "actor")
    shutil.copytree(tp1, step / "critic")
    adopt(step)
    done = cli("convert", step, tmp_path / "out", "--to", "hf", "--no-fsync", "--json")
    assert done.code == 0, done.stderr
    new = tmp_path / "out" / "global_step_2"
    assert {path.name for path in new.iterdir()} >= {"actor", "critic", "manifest.json"}
    source = open_checkpoint(new, ReadOptions(role="critic"))
    assert (source.format, source.state.iteration) == ("hf", 2)
    (weights,) = [file for file in source.files if file.path == "model.safetensors"]
    assert len(weights.records) == 1


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--tp", 2), 2, "--tp: means nothing with --to hf"),
        (("--eos-token-ids", "one"), 2, "should be ids of tokens such as 1,2"),
        (("--eos-token-ids", "71,72"), 2, "--eos-token-ids: 72: the model's vocabulary has 72 words, 0 to 71"),
        (("--max-shard-size", "much"), 2, "--max-shard-size"),
        (("--tokenizer", "nowhere"), 2, "nowhere: there is no such folder"),
        (("--reference-config", "nowhere"), 2, "cannot read the model's config"),
        (("--with-optimizer",), 1, "has no optimizer"),
        (("--masters",), 1, "--masters asks for its fp32 master"),
        (("--strict", "--dtype", "fp16"), 1, "converted to float16, and rounded"),
    ],
)
def test_what_is_refused(cli: Cli, options: tuple[object, ...], code: int, text: str, tmp_path: Path) -> None:
    refused = cli("convert", HF, tmp_path / "out", "--to", "hf", *options)
    assert refused.code == code, refused.stderr
    assert text in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_line_to_load_is_printed_where_the_thing_loads(cli: Cli, tmp_path: Path) -> None:
    """A folder without a config is no model's; a run without an optimizer cannot be told to load one."""
    run = HF.parents[1] / "deepspeed" / "z2_bf16_ac_dp2" / "step3"
    nameless = cli("convert", run, tmp_path / "nameless", "--to", "hf", "--no-fsync")
    assert nameless.code == 0, nameless.stderr
    assert "from_pretrained" not in nameless.stdout
    assert cli("convert", run, tmp_path / "j", "--to", "hf", "--no-fsync", "--json").json["load"] == ""
    for to, words in (
        ("deepspeed", "load_module_only=True"),
        ("universal", '"stage": 3'),
        ("megatron", f"--load {tmp_path}"),
    ):
        there = cli("convert", HF, tmp_path / to, "--to", to, "--no-fsync", "--json")
        assert words in there.json["load"]
        back = cli("convert", tmp_path / to, tmp_path / f"{to}-hf", "--to", "hf", "--no-fsync", "--strict", "--json")
        assert back.code == 0, back.stderr
        assert "from_pretrained" in back.json["load"]
