from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.cli.app import with_pattern
from mcore_rlhf.manager.run.adopt import adopt

from .conftest import Cli

# 4 layers, hidden 64, 4 heads in 2 groups of 16 channels, SwiGLU of 96, two vocabularies of 160 rows
LAYER = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96 + 2 * 64
PARAMETERS = 4 * LAYER + 2 * 160 * 64 + 64


def test_json_has_every_fact(cli: Cli, tp2pp2: Path) -> None:
    facts = cli("inspect", tp2pp2, "--json").json
    assert (facts["format"], facts["role"], facts["iteration"], facts["release"]) == ("megatron", "actor", 2, False)
    degrees = {name: facts["parallel"][name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "world_size")}
    assert degrees == {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "ep": 1, "etp": 2, "dp": 2, "world_size": 8}
    model = facts["model"]
    assert (model["num_layers"], model["num_experts"], model["tied"]) == (4, 0, False)
    assert (model["vocab_size"], model["padded_vocab_size"]) == (132, 160)
    assert (model["parameters"], model["dtypes"]) == (PARAMETERS, {"bfloat16": PARAMETERS})
    assert facts["optimizer"]["kind"] == "distributed"
    assert facts["optimizer"]["states"] == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "float32")
    assert [(g["weight_decay"], g["step"], g["expert"]) for g in facts["optimizer"]["param_groups"]] == [
        (0.1, 2, False),
        (0.0, 2, False),
    ]
    assert facts["counters"]["consumed_train_samples"] == 16
    assert facts["manifest"] is None
    assert "tensors" not in facts


def test_files_and_bytes_are_those_on_the_disk(cli: Cli, tp2pp2: Path) -> None:
    facts = cli("inspect", tp2pp2, "--json").json
    on_disk = {path.relative_to(tp2pp2).as_posix(): path.stat().st_size for path in tp2pp2.rglob("*.pt")}
    assert {file["path"]: file["bytes"] for file in facts["files"]} == on_disk
    assert facts["bytes"] == sum(on_disk.values())


def test_people_read_layout_vocabulary_and_param_groups(cli: Cli, tp2pp2: Path) -> None:
    text = cli("inspect", tp2pp2).words()
    assert "layout TP2×PP2×DP2 (8 ranks)" in text
    assert "132 words in 160 rows, 28 of them padding" in text
    assert f"parameters {PARAMETERS:,} in 27 tensors, bfloat16" in text
    assert "optimizer distributed: master float32, exp_avg float32, exp_avg_sq float32" in text
    assert "0 0.001 0.1 2 0.9, 0.999 1e-08" in text
    assert "manifest none: not written by mcore_rlhf" in text


def test_notes_and_expert_groups_are_shown(cli: Cli, moe: Path) -> None:
    text = cli("inspect", moe).words()
    assert "4 experts per mixture layer" in text
    assert "2 (experts)" in text
    assert "notes mp_rank_00_001: its last number is an expert-parallel rank" in text


def test_tensors_are_listed_with_shape_cut_and_chunks(cli: Cli, tp2pp2: Path) -> None:
    tensors = cli("inspect", tp2pp2, "--tensors", "word_emb", "--json").json["tensors"]
    assert [tensor["state"] for tensor in tensors] == ["param", "master", "exp_avg", "exp_avg_sq"]
    assert tensors[0] == {
        "name": "embedding.word_embeddings.weight", "state": "param", "global_shape": [160, 64], "dtype": "bfloat16",
        "partition": "vocabulary(0)", "chunks": 2, "replicas": 0, "bytes": 160 * 64 * 2,
    }  # fmt: skip
    text = cli("inspect", tp2pp2, "--tensors", "*layers.3.input_layernorm*").words()
    assert "decoder.layers.3.input_layernorm.weight param (64,) bfloat16 replicated 1 1" in text
    assert "word_embeddings" not in text


def test_tensors_alone_lists_all(cli: Cli, tp2pp2: Path) -> None:
    after = cli("inspect", tp2pp2, "--tensors", "--json").json["tensors"]
    before = cli("inspect", "--tensors", tp2pp2, "--json").json["tensors"]
    assert after == before
    assert len(after) == 27 * 4


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["/"], ["/"]),
        (["/", "--tensors"], ["/", "--tensors", "*"]),
        (["/", "--tensors", "--json"], ["/", "--tensors", "*", "--json"]),
        (["/", "--tensors", "qkv"], ["/", "--tensors", "qkv"]),
        (["/", "--tensors", "/"], ["/", "--tensors", "/"]),  # a pattern, since the checkpoint stands before it
        (["--tensors", "/"], ["--tensors", "*", "/"]),
        (["--tensors", "qkv", "/"], ["--tensors", "qkv", "/"]),
    ],
)
def test_the_pattern_may_be_left_out(args: list[str], expected: list[str]) -> None:
    assert with_pattern(args) == expected


def test_an_iteration_folder_is_a_checkpoint_too(cli: Cli, tp2pp2: Path) -> None:
    root, folder = (cli("inspect", path, "--json").json for path in (tp2pp2, tp2pp2 / "iter_0000002"))
    assert root == folder


def test_a_roles_folder_is_listed_in_the_manifest_of_its_step(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    step = tmp_path / "global_step_2"
    shutil.copytree(tp1, step / "actor")
    adopt(step)
    role = cli("inspect", step / "actor")
    assert role.code == 0
    assert "manifest of global_step_2, the step above, which lists these:" in role.words(), role.stdout
    facts = cli("inspect", step / "actor", "--json").json["manifest"]
    assert (facts["inside"], facts["path"], facts["step"]) == ("actor", str(step / "manifest.json"), 2)
    assert cli("inspect", step, "--role", "actor", "--json").json["manifest"] == facts
    copied = step / "actor_copied_there"  # which it does not list
    shutil.copytree(step / "actor", copied)
    assert cli("inspect", copied, "--json").json["manifest"] is None
    (step / "manifest.json").write_text('{"another": "program"}')
    assert "none: not written" in cli("inspect", step / "actor").words()
    (step / "manifest.json").write_text('{"format": "mcore_rlhf"')
    assert "manifest damaged" in cli("inspect", step / "actor").words()


def test_what_we_wrote_has_a_manifest(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    cli("convert", tp2pp2, tmp_path / "out", "--tp", 1, "--pp", 1, "--no-fsync")
    manifest = cli("inspect", tmp_path / "out", "--json").json["manifest"]
    assert (manifest["step"], manifest["lossless"], manifest["files"]) == (2, True, 3)
    assert manifest["report"]["source_parallel"] == "TP2×PP2×DP2"
    assert "manifest 3 files, lossless, mcore_rlhf" in cli("inspect", tmp_path / "out").words()
    (tmp_path / "out" / "mcore_rlhf.json").write_text("{")
    assert "manifest damaged" in cli("inspect", tmp_path / "out").words()


def test_what_is_no_checkpoint_is_said_to_be_none(cli: Cli, tmp_path: Path) -> None:
    missing, empty = cli("inspect", tmp_path / "nowhere"), cli("inspect", tmp_path)
    assert (missing.code, missing.stdout) == (2, "")
    assert missing.stderr == f"error: {tmp_path}/nowhere: no such file or folder\n"
    assert (empty.code, empty.stdout) == (2, "")
    assert "not a checkpoint in a format that is known" in empty.stderr
