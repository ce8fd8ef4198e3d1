"""``--only`` and adapters on the command line: what is printed, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.universal_by_hand import adam, write

if TYPE_CHECKING:
    from .conftest import Cli

GOLDENS = Path(__file__).parents[2] / "goldens"
BOTH = GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3"
PEFT = GOLDENS / "peft"


def test_inspect_and_verify_a_part(cli: Cli) -> None:
    shown = cli("inspect", BOTH, "--only", "critic", "--tensors", "--json")
    assert shown.code == 0
    names = {tensor["name"] for tensor in shown.json["tensors"]}
    assert names
    assert not any(name.startswith(("actor.", "critic.")) for name in names)
    assert cli("verify", BOTH, "--only", "critic", "--deep").code == 0


def test_diff_a_part_with_what_was_taken_out(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "convert", BOTH, tmp_path / "policy", "--to", "universal", "--only", "actor.actor", "--no-fsync", "--json"
    )
    assert done.code == 0, done.stderr
    assert cli("diff", tmp_path / "policy", tmp_path / "policy", "--only", "model").code == 0
    wrong = cli("diff", BOTH, BOTH, "--only", "policy")
    assert wrong.code == 2
    assert "actor (34), critic (21)" in wrong.stderr


def test_a_role_of_a_step(cli: Cli, tmp_path: Path) -> None:
    """The step has several models: the first word of --only picks one, the rest an attribute of it."""
    step = tmp_path / "global_step_7"
    for role in ("actor", "critic"):
        (step / role).mkdir(parents=True)
        write(step / role, {f"{role}_net.weight": adam(2, 3), "head.weight": adam(1, 3, seed=5)})
    shown = cli("inspect", step, "--only", "critic.critic_net", "--tensors", "--json")
    assert shown.code == 0, shown.stderr
    assert (shown.json["role"], {tensor["name"] for tensor in shown.json["tensors"]}) == ("critic", {"weight"})
    done = cli("convert", step, tmp_path / "out", "--to", "universal", "--only", "actor", "--no-fsync", "--json")
    assert done.code == 0, done.stderr
    assert done.json["tensors"] == 6
    assert cli("verify", step, "--only", "actor.nothing").code == 2


def test_an_adapter_is_shown(cli: Cli) -> None:
    shown = cli("inspect", PEFT / "adapter")
    assert shown.code == 0
    assert "an adapter of rank 4, alpha 12, for base" in shown.stdout


def test_a_merge_is_planned_proved_and_said_to_be_lossy(cli: Cli, tmp_path: Path) -> None:
    merge = ("--to", "hf", "--merge-adapter", "--base-model", PEFT / "base")
    planned = cli("plan", PEFT / "adapter", *merge, "--json")
    assert planned.code == 0
    assert not planned.json["lossless"]
    strict = cli("convert", PEFT / "adapter", tmp_path / "m", *merge, "--strict")
    assert strict.code == 1
    assert "the adapter by itself" in strict.stderr
    done = cli("convert", PEFT / "adapter", tmp_path / "m", *merge, "--verify", "--no-fsync", "--json")
    assert done.code == 0
    assert done.json["proved"]
    assert done.json["diff"]["tensors"] == 21
    assert json.loads((tmp_path / "m" / "mcore_rlhf.json").read_text())["lossless"] is False


def test_merging_needs_a_base(cli: Cli, tmp_path: Path) -> None:
    wrong = cli("convert", PEFT / "adapter", tmp_path / "m", "--to", "hf", "--merge-adapter")
    assert (wrong.code, list(tmp_path.iterdir())) == (2, [])
    assert "--base-model" in wrong.stderr
    other = cli(
        "convert", PEFT / "adapter", tmp_path / "m", "--to", "hf", "--merge-adapter", "--base-model", PEFT / "base_moe"
    )
    assert (other.code, list(tmp_path.iterdir())) == (1, [])
    assert "the adapter changes it" in other.stderr


def test_a_model_without_its_head_is_described_as_one(cli: Cli, tmp_path: Path) -> None:
    """A loader would make up an output layer of a class that has one; a description that claims one is not kept."""
    source = GOLDENS / "megatron" / "tp2pp2dp2_bf16_do"
    to_hf = ("--to", "hf", "--no-fsync")
    done = cli("convert", source, tmp_path / "body", *to_hf, "--only", "!output_layer*", "--verify")
    assert done.code == 0, done.stderr
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaModel"], False)
    assert cli("convert", source, tmp_path / "whole", *to_hf).code == 0
    refused = cli("convert", tmp_path / "whole", tmp_path / "out", *to_hf, "--only", "!lm_head")
    assert refused.code == 1
    assert "tie_word_embeddings is false, but lm_head.weight is not among the tensors" in refused.stderr
    assert not (tmp_path / "out").exists()
