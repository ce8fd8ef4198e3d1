"""Every job in ``configs/`` is one that the command line takes, and that fits its model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rlhf.core.account import Report
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import file_ranks
from mcore_rlhf.families.megatron.new_layout import NewLayout, choose
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import PipelineSplit, model_chunks
from mcore_rlhf.layouts.tensor import padded_vocab_size
from mcore_rlhf.models.spec import ModelSpec

from .deployments import MODELS, RUNS, Model, Run

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
GOLDENS = CONFIGS.parent / "tests" / "goldens"
# The others are configurations of runs (see test_runs.py), and exports, which have no layout.
JOBS = sorted(path for path in CONFIGS.glob("*.yaml") if "\nto: megatron\n" in path.read_text(encoding="utf-8"))
EXPORTS = sorted(path for path in CONFIGS.glob("*.yaml") if "\nto: hf\n" in path.read_text(encoding="utf-8"))
LAYOUT_OPTIONS = ("tp", "pp", "vpp", "ep", "etp", "dp", "pipeline_layout", "no_optimizer", "vocab_size")


@pytest.fixture(params=JOBS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def job(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture
def run(path: Path) -> Run:
    return RUNS[path.stem]


@pytest.fixture
def model(run: Run) -> Model:
    return MODELS[run.model]


@pytest.fixture
def choices(job: dict[str, Any], run: Run, model: Model) -> NewLayout:
    """What the writer itself decides for this job and a checkpoint of that run."""
    args = Arguments({**model.args(run.rows[0]), **run.split})
    spec = ModelSpec((), model.layers, model.tied, model.mtp, model.experts, None, run.rows[0])
    source = Source(
        format="megatron",
        root=Path(),
        role="actor",
        model=spec,
        parallel=run.source,
        catalog=_NoTensors(),
        state=TrainingState(1840),
        files=(),
        states=("master", "exp_avg", "exp_avg_sq"),
        optimizer="distributed",
        notes=Report(),
    )
    options = WriteOptions(**{name: job[name] for name in LAYOUT_OPTIONS if name in job})
    return choose(source, args, options)


class _NoTensors(dict[Any, Any]):
    """A catalogue without tensors: choosing a layout does not look at them."""


def test_every_job_has_a_run_and_every_run_a_job() -> None:
    assert [path.stem for path in JOBS] == sorted(RUNS)


def test_the_command_line_takes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_rlhf.cli.job import make_job

    monkeypatch.setenv("CHECKPOINT", "/data/old")
    monkeypatch.setenv("TARGET", "/data/new")
    loaded = make_job({}, path)
    assert (loaded.source, loaded.target, loaded.options.to) == ("/data/old", "/data/new", "megatron")
    options = loaded.options
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {name: getattr(options.write, name) for name in LAYOUT_OPTIONS if name in job} == {
        name: job[name] for name in LAYOUT_OPTIONS if name in job
    }


@pytest.mark.parametrize("export", EXPORTS, ids=lambda path: path.stem)
def test_an_export_becomes_a_folder(export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job itself, with a small checkpoint and model in the place of those that it was written for."""
    from mcore_rlhf.cli.job import make_job
    from mcore_rlhf.convert import convert

    model = tmp_path / "model"
    shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", model)
    for name, value in (("CHECKPOINT", "a"), ("TARGET", "b"), ("MODEL", str(model))):
        monkeypatch.setenv(name, value)
    job = make_job({}, export)
    assert (job.name, job.options.to, job.options.write.max_shard_size) == (export.stem, "hf", 5 * 10**9)
    done = convert(model, tmp_path / "out", replace(job.options, fsync=False))
    assert done.lossless
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_it_is_named_after_its_file(path: Path, job: dict[str, Any]) -> None:
    assert job["name"] == path.stem
    assert job["description"]
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_degrees_are_those_that_were_asked_for(job: dict[str, Any], run: Run, choices: NewLayout) -> None:
    new = choices.parallel
    assert all(getattr(new, name) == job[name] for name in ("tp", "pp", "vpp", "ep", "etp", "dp") if name in job)
    assert (run.source.world_size, new.world_size) == run.gpus


def test_the_layers_can_be_dealt(run: Run, model: Model, choices: NewLayout) -> None:
    old = Arguments({**model.args(run.rows[0]), **run.split}).pipeline_split
    for parallel, split in ((run.source, old), (choices.parallel, choices.split)):
        chunks = model_chunks(model.layers, parallel.pp, parallel.vpp, split, model.mtp)
        assert sum(chunk.num_layers for chunk in chunks) == model.layers
        assert len(chunks) == parallel.pp * parallel.vpp


def test_the_tensors_can_be_cut(run: Run, model: Model, choices: NewLayout) -> None:
    for parallel in (run.source, choices.parallel):
        assert model.heads % parallel.tp == 0
        assert model.groups % parallel.tp == 0
        assert model.hidden % parallel.tp == 0
        assert model.ffn % parallel.tp == 0
        assert model.experts % parallel.ep == 0
        assert model.expert_ffn % parallel.etp == 0


def test_megatron_can_name_the_files_of_both(run: Run, choices: NewLayout) -> None:
    for parallel in (run.source, choices.parallel):
        assert len(file_ranks(parallel)) == parallel.pp * max(parallel.tp, parallel.ep * parallel.etp)


def test_the_vocabulary_is_padded_as_the_comments_say(
    job: dict[str, Any], run: Run, model: Model, choices: NewLayout
) -> None:
    assert job["vocab_size"] == model.vocab
    assert run.rows[0] == padded_vocab_size(model.vocab, 128, run.source.tp)
    assert choices.padded_vocab_size == run.rows[1] == padded_vocab_size(model.vocab, 128, choices.parallel.tp)


def test_an_optimizer_is_written_unless_it_was_not_wanted(job: dict[str, Any], choices: NewLayout) -> None:
    assert choices.optimizer == (None if job.get("no_optimizer") else "distributed")


def test_a_global_batch_of_1024_still_divides(job: dict[str, Any], choices: NewLayout) -> None:
    assert 1024 % choices.parallel.dp == 0


def test_seven_stages_of_448_gpus_become_options_that_megatron_has() -> None:
    from mcore_rlhf.layouts.pipeline import split_from_option

    job = yaml.safe_load((CONFIGS / "qwen2.5-32b-grpo-512-to-448-gpus.yaml").read_text(encoding="utf-8"))
    assert split_from_option(job["pipeline_layout"], 64, 7, 1, 0) == PipelineSplit(first=7, last=7)


def test_an_uneven_split_of_94_layers_becomes_options_that_megatron_has() -> None:
    from mcore_rlhf.layouts.pipeline import split_from_option

    job = yaml.safe_load((CONFIGS / "qwen3-235b-a22b-grpo-256-to-128-gpus.yaml").read_text(encoding="utf-8"))
    assert split_from_option(job["pipeline_layout"], 94, 4, 1, 0) == PipelineSplit(first=24, last=22)


def test_other_shapes_of_448_gpus_do_not_work() -> None:
    qwen = MODELS["qwen2.5-32b"]
    assert 1024 % 14, "TP8 × PP4 × DP14"
    assert qwen.heads % 7, "TP7 × PP8 × DP8"
    assert ParallelConfig(tp=8, pp=7, etp=8, dp=8).world_size == 448
