"""What accelerate, and transformers' Trainer, keep beside the folder of a DeepSpeed tag: read with it, and written back where they look."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.core.facts import Fate, same
from mcore_rlhf.errors import CheckpointError, Incomplete, Untrusted
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.trainer_files import ACCELERATE, TRANSFORMERS, rng_item
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings

GOLDENS = Path(__file__).parents[2] / "goldens"
RUNS = GOLDENS / "trainers"
BOTH = ("random_states_0.pkl", "random_states_1.pkl")


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Two ranks' of accelerate, with DeepSpeed; it wrote the files itself."""
    shutil.copytree(RUNS / "ac_ds2" / "step_3", tmp_path / "step_3")
    (tmp_path / "step_3" / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps({"count": 6}))
    return tmp_path / "step_3"


def to(source: Path, target: Path, name: str, **write: object) -> Job:
    write.setdefault("reference_config", str(RUNS / "config.json"))
    return convert(source, target, ConvertOptions(to=name, fsync=False, write=WriteOptions(**write)))  # type: ignore[arg-type]


def into(source: Path, target: Path, trainer: str, **write: object) -> Path:
    """The step that a trainer's run has then."""
    options = ConvertOptions(to=trainer, fsync=False, write=WriteOptions(**write))  # type: ignore[arg-type]
    return Path(str(convert_step(find(source, ReadOptions()), target, options).published))


def states(folder: Path, names: tuple[str, ...] = BOTH) -> list[object]:
    return [torch.load(folder / name, weights_only=False) for name in names]


@pytest.mark.parametrize("target", ["deepspeed", "hf-accelerate"])
def test_everything_is_where_accelerate_looks(step: Path, tmp_path: Path, target: str) -> None:
    done = to(step, tmp_path / "out", target)
    assert done.lossless, done.account.lost
    assert {done.account.entries[rng_item(rank)].fate for rank in (0, 1)} == {Fate.KEPT}
    assert same(states(tmp_path / "out"), states(step))
    schedules = [torch.load(folder / "scheduler.bin", weights_only=False) for folder in (step, tmp_path / "out")]
    assert schedules[0] == schedules[1]
    registered = "custom_checkpoint_0.pkl"
    assert (tmp_path / "out" / registered).read_bytes() == (step / registered).read_bytes()
    again = to(tmp_path / "out", tmp_path / "again", "deepspeed" if target == "deepspeed" else "hf-trainer")
    assert again.lossless, again.account.lost


def test_a_rank_of_transformers_is_called_otherwise(step: Path, tmp_path: Path) -> None:
    to(step, tmp_path / "out", "hf-trainer")
    names = tuple(TRANSFORMERS.rng_name(rank, 2) for rank in (0, 1))
    for theirs, ours in zip(states(step), states(tmp_path / "out", names), strict=True):
        assert same(theirs["torch_manual_seed"], ours["cpu"])  # type: ignore[index]


def test_a_run_of_the_trainers_with_deepspeed(step: Path, tmp_path: Path) -> None:
    for rank, (name, own) in enumerate(zip(BOTH, states(step), strict=True)):
        here = {ours: own[theirs] for ours, theirs in ACCELERATE.generators.items() if ours != "cuda"}  # type: ignore[index]
        torch.save(TRANSFORMERS.spelled(here), step / TRANSFORMERS.rng_name(rank, 2))
        (step / name).unlink()
    (step / "scheduler.bin").rename(step / "scheduler.pt")
    (step / "config.json").write_bytes((RUNS / "config.json").read_bytes())
    done = to(step, tmp_path / "out", "deepspeed")
    assert done.lossless, done.account.lost
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "config.json"} <= there


def test_an_adapters_step_of_the_trainers_with_deepspeed(tmp_path: Path) -> None:
    """Its configuration and counters lie beside the tag, which has its schedule and no base; each goes along, and DeepSpeed alone stops."""
    step = RUNS / "tr_peft_ds2" / "checkpoint-3"
    done = into(step, tmp_path / "back", "transformers", like=str(step))
    for folder in (step, done):
        trainer, engine = (
            forecast(folder, loader_named(name)[0], Settings(), 1) for name in ("transformers", "accelerate")
        )
        assert trainer.resumes
        assert engine.stops
        assert any("an adapter alone" in one.why for one in engine.roles[""])
        assert (folder / "trainer_state.json").read_bytes() == (step / "trainer_state.json").read_bytes()
    alone = to(step, tmp_path / "peft", "peft", reference_config=None)
    assert alone.report.lines
    found, own = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", step))
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    plain = into(step, tmp_path / "plain", "transformers")
    assert [len(group["params"]) for group in torch.load(plain / "optimizer.pt")["param_groups"]] == [12, 0]
    assert json.loads((plain / "trainer_state.json").read_text()) == json.loads(
        (step / "trainer_state.json").read_text()
    )


@pytest.mark.parametrize("trainer", ["accelerate", "transformers"])
def test_an_adapter_under_deepspeed_has_no_group_that_trains_nothing(trainer: str, tmp_path: Path) -> None:
    """DeepSpeed drops such a group of any optimizer, and looks for frozen parameters in a dictionary that is there."""
    adapter = GOLDENS / "transformers" / "adapter"
    assert len(torch.load(adapter / "optimizer.pt")["param_groups"]) == 2
    done = into(adapter, tmp_path / "out", trainer, zero_stage=2)
    ((model, optimizer),) = [[torch.load(file, weights_only=False) for file in sorted(done.glob("*/*_states.pt"))]]
    assert len(optimizer["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]) == 1
    assert len(model["lr_scheduler"]["base_lrs"]) == len(model["param_shapes"]) == 1
    assert model["frozen_param_fragments"] is None
    assert forecast(done, loader_named(trainer)[0], Settings(), 1).resumes == (trainer == "transformers")
    if trainer == "transformers":
        counted = [json.loads((folder / "trainer_state.json").read_text()) for folder in (done, adapter)]
        assert counted[0] == counted[1]


@pytest.mark.parametrize("target", ["dcp", "universal", "hf", "megatron"])
def test_others_have_no_place_for_them(step: Path, tmp_path: Path, target: str) -> None:
    done = to(step, tmp_path / "out", target)
    assert "random states of 2 ranks: only transformers' and accelerate's own files have a place for them" in [
        text for text in done.account.lost if text.startswith("random states")
    ]
    assert not done.lossless


def test_of_other_ranks_they_are_lost_or_made_anew_by_name(step: Path, tmp_path: Path) -> None:
    done = to(step, tmp_path / "four", "deepspeed", dp=4)
    assert any("the tag becomes one of 4 ranks" in text for text in done.account.lost)
    assert not list((tmp_path / "four").glob("random_states_*"))
    done = to(step, tmp_path / "one", "hf-accelerate", dp=1)
    assert done.account.entries[rng_item(1)].fate is Fate.DERIVED
    assert [text for _, text in done.report.lines if text.startswith("rng: ")] == [
        "rng: new states for 1 rank, from iteration 3"
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda step: (step / BOTH[1]).unlink(), "random states of 1 rank lie beside the folder of the tag, which is of 2"),
        (lambda step: shutil.copy(step / BOTH[0], step / "random_states_2.pkl"), "random states of 3 ranks lie beside"),
        (lambda step: (step / BOTH[0]).unlink(), "random_states_0.pkl: missing, and there are random states of higher"),
        (lambda step: shutil.copy(step / BOTH[0], step / "random_states_999999.pkl"), "random_states_2.pkl: missing"),
    ],
)  # fmt: skip
def test_those_of_other_ranks_than_the_tags_are_lost_by_name(
    step: Path, tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    change(step)
    done = to(step, tmp_path / "out", "deepspeed")
    assert any(said in text for text in done.account.lost), done.account.lost
    assert not list((tmp_path / "out").glob("random_states_*"))
    assert (tmp_path / "out" / "scheduler.bin").is_file()


class _Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this runs",)


def _saved(tree: object) -> Callable[[Path], None]:
    return lambda path: torch.save(tree, path)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-500]), Incomplete),
        (lambda path: path.write_bytes(b""), Incomplete),
        (_saved({"random_state": _Hostile()}), Untrusted),
        (_saved({"random_state": Counter()}), None),
        (_saved([1, 2]), CheckpointError),
    ],
)
def test_damaged_and_hostile_ones(
    step: Path, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception] | None
) -> None:
    damage(step / BOTH[1])
    if error is None:
        assert to(step, tmp_path / "out", "deepspeed").account is not None
        return
    with pytest.raises(error, match=r"random_states_1\.pkl"):
        to(step, tmp_path / "out", "deepspeed")
    assert not (tmp_path / "out").exists()


def test_two_trainers_beside_one_tag_are_nobodys(step: Path, tmp_path: Path) -> None:
    (step / "rng_state_0.pth").write_bytes((step / BOTH[0]).read_bytes())
    done = to(step, tmp_path / "out", "deepspeed")
    assert [
        any(name in text for text in done.account.lost) for name in (*BOTH, "rng_state_0.pth", "scheduler.bin")
    ] == [True] * 4


def test_without_the_optimizer_they_stay_where_they_are(step: Path, tmp_path: Path) -> None:
    done = to(step, tmp_path / "out", "deepspeed", no_optimizer=True, zero_stage=0)
    assert all(any(name in text for text in done.account.lost) for name in BOTH)
    assert not list((tmp_path / "out").glob("random_states_*"))


def test_every_byte_of_them_is_checked(step: Path) -> None:
    assert {*BOTH, "scheduler.bin"} <= {file.path for file in open_checkpoint(step, ReadOptions()).files}
