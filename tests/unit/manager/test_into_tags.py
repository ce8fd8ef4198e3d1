"""Runs whose steps are DeepSpeed's tags, and steps of which a trainer counts otherwise than the framework that it saves with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.runs import listed_steps, run_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.unit.manager.test_further_trainers import slime

RUNS = Path(__file__).parents[2] / "goldens" / "trainers"
PRIME, GRPO, OPENRLHF = RUNS / "prime", RUNS / "open_instruct", RUNS / "or_z2"
PROGRESS = Path("orchestrator") / "progress.pt"
MODEL = "mp_rank_00_model_states.pt"


SIZES: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "vocab_size": 120,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
"""Of prime-rl's golden; open-instruct's has 16 and 24."""


def config(folder: Path, **more: object) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**SIZES, **more}))
    return str(file)


def into(source: Path, root: Path, to: str, **write: Any) -> StepJob:
    options = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))
    return convert_step(find(source, ReadOptions()), root, options)


def changed(run: Path, target: Path, **values: object) -> Path:
    """A copy of a run of DeepSpeed's with other values beside its models."""
    shutil.copytree(run, target)
    for file in target.rglob("*_model_states.pt"):
        torch.save({**torch.load(file, weights_only=False), **values}, file)
    return target


def iteration(path: Path, role: str | None = None) -> int:
    return open_checkpoint(path, ReadOptions(role=role)).state.iteration


def test_open_instruct_gets_what_it_asks_for(tmp_path: Path) -> None:
    done = into(PRIME, tmp_path / "run", "open-instruct", zero_stage=2)
    assert done.published == tmp_path / "run" / "global_step3"
    assert (tmp_path / "run" / "latest").read_text() == "global_step3"
    saved = torch.load(tmp_path / "run" / "global_step3" / MODEL, weights_only=False)
    assert saved["training_step"] == saved["global_steps"] == 3
    torch.set_rng_state(saved["rng_states"]["torch_cpu_rng_state"])
    found = run_at(tmp_path / "run")
    assert found is not None
    assert (found.trainer.name, found.tracked()) == ("open-instruct", 3), (
        "its manifest says so, where no reference does"
    )
    assert [step.state for step in listed_steps(tmp_path / "run")] == ["committed"]
    (prospects,) = forecast(tmp_path / "run", loader_named("open-instruct")[0], Settings()).roles.values()
    told = {one.thing: one.row.outcome for one in prospects}
    assert told[Thing.COUNTERS] is told[Thing.RNG] is told[Thing.OPTIMIZER] is Outcome.RESTORED
    (tmp_path / "run" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    assert not verify(tmp_path / "run", ReadOptions()).intact


def test_its_random_states_are_those_that_verl_had(tmp_path: Path) -> None:
    verl = tmp_path / "verl"
    shutil.copytree(RUNS.parent / "verl" / "fsdp2_tied_ws2", verl / "global_step_3" / "actor")
    into(verl, tmp_path / "run", "open-instruct")
    made = torch.load(tmp_path / "run" / "global_step3" / MODEL, weights_only=False)["rng_states"]
    rank = torch.load(verl / "global_step_3" / "actor" / "extra_state_world_size_2_rank_0.pt", weights_only=False)[
        "rng"
    ]
    assert torch.equal(made["torch_cpu_rng_state"], rank["cpu"])
    assert made["python_rng_state"] == rank["random"]


def test_what_lies_beside_accelerates_tag_is_lost_by_name_elsewhere(tmp_path: Path) -> None:
    """Random states of each rank, which went along where nobody looks; open-instruct takes rank 0's."""
    for to, place in (("openrlhf", "_actor"), ("open-instruct", "")):
        done = into(RUNS / "ac_ds2", tmp_path / to, to)
        assert [
            text
            for text in done.account.lost + done.jobs["actor"].account.lost
            if text.startswith("random states of 2 ranks")
        ]
        assert not [*(tmp_path / to / place).glob("random_states_*")]
    made = torch.load(tmp_path / "open-instruct" / "global_step3" / MODEL, weights_only=False)["rng_states"]
    own = torch.load(RUNS / "ac_ds2" / "step_3" / "random_states_0.pkl", weights_only=False)
    assert torch.equal(made["torch_cpu_rng_state"], own["torch_manual_seed"])


def test_a_tags_number_is_no_training_step(tmp_path: Path) -> None:
    """DeepSpeed calls its tags by updates, of which GRPO makes several in a step."""
    run = changed(GRPO, tmp_path / "own", training_step=1)
    into(run, tmp_path / "verl", "verl")
    assert iteration(tmp_path / "verl" / "global_step_1" / "actor") == 1
    assert (tmp_path / "verl" / "latest_checkpointed_iteration.txt").read_text() == "1"
    into(run, tmp_path / "lm", "megatron-dist", reference_config=config(tmp_path, hidden_size=16, intermediate_size=24))
    assert iteration(tmp_path / "lm") == 3, "a format of no trainer's has the checkpoint's own"
    again = into(run, tmp_path / "again", "open-instruct", dp=1)
    assert again.published == tmp_path / "again" / "global_step3"
    saved = torch.load(tmp_path / "again" / "global_step3" / MODEL, weights_only=False)
    assert (saved["training_step"], saved["global_steps"]) == (1, 3)
    into(tmp_path / "again", tmp_path / "openrlhf", "openrlhf")
    saved = torch.load(tmp_path / "openrlhf" / "_actor" / "global_step1" / MODEL, weights_only=False)
    assert (saved["global_step"], saved["episode"]) == (1, 0), "what GRPO calls episodes are samples"
    into(tmp_path / "openrlhf", tmp_path / "back", "open-instruct")
    assert torch.load(tmp_path / "back" / "global_step1" / MODEL, weights_only=False)["training_step"] == 1


def test_a_reference_that_stays_where_it_is_is_named(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GRPO, tmp_path / "own"))
    (run / "ref_policy").mkdir()
    torch.save({}, run / "ref_policy" / "pytorch_model.bin")
    for to in ("open-instruct", "verl"):
        lost = into(run, tmp_path / to, to).account.lost
        assert [
            text for text in lost if text.startswith("ref_policy/pytorch_model.bin: lies beside the steps of its run")
        ]


def test_updates_are_no_steps_of_openrlhfs(tmp_path: Path) -> None:
    """It says which step it is in the tag's name and among the actor's values; DeepSpeed counts updates beside."""
    run = changed(OPENRLHF, tmp_path / "own", global_steps=12)
    config = str(RUNS / "config.json")
    into(run, tmp_path / "again", "openrlhf", dp=1)
    for role in ("_actor", "_critic"):
        assert (tmp_path / "again" / role / "latest").read_text() == "global_step3"
        assert iteration(tmp_path / "again" / role) == 12
    done = into(run, tmp_path / "verl", "verl")
    assert done.lossless, done.account.lost
    assert (tmp_path / "verl" / "global_step_3" / "data.pt").is_file()
    into(run, tmp_path / "rlinf", "rlinf", tp=2, reference_config=config)
    assert iteration(tmp_path / "rlinf" / "global_step_3" / "actor") == 3
    said = into(run, tmp_path / "megatron", "megatron", tp=2, dp=1, reference_config=config)
    assert iteration(tmp_path / "megatron" / "global_step_3" / "actor") == 3
    assert not [text for _, text in said.report.lines if "says that it is of iteration" in text]


def test_slimes_steps_are_its_own_without_prompts_too(tmp_path: Path) -> None:
    into(PRIME, tmp_path / "slime", "slime", reference_config=config(tmp_path))
    assert not (tmp_path / "slime" / "rollout").exists()
    assert iteration(tmp_path / "slime") == 2
    into(tmp_path / "slime", tmp_path / "verl", "verl")
    assert iteration(tmp_path / "verl" / "global_step_3" / "actor") == 3


@pytest.mark.parametrize(("to", "at"), [("deepspeed", 3), ("universal", 3), ("dcp", 3), ("megatron-dist", 2)])
def test_a_rollout_out_of_megatrons_formats_is_counted_as_everybody_does(to: str, at: int, tmp_path: Path) -> None:
    own = slime(tmp_path / "own")
    for name, source in (("root", own), ("step", own / "iter_0000002")):
        job = into(source, tmp_path / name, to)
        assert iteration(tmp_path / name) == at
        said = [text for one in job.jobs.values() for fate, text in one.report.lines if fate is Fate.DERIVED]
        assert any(text.startswith("iteration 2 becomes 3") for text in said) == (at == 3)


def test_prime_rls_run_takes_from_another_what_only_it_says(tmp_path: Path) -> None:
    """A genuine file has a class of prime-rl's in it, which goes along, and is written with another step's number."""
    into(PRIME, tmp_path / "verl", "verl")
    with pytest.raises(CheckpointError, match="--like FOLDER"):
        into(tmp_path / "verl", tmp_path / "none", "prime-rl")
    into(PRIME, tmp_path / "grpo", "open-instruct")
    changed(tmp_path / "grpo", tmp_path / "later", global_steps=5, training_step=5)
    (tmp_path / "later" / "global_step3" / MANIFEST_NAME).unlink()
    for like in (PRIME, PRIME / "checkpoints" / "step_3", PRIME / "checkpoints" / "step_3" / "trainer"):
        root = tmp_path / f"prime{len(like.parts)}"
        done = into(tmp_path / "later", root, "prime-rl", like=str(like))
        assert done.published == root / "step_5"
        made = (root / "step_5" / PROGRESS).read_bytes()
        assert b"cprime_rl.orchestrator.types\nProgress\n" in made
        source = open_checkpoint(root / "step_5" / "trainer", ReadOptions())
        assert source.state.other["progress"] == {"step": 5, "total_tokens": 300, "total_samples": 18}
    back = into(PRIME, tmp_path / "back", "prime-rl")
    assert back.lossless
    assert (tmp_path / "back" / "step_3" / PROGRESS).read_bytes() == (
        PRIME / "checkpoints" / "step_3" / PROGRESS
    ).read_bytes()


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this runs",)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (None, "has no orchestrator/progress.pt, without which prime-rl stops"),
        ([1], "expected progress with a step"),
        ({"progress": {"step": True}}, "expected progress with a step"),
        ({"progress": {"step": "../../x"}, "train_source": {}}, "expected progress with a step"),
        ({"progress": {"step": 1}, "train_source": Hostile()}, "print"),
        (b"", "progress.pt"),
    ],
)
def test_a_file_that_shows_nothing_is_refused(planted: object, said: str, tmp_path: Path) -> None:
    like = Path(shutil.copytree(PRIME / "checkpoints", tmp_path / "like"))
    file = like / "step_3" / PROGRESS
    file.unlink()
    if isinstance(planted, bytes):
        file.write_bytes(planted)
    elif planted is not None:
        torch.save(planted, file)
    into(PRIME, tmp_path / "verl", "verl")
    with pytest.raises(CheckpointError) as caught:
        into(tmp_path / "verl", tmp_path / "run", "prime-rl", like=str(like))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_like_is_a_step_of_the_trainers_own(tmp_path: Path) -> None:
    into(PRIME, tmp_path / "verl", "verl")
    with pytest.raises(UsageError, match="no step of a run of prime-rl"):
        into(tmp_path / "verl", tmp_path / "run", "prime-rl", like=str(RUNS / "nm_v1"))


@pytest.mark.parametrize("said", ["verl", "../../x", ["slime"], {"slime": 1}, None])
def test_a_manifest_that_names_no_such_trainer_decides_nothing(said: object, tmp_path: Path) -> None:
    into(PRIME, tmp_path / "slime", "slime", reference_config=config(tmp_path))
    manifest = tmp_path / "slime" / "iter_0000002" / MANIFEST_NAME
    content = json.loads(manifest.read_text())
    content["report"]["trainer"] = said
    manifest.write_text(json.dumps(content))
    found = run_at(tmp_path / "slime")
    assert found is not None
    assert found.trainer.name == "megatron-lm"
    manifest.write_text("{")
    found = run_at(tmp_path / "slime")
    assert found is not None
    assert found.trainer.name == "megatron-lm"
