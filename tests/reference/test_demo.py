"""What ``mcore-rlhf demo`` proves, on a smaller model; and that it can fail, and be interrupted."""

from __future__ import annotations

import getpass
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.demo import command
from mcore_rlhf.demo.command import DemoReport, ProofRow, count_equal, render, table
from mcore_rlhf.demo.placed_state import PlacedPiece, assembled
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.installation import to_install
from tests.reference.lab import Lab
from tests.reference.tampering import change_one_moment

SMALL = replace(command.MODEL, hidden_size=32, prompts_per_step=4, group_size=4)
ROW = ProofRow("TP1×PP1", 10, 10, {3: 5.25, 4: 5.0}, {3: 5.25, 4: 5.0}, True, None, (2, 2))
STATES = ("param", "master", "exp_avg", "exp_avg_sq")


def test_the_demonstration_proves_every_layout(lab: Lab, tmp_path: Path) -> None:
    said: list[str] = []
    report = DemoReport(tuple(command.prove(lab.pool, tmp_path, said.append, SMALL)), 1.0)
    assert report.passed, render(report)
    assert [row.exact for row in report.rows] == [True, False, False, True]
    assert [row.lines for row in report.rows] == [(command.END, command.END), *[(command.AFTER, command.AFTER)] * 3]
    tensors = SMALL.layers * 6 + 4  # final norm, embedding, positions, output layer
    assert {row.tensors for row in report.rows} == {len(STATES) * tensors}
    assert any("SIGKILL" in line for line in said)
    assert all(len(cells) == len(render(report)[0]) for cells in render(report))
    repeated = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(repeated) >= command.KILLED_AT + command.END - command.SAVED_AT


def test_a_damaged_checkpoint_is_no_proof(lab: Lab, tmp_path: Path) -> None:
    demo = command.Demo(lab.pool, tmp_path, lambda line: None, replace(SMALL, steps=command.SAVED_AT))
    demo._go(demo.run)
    expected = demo.continued("as saved", demo.onward())
    _, actor = demo.reshaped("actor", "same", WriteOptions())
    change_one_moment(actor / f"iter_{command.SAVED_AT:07d}" / "mp_rank_01" / "distrib_optim.pt")
    row = demo.compared("damaged", expected, demo.onward(), actor, exact=True)
    assert row.equal == row.tensors - 1
    assert not row.passed


@pytest.mark.parametrize(
    "changes",
    [{"equal": 9}, {"tensors": 0, "equal": 0}, {"resumed": {3: 5.25, 4: 5.0000001}}, {"resumed": {3: 5.25}},
     {"resumed": {3: 5.25, 4: math.nan}}, {"resumed": {3: 5.25, 4: 5.1}, "exact": False}, {"lines": (1, 2)},
     {"lines": (0, 0)}],
)  # fmt: skip
def test_a_row_fails(changes: dict[str, object]) -> None:
    assert ROW.passed
    failed = replace(ROW, **changes)
    report = DemoReport((ROW, failed), 1.0)
    assert not failed.passed
    assert not report.passed
    assert "FAILED" in "\n".join(table(report))


def test_nothing_proved_is_a_failure() -> None:
    assert not DemoReport((), 1.0).passed


def test_losses_of_another_layout_may_differ_a_little() -> None:
    assert replace(ROW, resumed={3: 5.2503, 4: 5.0}, exact=False).passed


def piece(offset: int, values: list[float]) -> PlacedPiece:
    return PlacedPiece(("param", "weight"), (4,), (offset,), torch.tensor(values))


def test_pieces_make_a_whole() -> None:
    whole = assembled([piece(2, [3.0, 4.0]), piece(0, [1.0, 2.0]), piece(0, [1.0, 2.0])])
    assert whole["param", "weight"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [([piece(0, [1.0, 2.0])], "missing"), ([piece(0, [1.0] * 4), piece(0, [2.0])], "differ")],
)
def test_pieces_that_make_none_are_refused(pieces: list[PlacedPiece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assembled(pieces)


def test_tensors_in_one_model_only_count_as_different() -> None:
    a, b = {("param", "x"): torch.zeros(2)}, {("param", "x"): torch.zeros(2), ("param", "y"): torch.zeros(2)}
    assert count_equal(a, b) == (2, 1)
    assert count_equal(a, {("param", "x"): torch.tensor([0.0, -0.0])}) == (1, 0)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        command.run_demo(tmp_path)


def test_without_megatron_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=re.escape(to_install("megatron"))):
        command.run_demo()


SCRIPT = "from mcore_rlhf.demo.command import run_demo; run_demo(None, lambda line: print(line, flush=True))"


@pytest.mark.slow
def test_an_interrupt_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "training" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(1.0)
        workers = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in error
    assert len(workers) > command.WORLD
    assert {path.name for path in tmp_path.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}  # torch's own cache
    assert eventually(lambda: not [pid for pid in workers if alive(pid)])


def descendants(pid: int) -> list[int]:
    children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def eventually(condition: object, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.1)
    return False
