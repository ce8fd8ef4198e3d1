"""Steps of accelerate and of transformers' Trainer under DeepSpeed are targets: both go on from what was another format's in between."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings
from tests.reference.forked_ranks import ForkedRanks
from tests.trainers import hf_runs

pytestmark = pytest.mark.reference
Seen = list[list[object]]
STEPS = {"accelerate": "step_3", "transformers": "checkpoint-3"}


class Ranks:
    """Runs of ranks, and what they saw of each step."""

    def __init__(self, forked: ForkedRanks) -> None:
        self._forked = forked

    def __call__(self, how: str, stage: int, world: int, folder: Path, resume: Path | None = None) -> Seen:
        folder.mkdir()
        words = [how, str(stage), str(folder), *([] if resume is None else [str(resume)])]
        self._forked.run(world, "tests.reference.zero_runs", *words)
        seen: Seen = json.loads((folder / "seen.json").read_text())
        return seen


@pytest.fixture(scope="module")
def ranks(forked_ranks: ForkedRanks) -> Ranks:
    return Ranks(forked_ranks)


def to(source: Path, target: Path, name: str, **write: object) -> StepJob:
    options = ConvertOptions(to=name, fsync=False, write=WriteOptions(**write))  # type: ignore[arg-type]
    return convert_step(find(source, ReadOptions()), target, options)


def by_megatron(step: Path, folder: Path, config: Path) -> Path:
    """The same step, for two tensor-parallel ranks of Megatron."""
    to(step, folder / "megatron", "megatron-dist", tp=2, reference_config=str(config))
    return folder / "megatron"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's description, which accelerate does not keep."""
    folder = tmp_path_factory.mktemp("described")
    hf_runs.model(1, tie_word_embeddings=False).config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[*STEPS])
def run(
    request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Seen]:
    """Two ranks with ZeRO 2."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, folder / STEPS[request.param], ranks(request.param, 2, 2, folder)


def test_it_goes_on_as_its_own_run_would(
    run: tuple[str, Path, Seen], ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    """With ``--like`` its groups, stage, ranks and counters are as the run has them; losses and rates are the same to the last bit."""
    how, step, whole = run
    done = to(by_megatron(step, tmp_path, config), tmp_path / "back", how, like=str(step), reference_config=str(config))
    assert done.published is not None
    tag = "pytorch_model" if how == "accelerate" else "global_step3"
    assert (Path(str(done.published)) / tag / "mp_rank_00_model_states.pt").is_file()
    assert forecast(done.published, loader_named(how)[0], Settings(), 2).resumes
    resumed = ranks(how, 2, 2, tmp_path / "seen", Path(str(done.published)))
    assert [one[:3] for one in resumed] == [one[:3] for one in whole[3:]]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), [(3, 1), (1, 2)])
def test_of_another_stage_and_number_of_ranks(
    run: tuple[str, Path, Seen], ranks: Ranks, config: Path, tmp_path: Path, stage: int, world: int
) -> None:
    """A run of that stage shows how it is; accelerate's schedule counts once for every process in a step."""
    how, step, whole = run
    ranks(how, stage, world, tmp_path / "other")
    shown = tmp_path / "other" / step.name
    done = to(
        by_megatron(step, tmp_path, config), tmp_path / "back", how, like=str(shown), reference_config=str(config)
    )
    assert done.published is not None
    opened, own = (open_checkpoint(folder, ReadOptions()) for folder in (done.published, shown))
    assert (opened.optimizer, opened.parallel) == (own.optimizer, own.parallel) == (f"zero{stage}", own.parallel)
    resumed = ranks(how, stage, world, tmp_path / "seen", Path(str(done.published)))
    for one, wanted in zip(resumed, whole[3:], strict=True):
        torch.testing.assert_close(one[1], wanted[1], rtol=2e-6, atol=0)
        assert one[2] == wanted[2]


@pytest.mark.slow
def test_back_from_there(run: tuple[str, Path, Seen], config: Path, tmp_path: Path) -> None:
    """What was written becomes every bit of what it was made of."""
    how, step, _ = run
    done = to(step, tmp_path / "there", how, zero_stage=3, dp=1, reference_config=str(config))
    again = to(Path(str(done.published)), tmp_path / "again", how, like=str(step), reference_config=str(config))
    assert again.published is not None
    a, b = (
        torch.load(file, weights_only=False)
        for of in (step, again.published)
        for file in sorted(Path(str(of)).glob("*/mp_rank_00*"))
    )
    assert a["module"].keys() == b["module"].keys()
    assert all(torch.equal(a["module"][name], b["module"][name]) for name in a["module"])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 2)])
def test_an_adapter_goes_on_under_deepspeed(ranks: Ranks, stage: int, world: int, tmp_path: Path) -> None:
    """The Trainer saves it without its base, loads it so, and has its schedule in DeepSpeed's own file."""
    whole = ranks("adapter", stage, world, tmp_path / "run")
    step = tmp_path / "run" / STEPS["transformers"]
    done = to(step, tmp_path / "back", "transformers", like=str(step))
    for folder in (step, done.published):
        assert folder is not None
        assert forecast(folder, loader_named("transformers")[0], Settings(), world).resumes
    assert ranks("adapter", stage, world, tmp_path / "seen", Path(str(done.published))) == whole[3:]


def test_deepspeed_stops_at_a_step_without_its_files(ranks: Ranks, tmp_path: Path) -> None:
    """As is said of the Trainer with a configuration that names DeepSpeed's, and a step that was saved without."""
    saved = Path(__file__).parents[1] / "goldens" / "transformers" / "checkpoint-2"
    step = Path(shutil.copytree(saved, tmp_path / "run" / saved.name))
    assert forecast(step, loader_named("transformers")[0], Settings({"deepspeed": "zero.json"}), 1).stops
    with pytest.raises(AssertionError, match="Can't find a valid checkpoint"):
        ranks("transformers", 2, 1, tmp_path / "seen", step)
