"""``will-resume`` for slime, miles and prime-rl; optimizers of another class; configurations of overrides alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.manager.will_resume import Forecast, forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.settings_file import read_settings

GOLDENS = Path(__file__).parents[2] / "goldens"
BESIDE = "rollout/global_dataset_state_dict_2.pt"


def told(found: Forecast) -> dict[Thing, tuple[Outcome, str]]:
    (prospects,) = found.roles.values()
    return {one.thing: (one.row.outcome, one.why) for one in prospects}


def asked(root: Path, trainer: str, **settings: object) -> Forecast:
    return forecast(root, loader_named(trainer)[0], Settings(settings))


@pytest.fixture
def slime(tmp_path: Path) -> Path:
    """Megatron-LM's save, and ``RolloutDataSource.save`` (slime 624b824)."""
    root = Path(shutil.copytree(GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable", tmp_path / "run"))
    (root / "rollout").mkdir()
    torch.save({"sample_offset": 8, "epoch_id": 0, "sample_group_index": 8, "sample_index": 64}, root / BESIDE)
    return root


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_the_data_of_slime_lie_beside_the_step(slime: Path, trainer: str) -> None:
    assert asked(slime, trainer).resumes
    (slime / BESIDE).write_bytes(bytes(100))
    assert told(asked(slime, trainer))[Thing.DATA][0] is Outcome.REFUSED
    (slime / BESIDE).rename(slime / "rollout" / "global_dataset_state_dict_1.pt")
    outcome, why = told(asked(slime, trainer))[Thing.DATA]
    assert outcome is Outcome.ANEW
    assert "prompts begin anew" in why
    off = told(asked(slime, trainer, disable_rollout_global_dataset=True))
    assert off[Thing.DATA][0] is Outcome.ABSENT
    (slime / "latest_checkpointed_iteration.txt").unlink()
    assert asked(slime, trainer).taken.folder is None


@pytest.mark.parametrize(
    ("asked_for", "begin"), [({"start_rollout_id": 0}, 0), ({"finetune": True}, 1), ({"start_rollout_id": 3}, 3)]
)
def test_rollouts_that_begin_elsewhere_have_other_prompts(
    slime: Path, asked_for: dict[str, object], begin: int
) -> None:
    found = told(asked(slime, "slime", **asked_for))
    same = Outcome.RESTORED if begin == 3 else Outcome.ANEW
    assert (found[Thing.COUNTERS][0], found[Thing.DATA][0]) == (same, same)
    assert begin == 3 or f"global_dataset_state_dict_{begin - 1}.pt" in found[Thing.DATA][1]


def test_rows_of_megatron_hold_for_slime(slime: Path) -> None:
    found = told(asked(slime, "slime", no_load_optim=True))
    assert found[Thing.OPTIMIZER][0] is Outcome.ANEW
    assert found[Thing.COUNTERS][0] is Outcome.RESTORED


@pytest.mark.parametrize(
    ("source", "trainer", "key", "same", "other"),
    [
        ("transformers/checkpoint-2", "transformers", "optim", "adamw_torch_fused", ("sgd", "adafactor", "adamw_8bit")),
        ("verl/fsdp2_tied_ws2", "verl", "actor.optim.optimizer", "AdamW", ("SGD",)),
        ("deepspeed/z1_bf16acc32_untied_dp2", "deepspeed", "optimizer.type", "AdamW", ("Muon", "Lion")),
        ("trainers/nm_v1", "nemo-rl", "policy.optimizer.name", "torch.optim.AdamW", ("torch.optim.SGD",)),
        ("torchtitan/checkpoint", "torchtitan", "optimizer.name", "Adam", ("Muon",)),
        ("megatron/tp2pp2dp2_bf16_do", "megatron-lm", "optimizer", "adam", ("sgd",)),
        ("areal/trial", "areal", "actor.optimizer.type", "adam", ("sgd",)),
    ],
)
def test_an_optimizer_of_another_class(
    source: str, trainer: str, key: str, same: str, other: tuple[str, ...], tmp_path: Path
) -> None:
    root = GOLDENS / source
    if trainer == "verl":
        root = tmp_path / "global_step_3"
        shutil.copytree(GOLDENS / source, root / "actor")
    for name in (same, "SomebodysOwn"):
        assert told(asked(root, trainer, **{key: name}))[Thing.OPTIMIZER] == told(asked(root, trainer))[Thing.OPTIMIZER]
    for name in other:
        outcome, why = told(asked(root, trainer, **{key: name}))[Thing.OPTIMIZER]
        assert outcome is Outcome.REFUSED
        assert f"{key} is {name}, and the states that are stored are those of Adam" in why


def test_overrides_alone(tmp_path: Path) -> None:
    file = tmp_path / "overrides.txt"
    file.write_text("actor_rollout_ref.actor.checkpoint.load_contents=[model]\ntrainer.save_freq=5 +a.b=c\n")
    found = read_settings(file)
    assert found.listed("checkpoint.load_contents") == ["model"]
    assert found.number("trainer.save_freq") == 5
    file.write_text("a: b=c\n")
    assert read_settings(file).get("a") == "b=c"


@pytest.mark.parametrize(("file", "named"), [("optimizer", Thing.OPTIMIZER), ("weights", Thing.WEIGHTS)])
def test_nemo_rl_names_what_a_missing_file_is_of(file: str, named: Thing, tmp_path: Path) -> None:
    root = Path(shutil.copytree(GOLDENS / "trainers" / "nm_v1", tmp_path / "run"))
    (root / "step_3" / "policy" / file / "__1_0.distcp").unlink()
    found = told(asked(root, "nemo-rl"))
    assert found[named][0] is Outcome.REFUSED
    assert (found[Thing.WEIGHTS][0] is Outcome.REFUSED) == (named is Thing.WEIGHTS)


def test_prime_rl_takes_the_highest_whatever_lies_there(tmp_path: Path) -> None:
    """``get_all_ckpt_steps`` reads whatever stands behind the last underscore."""
    (tmp_path / "step_3" / "trainer").mkdir(parents=True)
    (tmp_path / "step_old").mkdir()
    found = asked(tmp_path, "prime-rl")
    assert found.taken.stops
    assert "step_old" in found.taken.why
    (tmp_path / "step_old").rmdir()
    assert told(asked(tmp_path, "prime-rl"))[Thing.WEIGHTS][0] is Outcome.REFUSED
