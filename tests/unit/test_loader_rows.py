"""The rows of loaders: what they need to be read by people, and the page that is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.loaders.known import LOADERS
from mcore_rlhf.trainers.resuming import Held, Loader, Outcome, Seen, Settings, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers import loader_rows

EMPTY = Seen("", frozenset(), frozenset(), {}, Held(), Settings())


def test_the_page_is_what_the_rows_say() -> None:
    assert loader_rows.written() == loader_rows.PAGE.read_text(encoding="utf-8"), (
        "python -m tests.helpers.loader_rows writes it"
    )


@pytest.mark.parametrize("loader", LOADERS, ids=lambda one: one.trainer.name)
def test_rows_answer_for_a_folder_with_nothing_in_it(loader: Loader) -> None:
    """Weights, optimizer and counters are always spoken of, a reason is never empty, and its source has a version; nothing is restored."""
    found = {one.thing: one for one in loader.prospects(EMPTY)}
    assert {Thing.WEIGHTS, Thing.OPTIMIZER, Thing.COUNTERS} <= found.keys()
    assert all(one.why and "{" not in one.why for one in found.values())
    assert all(row.source and any(character.isdigit() for character in row.source) for row in loader.rows)
    outcomes = {one.row.outcome for one in found.values()}
    assert Outcome.REFUSED in outcomes or outcomes == {Outcome.ANEW}


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("a.yaml", "trainer:\n  resume_mode: disable\n", "trainer.resume_mode", "disable"),
        ("overrides.yaml", "- trainer.resume_mode=disable\n- +a.b=[x, y]\n", "resume_mode", "disable"),
        ("a.json", '{"bf16": {"enabled": true}}', "bf16.enabled", True),
        ("args.txt", "# one\n--no-load-optim \\\n --ckpt-step 7 --a=b\n", "ckpt_step", "7"),
        ("args.sh", "torchrun pretrain_gpt.py --no-load-optim", "no_load_optim", True),
        ("args.sh", "ARGS=(\n   --load /a  # b --c\n   --no-load-optim\n)\nMORE=(\n  --d\n)\n", "no_load_optim", True),
        ("args.sh", "ARGS=(\n   --load /a  # b --c\n   --no-load-optim\n)\nMORE=(\n  --d\n)\n", "load", "/a"),
        ("args.sh", "python train.py --d \\\n  --no-load-optim\necho done\n", "no_load_optim", True),
        (
            "verl.sh",
            "set -x\npython3 -m verl.trainer.main_ppo \\\n  a.b=c \\\n  trainer.resume_mode=disable $@\n",
            "resume_mode",
            "disable",
        ),
        ("overrides.txt", "runner.resume_dir=null", "resume_dir", None),
        ("args.txt", "--no-load-optim\n--ckpt-step\n7\n", "ckpt_step", "7"),
        ("args.txt", "--a 'b # c\nd' --ckpt-step 7\n", "ckpt_step", "7"),
        ("b.yaml", "trainer:\n  resume_mode: disable  # as --resume\n", "trainer.resume_mode", "disable"),
    ],
)
def test_configurations(tmp_path: Path, name: str, text: str, key: str, value: object) -> None:
    (tmp_path / name).write_text(text)
    assert read_settings(tmp_path / name).get(key) == value


def test_a_reference_to_another_key_is_followed() -> None:
    """As verl's ``load_contents`` has it by default; and one that leads round in a circle is no value."""
    told = Settings(
        {
            "a.save": ["model"],
            "a.load": "${.save}",
            "b.load": "${a.load}",
            "c.x": "${.y}",
            "c.y": "${.x}",
            "d.z": "${oc.env:HOME}",
        }
    )
    assert told.listed("a.load") == told.listed("b.load") == ["model"]
    assert told.get("c.x") is None
    assert told.get("d.z") is None
    assert told.get("e") is None


def test_a_critic_has_contents_of_its_own() -> None:
    rows = loader_named("verl")[0]
    told = Settings({"actor_rollout_ref.actor.checkpoint.load_contents": ["model", "extra"]})
    files = frozenset(f"{what}_world_size_1_rank_0.pt" for what in ("model", "optim", "extra_state"))
    for role, outcome in (("actor", Outcome.ANEW), ("critic", Outcome.RESTORED)):
        seen = Seen(role, files, frozenset(), {}, Held(), told)
        assert {one.thing: one.row.outcome for one in rows.prospects(seen)}[Thing.OPTIMIZER] is outcome


def test_a_step_that_a_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    for number in (5, 7):
        (tmp_path / f"iter_{number:07d}").mkdir()
    loader = loader_named("megatron-lm")[0]
    for named, taken in (
        ("7", "iter_0000007"),
        ("9", None),
        ("9" * 5000, "iter_0000005"),
        ("../..", "iter_0000005"),
        (None, "iter_0000005"),
    ):
        folder = forecast(tmp_path, loader, Settings({"ckpt_step": named})).taken.folder
        assert (None if folder is None else folder.name) == taken


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"{"), ("a.json", b"[" * 100_000), ("a.yaml", b"a: [" * 5000), ("a.yaml", b"\xff\xfe"), ("a.yaml", b"just words"),
        ("a.txt", b"--a 'unclosed"), ("a.json", b"[1, 2]"), ("a.toml", b"= 3"), ("a.toml", b"a = " + b"[" * 5000),
    ],
)  # fmt: skip
def test_a_configuration_that_is_none(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=name):
        read_settings(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "meant"), [("vrel", "verl"), ("trnsformers", "transformers"), ("dspeed", "deepspeed")]
)
def test_a_trainer_that_nobody_knows(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        loader_named(given)


def test_a_tracker_is_a_strangers(tmp_path: Path) -> None:
    for text in ("../../etc", "a\x1b[2J", "global_step_" + "9" * 500, "", "step/../.."):
        (tmp_path / "latest").write_text(text)
        found = forecast(tmp_path, loader_named("deepspeed")[0], Settings())
        assert found.taken.folder is None
        assert not found.resumes


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no such folder"):
        forecast(tmp_path / "nothing", loader_named("verl")[0], Settings())
    for loader in LOADERS:
        with pytest.raises(NotACheckpoint, match=str(loader.trainer.title)):
            forecast(tmp_path, loader, Settings())


_RANKS = " ".join(f"{what}_world_size_1_rank_0.pt" for what in ("model", "optim", "extra_state"))
_TRACKED = "training_info.json policy/weights/latest_train_state.pt policy/weights/iter_0000000/.metadata"
_PARTS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
_TAG, _ZERO = (" ".join(["latest", *(f"{tag}/{part}" for part in _PARTS)]) for tag in ("pytorch_model", "global_step3"))


@pytest.mark.parametrize(
    ("name", "files", "said", "outcome"),
    [
        ("verl", _RANKS, {"actor_rollout_ref.actor.strategy": "megatron"}, Outcome.REFUSED),
        ("verl", "dist_ckpt/.metadata", {"actor_rollout_ref.actor.strategy": "fsdp2"}, Outcome.REFUSED),
        ("verl-sft", "dist_ckpt/.metadata", {"engine.strategy": "fsdp"}, Outcome.REFUSED),
        ("skyrl", _RANKS, {"trainer.strategy": "megatron"}, Outcome.REFUSED),
        ("skyrl", "common.pt", {"trainer.strategy": "fsdp"}, Outcome.REFUSED),
        ("rlinf", "dcp_checkpoint/.metadata", {"actor.training_backend": "megatron"}, Outcome.ANEW),
        ("rlinf", "iter_0000003/common.pt", {"actor.training_backend": "fsdp"}, Outcome.REFUSED),
        ("nemo-rl", "policy/weights/.metadata policy/optimizer/.metadata", {"policy.megatron_cfg.enabled": True}, Outcome.ANEW),
        ("nemo-rl", _TRACKED, {"policy.dtensor_cfg.enabled": True}, Outcome.REFUSED),
        ("accelerate", "model.safetensors optimizer.bin", {"distributed_type": "DEEPSPEED"}, Outcome.REFUSED),
        ("accelerate", _TAG, {"distributed_type": "MULTI_GPU"}, Outcome.REFUSED),
        ("transformers", "model.safetensors optimizer.pt scheduler.pt", {"deepspeed.zero.stage": 2}, Outcome.REFUSED),
        ("transformers", f"{_ZERO} scheduler.pt model.safetensors", {"deepspeed": False}, Outcome.ANEW),
    ],
)  # fmt: skip
def test_another_backend_in_the_configuration_restores_no_optimizer(
    name: str, files: str, said: dict[str, object], outcome: Outcome
) -> None:
    """Though everything is there that the backend which saved it would restore."""
    (loader,) = (one for one in LOADERS if one.trainer.name == name)
    there = frozenset(files.split())
    held = Held(optimizer=True, scheduler=True, rng=True)
    seen = Seen("actor", there, there | {"trainer_state.pt", "data.pt"}, {}, held, Settings())
    found, own = (
        next(one for one in loader.prospects(replace(seen, settings=settings)) if one.thing is Thing.OPTIMIZER)
        for settings in (Settings(said), Settings())
    )
    assert found.row.outcome is outcome, found.why
    assert found.why != own.why
