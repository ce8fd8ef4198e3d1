"""transformers' own Trainer, and accelerate, go on from what we write with the losses of a run that was never interrupted.

Both load an optimizer by position and say nothing where a moment lies at another parameter: only a next loss that is equal to the last bit
shows that all are in place. Which number is whose is also held against the real module.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, Unportable, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step, prepare_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.models.spec import ParamRule, Rules
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.catalog_values import tensor_of
from tests.trainers.hf_runs import (
    HALF,
    MOE,
    STEPS,
    Headed,
    Seen,
    accelerated,
    actor_and_critic,
    adapted,
    adapted_experts,
    compiled,
    critic,
    model,
    train,
)

GOLDENS = Path(__file__).parents[1] / "goldens" / "transformers"
TRAINER, ACCELERATE, ADAPTER = (
    GOLDENS / "checkpoint-2",
    GOLDENS / "step_2",
    GOLDENS / "adapter",
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "untied": ("qwen2", {"tie_word_embeddings": False}),
    "experts": ("qwen3_moe", MOE),
}


@cache
def seen_of(folder: Path) -> Seen:
    """What the golden itself goes on with, on this processor: another one's sums end in other bits."""
    if folder is ACCELERATE:
        return accelerated(model(9, tie_word_embeddings=False), resume=folder)
    with TemporaryDirectory() as run:
        return train(adapted(9) if folder is ADAPTER else model(9, tie_word_embeddings=True), Path(run), folder)


def to(source: Path, target: Path, name: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=name, fsync=False, workers=1, write=WriteOptions(**write)))


def forget(root: Path) -> None:
    """Leave nothing of what waits for the way back, as in a run that went on elsewhere."""
    for path in root.rglob("mcore_rlhf/state.json"):
        path.unlink()
    (root / "mcore_rlhf.json").unlink()


@pytest.mark.parametrize("golden", [TRAINER, ACCELERATE, ADAPTER], ids=lambda path: path.name)
def test_the_goldens_go_on_as_they_did(golden: Path) -> None:
    """So the recipe is the one that wrote them, and what follows compares like with like."""
    whole = json.loads((GOLDENS / f"{golden.name}.json").read_text())
    for here, there in zip(seen_of(golden), whole[HALF:], strict=True):
        assert here == pytest.approx(tuple(there), rel=1e-5)


@pytest.mark.parametrize("golden", [TRAINER, ACCELERATE, ADAPTER], ids=lambda path: path.name)
def test_every_number_is_the_parameter_that_the_module_has_there(golden: Path) -> None:
    made = adapted(1) if golden is ADAPTER else model(1, tie_word_embeddings=golden is TRAINER)
    decayed = transformers.Trainer.get_decay_parameter_names(None, made)  # type: ignore[arg-type]  # asks nothing of it
    named = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    order = [n for n in named if n in decayed] + [n for n in named if n not in decayed]
    stored = torch.load(next(golden.glob("optimizer.*")), weights_only=True)
    source = open_checkpoint(golden, ReadOptions())
    assert len(order) == len(stored["state"]) == sum(len(group["params"]) for group in stored["param_groups"])
    for number, name in enumerate(order):
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensor_of(source, name, state), stored["state"][number][state]), name
    assert [len(group.params) for group in source.state.groups] == [
        len(group["params"]) for group in stored["param_groups"]
    ]


def test_trainer_passes_over_experts_of_its_own_checkpoint(tmp_path: Path) -> None:
    """Why the model of the next test is made with ``from_pretrained``, and why the report says so: transformers 5.23.0 does not unpack."""
    whole = train(model(1, "qwen3_moe", **MOE), tmp_path / "run")
    saved = tmp_path / "run" / f"checkpoint-{HALF}"
    assert train(model(9, "qwen3_moe", **MOE), tmp_path / "again", saved) != whole[HALF:]
    job = to(saved, tmp_path / "same", "hf-trainer")
    assert any("Trainer passes over them" in text for _, text in job.report.lines)


@pytest.mark.parametrize("like", [False, True], ids=["alone", "like"])
@pytest.mark.parametrize("name", MODELS)
def test_trainer_goes_on_after_megatron(name: str, like: bool, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    whole = train(model(1, kind, **config), tmp_path / "run")
    saved = tmp_path / "run" / f"checkpoint-{HALF}"
    to(saved, tmp_path / "megatron", "megatron", tp=2, **({"ep": 2, "dp": 2} if config is MOE else {}))
    if like:
        forget(tmp_path / "megatron")
    back = tmp_path / "back" / f"checkpoint-{HALF}"
    given = {"like": str(saved), "reference_config": str(saved)} if like else {}
    job = to(tmp_path / "megatron", back, "hf-trainer", **given)
    began = transformers.AutoModelForCausalLM.from_pretrained(back) if config is MOE else model(9, kind, **config)
    assert train(began, tmp_path / "again", back) == whole[HALF:]
    text = "trainer_state.json: as --like has them, at this step"
    assert (text in [line for _, line in job.report.lines]) == like
    kept = json.loads((back / "trainer_state.json").read_text())
    was = json.loads((saved / "trainer_state.json").read_text())
    assert {key: kept[key] for key in ("global_step", "epoch", "max_steps", "num_train_epochs")} == {
        key: was[key] for key in ("global_step", "epoch", "max_steps", "num_train_epochs")
    }


def test_trainer_goes_on_where_nobody_says_how_its_run_is(tmp_path: Path) -> None:
    """It divides ``train_batch_size`` out of ``trainer_state.json``, which stopped it where there was none."""
    train(model(1), tmp_path / "run")
    saved = tmp_path / "run" / f"checkpoint-{HALF}"
    to(saved, tmp_path / "megatron", "megatron", tp=2)
    forget(tmp_path / "megatron")
    back = tmp_path / "back" / f"checkpoint-{HALF}"
    job = to(tmp_path / "megatron", back, "hf-trainer", reference_config=str(saved))
    (said,) = [line for _, line in job.report.lines if line.startswith("trainer_state.json: ")]
    assert "train_batch_size 8" in said
    assert "every 500 steps" in said
    assert train(model(9), tmp_path / "again", back) == [], "it logs as its own default is"
    first, second = (
        load_file(tmp_path / run / f"checkpoint-{STEPS}" / "model.safetensors") for run in ("run", "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def frozen(trained: Any, parts: tuple[str, ...]) -> Any:
    """The model with what has such names not trained."""
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    return trained


LOWER_LAYER = Rules((ParamRule("model.layers.0.*", trainable=False),))
SETTINGS: dict[str, tuple[tuple[str, ...], Rules, dict[str, Any]]] = {
    "norms and biases frozen": (("norm", "bias"), Rules(), {}),
    "lower layer frozen": (("layers.0.",), LOWER_LAYER, {}),
    "SGD": ((), Rules(), {"optim": "sgd"}),
    "Adagrad": ((), Rules(), {"optim": "adagrad"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_goes_on_after_megatron_whatever_trains_and_is_trained(name: str, tmp_path: Path) -> None:
    parts, rules, arguments = SETTINGS[name]
    whole = train(frozen(model(1, tie_word_embeddings=False), parts), tmp_path / "run", **arguments)
    saved, back = tmp_path / "run" / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}"
    if rules.rules:  # numbers of one layer may be those of another
        with pytest.raises(Unportable, match=r"which are frozen \(trainable: false\)"):
            open_checkpoint(saved, ReadOptions())
    told = ConvertOptions(
        to="megatron", fsync=False, workers=1, read=ReadOptions(rules=rules), write=WriteOptions(tp=2)
    )
    convert(saved, tmp_path / "megatron", told)
    to(tmp_path / "megatron", back, "hf-trainer", like=str(saved))
    again = frozen(model(9, tie_word_embeddings=False), parts)
    assert train(again, tmp_path / "again", back, **arguments) == whole[HALF:]


@pytest.mark.parametrize("kind", ["adamw", "radam", "sgd"])
def test_trainer_goes_on_with_a_schedule_free_optimizer(trainers: Path, kind: str, tmp_path: Path) -> None:
    """Of an Adam it has ``z`` in place of the first moment: that was damage."""
    pytest.importorskip("schedulefree")
    arguments = {"optim": f"schedule_free_{kind}", "lr_scheduler_type": "constant"}
    whole = train(model(1, tie_word_embeddings=False), tmp_path / "run", **arguments)
    saved, back = tmp_path / "run" / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}"
    assert verify(saved, ReadOptions()).intact
    assert forecast(saved, loader_named("transformers")[0], Settings(), None).resumes
    job = to(saved, tmp_path / "megatron", "megatron", tp=2)
    assert any("z: no optimizer of Megatron's keeps such states" in text for text in job.account.lost)
    to(tmp_path / "megatron", back, "hf-trainer", like=str(saved))
    assert train(model(9, tie_word_embeddings=False), tmp_path / "again", back, **arguments) == whole[HALF:]


def test_accelerate_goes_on_where_its_optimizer_was_given_frozen_weights(tmp_path: Path) -> None:
    still, saved = ("layers.0.",), tmp_path / "step_2"
    whole = accelerated(frozen(model(1, tie_word_embeddings=False), still), save=saved)
    model(1, tie_word_embeddings=False).config.save_pretrained(saved)
    to(saved, tmp_path / "megatron", "megatron", tp=2)
    model_there = open_checkpoint(tmp_path / "megatron", ReadOptions()).model
    assert {spec.name for spec in model_there.params if not spec.trainable} == {
        name for name in model_there.shapes if ".layers.0." in name
    }
    for name, source in (("same", saved), ("back", tmp_path / "megatron")):
        to(source, tmp_path / name, "hf-accelerate", like=str(saved))
        found = accelerated(frozen(model(9, tie_word_embeddings=False), still), resume=tmp_path / name)
        assert [step[:-1] for step in found] == [step[:-1] for step in whole[HALF:]]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_accelerate_goes_on_with_each_of_two_models_that_it_saved_together(role: str, tmp_path: Path) -> None:
    """They are roles of one step, by the numbers of their files; the second was passed over, and its optimizer refused."""
    saved, at = tmp_path / "step_2", ("actor", "critic").index(role)
    whole = actor_and_critic(save=saved)
    assert actor_and_critic(resume=saved) == whole[HALF:]
    assert verify(saved, ReadOptions(role=role)).intact
    step = prepare_step(find(saved, ReadOptions()), ConvertOptions(to="dcp", fsync=False))
    assert [*step.jobs] == ["actor", "critic"]
    told = ConvertOptions(to="hf-accelerate", fsync=False, workers=1, read=ReadOptions(role=role))
    convert(saved, tmp_path / "alone", told)
    found = actor_and_critic(resume=tmp_path / "alone", of=(role,))
    assert found == [step[at::2] for step in whole[HALF:]]
    restored = {
        thing.thing: thing.row.outcome
        for of in forecast(saved, loader_named("accelerate")[0], Settings(), None).roles.values()
        for thing in of
    }
    assert restored[Thing.SCHEDULER] is restored[Thing.OPTIMIZER] is Outcome.RESTORED


@pytest.mark.parametrize("of", [("actor", "critic"), ("critic", "actor")], ids="-".join)
def test_accelerate_goes_on_with_two_models_that_we_wrote_together(of: tuple[str, str], tmp_path: Path) -> None:
    """``load_state`` counts models, optimizers and schedules by number; random states are the process's. The second was left out."""
    saved = tmp_path / "step_2"
    whole = actor_and_critic(save=saved, of=of)

    def into(source: Path, to: str, **write: Any) -> Path:
        options = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))
        done = convert_step(find(source, ReadOptions()), tmp_path / f"{source.name}-{to}", options)
        assert {*done.jobs} == {*of}
        return Path(str(done.published))

    again = into(saved, "accelerate")
    assert actor_and_critic(resume=again, of=of) == whole[HALF:]
    back = into(
        into(again, "dcp"), "accelerate", like=str(saved)
    )  # which knows no numbers: those of the run that goes on
    assert actor_and_critic(resume=back, of=of) == whole[HALF:]
    assert all(verify(back, ReadOptions(role=role)).intact for role in of)


SOME_TRAINED = {
    "reward first": (("reward", "actor"), ("critic", "actor"), ""),
    "reference in between": (
        ("actor", "reference", "critic"),
        ("actor", "model_1", "critic"),
        "those of model and model_2 or",
    ),
    "reference last": (("actor", "reference"), ("actor", "model_1"), "those of model or model_1: the first is taken"),
}


@pytest.mark.parametrize("name", SOME_TRAINED)
def test_accelerate_goes_on_where_fewer_are_trained_than_it_prepared(name: str, tmp_path: Path) -> None:
    """Optimizers are counted on their own: those of models had the models' numbers, under which ``load_state`` does not look."""
    of, roles, doubt = SOME_TRAINED[name]
    saved, there, back = tmp_path / "step_2", tmp_path / "there", tmp_path / "back"
    whole = actor_and_critic(save=saved, of=of)
    step = find(saved, ReadOptions())
    assert (*step.models,) == roles
    for role, made in zip(roles, of, strict=True):
        source = open_checkpoint(saved, ReadOptions(role=role))
        assert (source.optimizer is None) == (made in ("reference", "reward"))
        told = [text for fate, text in source.notes.lines if fate is Fate.DERIVED and "fewer optimizers" in text]
        assert [doubt in text for text in told] == ([True] if doubt and made != "critic" else [])
        assert verify(saved, ReadOptions(role=role)).intact
    assert forecast(saved, loader_named("accelerate")[0], Settings(), None).resumes
    done = convert_step(step, there, ConvertOptions(to="dcp", fsync=False, workers=1))
    assert {*done.jobs} == {*roles}
    options = ConvertOptions(to="accelerate", fsync=False, workers=1, write=WriteOptions(like=str(saved)))
    written = Path(str(convert_step(find(there, ReadOptions()), back, options).published))
    assert {path.name for path in written.glob("*.bin")} == {path.name for path in saved.glob("*.bin")}
    assert actor_and_critic(resume=written, of=of) == whole[HALF:]


def test_an_optimizer_is_the_model_of_its_number_where_a_user_gave_it_one(tmp_path: Path) -> None:
    saved = tmp_path / "step_2"
    actor_and_critic(save=saved, of=("reference", "actor"))
    assert open_checkpoint(saved, ReadOptions(role="model_1")).optimizer is None
    for name in ("optimizer", "scheduler"):
        (saved / f"{name}.bin").rename(saved / f"{name}_1.bin")
    assert open_checkpoint(saved, ReadOptions(role="actor")).optimizer is None
    found = open_checkpoint(saved, ReadOptions(role="model_1"))
    assert found.optimizer == "torch"
    assert not [text for fate, text in found.notes.lines if "fewer optimizers" in text]


def test_roles_and_descriptions_of_several_models_come_back(tmp_path: Path) -> None:
    """No file of accelerate's says them: the manifest does, and what is a further model's alone has a folder of its own."""
    saved, mine = tmp_path / "step_2", tmp_path / "mine" / "global_step_2"
    actor_and_critic(save=saved)
    for role, at in (("actor", "actor"), ("critic", "value")):
        told = ConvertOptions(to="hf-accelerate", fsync=False, workers=1, read=ReadOptions(role=role))
        convert(saved, mine / at, told)
        (mine / at / "mcore_rlhf.json").unlink()
        (mine / at / "added_tokens.json").write_text(json.dumps({f"<{at}>": 1}))
        made = critic(1) if at == "value" else model(1, tie_word_embeddings=False)
        made.config.save_pretrained(mine / at)
    written, back = tmp_path / "written", tmp_path / "back"
    done = convert_step(find(mine.parent, ReadOptions()), written, ConvertOptions(to="accelerate", fsync=False))
    assert done.jobs["value"].account.lost == [
        "rng: a process has one state of each generator, and gets that of the first model"
    ]
    done = convert_step(find(written, ReadOptions()), back, ConvertOptions(to="hf-accelerate", fsync=False))
    assert done.lossless
    for at in ("actor", "value"):
        for name in ("config.json", "added_tokens.json"):
            before, after = ((root / at / name).read_text() for root in (mine, back / "global_step_2"))
            differing = {"dtype", "torch_dtype"}
            assert all(
                value == json.loads(before)[key] for key, value in json.loads(after).items() if key not in differing
            )


def test_will_resume_knows_a_script_without_a_schedule(tmp_path: Path) -> None:
    """``load_state`` opens no ``scheduler.bin`` then; it was said to stop there."""
    saved = tmp_path / "step_2"
    whole = accelerated(model(1), save=saved, scheduled=False)
    assert accelerated(model(9), resume=saved, scheduled=False) == whole[HALF:]
    found = forecast(saved, loader_named("accelerate")[0], Settings(), None)
    assert found.resumes
    assert [one.row.outcome for one in found.roles[""] if one.thing is Thing.SCHEDULER] == [Outcome.ABSENT]


def test_accelerate_looks_for_one_file_of_weights(tmp_path: Path) -> None:
    """Its ``load_state`` reads no index: several files were written, of which it found none."""
    with pytest.raises(UsageError, match="--max-shard-size: accelerate's load_state"):
        to(ACCELERATE, tmp_path / "out", "hf-accelerate", max_shard_size=4096)


@pytest.mark.parametrize(
    "gone", ["model.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", ""]
)
def test_will_resume_misses_what_accelerate_misses_of_two_models(gone: str, tmp_path: Path) -> None:
    saved = tmp_path / "step_2"
    actor_and_critic(save=saved)
    if gone:
        (saved / gone).unlink()
        with pytest.raises(FileNotFoundError):
            actor_and_critic(resume=saved)
    assert forecast(saved, loader_named("accelerate")[0], Settings(), None).stops == bool(gone)


def test_models_and_optimizers_that_do_not_belong_together_are_refused_by_name(tmp_path: Path) -> None:
    saved = tmp_path / "step_2"
    actor_and_critic(save=saved)
    first, second, kept = saved / "optimizer.bin", saved / "optimizer_1.bin", saved / "kept"
    for one, to_be in ((first, kept), (second, first), (kept, second)):
        one.rename(to_be)
    with pytest.raises(CheckpointError, match="optimizer"):
        open_checkpoint(saved, ReadOptions(role="actor"))
    (saved / "model_1.safetensors").rename(saved / "model_2.safetensors")
    with pytest.raises(CheckpointError, match=r"model_1.safetensors: is missing"):
        open_checkpoint(saved, ReadOptions(role="model_1"))
    (saved / "model_2.safetensors").unlink()
    with pytest.raises(Unsupported, match="a second optimizer"):
        open_checkpoint(saved, ReadOptions())


PREPARED: dict[str, tuple[Callable[[int], Any], str, dict[str, Any]]] = {
    "compiled": (lambda seed: compiled(model(seed, tie_word_embeddings=True)), "megatron", {"tp": 2}),
    "compiled adapter": (lambda seed: compiled(adapted(seed)), "dcp", {}),
    "adapter": (adapted, "deepspeed", {"dp": 2, "zero_stage": 2}),
    "experts": (lambda seed: model(seed, "qwen3_moe", **MOE), "megatron", {"tp": 2, "ep": 2, "dp": 2}),
    "experts' adapter": (adapted_experts, "dcp", {}),
}


@pytest.mark.parametrize("name", PREPARED)
def test_accelerate_goes_on_with_a_model_as_its_script_prepared_it(name: str, tmp_path: Path) -> None:
    """``save_state`` unwraps nothing: names have ``_orig_mod.``, an adapter its base, experts are packed. They were damaged."""
    make, there, how = PREPARED[name]
    saved = tmp_path / "step_2"
    whole = accelerated(make(1), save=saved)
    kind = ("qwen3_moe", MOE) if "experts" in name else ("qwen2", {"tie_word_embeddings": name == "compiled"})
    model(1, kind[0], **kind[1]).config.save_pretrained(saved)
    assert verify(saved, ReadOptions()).intact
    to(saved, tmp_path / "there", there, **how)
    forget(tmp_path / "there")
    for number, source in enumerate((saved, tmp_path / "there")):
        to(source, tmp_path / f"back-{number}", "hf-accelerate", like=str(saved))
        found = accelerated(make(9), resume=tmp_path / f"back-{number}")
        assert [step[:-1] for step in found] == [step[:-1] for step in whole[HALF:]]
        written, stored = (load_file(at / "model.safetensors") for at in (tmp_path / f"back-{number}", saved))
        assert written.keys() == stored.keys()


@pytest.mark.parametrize("make", [Headed, adapted_experts])
def test_trainer_goes_on_with_what_no_class_of_transformers_has(make: Callable[[int], Any], tmp_path: Path) -> None:
    """A value head counts after the model that it is upon, adapters of packed experts where these are: optimizers were refused."""
    whole = train(make(1), tmp_path / "run")
    saved, back = tmp_path / "run" / f"checkpoint-{HALF}", tmp_path / "back" / f"checkpoint-{HALF}"
    if make is Headed:  # which no trainer writes for it
        make(1).config.save_pretrained(saved)
    to(saved, tmp_path / "dcp", "dcp")
    to(tmp_path / "dcp", back, "hf-trainer", like=str(saved))
    (found,) = forecast(back, loader_named("transformers")[0], Settings(), None).roles.values()
    weights = next(one.row.outcome for one in found if one.thing is Thing.WEIGHTS)
    made = make(9)
    if isinstance(made, Headed):
        assert weights is Outcome.ANEW
        assert train(make(9), tmp_path / "without", back) != whole[HALF:]
        made.take(back)
    else:
        assert weights is Outcome.RESTORED
    assert train(made, tmp_path / "again", back) == whole[HALF:]


def test_what_merging_an_adapter_of_a_run_leaves_is_said(tmp_path: Path) -> None:
    """The run's counters are none of the base's: "nothing accounts for it; please report this"."""
    model(1, tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    account = to(ADAPTER, tmp_path / "merged", "hf", merge_adapter=True, base_model=str(tmp_path / "base")).account
    assert not account.unaccounted
    assert "counters and values of the run that trained the adapter: the base has none of them" in account.lost


def test_two_adapters_of_a_module_are_not_told_apart(tmp_path: Path) -> None:
    """Safetensors are sorted by name, and an optimizer has the one that was added first before the other."""
    from peft import LoraConfig

    trained = adapted(1)
    trained.add_adapter("another", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    accelerated(trained, save=tmp_path / "step_2")
    with pytest.raises(Unsupported, match="no file says which was added first"):
        open_checkpoint(tmp_path / "step_2", ReadOptions())


def test_a_step_without_its_optimizer_shows_what_the_run_is_like(tmp_path: Path) -> None:
    """As ``save_only_model`` leaves it; it was refused."""
    whole = train(model(1), tmp_path / "run")
    saved, shown = tmp_path / "run" / f"checkpoint-{HALF}", tmp_path / "shown" / f"checkpoint-{HALF}"
    train(model(1), tmp_path / "shown", save_only_model=True)
    to(saved, tmp_path / "dcp", "dcp")
    back = tmp_path / "back" / f"checkpoint-{HALF}"
    to(tmp_path / "dcp", back, "hf-trainer", like=str(shown))
    assert train(model(9), tmp_path / "again", back) == whole[HALF:]
    with pytest.raises(UsageError, match=r"has no optimizer\.pt"):
        to(saved, tmp_path / "none", "hf-trainer", like=str(tmp_path / "dcp"))


def test_trainer_goes_on_after_deepspeed_and_several_files(tmp_path: Path) -> None:
    to(TRAINER, tmp_path / "zero", "deepspeed", dp=2, zero_stage=2)
    back = tmp_path / f"checkpoint-{HALF}"
    to(tmp_path / "zero", back, "hf-trainer", max_shard_size=4096)
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 3
    assert train(model(9, tie_word_embeddings=True), tmp_path / "again", back) == seen_of(TRAINER)


def test_a_model_in_bf16_is_its_own_master(tmp_path: Path) -> None:
    whole = train(model(1, dtype=torch.bfloat16, tie_word_embeddings=True), tmp_path / "run")
    saved, back = tmp_path / "run" / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}"
    assert open_checkpoint(saved, ReadOptions()).states == ("exp_avg", "exp_avg_sq")
    to(saved, tmp_path / "dcp", "dcp")
    to(tmp_path / "dcp", back, "hf-trainer")
    assert train(model(9, dtype=torch.bfloat16, tie_word_embeddings=True), tmp_path / "again", back) == whole[HALF:]


def test_an_adapter_goes_on_after_dcp(tmp_path: Path) -> None:
    to(ADAPTER, tmp_path / "dcp", "dcp")
    back = tmp_path / f"checkpoint-{HALF}"
    to(tmp_path / "dcp", back, "hf-trainer")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in back.iterdir()}
    assert train(adapted(9), tmp_path / "again", back) == seen_of(ADAPTER)


def test_accelerate_goes_on_after_megatron(tmp_path: Path) -> None:
    """Random states too are those of the run: ``load_state`` gives them back."""
    with_config = tmp_path / ACCELERATE.name
    shutil.copytree(ACCELERATE, with_config)
    model(1, tie_word_embeddings=False).config.save_pretrained(with_config)
    to(with_config, tmp_path / "megatron", "megatron", tp=2)
    to(tmp_path / "megatron", tmp_path / "back", "hf-accelerate", like=str(ACCELERATE))
    found = accelerated(model(9, tie_word_embeddings=False), resume=tmp_path / "back")
    assert [step[:3] for step in found] == [step[:3] for step in seen_of(ACCELERATE)]
    to(ACCELERATE, tmp_path / "same", "hf-accelerate")
    assert accelerated(model(9, tie_word_embeddings=False), resume=tmp_path / "same") == seen_of(ACCELERATE)


def test_one_goes_on_with_what_the_other_saved(tmp_path: Path) -> None:
    """The two have the same content under other names; of random states, too."""
    to(ACCELERATE, tmp_path / "trainer", "hf-trainer")
    to(tmp_path / "trainer", tmp_path / "back", "hf-accelerate")
    assert accelerated(model(9, tie_word_embeddings=False), resume=tmp_path / "back") == seen_of(ACCELERATE)
