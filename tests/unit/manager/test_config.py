"""A run's configuration: what it accepts, what it fills in, and that every mistake is named where it was made."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rlhf.errors import LayoutMismatch, StorageError, Unsupported, UsageError
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.manager.config.options import manager_options, prompt_sampler
from mcore_rlhf.manager.config.run import (
    ELSEWHERE,
    RunConfig,
    _section,
    config_hash,
    known_keys,
    load_run_config,
    parse_resume,
    text,
)
from mcore_rlhf.manager.config.sections import duration, size
from mcore_rlhf.manager.run.candidates import Resume
from mcore_rlhf.manager.run.options import Mirror
from mcore_rlhf.manager.run.policies import AtEnd, BeforeDeadline, EveryMinutes, EverySteps, OnSignal
from mcore_rlhf.manager.run.retention import KeepLast, Retention

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "run-config.md"

SMALLEST: dict[str, Any] = {
    "runner": {"task_type": "reasoning", "output_dir": "runs", "experiment_name": "one"},
    "algorithm": {"name": "grpo", "group_size": 4},
    "data": {"train_data_paths": ["a.jsonl"], "rollout_batch_size": 8},
}


def _with(**changes: Any) -> dict[str, Any]:
    """The smallest configuration with ``runner__save_interval=5`` set."""
    values = copy.deepcopy(SMALLEST)
    for name, value in changes.items():
        *path, last = name.split("__")
        at = values
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return values


def _load(**changes: Any) -> RunConfig:
    return load_run_config(_with(**changes))


def _refusal(source: Any, overrides: list[str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_run_config(source, overrides or [])
    return str(caught.value)


# What is accepted


def test_the_smallest_has_defaults() -> None:
    config = _load()
    assert (config.runner.save_interval, config.runner.resume_dir, config.save_every) == (-1, None, None)
    assert config.actor.parallel.tp == config.actor.parallel.pp == 1
    assert config.checkpoint.keep.best is None


def test_the_root_is_where_rlinf_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _load().checkpoint_root == tmp_path / "runs" / "one" / "checkpoints"
    logs = {"runner__logger__log_path": "/logs", "runner__logger__experiment_name": "two"}
    assert _load(**logs).checkpoint_root == tmp_path / "runs" / "one" / "checkpoints"
    fsdp = {"actor__training_backend": "fsdp"}
    assert _load(**logs, **fsdp).checkpoint_root == Path("/logs/two/checkpoints")
    assert _load(**fsdp, runner__logger__log_path="/logs").checkpoint_root == Path("/logs/one/checkpoints")
    assert _load(**fsdp).checkpoint_root == tmp_path / "runs" / "one" / "checkpoints"


def test_references_the_environment_and_home_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_RUNS", "/data")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MY_LOGS", raising=False)
    config = _load(
        runner__output_dir="$MY_RUNS/x",
        runner__experiment_name="g${algorithm.group_size}",
        runner__logger__log_path="~/${oc.env:MY_LOGS,logs}/${runner.experiment_name}",
    )
    assert config.checkpoint_root == Path("/data/x/g4/checkpoints")
    assert config.runner.logger.log_path == "/home/me/logs/g4"


def test_overrides_win_and_may_open_sections(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SMALLEST), encoding="utf-8")
    overrides = [
        "runner.save_interval=5", "runner.save_interval=7", "actor.parallel={tp: 2, pp: 4}", "data.shuffle=false",
        "checkpoint.keep.best.metric=reward", "actor.optim.lr=3e-7", "data.train_data_paths=[a, b]",
        "runner.experiment_name=x=y", "runner.output_dir=${runner.task_type}",
    ]  # fmt: skip
    config = load_run_config(str(file), overrides)
    assert (config.save_every, config.data.shuffle, config.actor.optim.lr) == (7, False, 3e-7)
    assert (config.actor.parallel.tp, config.actor.parallel.pp) == (2, 4)
    assert config.data.train_data_paths == ["a", "b"]
    assert config.checkpoint.keep.best is not None
    assert (config.runner.experiment_name, config.runner.output_dir) == ("x=y", "reasoning")
    assert load_run_config(file).save_every is None


def test_the_users_own_section_is_left_alone() -> None:
    assert _load(extra={"anything": [1, {"goes": None}]}).extra == {"anything": [1, {"goes": None}]}


def test_a_configuration_does_not_change() -> None:
    config = _load()
    with pytest.raises(ValueError, match="frozen"):
        config.runner.save_interval = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [("2TB", 2 * 10**12), ("2 TiB", 2 * 2**40), ("1.5G", 3 * 2**29), ("1PB", 10**15), ("500", 500), (7, 7)],
)
def test_sizes(written: object, nbytes: int) -> None:
    assert size(written) == nbytes
    assert _load(checkpoint__keep__max_size=written).checkpoint.keep.max_size == nbytes


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90", 90), ("90s", 90), ("30m", 1800), ("30 min", 1800), ("1.5h", 5400), ("2d", 172800), ("23:30:00", 84600),
        ("04:00", 240), ("1-12:00:00", 129600), (12, 12.0), (0.5, 0.5),
    ],
)  # fmt: skip
def test_times(written: object, seconds: float) -> None:
    assert duration(written) == seconds
    assert _load(checkpoint__save__time_limit=written).checkpoint.save.time_limit == seconds


def test_yaml_reads_a_clock_as_the_same_seconds(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SMALLEST) + "checkpoint: {save: {time_limit: 23:30:00, margin: 2:30}}", "utf-8")
    save = load_run_config(file).checkpoint.save
    assert (save.time_limit, save.margin) == (84600, 150)


def test_the_data_parallel_degree_follows_from_the_gpus() -> None:
    parallel = _load(actor__parallel={"tp": 2, "pp": 2, "ep": 4}).actor.parallel
    assert (parallel.on(16).dp, parallel.on(16).world_size, parallel.on(16).ep) == (4, 16, 4)
    with pytest.raises(UsageError, match="18 GPUs cannot be divided into TP 2 × PP 2 × CP 1 = 4"):
        parallel.on(18)
    with pytest.raises(LayoutMismatch, match="cannot hold"):
        parallel.on(4)


# What is refused


def test_all_mistakes_are_named_at_once_with_line_and_guess(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "runner:\n  task_type: reasoning\n  output_dri: /x\n  experiment_name: ../up\n  save_interval: 0\n"
        "algorithm:\n  name: gpro\n  kl_beta: 0.1\n  kl:\n    coefficient: -1\n"
        "data:\n  train_data_paths: [a, 3]\n  rollout_batch_size: '8'\n"
        "cluster: {}\nsave_interval: 3\ncheckpoint: {keep: {max_size: lots}, save: {time_limit: soon}}\n",
        encoding="utf-8",
    )
    lines = _refusal(file, ["actor.paralel.tp=2", "checkpoint.on_busy=panic", "actor.optim=1"]).splitlines()
    assert lines[0] == "16 problems:"
    expected = [
        "bad.yaml:1: runner.output_dir: is missing",
        "bad.yaml:3: runner.output_dri: unknown key; did you mean 'output_dir'?",
        "bad.yaml:4: runner.experiment_name: expected the name of a folder, found '../up'",
        "bad.yaml:5: runner.save_interval: expected -1 (never), or at least 1, found 0",
        "bad.yaml:7: algorithm.name: expected 'grpo' or 'ppo', found 'gpro'",
        "bad.yaml:8: algorithm.kl_beta: unknown key; did you mean algorithm.kl.coefficient?",
        "bad.yaml:10: algorithm.kl.coefficient: expected greater than or equal to 0, found -1",
        "bad.yaml:12: data.train_data_paths[1]: expected a valid string, found 3",
        "bad.yaml:13: data.rollout_batch_size: expected a valid integer, found '8'",
        "bad.yaml:14: cluster: this section is for another program",
        "bad.yaml:15: save_interval: unknown key; did you mean runner.save_interval?",
        "bad.yaml:16: checkpoint.keep.max_size: should be a size such as 2GB, 512MiB or 500000000, found 'lots'",
        "bad.yaml:16: checkpoint.save.time_limit: expected a time such as 90s, 30m, 4h, 2d or 23:30:00, found 'soon'",
        "override actor.paralel: unknown key; did you mean 'parallel'?",
        "override actor.optim: expected a section of keys, found 1",
        "override checkpoint.on_busy: expected 'wait' or 'refuse', found 'panic'",
    ]
    found = [line.removeprefix("  - ").removeprefix(f"{tmp_path}/") for line in lines[1:17]]
    assert sorted(found) == sorted(expected)
    assert lines[17:] == ["Keep it in that program's own file, or put it under 'extra:'."]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm__group_size": 1}, "algorithm: group_size: GRPO compares samples, expected at least 2, found 1"),
        ({"algorithm__gamma": 1.0, "algorithm__clip__value": 0.5}, "gamma, clip.value: GRPO has no value function"),
        ({"algorithm__name": "ppo"}, "algorithm.name: ppo needs a section 'critic'"),
        ({"critic": {}}, "algorithm.name: grpo has no critic"),
        ({"algorithm__kl__kind": "adaptive"}, "algorithm.kl: kind: adaptive needs target and horizon"),
        ({"algorithm__kl__kind": "adaptive", "algorithm__kl__target": 0.1}, "adaptive needs horizon"),
        ({"algorithm__kl__horizon": 5.0}, "kind: fixed does not take horizon"),
        ({"algorithm__n_minibatches": 3}, "= 32 samples cannot be divided into algorithm.n_minibatches: 3"),
        ({"runner__save_interval": 5, "checkpoint__save__every_steps": 6}, "runner.save_interval is 5, and"),
        ({"actor__training_backend": "fsdp", "actor__parallel__tp": 2}, "fsdp has data parallelism only, found tp: 2"),
        ({"runner__output_dir": "$NOT_SET_ANYWHERE/x"}, "runner.output_dir: the environment variable NOT_SET_ANYWHERE"),
        ({"runner__output_dir": " "}, "runner.output_dir: expected a path, found ''"),
        ({"runner__experiment_name": "/abs"}, "runner.experiment_name: expected the name of a folder"),
        ({"runner__resume_dir": True}, "resume_dir: expected null, auto, a path or the number of a step, found True"),
        ({"runner__resume_dir": -1}, "found -1"),
        ({"data__seed": True}, "data.seed: expected a valid integer, found True"),
        ({"actor__optim__lr": float("nan")}, "actor.optim.lr: expected a finite number"),
        ({"actor__optim__lr": "fast"}, "actor.optim.lr: expected a valid number, found 'fast'"),
        ({"actor__quantum": 1}, "Known keys of actor: training_backend, model_dir,"),
        ({"algorithm__tensor_model_parallel_size": 2}, "did you mean actor.parallel.tp?"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in _refusal(_with(**changes))


def test_both_keys_of_the_interval_may_agree() -> None:
    assert _load(runner__save_interval=5, checkpoint__save__every_steps=5).save_every == 5
    assert _load(checkpoint__save__every_steps=6).save_every == 6


def test_every_reference_that_leads_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    said = _refusal(
        _with(
            runner__output_dir="${runner.ouput_dir}", runner__experiment_name="${runner.experiment_name}",
            runner__task_type="???", data__train_data_paths=["${oc.env:NOT_SET_ANYWHERE}"], data__seed="${subtract:3,2}",
        )
    )  # fmt: skip
    for line in (
        "runner.output_dir: cannot fill in ${runner.ouput_dir}: Interpolation key 'runner.ouput_dir' not found; "
        "did you mean ${runner.output_dir}?",
        "runner.experiment_name: cannot fill in ${runner.experiment_name}: Recursive interpolation detected",
        "runner.task_type: has no value yet (???)",
        "data.train_data_paths[0]: cannot fill in ${oc.env:NOT_SET_ANYWHERE}",
        "data.seed: cannot fill in ${subtract:3,2}: Unsupported interpolation type subtract",
        "Only OmegaConf's own resolvers are there",
        "Set it (export NAME=…)",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("runner: [", "is not valid YAML"),
        ("runner: 1\nrunner: 2", "the key 'runner' is there twice"),
        ("- a", "expected sections such as 'runner:', found '- a'"),
        ("", "expected sections such as 'runner:', found ''"),
        ("a: ${b.", "a: no viable alternative"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("runner:", "runner: expected a section of keys, found None"),
    ],
)
def test_what_is_not_a_configuration_is_refused(tmp_path: Path, document: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(document, encoding="utf-8")
    found = _refusal(file)
    assert said in found
    assert "run.yaml" in found


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no\.yaml: cannot read: No such file .*the run's configuration"):
        load_run_config(tmp_path / "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in _refusal(tmp_path / "binary.yaml")


@pytest.mark.parametrize("override", ["runner", "+runner.save_interval=1", "~runner", "=3", "a b=1"])
def test_an_override_is_a_key_and_a_value(override: str) -> None:
    assert f"override {override!r}: expected key=value" in _refusal(_with(), [override])


def test_an_override_that_cannot_be_merged() -> None:
    assert "overrides data.train_data_paths[5]=x" in _refusal(_with(), ["data.train_data_paths[5]=x"])
    assert "override 'runner.x=[1,': " in _refusal(_with(), ["runner.x=[1,"])


def test_advice_leads_to_keys_that_exist() -> None:
    known = {text(key) for key in known_keys(RunConfig)}
    assert {home for advice in ELSEWHERE.values() for home in advice.split(" and ")} <= known
    assert not {name for name in ELSEWHERE if name in {str(key[-1]) for key in known_keys(RunConfig)}}


# Resume


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "none"), ("none", "none"), ("null", "none"), ("", "none"), ("auto", "auto"), ("Auto", "auto")],
)
def test_resume_from_nothing_or_the_newest(value: Any, kind: str) -> None:
    assert parse_resume(value).kind == kind


@pytest.mark.parametrize("value", [1840, "1840", " 1840 "])
def test_resume_from_a_step(value: Any) -> None:
    assert parse_resume(value) == Resume("step", step=1840)
    assert parse_resume(0) == Resume("step", step=0)


def test_resume_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("OLD", "/old")
    for value, expected in (
        ("runs/x/global_step_5", tmp_path / "runs/x/global_step_5"), ("~/g", Path("/home/me/g")),
        ("$OLD/g", Path("/old/g")), ("${OLD}/g", Path("/old/g")), (Path("1840"), tmp_path / "1840"),
        ("./1840", tmp_path / "1840"), ("/auto", Path("/auto")),
    ):  # fmt: skip
        assert parse_resume(value) == Resume("path", path=expected)


@pytest.mark.parametrize("value", [-1, "-1", 1.5, "1.5", True, [], "$NOT_SET_ANYWHERE/x"])
def test_resume_from_nonsense(value: Any) -> None:
    with pytest.raises(UsageError, match="resume: "):
        parse_resume(value)


def test_the_configuration_says_what_to_resume_from() -> None:
    assert _load(runner__resume_dir="auto").resume.kind == "auto"
    assert _load(runner__resume_dir=20).resume == Resume("step", step=20)


# What it becomes


def test_the_managers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    checkpoint = {
        "asynchronous": False, "on_busy": "refuse", "fsync": False, "rng": "ignore", "check": "sizes", "timeout": "2m",
        "save": {"every_steps": 10, "every_minutes": 5.0, "margin": 30, "time_limit": "1h"}, "tensorboard": "tb",
    }  # fmt: skip
    config = _load(checkpoint=checkpoint)
    options = manager_options(config, timeout=3.0)
    assert options.save.policies == (EverySteps(10), EveryMinutes(5.0), BeforeDeadline(seconds=30), OnSignal(), AtEnd())  # type: ignore[attr-defined]
    assert (options.asynchronous, options.on_busy, options.fsync, options.rng) == (False, "refuse", False, "ignore")
    assert (options.check, options.timeout, options.tensorboard) == ("sizes", 3.0, Path("tb"))
    assert options.deadline is not None
    assert 3500 < options.deadline.remaining() <= 3600
    assert options.provenance == {"config_hash": config_hash(config)}
    off = dict.fromkeys(("before_deadline", "on_signal", "at_end"), False)
    quiet = manager_options(_load(checkpoint__save=off))
    assert (quiet.save.policies, quiet.catch_signals, quiet.deadline) == ((), False, None)  # type: ignore[attr-defined]


def test_an_export_is_passed_on_or_refused() -> None:
    (export,) = manager_options(_load(checkpoint__export={"format": "megatron", "every": 100})).exports
    assert (export.format, export.every, export.role) == ("megatron", 100, "actor")
    asked = {"format": "hf", "tokenizer": "/t", "generation_config": "/g", "reference_config": "/r", "dtype": "bf16"}
    (folder,) = manager_options(_load(checkpoint__export=asked)).exports
    assert folder.write == WriteOptions(
        no_optimizer=True, tokenizer="/t", generation_config="/g", reference_config="/r", dtype="bf16"
    )
    with pytest.raises(Unsupported, match=r"checkpoint\.export: tokenizer: means nothing for format: "):
        manager_options(_load(checkpoint__export={"format": "megatron", "tokenizer": "/t"}))


def test_a_mirror_is_passed_on_with_rules_of_its_own() -> None:
    asked = {"url": "s3://b/run", "keep": {"last": 5}, "on_error": "raise", "memory": "64MiB", "store": {"region": "x"}}
    mirror = manager_options(_load(checkpoint__mirror=asked)).mirror
    assert mirror == Mirror(
        "s3://b/run", Retention((KeepLast(5),)), on_error="raise", memory=64 << 20, store={"region": "x"}
    )
    assert manager_options(_load()).mirror is None


def test_the_sampler_has_the_runs_settings() -> None:
    config = _load(runner__max_epochs=2, data__last_batch="drop", data__seed=9)
    saved = prompt_sampler(config, ["x"] * 20).state_dict()
    assert {name: saved["state"][name] for name in ("seed", "group_size", "epoch_length")} == {
        "seed": 9, "group_size": 4, "epoch_length": 16,
    }  # fmt: skip
    assert sum(len(batch) for batch in prompt_sampler(config, ["x"] * 20)) == 32


def test_the_hash_is_that_of_the_canonical_json() -> None:
    assert config_hash({"b": [1, "é"], "a": None}) == hashlib.sha256('{"a":null,"b":[1,"é"]}'.encode()).hexdigest()
    assert config_hash(_load()) == config_hash(_load(runner__save_interval=-1))
    assert config_hash(_load()) != config_hash(_load(runner__save_interval=1))
    for bad in ({"a": {1, 2}}, {"a": float("nan")}):
        with pytest.raises(UsageError, match="the configuration has no hash"):
            config_hash(bad)


# The page, and what must stay cheap


def _default(key: tuple[Any, ...]) -> str | None:
    """A key's default as the page writes it; None for a section, and for the critic's keys, which are the actor's."""
    model: Any = RunConfig
    for part in key[:-1]:
        model = _section(model.model_fields[part].annotation)
    field = model.model_fields[key[-1]]
    if key != ("critic",) and (key[0] == "critic" or _section(field.annotation) is not None):
        return None
    if field.is_required():
        return "required"
    value = str(field.get_default(call_default_factory=True))
    return {"None": "null", "True": "true", "False": "false"}.get(value, value)


def test_the_page_lists_every_key_with_its_default() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("\n## Keys\n")[2]
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    shown = {row[1].strip(" `"): row[2].strip() for row in cells}
    assert shown == {text(key): default for key in known_keys(RunConfig) if (default := _default(key)) is not None}


def test_neither_the_command_line_nor_the_manager_imports_it() -> None:
    code = (
        "import sys, mcore_rlhf.cli, mcore_rlhf.manager, mcore_rlhf.manager.rlhf.sampler;"
        "print([name for name in ('omegaconf', 'pydantic') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PAGE.parents[2], env={**os.environ}
    )
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr
