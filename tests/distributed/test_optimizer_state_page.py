"""The page on an optimizer's state: what it says of AdEMAMix is run, on one, two and three ranks, and converted."""

from __future__ import annotations

import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.demo.workers import WorkerPool

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "how-to" / "add-an-optimizers-state.md"
STATES = ("exp_avg", "exp_avg_slow", "exp_avg_sq", "step")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _lines(program: str) -> list[list[str]]:
    lines = (line.partition("#")[0].split() for block in _blocks("bash") for line in block.splitlines())
    return [line for line in lines if line and line[0] == program]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def as_torchrun_does(folder: str, words: list[str], port: int) -> None:
    """A rank of a script that makes its process group itself."""
    dist.barrier()  # a rank that left while others still connect would break their connections
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    before, sys.argv, sys.path[:0] = (sys.argv, os.getcwd()), words, [folder]
    os.chdir(folder)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, there = before
        os.chdir(there)
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def ran(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page's scripts were run, on so many ranks as the page says."""
    folder = tmp_path_factory.mktemp("page")
    optimizer, train = _blocks("python")
    (folder / "ademamix.py").write_text(optimizer, encoding="utf-8")
    (folder / "train.py").write_text(train, encoding="utf-8")
    runs = _lines("torchrun")
    assert len(runs) == 4
    for _, option, ranks, *words in runs:
        assert option == "--nproc-per-node"
        pool.run(as_torchrun_does, str(folder), words, free_port(), world_size=int(ranks), timeout=120)
    return folder


def _same(one: Path, other: Path) -> dict[str, torch.Tensor]:
    first, second = torch.load(one), torch.load(other)
    assert list(first) == list(second)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    return dict(first)


def test_a_state_of_its_own_name_is_resumed_bit_for_bit(ran: Path) -> None:
    whole = _same(ran / "through.pt", ran / "resumed.pt")
    assert {name.rpartition(".")[2] for name in whole} == {"weight", "bias", *STATES}
    assert whole["0.weight.step"] == 4
    assert all(whole[f"0.weight.{state}"].abs().sum() > 0 for state in STATES)


def test_it_is_resharded_with_its_parameter(ran: Path) -> None:
    whole = _same(ran / "three.pt", ran / "one.pt")
    assert whole["0.weight.step"] == 2
    assert whole["2.bias.exp_avg_slow"].shape == (5,)


def test_it_goes_along_into_other_formats(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ran)
    inspect, convert = _lines("mcore-rlhf")
    shown = CliRunner().invoke(app, [argument.strip("'") for argument in inspect[1:]])
    assert shown.exit_code == 0, shown.output
    assert "exp_avg_slow" in shown.output
    converted = CliRunner().invoke(app, convert[1:])
    assert converted.exit_code == 0, converted.output
    (found,) = (ran / "universal").rglob("0.weight/exp_avg_slow.pt")
    stored = torch.load(found, weights_only=False)
    assert torch.equal(stored["param"], torch.load(ran / "one.pt")["0.weight.exp_avg_slow"])
