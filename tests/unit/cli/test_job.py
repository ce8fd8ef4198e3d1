from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.cli import app
from mcore_rlhf.cli.job import make_job
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import of_command


@pytest.fixture
def job_file(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Writes a job file."""

    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_command_line_and_the_file_have_the_same_options() -> None:
    fields = {row.name for row in of_command("convert")} | {"source", "target"}
    assert {param.name for param in app.convert.params} - {"config", "json", "progress"} == fields
    assert {param.name for param in app.plan.params} - {"config", "json", "progress", "copies", "save"} < fields
    assert {"masters", "rules", "no_fsync", "to"} < fields


def test_nothing_given_keeps_what_the_source_has() -> None:
    options = make_job({"source": "a", "target": "b", "tp": None}).options
    assert (options.to, options.write.tp, options.write.rng, options.fsync) == ("megatron", None, None, True)
    assert options.workers >= 1
    assert options.max_memory == 2 << 30


def test_every_option_reaches_the_library(job_file) -> None:  # type: ignore[no-untyped-def]
    path = job_file(
        "role: critic\nstep: 7\nstub: my.Class\ntp: 2\npp: 3\nvpp: 2\nep: 4\netp: 1\ndp: 8\npipeline_layout: [3, 5, 4]\n"
        "dtype: bf16\nno_optimizer: true\noptimizer: plain\nrng: drop\nvocab_size: 100\npadded_vocab_size: 128\n"
        "trust_replicas: true\nworkers: 3\nmax_memory: 1GB\nno_fsync: true\nstrict: true\noverwrite: true\n"
    )
    options = make_job({}, path).options
    read, write = options.read, options.write
    assert (read.role, read.step, read.stubs, read.vocab_size) == ("critic", 7, ("my.Class",), 100)
    assert (write.tp, write.pp, write.vpp, write.ep, write.etp, write.dp) == (2, 3, 2, 4, 1, 8)
    assert (write.pipeline_layout, write.dtype, write.no_optimizer) == ("3,5,4", "bf16", True)
    assert (write.optimizer, write.rng, write.vocab_size, write.padded_vocab_size) == ("plain", "drop", 100, 128)
    assert (options.trust_replicas, options.workers, options.max_memory) == (True, 3, 10**9)
    assert (options.fsync, options.strict, options.overwrite) == (False, True, True)


def test_options_win_over_the_file_even_where_they_say_no(job_file) -> None:  # type: ignore[no-untyped-def]
    path = job_file("tp: 2\npp: 2\noverwrite: true\nstub: [a.B, c.D]\n")
    options = make_job({"tp": 8, "overwrite": False, "stub": ["e.F"]}, path).options
    assert (options.write.tp, options.write.pp, options.overwrite, options.read.stubs) == (8, 2, False, ("e.F",))


def test_unknown_keys_are_named_with_the_known_ones(job_file) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as error:
        make_job({}, job_file("tensor_parallel: 2\nno-optimizer: true\n"))
    text = str(error.value)
    assert "unknown key 'tensor_parallel'" in text
    assert "unknown key 'no-optimizer'; did you mean 'no_optimizer'?" in text
    assert "Known keys: name, description, source, target, to, " in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tp": 0}, "--tp: should be greater than or equal to 1, found 0"),
        ({"rng": "keeep"}, "--rng: should be 'keep', 'derive' or 'drop', found 'keeep'"),
        ({"dtype": "int8"}, "--dtype: should be a floating-point type, found 'int8'"),
        ({"dtype": "bf17"}, "--dtype: unknown dtype 'bf17'; did you mean 'bf16'?"),
        ({"dtype": "quarter"}, "--dtype: unknown dtype 'quarter'; known: "),
        ({"max_memory": "lots"}, "--max-memory: should be a size such as 2GB"),
        ({"max_memory": "10"}, "--max-memory: should be greater than or equal to 1048576"),
    ],
)
def test_impossible_values_are_named_by_their_option(given: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as error:
        make_job(given)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"to": "megatron", "zero_stage": 0}, "--zero-stage: means nothing with --to megatron; it is for --to deepspeed"),
        ({"to": "dcp", "max_shard_size": "1GB"}, "--max-shard-size: means nothing with --to dcp; it is for --to hf"),
        ({"to": "deepspeed", "tokenizer": "d"}, "--tokenizer: means nothing with --to deepspeed; it is for --to hf"),
        ({"to": "peft", "generation_config": "d"}, "--generation-config: means nothing with --to peft; it is for --to hf"),
        ({"to": "universal", "eos_token_ids": "1"}, "--eos-token-ids: means nothing with --to universal; it is for --to hf"),
        ({"masters": True}, "--masters: means nothing with --to megatron; it is for --to hf or --to peft"),
        ({"to": "hf", "transformer_impl": "local"}, "--transformer-impl: means nothing with --to hf; it is for --to megatron or"),
    ],
)  # fmt: skip
def test_options_that_the_format_would_pass_over_are_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as error:
        make_job(given)
    assert str(error.value).startswith(expected)


def test_options_of_no_meaning_are_named_together_and_what_was_not_given_is_not() -> None:
    with pytest.raises(UsageError, match="2 problems") as error:
        make_job({"to": "dcp", "masters": True, "zero_stage": 1, "tokenizer": None})
    assert "--tokenizer" not in str(error.value)
    assert make_job({"to": "hf", "masters": True, "eos_token_ids": "1,2"}).options.write.eos_token_ids == (1, 2)
    assert make_job({"to": "dcp", "masters": False}).options.to == "dcp"


@pytest.mark.parametrize("value", ["'2'", "true", "2.5", "[2]"])
def test_values_of_the_file_are_named_by_file_and_key(job_file, value: str) -> None:  # type: ignore[no-untyped-def]
    path = job_file(f"tp: {value}\n")
    with pytest.raises(UsageError, match=r"job\.yaml: tp: should be a valid integer, found "):
        make_job({}, path)


def test_environment_variables_are_filled_in(job_file, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("RUN", "/runs/a")
    monkeypatch.delenv("NOPE", raising=False)
    job = make_job({}, job_file("source: ${RUN}/actor\ntarget: ${NOPE:-/tmp}/out\ndescription: ${NOPE} stays\n"))
    assert (job.source, job.target, job.description) == ("/runs/a/actor", "/tmp/out", "${NOPE} stays")


def test_variables_that_are_not_set_are_all_named(job_file, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("NOPE", raising=False)
    monkeypatch.delenv("NEITHER", raising=False)
    with pytest.raises(UsageError) as error:
        make_job({}, job_file("source: ${NOPE}/a\ntarget: ${NEITHER}\n"))
    assert "source: the environment variable NOPE is not set (in '${NOPE}/a')" in str(error.value)
    assert "NEITHER" in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- tp: 2\n", "expected a mapping"),
        ("", "expected a mapping"),
        ("tp: [", "the conversion job is not valid YAML: line 1, column 6: "),
    ],
)
def test_what_is_no_job_is_refused(job_file, text: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=expected):
        make_job({}, job_file(text))


def test_a_missing_job_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml: cannot read the conversion job"):
        make_job({}, tmp_path / "nowhere.yaml")


def test_rules_are_found_beside_the_job_file(job_file, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "rules.yaml").write_text("rules: [{pattern: '*head', partition: row}]\n")
    job = make_job({}, job_file("rules: rules.yaml\n"))
    options = job.options
    assert str(options.read.rules.partition("value_head")) == "split(1)"
    assert options.write.rules == options.read.rules
    with pytest.raises(UsageError, match=r"elsewhere\.yaml"):
        make_job({"rules": "elsewhere.yaml"}, job_file("rules: rules.yaml\n"))


def test_the_home_folder_may_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert make_job({"source": "~/run"}).source_folder() == Path("/home/me/run")
