"""Whole runs of other trainers, written: where each thing lies, what goes along, and what is lost by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import CheckpointError, Lossy, NotACheckpoint, Unsupported, UsageError
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.source import bytes_of
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_part, convert_step
from mcore_rlhf.manager.into_run import resolved
from mcore_rlhf.manager.runs import listed_steps, run_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings
from mcore_rlhf.verify.differ import Differ

GOLDENS = Path(__file__).parents[2] / "goldens"
RUNS = GOLDENS / "trainers"
V2 = GOLDENS / "nemo_rl" / "v2_ws2"
NEMO, OPENRLHF, RLINF = RUNS / "nm_v1", RUNS / "or_z2", RUNS / "rl_fsdp2" / "grpo" / "checkpoints"
VERL = GOLDENS / "verl" / "fsdp2_tied_ws2"


def into(source: Path, root: Path, to: str, *, role: str | None = None, **write: object) -> StepJob:
    options = ConvertOptions(to=to, fsync=False, write=WriteOptions(**write))  # type: ignore[arg-type]
    return convert_step(find(source, ReadOptions(role=role)), root, options)


def equal(a: Path, b: Path, *but: str) -> None:
    """In every tensor that both have, the optimizer's too, and in all else but what is named."""
    first, second = (open_checkpoint(path, ReadOptions()) for path in (a, b))
    with bytes_of(first) as bytes_a, bytes_of(second) as bytes_b:
        found = Differ(first, second, bytes_a, bytes_b).compare()
    assert found.tensors > 50
    assert [one.name for one in found.differences] == [*but], found.differences[:3]


def verls(root: Path) -> Path:
    """A run of verl's: one step, with the position of its loader."""
    shutil.copytree(VERL, root / "global_step_3" / "actor")
    torch.save({"_snapshot": {"_main_snapshot": {"_num_yielded": 3}}}, root / "global_step_3" / "data.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


def test_a_run_is_laid_out_as_its_trainer_does_and_found_again(tmp_path: Path) -> None:
    done = into(OPENRLHF, tmp_path / "rlinf", "rlinf")
    step = tmp_path / "rlinf" / "global_step_3"
    assert done.published == step
    assert (step / "actor" / "dcp_checkpoint" / ".metadata").is_file()
    assert (step / "critic" / "model_state_dict" / "full_weights.pt").is_file()
    assert done.told == f"RLinf: runner.resume_dir={step}"
    assert not (tmp_path / "rlinf" / "latest_checkpointed_iteration.txt").exists(), "RLinf has none"
    assert [(one.step, one.state) for one in listed_steps(tmp_path / "rlinf")] == [(3, "committed")]
    back = into(tmp_path / "rlinf", tmp_path / "openrlhf", "openrlhf", dp=2)
    assert back.published == tmp_path / "openrlhf"
    for role in ("_actor", "_critic"):
        assert (tmp_path / "openrlhf" / role / "latest").read_text() == "global_step3"
        equal(OPENRLHF / role, tmp_path / "openrlhf" / role, "param_groups")
    found = run_at(tmp_path / "openrlhf")
    assert found is not None
    assert (found.trainer.name, found.tracked()) == ("openrlhf", 3)


def test_param_groups_are_those_that_a_trainer_makes_whatever_its_run_is(tmp_path: Path) -> None:
    """RLinf has one weight decay, and torch's loader stops where a group has two; DeepSpeed loads OpenRLHF's two groups alone."""
    said = into(OPENRLHF, tmp_path / "rlinf", "rlinf").jobs["actor"].report.lines
    assert (Fate.CHANGED, "weight_decay of 11 parameters: 0.0 → 0.01, as the run has it") in said
    found = open_checkpoint(tmp_path / "rlinf" / "global_step_3" / "actor", ReadOptions()).state
    assert [group.fields["weight_decay"] for group in found.groups] == [0.01]
    assert found.scheduler is not None
    assert found.scheduler["base_lrs"] == [0.01]
    into(verls(tmp_path / "verl"), tmp_path / "openrlhf", "openrlhf")
    state = open_checkpoint(tmp_path / "openrlhf" / "_actor", ReadOptions()).state
    still = [name.endswith(("bias", "norm.weight")) for group in state.groups for name in group.params]
    assert [len(group.params) for group in state.groups] == [still.count(False), still.count(True)]
    assert still == sorted(still)
    assert state.scheduler is not None
    assert len(state.scheduler["base_lrs"]) == len(state.scheduler["lr_lambdas"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["verl", "rlinf", "nemo"])
def test_openrlhf_finds_all_that_it_asks_for_after_megatron(tmp_path: Path, source: str) -> None:
    """Its counters are no Megatron's, nor has Megatron a LambdaLR's state: without either its loader stops."""
    root = {"verl": verls(tmp_path / "verl"), "rlinf": RLINF, "nemo": NEMO}[source]
    config = {} if source == "verl" else {"reference_config": str(RUNS / "config.json")}
    into(root, tmp_path / "megatron", "megatron", tp=2, dp=1, **config)
    into(tmp_path / "megatron", tmp_path / "openrlhf", "openrlhf", dp=2, **config)
    tag = tmp_path / "openrlhf" / "_actor" / "global_step3"
    read = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
    assert (read["episode"], read["global_step"]) == (0, 3)
    assert read["lr_scheduler"]["last_epoch"] == 3
    assert len(read["lr_scheduler"]["lr_lambdas"]) == len(read["lr_scheduler"]["base_lrs"]) == 2


def test_the_position_in_the_data_goes_along_under_the_trainers_name(tmp_path: Path) -> None:
    source = verls(tmp_path / "verl")
    into(source, tmp_path / "rlinf", "rlinf")
    raw = (source / "global_step_3" / "data.pt").read_bytes()
    assert (tmp_path / "rlinf" / "global_step_3" / "data" / "data.pt").read_bytes() == raw


def test_what_openrlhf_asks_of_the_actors_client_state_is_there(tmp_path: Path) -> None:
    done = into(RLINF, tmp_path / "openrlhf", "openrlhf")
    said = open_checkpoint(tmp_path / "openrlhf" / "_actor", ReadOptions()).state.other
    assert {name: said[name] for name in ("episode", "global_step", "total_consumed_prompts")} == {
        "episode": 0, "global_step": 3, "total_consumed_prompts": 0,
    }  # fmt: skip
    states = torch.load(next((tmp_path / "openrlhf" / "_actor").glob("*/mp_rank_*")), weights_only=False)
    before = torch.load(RLINF / "global_step_3" / "data" / "data.pt", weights_only=False)
    assert states["data_loader_state_dict"].keys() == before.keys()
    assert torch.equal(
        states["data_loader_state_dict"]["_sampler_iter_state"]["sampler_iter_state"]["generator"],
        before["_sampler_iter_state"]["sampler_iter_state"]["generator"],
    )
    assert done.account.lost == []
    again = into(tmp_path / "openrlhf", tmp_path / "again", "openrlhf", dp=1)
    assert again.lossless, "what is there already is not made again"


@pytest.mark.parametrize(("to", "place"), [("verl", "data.pt"), ("rlinf", "data/data.pt")])
def test_the_position_among_openrlhfs_values_becomes_a_file(tmp_path: Path, to: str, place: str) -> None:
    done = into(OPENRLHF, tmp_path / "out", to, reference_config=str(RUNS / "config.json"))
    file = OPENRLHF / "_actor" / "global_step3" / "mp_rank_00_model_states.pt"
    before = torch.load(file, weights_only=False)["data_loader_state_dict"]
    after = torch.load(tmp_path / "out" / "global_step_3" / place, weights_only=True)
    generators = [one["_sampler_iter_state"]["sampler_iter_state"].pop("generator") for one in (before, after)]
    assert torch.equal(*generators)
    assert after == before
    assert after["_num_yielded"] == 3
    assert done.lossless, done.account.lost


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"global_step": [3]}, "is of step [3], and the model of step 3"),
        ({"data_loader_state_dict": {"at": 7}}, "has none of _num_yielded, _snapshot"),
        ({"data_loader_state_dict": [3]}, "has none of _num_yielded, _snapshot"),
        ({"data_loader_state_dict": {}}, ""),
    ],
)
def test_a_position_that_is_another_steps_or_none_is_lost_by_name(
    tmp_path: Path, planted: dict[str, object], said: str
) -> None:
    root = tmp_path / "openrlhf"
    shutil.copytree(OPENRLHF, root)
    file = root / "_actor" / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), **planted}, file)
    done = into(root, tmp_path / "verl", "verl", reference_config=str(RUNS / "config.json"))
    assert not (tmp_path / "verl" / "global_step_3" / "data.pt").exists()
    lost = [text for text in done.account.lost if text.startswith("data_loader_state_dict: ")]
    assert [said in text for text in lost] == ([True] if said else [])


def accelerates(folder: Path, position: object) -> Path:
    """A step of accelerate's own, of one rank, with what a loader said of its position."""
    shutil.copytree(GOLDENS / "transformers" / "step_2", folder / "step_2")
    torch.save(position, folder / "step_2" / "dl_state_dict.bin")
    return folder / "step_2"


def test_the_position_beside_accelerates_model_becomes_a_file(tmp_path: Path) -> None:
    position = {"_num_yielded": 2, "_iterator_finished": False, "_sampler_iter_state": {"generator": torch.arange(9)}}
    step = accelerates(tmp_path, position)
    config = str(GOLDENS / "transformers" / "checkpoint-2" / "config.json")
    done = into(step, tmp_path / "verl", "verl", reference_config=config)
    assert not [text for text in done.account.lost if "dl_state_dict" in text]
    assert Item(Kind.FILE, "dl_state_dict.bin") not in done.jobs["actor"].account.entries
    assert "dl_state_dict.bin" in {file.path for file in done.jobs["actor"].source.files}
    after = torch.load(tmp_path / "verl" / "global_step_2" / "data.pt", weights_only=True)
    assert torch.equal(after["_sampler_iter_state"].pop("generator"), torch.arange(9))
    assert after == {"_num_yielded": 2, "_iterator_finished": False, "_sampler_iter_state": {}}


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this runs",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda step: None, "counts 2 batches, and has no state of a sampler"),
        (
            lambda step: torch.save(
                {"_snapshot": {"_main_snapshot": {"_sampler_iter_yielded": 3}}}, step / "dl_state_dict.bin"
            ),
            "counts 3",
        ),
        (lambda step: torch.save({"at": 7}, step / "dl_state_dict.bin"), "has none of _num_yielded, _snapshot"),
        (lambda step: (step / "dl_state_dict.bin").write_bytes(b""), "the file is empty"),
        (lambda step: torch.save({"_num_yielded": Hostile()}, step / "dl_state_dict.bin"), "print"),
        (lambda step: torch.save({"_num_yielded": 2}, step / "dl_state_dict_1.bin"), "lies beside dl_state_dict_1.bin"),
        (lambda step: torch.save({"step": 2}, step / "random_states_1.pkl"), "is of one of 2 ranks"),
        (lambda step: (step / "random_states_0.pkl").unlink(), "nothing says how many ranks"),
    ],
)
def test_a_position_that_is_not_the_runs_is_lost_by_name(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    step = accelerates(tmp_path, {"_num_yielded": 2})  # as of a DataLoader of torch's own, whose sampler has no state
    change(step)
    config = str(GOLDENS / "transformers" / "checkpoint-2" / "config.json")
    done = into(step, tmp_path / "verl", "verl", reference_config=config)
    assert not (tmp_path / "verl" / "global_step_3" / "data.pt").exists()
    (lost,) = [text for text in done.account.lost if text.startswith("dl_state_dict.bin: ")]
    assert said in lost
    assert lost.endswith("verl begins its data anew")


def test_what_becomes_of_the_place_in_the_data_is_said(tmp_path: Path) -> None:
    """The Trainer has none but its count of steps: neither way there is a loader's state that could be handed on."""
    away = into(verls(tmp_path / "verl"), tmp_path / "trainer", "transformers")
    assert [text for text in away.account.lost if text.startswith("data.pt")] == [
        "data.pt: transformers' Trainer has no place for it; when it resumes it passes over as many batches of its own order "
        "as trainer_state.json counts steps"
    ]
    loop = into(verls(tmp_path / "again"), tmp_path / "loop", "accelerate")
    assert (
        "data.pt: accelerate has no place for it; its data begin anew, unless the script goes forward itself"
        in loop.account.lost
    )
    for to in ("verl", "rlinf", "openrlhf"):
        back = into(GOLDENS / "transformers" / "checkpoint-2", tmp_path / to, to)
        (said,) = [text for text in back.account.lost if text.startswith("the place in the data")]
        assert said.startswith(
            "the place in the data: transformers' Trainer counts batches by its steps alone (step 2, epoch 0.25); "
        )
        assert said.endswith("begins its data anew")
    same = into(GOLDENS / "transformers" / "checkpoint-2", tmp_path / "same", "transformers")
    assert not [text for text in same.account.lost if "data" in text]


def test_counters_that_a_trainer_wants_and_nobody_has_are_made(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(NEMO, source)
    (source / "step_3" / "training_info.json").unlink()
    done = into(source / "step_3", tmp_path / "nemo", "nemo-rl")
    counters = json.loads((tmp_path / "nemo" / "step_3" / "training_info.json").read_text())
    assert counters == {"consumed_samples": 0, "current_step": 3, "total_steps": 3}
    said = [text for fate, text in done.report.lines if fate is Fate.DERIVED]
    assert said == ["training_info.json: step 3; nothing says how many samples were consumed: 0"]


@pytest.mark.parametrize("name", ["autotp2_z1_bf16_dp1", "z3_bf16_frozen_dp2"])
def test_what_openrlhf_asks_for_is_there_where_every_rank_keeps_its_own_values(name: str, tmp_path: Path) -> None:
    into(GOLDENS / "deepspeed" / name, tmp_path, "openrlhf", **({} if "z3" in name else {"tp": 2}))
    files = sorted((tmp_path / "_actor").rglob("*model_states.pt"))
    assert len(files) == 2
    for file in files:
        state = torch.load(file, weights_only=False)
        assert (state["data_loader_state_dict"], state["episode"], state["global_step"]) == ({}, 0, 3)


def test_nemo_is_given_a_loader_that_begins_where_there_is_none(tmp_path: Path) -> None:
    """It opens the file without a look; what is empty goes into no other trainer's run."""
    done = into(RUNS / "ac_ds2", tmp_path / "nemo", "nemo-rl", like=str(NEMO / "step_3" / "policy"))
    assert torch.load(tmp_path / "nemo" / "step_3" / "train_dataloader.pt") == {}
    assert (Fate.DERIVED, "train_dataloader.pt: empty, since NeMo-RL opens it without a look; its data begin anew") in (
        done.report.lines
    )
    into(tmp_path / "nemo", tmp_path / "verl", "verl")
    assert not (tmp_path / "verl" / "global_step_3" / "data.pt").exists()


@pytest.mark.parametrize(
    ("source", "to", "like"),
    [
        (RUNS / "ac_ds2", "nemo-rl", NEMO), (NEMO, "rlinf", RLINF), (OPENRLHF, "rlinf", RLINF), (RUNS / "ac_ds2", "openrlhf", OPENRLHF),
        (OPENRLHF, "nemo-rl", NEMO),
    ],
    ids=lambda one: one.name if isinstance(one, Path) else one,
)  # fmt: skip
def test_like_may_be_a_run_of_several_roles_and_accounts_for_the_schedule(
    source: Path, to: str, like: Path, tmp_path: Path
) -> None:
    done = into(source, tmp_path / "run", to, like=str(like))
    assert [step.step for step in listed_steps(tmp_path / "run")] == [3]
    for job in done.jobs.values():
        assert not [text for text in job.account.lost if "nothing accounts for it" in text]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # of torch, where one process loads
@pytest.mark.parametrize("by", ["megatron", "fsdp-ranks"])
def test_nemos_second_layout_is_written_for_its_loader(by: str, tmp_path: Path) -> None:
    """DTensor v2's two folders, the model's as DCP files: each key that it asks for is there, and every value is as it was."""
    run = tmp_path / "run"
    shutil.copytree(V2 / "step_3", run / "step_3")
    (run / "step_3" / "training_info.json").write_text(json.dumps({"total_steps": 3, "current_step": 3}))
    convert_step(find(run, ReadOptions()), tmp_path / "there", ConvertOptions(to=by, fsync=False))
    into(tmp_path / "there", tmp_path / "back", "nemo-rl", like=str(run / "step_3"))
    theirs, ours = (root / "step_3" / "policy" for root in (run, tmp_path / "back"))
    wanted, found = (FileSystemReader(policy / "optimizer" / "optim").read_metadata() for policy in (theirs, ours))
    assert wanted.state_dict_metadata.keys() <= found.state_dict_metadata.keys()
    whole = torch.load(V2 / "expected.pt", weights_only=False)
    model = {name: torch.zeros_like(value) for name, value in whole["model"].items()}
    dcp.load(model, checkpoint_id=ours / "weights" / "model", no_dist=True)
    assert all(torch.equal(model[name], value) for name, value in whole["model"].items())
    states = {
        f"state.{name}.exp_avg": torch.zeros_like(of["exp_avg"])
        for name, of in whole["states"].items()
        if "exp_avg" in of
    }
    dcp.load({"optim": states}, checkpoint_id=ours / "optimizer" / "optim", no_dist=True)
    assert all(torch.equal(value, whole["states"][key[6:-8]]["exp_avg"]) for key, value in states.items())
    with pytest.raises(Unsupported, match="has not the keys of a run of torchtitan"):
        into(run, tmp_path / "titan", "torchtitan")
    with pytest.raises(Unsupported, match="has not the keys of a run of nemo-rl"):
        into(GOLDENS / "torchtitan" / "checkpoint", tmp_path / "no", "nemo-rl")


def test_nemos_own_folders_are_written_for_its_loader(tmp_path: Path) -> None:
    """It loads each with ``dcp.load``, which stops at a key that is not there."""
    into(NEMO, tmp_path / "again", "nemo-rl", dp=1)
    for folder in ("weights", "optimizer"):
        first, second = (
            FileSystemReader(root / "step_3" / "policy" / folder).read_metadata() for root in (NEMO, tmp_path / "again")
        )
        assert first.state_dict_metadata.keys() == second.state_dict_metadata.keys()
        assert len(first.state_dict_metadata) > 20
    with pytest.raises(Unsupported, match="has not the keys of a run of nemo-rl"):
        into(RLINF, tmp_path / "no", "nemo-rl")
    assert not (tmp_path / "no").exists()


def test_what_a_run_of_the_same_trainer_has_stays(tmp_path: Path) -> None:
    source = tmp_path / "nemo"
    shutil.copytree(NEMO, source)
    (source / "step_3" / "config.yaml").write_text("policy: {}")
    done = into(source, tmp_path / "again", "nemo-rl", dp=1)
    step = tmp_path / "again" / "step_3"
    assert {path.name for path in step.iterdir() if path.is_file()} == {
        "config.yaml", "training_info.json", "train_dataloader.pt", "manifest.json",
    }  # fmt: skip
    assert json.loads((step / "training_info.json").read_text())["consumed_samples"] == 12, "its own"
    assert done.lossless, done.account.lost
    equal(NEMO / "step_3" / "policy", step / "policy")


def test_our_own_loaders_position_is_taken_out_and_our_samplers_is_lost_by_name(tmp_path: Path) -> None:
    for kind, lost in (("stateful", False), ("prompt_sampler", True)):
        root = tmp_path / kind
        step = root / "global_step_3"
        shutil.copytree(RLINF / "global_step_3" / "actor", step / "actor")
        (step / "data").mkdir()
        torch.save({"version": 1, "kind": kind, "state": {"at": 7}, "fingerprint": None}, step / "data" / "data.pt")
        done = into(root, tmp_path / f"rlinf_{kind}", "rlinf")
        data = tmp_path / f"rlinf_{kind}" / "global_step_3" / "data" / "data.pt"
        if lost:
            assert not data.exists()
            assert "from which RLinf cannot go on" in done.account.lost[0]
        else:
            assert torch.load(data, weights_only=False) == {"at": 7}
            assert not any("data" in text for text in done.account.lost)


def test_what_a_trainer_has_no_place_for_is_lost_by_name(tmp_path: Path) -> None:
    root = verls(tmp_path / "verl")
    (root / "global_step_3" / "notes.txt").write_text("mine")
    shutil.copytree(root / "global_step_3" / "actor", root / "global_step_3" / "reward")
    done = into(root, tmp_path / "rlinf", "rlinf")
    assert set(done.account.lost) == {
        "the model of the role reward: RLinf has models of the roles actor, critic", "notes.txt: RLinf has no place for it",
    }  # fmt: skip
    assert not done.lossless


def test_strict_refuses_what_the_step_loses_though_its_models_lose_nothing(tmp_path: Path) -> None:
    strict = ConvertOptions(to="rlinf", strict=True, fsync=False)
    with pytest.raises(Lossy, match=r"training_info\.json: RLinf has no place for it"):
        convert_step(find(NEMO, ReadOptions()), tmp_path / "no", strict)
    assert not (tmp_path / "no").exists()


def test_a_lone_checkpoint_becomes_a_step_of_one_role(tmp_path: Path) -> None:
    lone = NEMO / "step_3" / "policy"
    assert into(lone, tmp_path / "nemo", "nemo-rl").published == tmp_path / "nemo" / "step_3"
    equal(lone, tmp_path / "nemo" / "step_3" / "policy")
    into(lone, tmp_path / "critic", "openrlhf", role="critic")
    assert (tmp_path / "critic" / "_critic" / "latest").is_file()
    with pytest.raises(UsageError, match=r"--role reward: OpenRLHF has models of the roles actor, critic"):
        into(lone, tmp_path / "no", "openrlhf", role="reward")


def test_a_step_that_only_the_optimizer_counts_gives_the_folder_its_number(tmp_path: Path) -> None:
    source = GOLDENS / "megatron" / "tp2pp2dp2_fp32_do"
    convert(source, tmp_path / "state", ConvertOptions(to="hf-accelerate", fsync=False))
    into(tmp_path / "state", tmp_path / "run", "transformers")
    assert [step.step for step in listed_steps(tmp_path / "run")] == [2]
    assert open_checkpoint(tmp_path / "run" / "checkpoint-2", ReadOptions()).state.iteration == 2


def test_the_schedules_start_that_one_of_two_does_not_say_is_no_difference(tmp_path: Path) -> None:
    source = GOLDENS / "deepspeed" / "z1_bf16acc32_untied_dp2"
    into(source, tmp_path / "rlinf", "rlinf")
    into(tmp_path / "rlinf", tmp_path / "verl", "verl-sft")
    equal(tmp_path / "rlinf" / "global_step_3" / "actor", tmp_path / "verl" / "global_step_3")


def test_a_schedule_of_several_waits_beside_the_one_that_verl_is_given(tmp_path: Path) -> None:
    into(NEMO, tmp_path / "verl", "verl")
    equal(NEMO / "step_3" / "policy", tmp_path / "verl" / "global_step_3" / "actor")


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported, match=r"--to roll-fsdp2: runs of ROLL on FSDP2 are read, and not written as a whole"
    ):
        resolved(ConvertOptions(to="roll-fsdp2"))
    options = resolved(ConvertOptions(to="rlinf"))
    assert (options.to, options.trainer) == ("dcp", "rlinf")
    options = resolved(ConvertOptions(to="rlinf", write=WriteOptions(tp=2)))
    assert (options.to, options.trainer) == ("megatron", "rlinf")
    into(RLINF, tmp_path / "out", "rlinf")
    with pytest.raises(CheckpointError, match="exists"):
        into(RLINF, tmp_path / "out", "rlinf")
    with pytest.raises(UsageError, match="written by one process"):
        convert_part(find(RLINF, ReadOptions()), tmp_path / "parts", options, PartNumber(1, 2))
    with pytest.raises(CheckpointError, match="same"):
        into(RLINF, RLINF, "rlinf")


def test_a_step_whose_conversion_was_killed_before_the_tracker_named_it(tmp_path: Path) -> None:
    """The trainer goes on from the step before; a repeat says so, and with ``--overwrite`` the tracker names it and nothing is left."""
    run, step = tmp_path / "run", GOLDENS / "transformers" / "checkpoint-2"
    into(step, run, "verl")
    tracker = run / "latest_checkpointed_iteration.txt"
    with pytest.raises(CheckpointError, match=r"exists already\.\s+Choose"):
        into(step, run, "verl")
    left = run / f".{tracker.name}.tmp-{'0' * 16}"
    tracker.rename(left)
    os.utime(left, (0, 0))
    with pytest.raises(UsageError, match="exists already, and latest_checkpointed_iteration"):
        into(step, run, "verl")
    convert_step(find(step, ReadOptions()), run, ConvertOptions(to="verl", workers=1, fsync=False, overwrite=True))
    assert tracker.read_text() == "2"
    assert not left.exists()


def test_a_step_whose_replacement_was_killed_between_two_renames(tmp_path: Path) -> None:
    """Nothing is there for that moment: who asks hears where it lies, and whoever writes next puts it back."""
    run, step = tmp_path / "run", GOLDENS / "transformers" / "checkpoint-2"
    into(step, run, "accelerate")
    (run / "checkpoint_2").rename(run / f".checkpoint_2.old-{'1' * 13}-{'0' * 8}")
    said = r"checkpoint_2: lies aside, as \.checkpoint_2\.old-"
    with pytest.raises(NotACheckpoint, match=said):
        open_checkpoint(run, ReadOptions())
    with pytest.raises(NotACheckpoint, match=said):
        forecast(run, loader_named("accelerate")[0], Settings())
    with pytest.raises(CheckpointError, match=r"put .*checkpoint_2 back"):
        into(step, run, "accelerate")
    assert [one.name for one in run.iterdir()] == ["checkpoint_2"]


def test_a_planted_position_is_never_run(tmp_path: Path) -> None:
    root, planted = verls(tmp_path / "verl"), tmp_path / "planted"

    class Plant:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(planted),))

    with (root / "global_step_3" / "data.pt").open("wb") as file:
        pickle.dump(Plant(), file)
    with pytest.raises(CheckpointError, match=r"data\.pt"):
        into(root, tmp_path / "rlinf", "rlinf")
    assert not planted.exists()
    assert not (tmp_path / "rlinf").exists()


def test_a_root_with_another_trainers_steps_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Of the same number, too; it was said after the step had been published."""
    root = verls(tmp_path / "run")
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    with pytest.raises(UsageError, match=r"run: is a run of verl\nGive the one for NeMo-RL a root of its own"):
        into(OPENRLHF, root, "nemo-rl")
    into(OPENRLHF, tmp_path / "own", "dcp")
    own = find(tmp_path / "own", ReadOptions())
    options = ConvertOptions(to="deepspeed", fsync=False)
    for target in (root, root / "global_step_3"):
        with pytest.raises(UsageError, match=r"run: is a run of verl\nGive this one a root of its own"):
            convert_step(own, target, options)
        with pytest.raises(UsageError, match="is a run of verl"):  # by parts, in which many processes write
            convert_part(own, target, options, PartNumber(1, 2))
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before
