"""Every run configuration in ``configs/`` loads, says what its comments say, and sets known keys only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rlhf.manager.config.options import kl_controller, manager_options, prompt_sampler
from mcore_rlhf.manager.config.run import RunConfig, known_keys, load_run_config
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL, FixedKL
from mcore_rlhf.manager.run.retention import KeepBest, KeepEvery, KeepLast

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RUNS = sorted(path for path in CONFIGS.glob("*.yaml") if "runner" in yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_DIR", "DATA_DIR", "RUN_DIR", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


def _keys(value: object, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*at, name)
            yield from _keys(inner, (*at, name))


def test_the_issue_names_two_of_them() -> None:
    assert {"grpo_megatron", "ppo_megatron"} <= {path.stem for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_loads_and_becomes_objects(path: Path) -> None:
    config = load_run_config(path)
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert manager_options(config).provenance["config_hash"]
    assert prompt_sampler(config, ["a"] * 1000).next_batch()[0].group_size == config.algorithm.group_size
    assert kl_controller(config).value == config.algorithm.kl.coefficient


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_key_that_it_sets_is_known_and_holds(path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    dumped = load_run_config(path).model_dump()
    known = set(known_keys(RunConfig))
    for key in _keys(document):
        assert key in known
        given: Any = document
        loaded: Any = dumped
        for name in key:
            given, loaded = given[name], loaded[name]
        if isinstance(given, (int, float)) or (isinstance(given, str) and "$" not in given and key[-1] != "max_size"):
            assert loaded == given or key[-1] == "margin"


def test_grpo_is_what_its_comments_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_run_config(CONFIGS / "grpo_megatron.yaml")
    assert config.checkpoint_root == tmp_path / "runs" / "grpo-1.5b-16x128" / "checkpoints"
    assert config.actor.parallel.on(8).dp == 4
    assert (config.resume.kind, config.save_every, config.critic) == ("auto", 20, None)
    assert config.checkpoint.save.margin == 120
    options = manager_options(config)
    assert options.keep is not None
    assert list(options.keep.keep) == [KeepLast(3), KeepBest("reward", "max", 2), KeepEvery(500)]
    assert options.keep.cap is not None
    assert options.keep.cap.nbytes == 2 * 10**12
    assert kl_controller(config) == AdaptiveKL(0.001, 0.05, 10_000)
    monkeypatch.setenv("RUN_DIR", "/scratch")
    assert load_run_config(CONFIGS / "grpo_megatron.yaml").checkpoint_root.parts[:2] == ("/", "scratch")


def test_ppo_is_what_its_comments_say() -> None:
    config = load_run_config(CONFIGS / "ppo_megatron.yaml", ["runner.resume_dir=1840", "checkpoint.keep.last=5"])
    assert config.critic is not None
    assert config.critic.parallel == config.actor.parallel
    assert config.actor.parallel.on(32).dp == 4
    assert (config.critic.optim.lr, config.actor.optim.lr) == (1e-5, 1e-6)
    assert config.data.train_data_paths == ["./data/train.jsonl"]
    assert (config.resume.kind, config.resume.step, config.checkpoint.keep.last) == ("step", 1840, 5)
    assert kl_controller(config) == FixedKL(0.01)
