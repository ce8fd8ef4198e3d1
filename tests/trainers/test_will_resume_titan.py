"""``will-resume --trainer torchtitan`` says what torchtitan's own manager does with folders from which one thing was taken."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.will_resume import Forecast, forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers.one_key import copies_without, without_names
from tests.trainers.test_torchtitan import GOLDEN, golden_goes_on, needs_torchtitan, titan
from tests.trainers.titan_jobs import SAVED, Seen, resume_in, resume_without

__all__ = ["titan"]  # a fixture
Change = Callable[[Path], object]


def _zeroed(name: str) -> Change:
    return lambda step: (step / name).write_bytes(bytes((step / name).stat().st_size))


def _without(*ends: str) -> Change:
    """Take the first name that ends so out of the step."""

    def change(step: Path) -> None:
        metadata = pickle.loads((step / ".metadata").read_bytes())
        gone = {next(name for name in metadata.state_dict_metadata if name.endswith(end)) for end in ends}
        without_names(metadata, gone, step / ".metadata")

    return change


def _also(name: str, *, taken: str = "", index: str = "") -> Change:
    """Another folder beside the step: with all that is in it, or with the index of a Hugging Face folder."""

    def change(step: Path) -> None:
        other = step.with_name(name)
        if index:
            other.mkdir()
            (other / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
        else:
            shutil.copytree(step, other)
        if taken:
            shutil.rmtree(step.with_name(taken))

    return change


KEYS = [
    "layers.0.attention.wq.weight", "norm.weight", "wq.weight.exp_avg", "norm.weight.step", "norm.weight.lr", "norm.weight.weight_decay",
    "norm.weight.decoupled_weight_decay", "norm.weight.initial_lr", "lr_scheduler.last_epoch", "lr_scheduler._last_lr", "train_state.step",
    "train_state.ntokens_seen",
]  # fmt: skip
CASES: dict[str, tuple[Change, list[str]]] = {
    "whole": (lambda step: None, []),
    "no metadata": (lambda step: (step / ".metadata").unlink(), []),
    "a rank's file gone": (lambda step: (step / "__1_0.distcp").unlink(), []),
    "a rank's file of zeros": (_zeroed("__1_0.distcp"), []),
    "metadata of zeros": (_zeroed(".metadata"), []),
    **{f"no {name}": (_without(name), []) for name in KEYS},
    "a step that somebody renamed": (_also("step-3-old"), []),
    "a step that somebody renamed, and a newer one gone": (_also("old-step-9"), []),
    "step 0 alone": (_also("step-0", taken="step-3"), []),
    "a last step for Hugging Face": (_also("step-5", index="model.safetensors.index.json"), []),
    "no moment, and not wanted": (_without("wq.weight.exp_avg"), ["optimizer"]),
    **{
        f"without {key}": (lambda step: None, [key])
        for key in ("optimizer", "lr_scheduler", "dataloader", "train_state")
    },
}


@needs_torchtitan
@pytest.mark.parametrize("name", CASES)
def test_torchtitan(titan: WorkerPool, name: str, tmp_path: Path) -> None:
    change, excluded = CASES[name]
    root, file = tmp_path / "checkpoint", tmp_path / "train.toml"
    shutil.copytree(GOLDEN / "checkpoint", root)
    change(root / "step-3")
    file.write_text(f"[checkpoint]\nenable = true\nexclude_from_loading = {excluded}\n")
    found = forecast(root, loader_named("torchtitan")[0], read_settings(file))
    agrees(found, titan.run(resume_without, str(tmp_path), excluded, world_size=2, timeout=100.0)[0])
    assert found.resumes == (name in ("whole", "a step that somebody renamed"))


@needs_torchtitan
def test_another_dtype(titan: WorkerPool, tmp_path: Path) -> None:
    """What is stored in float32 goes on in ``training.dtype``, and torchtitan says nothing."""
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint")
    assert all(titan.run(resume_in, str(tmp_path), "bfloat16", world_size=2, timeout=100.0)[0])
    for dtype in ("bfloat16", "float32"):
        found = forecast(tmp_path / "checkpoint", loader_named("torchtitan")[0], Settings({"training.dtype": dtype}))
        told = [one.why for one in found.roles[""] if one.row.outcome is Outcome.IGNORED]
        assert told == (
            ["stored as float32, cast to the bfloat16 of training.dtype, moments too; nothing is said"]
            if dtype == "bfloat16"
            else []
        )
        assert found.resumes == (dtype == "float32")


def agrees(found: Forecast, seen: tuple[int, Seen] | str | None) -> None:
    """What is said, and what torchtitan did."""
    assert found.stops == isinstance(seen, str), seen
    assert (found.taken.folder is None and not found.taken.stops) == (seen is None)
    if isinstance(seen, tuple):
        told = {one.thing: one.row.outcome for one in found.roles[""]}
        step, ((loss, rate, batch), (later, *_)) = seen
        (wanted, wanted_rate, wanted_batch), (wanted_later, *_) = golden_goes_on()
        restored = {
            Thing.COUNTERS: step == SAVED, Thing.WEIGHTS: loss == wanted, Thing.SCHEDULER: rate == wanted_rate,
            Thing.DATA: batch == wanted_batch,
        }  # fmt: skip
        if restored[Thing.SCHEDULER]:
            restored[Thing.OPTIMIZER] = later == wanted_later
        for thing, is_restored in restored.items():
            assert (told[thing] is Outcome.RESTORED) == is_restored, (thing, told[thing])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_torchtitan
def test_each_file_and_each_key_taken(titan: WorkerPool, tmp_path: Path) -> None:
    wrong, unsaid, count = [], list[str](), 0
    for count, (root, what) in enumerate(copies_without(GOLDEN / "checkpoint", tmp_path), 1):  # noqa: B007
        found = forecast(root, loader_named("torchtitan")[0], Settings())
        seen = titan.run(resume_without, str(root.parent), [], world_size=2, timeout=100.0)[0]
        try:
            agrees(found, seen)
        except AssertionError as error:
            if found.doubtful:
                unsaid.append(what)
            elif not what.endswith("_is_initial"):
                wrong.append((what, str(seen)[-120:], str(error).partition("\n")[0]))
        shutil.rmtree(root)
    print(f"{len(unsaid)} of {count} cannot be opened: {unsaid}")
    assert not wrong, "\n".join(map(str, wrong))
    assert count > 30
