"""A URL is refused wherever a folder of this machine is needed, one of an unknown kind everywhere, and no folder called ``s3:`` appears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rlhf import CheckpointManager, ConvertOptions, WriteOptions, convert_checkpoint, open_checkpoint
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.config.run import load_run_config, parse_resume
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.run.candidates import Resume
from mcore_rlhf.manager.subject import whole_step
from mcore_rlhf.verify.checkpoint import verify

from .conftest import Cli

URL = "s3://bucket/run"
UNKNOWN = "ftp://host/run"
COMMANDS: tuple[list[object], ...] = (
    ["inspect", UNKNOWN],
    ["verify", UNKNOWN],
    ["diff", UNKNOWN, "TP1"],
    ["diff", "TP1", UNKNOWN],
    ["plan", UNKNOWN],
    ["convert", UNKNOWN, "out"],
    ["convert", "TP1", UNKNOWN],
    ["convert", "TP1", UNKNOWN, "--to", "universal"],
    ["plan", "TP1", "--to", "hf", "--tokenizer", "hf://org/model"],
    ["plan", "TP1", "--to", "hf", "--reference-config", "hf://org/model"],
    ["steps", UNKNOWN],
    ["prune", UNKNOWN, "--keep-last", 1],
    ["interval", "--root", UNKNOWN],
    ["adopt", f"{UNKNOWN}/global_step_1"],
    ["resume-check", "--environment", "--dir", URL, "--", "true"],
    ["resume-check", "--compare", URL, "TP1"],
    ["resume-check", "--make-control", "TP1", URL],
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in which nothing may appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command)))
def test_every_command_refuses_urls(cli: Cli, tp1: Path, here: Path, command: list[object]) -> None:
    outcome = cli(*(tp1 if word == "TP1" else word for word in command))
    assert (outcome.code, "is a URL" in outcome.stderr) == (2, True), outcome
    assert not any(here.iterdir())


@pytest.mark.parametrize("key", ["source", "target", "tokenizer"])
def test_jobs_in_yaml_refuse_urls(cli: Cli, tp1: Path, here: Path, key: str) -> None:
    job = {"to": "hf", "source": str(tp1), "target": "out", key: UNKNOWN}
    (here / "job.yaml").write_text("".join(f"{name}: {value}\n" for name, value in job.items()))
    outcome = cli("convert", "--config", here / "job.yaml")
    assert (outcome.code, "is a URL" in outcome.stderr) == (2, True), outcome
    assert sorted(path.name for path in here.iterdir()) == ["job.yaml"]


def _config(output_dir: str) -> object:
    return load_run_config({"runner": {"output_dir": output_dir}})


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "open": lambda url, there: open_checkpoint(UNKNOWN, ReadOptions()),
    "source": lambda url, there: convert_checkpoint(UNKNOWN, Path("out"), ConvertOptions()),
    "target": lambda url, there: convert_checkpoint(there, Path(UNKNOWN), ConvertOptions()),
    "universal": lambda url, there: convert_checkpoint(there, Path(UNKNOWN), ConvertOptions(to="universal")),
    "tokenizer": lambda url, there: WriteOptions(tokenizer=str(url)),
    "verify": lambda url, there: verify(UNKNOWN, ReadOptions()),
    "step": lambda url, there: whole_step(UNKNOWN, ReadOptions()),
    "steps": lambda url, there: steps.listed(Path(UNKNOWN)),
    "adopt": lambda url, there: adopt(Path(UNKNOWN) / "global_step_1"),
    "manager": lambda url, there: CheckpointManager(url, torch.nn.Linear(1, 1)),
    "resume": lambda url, there: Resume.parse(url),
    "resume in YAML": lambda url, there: parse_resume(str(url)),
    "config": lambda url, there: _config(str(url)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_python_refuses_urls_even_as_paths(tp1: Path, here: Path, call: Callable[[Path, Path], object]) -> None:
    with pytest.raises(UsageError, match="is a URL"):
        call(Path(URL), tp1)
    assert not any(here.iterdir())


def test_datasets_may_lie_anywhere() -> None:
    """They are read by the run's own code."""
    with pytest.raises(UsageError) as missing:
        load_run_config({"data": {"train_data_paths": "s3://bucket/prompts.jsonl"}})
    assert "is missing" in str(missing.value)
    assert "is a URL" not in str(missing.value)
