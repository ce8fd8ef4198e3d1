"""What cannot be read of a source does not hide what can: verl's FSDP1 optimizer, a state of another shape, an unreadable role."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf import ConvertOptions, ReadOptions, WriteOptions, open_checkpoint, prepare_conversion
from mcore_rlhf.demo.cpu_megatron import import_megatron
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager.run import steps
from tests.helpers.catalog_values import tensor_of
from tests.helpers.damage import flip_a_bit

from .conftest import GOLDENS, Cli

VERL = GOLDENS.parent / "verl" / "fsdp1_ws2"


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """What verl's default strategy leaves: the optimizer in flat pieces without names."""
    return Path(shutil.copytree(VERL, tmp_path / "global_step_2" / "actor"))


def test_inspect_shows_the_weights_and_says_what_is_not_understood(cli: Cli, actor: Path) -> None:
    facts = cli("inspect", actor, "--json").json
    assert facts["model"]["tensors"] == 12
    assert (facts["optimizer"], "flat pieces" in facts["unread"]) == (None, True)
    assert [note for note in facts["notes"] if note["fate"] == "lost" and "not understood" in note["text"]]
    assert "optimizer not understood: " in cli("inspect", actor).words()
    assert "an optimizer that is not understood" in cli("inspect", actor.parent).stdout


def test_verify_reads_every_byte_of_what_it_does_not_understand(cli: Cli, actor: Path) -> None:
    sound = cli("verify", actor, "--json")
    assert (sound.code, sound.json["intact"], "flat pieces" in sound.json["unread"]) == (0, True, True)
    assert "intact, but for what the optimizer holds, which is not understood" in cli("verify", actor).words()
    assert cli("verify", actor.parent).code == 0
    flip_a_bit(actor / "optim_world_size_2_rank_1.pt")
    damaged = cli("verify", actor, "--json")
    assert damaged.code == 1
    assert "optim_world_size_2_rank_1.pt" in damaged.json["problems"][0]["message"]


@pytest.mark.parametrize("to", ["dcp", "deepspeed", "universal"])
def test_a_target_with_an_optimizer_is_refused_with_a_way_out(cli: Cli, actor: Path, tmp_path: Path, to: str) -> None:
    outcome = cli("convert", actor, tmp_path / "out", "--to", to)
    assert outcome.code == 2
    assert "flat pieces" in outcome.stderr
    assert "--no-optimizer" in outcome.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(Unsupported, match="flat pieces"):
        prepare_conversion(actor, ConvertOptions(to="hf", write=WriteOptions(with_optimizer=True)))


def test_targets_of_weights_are_made(cli: Cli, actor: Path, tmp_path: Path) -> None:
    outcome = cli("convert", actor, tmp_path / "hf", "--to", "hf", "--json")
    assert (outcome.code, outcome.json["lossless"]) == (0, False)
    assert any("not understood" in line["text"] for line in outcome.json["report"] if line["fate"] == "lost")
    assert cli("convert", actor, tmp_path / "no", "--to", "hf", "--strict").code == 1
    assert cli("convert", actor, tmp_path / "dcp", "--to", "dcp", "--no-optimizer").code == 0
    wanted = open_checkpoint(VERL, ReadOptions(optimizer=False))
    for made in (tmp_path / "hf", tmp_path / "dcp"):
        found = open_checkpoint(made, ReadOptions())
        for spec in wanted.model.params:
            assert torch.equal(tensor_of(found, spec.name, "param"), tensor_of(wanted, spec.name, "param"))
    assert cli("diff", actor, tmp_path / "dcp", "--states", "param").code == 0
    refused = cli("diff", actor, tmp_path / "dcp")
    assert (refused.code, "--states param" in refused.stderr) == (2, True)


def _with_factors(state: object) -> None:
    """A state of three numbers for every parameter, as optimizers with factored moments keep one."""
    for values in state.values() if isinstance(state, dict) else state:  # type: ignore[attr-defined]
        values["row_factor"] = torch.ones(3)


def _factored_megatron(folder: Path) -> None:
    import_megatron()  # the pickles name its classes
    shutil.copytree(GOLDENS / "tp2pp2dp2_bf16_nodo", folder)
    for path in folder.rglob("model_optim_rng.pt"):
        path.chmod(0o644)
        tree = torch.load(path, weights_only=False)
        _with_factors(tree["optimizer"]["optimizer"]["state"])
        torch.save(tree, path)


def _factored_deepspeed(folder: Path) -> None:
    shutil.copytree(GOLDENS.parent / "deepspeed" / "z2_fp32_frozen_dp4", folder)
    for path in folder.rglob("*optim_states.pt"):
        path.chmod(0o644)
        tree = torch.load(path, weights_only=False)
        _with_factors(tree["optimizer_state_dict"]["base_optimizer_state"]["state"])
        torch.save(tree, path)


@pytest.mark.parametrize("make", [_factored_megatron, _factored_deepspeed])
@pytest.mark.filterwarnings("ignore")  # of the frameworks whose classes the pickles name
def test_another_optimizer_is_unknown_and_not_damaged(cli: Cli, tmp_path: Path, make: object) -> None:
    folder = tmp_path / "run"
    assert callable(make)
    make(folder)
    for command in ("inspect", "verify"):
        outcome = cli(command, folder, "--json")
        assert (outcome.code, "row_factor" in outcome.json["unread"]) == (0, True)
    same = ("--tp", 2) if make is _factored_megatron else ("--dp", 2, "--to", "deepspeed")
    refused = cli("convert", folder, tmp_path / "out", *same)
    lossy = make is _factored_megatron  # what belongs to whole matrices fits no other layout, whoever understands it
    assert (refused.code, "--no-optimizer" in refused.stderr) == (1 if lossy else 2, True)
    assert cli("convert", folder, tmp_path / "out", *same, "--no-optimizer").code == 0


def test_steps_recommends_adopt_where_it_works(cli: Cli, actor: Path) -> None:
    step = actor.parent
    (listed,) = cli("steps", step.parent, "--json").json
    assert (listed["state"], f"mcore-rlhf adopt {step}" in listed["why"]) == ("foreign", True)
    adopted = cli("adopt", step)
    assert adopted.code == 0
    assert "not understood" in adopted.stdout
    assert steps.is_committed(step)
    assert "flat pieces" in str(steps.read_manifest(step).parts[0]["unread"])


def _of_another_iteration(step: Path) -> None:
    step.rename(step.with_name("global_step_3"))


def _bare_shards(step: Path) -> None:
    shutil.rmtree(step / "actor")
    (step / "actor" / "local_shard_checkpoint").mkdir(parents=True)
    torch.save({"model": {}}, step / "actor" / "local_shard_checkpoint" / "checkpoint_rank_0.pt")
    (step / "actor" / "latest_checkpointed_iteration.txt").write_text("2")


def _unpickled(step: Path) -> None:
    (step / "data").mkdir()
    (step / "data" / "data.pt").write_bytes(b"\x80\x04}.")


@pytest.mark.parametrize("spoil", [_of_another_iteration, _bare_shards, _unpickled])
def test_steps_does_not_recommend_adopt_where_it_fails(cli: Cli, tp1: Path, tmp_path: Path, spoil: object) -> None:
    step = tmp_path / "run" / "global_step_2"
    shutil.copytree(tp1, step / "actor")
    assert callable(spoil)
    spoil(step)
    (listed,) = cli("steps", tmp_path / "run", "--json").json
    assert "it cannot be adopted: " in listed["why"]
    assert cli("adopt", listed["path"]).code != 0


def test_a_role_that_cannot_be_read_does_not_hide_the_others(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    step = tmp_path / "global_step_2"
    shutil.copytree(tp1, step / "actor")
    (step / "critic" / "local_shard_checkpoint").mkdir(parents=True)
    torch.save({"model": {}}, step / "critic" / "local_shard_checkpoint" / "checkpoint_rank_0.pt")
    for command in ("inspect", "verify"):
        outcome = cli(command, step, "--json")
        assert outcome.code == 2
        models = outcome.json["models"]
        assert models["critic"]["error"]["kind"] == "Unsupported"
        assert "error" not in models["actor"]
        assert "critic cannot be read: " in cli(command, step).words()
    flip_a_bit(step / "actor" / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
    assert cli("verify", step).code == 1
