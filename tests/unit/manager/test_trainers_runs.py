"""Runs that other trainers saved: found, listed, opened, adopted and converted, by the names that each trainer gives them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, NotACheckpoint, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.runs import goes_without, listed_steps, run_at, step_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers import lightning
from mcore_rlhf.trainers.known import TRAINERS, left_by_trainers
from mcore_rlhf.trainers.resuming import Settings
from mcore_rlhf.trainers.table import Trainer
from tests.helpers import trainer_tables
from tests.helpers.damage import edited

GOLDENS = Path(__file__).parents[2] / "goldens"
RUNS = GOLDENS / "trainers"
NEMO, OPENRLHF, ACCELERATE, RLINF = "nm_v1", "or_z2", "ac_ds2", "rl_fsdp2/grpo/checkpoints"


def trainers_own(root: Path) -> Path:
    """A run of transformers' Trainer: two steps, model folders with its state in them."""
    for step in (2, 10):
        folder = root / f"checkpoint-{step}"
        shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return root


def titans(root: Path) -> Path:
    """A run of torchtitan's: one step that is whole, and one without ``.metadata``."""
    for step in (3, 6):
        shutil.copytree(GOLDENS / "dcp" / "fsdp2_ws2" / "actor" / "dcp_checkpoint", root / f"step-{step}")
    (root / "step-6" / ".metadata").unlink()
    return root


def described(root: Path) -> list[tuple[int, str, tuple[str, ...]]]:
    return [(step.step, step.state, step.roles) for step in listed_steps(root)]


@pytest.mark.parametrize(
    ("run", "title", "roles"),
    [
        (NEMO, "NeMo-RL", ("actor",)), (OPENRLHF, "OpenRLHF", ("actor", "critic")), (ACCELERATE, "open-instruct's SFT and DPO", ("actor",)),
        (RLINF, "RLinf", ("actor",)),
    ],
)  # fmt: skip
def test_a_genuine_run_is_listed_and_its_models_are_opened(run: str, title: str, roles: tuple[str, ...]) -> None:
    found = run_at(RUNS / run)
    assert found is not None
    assert (found.trainer.title, [*found.found]) == (title, [3])
    assert described(RUNS / run) == [(3, "foreign", roles)]
    subject = find(RUNS / run, ReadOptions())
    assert tuple(role or "actor" for role in subject.models) == roles
    assert subject.chosen is not None
    assert subject.chosen.step == 3
    for role, folder in subject.models.items():
        source = open_checkpoint(folder, subject.reading(role))
        assert source.state.iteration == 3
        assert "exp_avg" in source.states, "its optimizer is seen"


def test_what_lies_beside_the_models_is_the_steps(tmp_path: Path) -> None:
    assert find(RUNS / NEMO, ReadOptions()).others == ("train_dataloader.pt", "training_info.json")
    assert find(RUNS / RLINF, ReadOptions()).others == ("data/data.pt",)
    assert find(RUNS / NEMO / "step_3", ReadOptions(role="actor")).alone
    job = convert_step(find(RUNS / NEMO, ReadOptions()), tmp_path / "run", ConvertOptions(to="universal", fsync=False))
    assert job.lossless, job.account.lost
    assert job.published == tmp_path / "run" / "global_step_3"
    assert (tmp_path / "run" / "global_step_3" / "train_dataloader.pt").is_file()
    (again,) = find(tmp_path / "run", ReadOptions()).models.items()
    assert open_checkpoint(again[1], ReadOptions(role=again[0])).state.iteration == 3


def test_a_step_that_is_a_models_own_folder_is_opened_as_that(tmp_path: Path) -> None:
    root = trainers_own(tmp_path)
    assert find(root, ReadOptions(step=2)).alone
    shutil.copytree(
        root / "checkpoint-2", root, dirs_exist_ok=True
    )  # as save_model leaves the last one above the steps
    assert find(root, ReadOptions()).folder == root
    assert find(root, ReadOptions(step=2)).folder == root / "checkpoint-2"


def test_of_several_steps_one_must_be_named_unless_a_tracker_does(tmp_path: Path) -> None:
    root = trainers_own(tmp_path / "hf")
    assert described(root) == [(2, "foreign", ("actor",)), (10, "foreign", ("actor",))]
    with pytest.raises(UsageError, match=r"which of transformers' Trainer's steps is meant\? checkpoint-10 is foreign"):
        find(root, ReadOptions())
    assert find(root, ReadOptions(step=2)).folder == root / "checkpoint-2"
    with pytest.raises(NotACheckpoint, match="has no step 5 there; there are 2, 10"):
        find(root, ReadOptions(step=5))
    both = tmp_path / "openrlhf"
    shutil.copytree(RUNS / OPENRLHF, both)
    for role in ("_actor", "_critic"):
        shutil.copytree(both / role / "global_step3", both / role / "global_step6")
    with edited(both / "_actor" / "global_step6" / "mp_rank_00_model_states.pt") as states:
        states["global_step"] = 6
    assert find(both, ReadOptions()).step == 3, "as the trackers of both say"
    (both / "_critic" / "latest").write_text("global_step6")
    with pytest.raises(UsageError, match="is meant"):
        find(both, ReadOptions())
    assert find(both, ReadOptions(step=6)).step == 6


def test_weights_that_verl_saved_without_its_own_files_are_a_step(tmp_path: Path) -> None:
    """``save_contents: [hf_model, extra]``, and with the optimizer, which lies there alone."""
    root, ranks = tmp_path / "run", GOLDENS / "verl" / "fsdp1_flat_ws3"
    step, critic = root / "global_step_3", root / "global_step_3" / "critic"
    shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", step / "actor" / "huggingface")
    shutil.copytree(ranks, critic)
    shutil.copy(RUNS / RLINF / "global_step_3" / "data" / "data.pt", step / "data.pt")
    found = find(root, ReadOptions(step=3))
    assert {role: str(place.relative_to(step)) for role, place in found.models.items()} == {
        "actor": "actor/huggingface", "critic": "critic",
    }  # fmt: skip
    assert not goes_without(step)
    refused = forecast(root, loader_named("verl")[0], Settings())
    assert not refused.resumes
    convert_step(found, tmp_path / "hf", ConvertOptions(to="hf", fsync=False, workers=1))
    made = find(tmp_path / "hf", ReadOptions()).models
    assert {role: open_checkpoint(place, ReadOptions()).optimizer for role, place in made.items()} == dict.fromkeys(
        ("actor", "critic")
    )
    for path in ranks.glob("optim_*"):
        shutil.copy(path, step / "actor" / path.name)
    (text,) = goes_without(step)
    assert text.startswith(
        "actor is the weights of actor/huggingface alone: optim_world_size_3_rank_0.pt is of an optim"
    )
    assert adopt(step).step == 3


def test_what_is_half_written_is_not_taken(tmp_path: Path) -> None:
    root = tmp_path / "nemo"
    shutil.copytree(RUNS / NEMO, root)
    shutil.copytree(root / "step_3", root / "tmp_step_6")
    shutil.copytree(root / "step_3", root / "step_5")
    (root / "step_5" / "training_info.json").unlink()
    assert described(root) == [(3, "foreign", ("actor",)), (5, "partial", ("actor",)), (6, "partial", ())]
    why = [step.why for step in listed_steps(root)]
    assert "has no training_info.json: NeMo-RL does not go on from it" in why
    assert find(root, ReadOptions()).step == 3
    assert [step.state for step in listed_steps(titans(tmp_path / "titan"))] == ["foreign", "partial"]
    assert find(tmp_path / "titan", ReadOptions(step=3)).alone


def test_a_step_gets_a_manifest_and_counts_from_then_on(tmp_path: Path) -> None:
    root = trainers_own(tmp_path / "hf")
    manifest = adopt(root / "checkpoint-2")
    assert manifest.step == 2
    assert "trainer_state.json" in manifest.files
    assert [step.state for step in listed_steps(root)] == ["committed", "foreign"]
    nemo = tmp_path / "nemo"
    shutil.copytree(RUNS / NEMO, nemo)
    assert {str(part["role"]) for part in adopt(nemo / "step_3").parts} == {"actor"}
    subject = find(nemo, ReadOptions())
    assert subject.chosen is not None
    assert (subject.chosen.why, subject.manifest is not None) == ("newest committed", True)
    data = nemo / "step_3" / "policy" / "weights" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert [step.state for step in listed_steps(nemo)] == ["damaged"]


@pytest.mark.parametrize("name", ["named", "numbered"])
def test_folders_of_torch_checkpointing_are_steps(tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(GOLDENS / "torch_checkpointing" / name, tmp_path / "run"))
    assert described(root) == [(3, "foreign", ("actor",))]
    assert adopt(root / "step_3").step == 3
    assert described(root) == [(3, "committed", ("actor",))]
    (root / "tmp_step_4").mkdir()
    assert [(step.step, step.state) for step in listed_steps(root)] == [(3, "committed"), (4, "partial")]


def test_a_folder_that_was_no_step_to_who_wrote_it_is_one_by_its_name(tmp_path: Path) -> None:
    """As ``dcp.save`` through a writer of an older release left it: its manifest says no step."""
    root = titans(tmp_path / "titan")
    manifest = adopt(root / "step-3")
    (root / "step-3" / "mcore_rlhf.json").write_text(replace(manifest, step=None).to_json())
    assert listed_steps(root)[0].state == "committed"
    (root / "step-3" / "mcore_rlhf.json").write_text(replace(manifest, step=4).to_json())
    (found, _) = listed_steps(root)
    assert (found.state, found.why.rpartition("/")[2]) == (
        "damaged",
        "mcore_rlhf.json: is of step 4, but the folder is step-3",
    )


def test_two_trainers_are_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(RUNS / NEMO, mixed)
    shutil.copytree(RUNS / ACCELERATE / "step_3", mixed / "step_6")
    with pytest.raises(
        LayoutMismatch, match=r"steps of two trainers: step_3 of NeMo-RL; step_6 of open-instruct's SFT and DPO"
    ):
        find(mixed, ReadOptions())
    shutil.rmtree(mixed / "step_6")
    shutil.copy(RUNS / ACCELERATE / "step_3" / "random_states_0.pkl", mixed / "step_3")
    with pytest.raises(LayoutMismatch, match="holds files of NeMo-RL and of accelerate"):
        find(mixed / "step_3", ReadOptions())


def test_counters_of_another_step_are_a_contradiction(tmp_path: Path) -> None:
    shutil.copytree(RUNS / NEMO / "step_3", tmp_path / "step_5")
    with pytest.raises(LayoutMismatch, match=r"training_info\.json: total_steps is 3, and the folder is step_5"):
        find(tmp_path, ReadOptions())
    shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", tmp_path / "hf" / "checkpoint-7")
    (tmp_path / "hf" / "checkpoint-7" / "trainer_state.json").write_text('{"global_step": 2}')
    with pytest.raises(LayoutMismatch, match="global_step is 2, and the folder is checkpoint-7"):
        find(tmp_path / "hf", ReadOptions())


def test_a_step_that_one_role_lacks_is_no_step_of_the_run(tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(RUNS / OPENRLHF, root)
    shutil.copytree(root / "_actor" / "global_step3", root / "_actor" / "global_step6")
    assert described(root) == [(3, "foreign", ("actor", "critic")), (6, "partial", ("actor",))]
    with pytest.raises(Incomplete, match="step 6 has no model in _critic"):
        find(root, ReadOptions(step=6))


def test_a_folder_that_is_called_like_a_step_is_none(tmp_path: Path) -> None:
    for name in ("step_3", "checkpoint-2", "step-1", "global_step_4", "iter_0000002", "step_03", "step_٣"):
        (tmp_path / name / "policy").mkdir(parents=True)
    assert run_at(tmp_path) is None
    assert [step_at(tmp_path / name) for name in ("step_3", "step_03", "step_٣")] == [None] * 3
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(find(tmp_path / "step_3", ReadOptions()).folder, ReadOptions())


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.name)
def test_a_row_reads_the_names_that_it_makes(trainer: Trainer) -> None:
    for number in (trainer.done(0), 7, 10**9) if trainer.steps else ():  # a run may be its one step
        assert trainer.step_of(trainer.folder_of(number)) == number
    assert trainer.step_of(trainer.folder_of(7) + "x") is None
    assert trainer.step_of("../" + trainer.folder_of(7)) is None
    if trainer.tracker:
        assert trainer.tracked_step(trainer.tracked.format(step=12) + "\n") == 12
    assert not any(mark.startswith(("/", "..")) for mark in left_by_trainers())


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step=10.ckpt", 10), ("epoch=0-step=10.ckpt", 10), ("epoch=0-step=10-v1.ckpt", 10), ("step=3-loss=0.25.ckpt", 3),
        ("epoch=0.ckpt", None), ("last.ckpt", None), ("epoch=0-step=010.ckpt", None), ("epoch=0-substep=3.ckpt", None),
        ("a/../b-step=3.ckpt", None), ("epoch=0-step=3.ckpt.old", None), ("epoch=0-step=-3.ckpt", None),
    ],
)  # fmt: skip
def test_lightnings_names_have_other_metrics_in_them(name: str, step: int | None) -> None:
    assert lightning.TRAINER.step_of(name) == step


def test_a_link_out_of_a_run_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "step_3").symlink_to(RUNS / NEMO / "step_3")
    with pytest.raises(CheckpointError, match="link"):
        convert_step(find(root, ReadOptions()), tmp_path / "out", ConvertOptions(to="universal", fsync=False))
    assert not (tmp_path / "out").exists()


def test_the_page_has_the_tables_as_they_are() -> None:
    page = trainer_tables.PAGE.read_text(encoding="utf-8")
    assert trainer_tables.written(page) == page, "python -m tests.helpers.trainer_tables writes it"


@pytest.mark.parametrize(
    ("golden", "within", "trainer"),
    [
        (GOLDENS / "torchtitan" / "checkpoint", "checkpoint", "torchtitan"),
        (GOLDENS / "trainers" / "ac_ds2", "checkpoints", "accelerate"),
        (GOLDENS / "trainers" / "rl_fsdp2" / "grpo" / "checkpoints", "checkpoints", "rlinf"),
    ],
)
def test_the_folder_that_a_trainer_was_given_is_its_run(
    golden: Path, within: str, trainer: str, tmp_path: Path
) -> None:
    """torchtitan's ``dump_folder`` opened as a step with a model of the role ``checkpoint``."""
    shutil.copytree(golden, tmp_path / "given" / within, ignore=shutil.ignore_patterns("COMPLETED"))
    run = run_at(tmp_path / "given")
    assert run is not None
    assert (run.trainer.name, run.root) == (trainer, tmp_path / "given" / within)
    step = find(tmp_path / "given", ReadOptions())
    assert [*step.models] in ([""], ["actor"])
    assert forecast(tmp_path / "given", loader_named(trainer)[0], Settings()).taken.folder == run.found[3].folder
    shutil.copytree(golden, tmp_path / "given", dirs_exist_ok=True)
    assert run_at(tmp_path / "given").root == tmp_path / "given"  # type: ignore[union-attr]  # steps of its own come first
