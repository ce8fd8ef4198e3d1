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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.demo import command
from mcore_rlhf.demo.command import DemoReport, ProofRow, count_equal, render, table
from mcore_rlhf.demo.placed_state import PlacedPiece, assembled
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.installation import to_install
from tests.reference.lab import Lab
from tests.reference.tampering import change_one_moment, change_one_weight, swap_gate_and_up

PROJECT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize(("tamper", "wrong"), [(swap_gate_and_up, 1e-4), (change_one_weight, 1e-9)])
def test_a_wrong_weight_is_seen_by_what_the_model_says_on_another_layout(
    lab: Lab, tmp_path: Path, tamper: Callable[[str], None], wrong: float
) -> None:
    """By the log-probabilities alone, of another layout: a single bit is far more than all roundings."""
    demo = command.Demo(lab.pool, tmp_path, lambda line: None, replace(SMALL, steps=command.SAVED_AT))
    demo._go(demo.run)
    expected = demo.continued("as saved", demo.onward())
    _, actor = demo.reshaped("actor", "one", WriteOptions(tp=1, pp=1, dp=2))
    onward = demo.onward(tp=1, pp=1)
    right = demo.compared("right", expected, onward, actor)
    assert 0 < right.apart <= right.limit < 1e-10
    assert right.passed
    file = str(actor / f"iter_{command.SAVED_AT:07d}" / "mp_rank_00" / "model_optim_rng.pt")
    lab.pool.run(tamper, file, world_size=1)
    row = demo.compared("wrong", expected, onward, actor)
    assert row.equal == row.tensors - 1
    assert row.apart > max(wrong, 100 * row.limit)
    assert not replace(row, equal=row.tensors).passed


@pytest.mark.slow
def test_other_roundings_are_no_other_model(tmp_path: Path) -> None:
    """As on a processor that computes in bf16 in a way of its own, such as Intel's AMX."""
    with WorkerPool(command.WORLD, preload="tests.reference.rounding_preload") as pool:
        report = DemoReport(tuple(command.prove(pool, tmp_path, lambda line: None, SMALL)), 1.0)
    assert report.passed, render(report)
    assert all(0 < row.max_difference < math.inf for row in report.rows if not row.exact)


ISA = {
    "SSE41": "sse4_1", "AVX": "avx", "AVX2": "avx2", "AVX2_VNNI": "avx_vnni", "AVX512_CORE": "avx512bw", "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16", "AVX512_CORE_FP16": "avx512_fp16", "AVX512_CORE_AMX": "amx_bf16",
}  # fmt: skip
"""oneDNN's instruction sets, and the flag of a processor that has one. Sources: oneDNN, CPU dispatcher; Linux, ``cpufeatures.h``."""


@pytest.mark.slow
@pytest.mark.parametrize("isa", [*ISA, "as AMX rounds"])
def test_the_demo_of_the_readme_passes_with_every_instruction_set(isa: str, tmp_path: Path) -> None:
    if isa in ISA:
        if ISA[isa] not in Path("/proc/cpuinfo").read_text().split():
            pytest.skip(f"this processor has no {ISA[isa]}")
        command_line = [sys.executable, "-m", "mcore_rlhf", "demo"]
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    else:
        command_line = [sys.executable, "-c", ROUNDED]
        environment = dict(os.environ)
    environment = {**environment, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Proved in" in done.stdout
    assert "FAILED" not in done.stdout


ROUNDED = """
from functools import partial
from mcore_rlhf.demo import command
command.WorkerPool = partial(command.WorkerPool, preload="tests.reference.rounding_preload")
report = command.run_demo()
print("\\n".join(command.table(report)))
raise SystemExit(not report.passed)
"""


@pytest.mark.parametrize(
    "changes",
    [{"equal": 9}, {"tensors": 0, "equal": 0}, {"resumed": {3: 5.25, 4: 5.0000001}}, {"resumed": {3: 5.25}},
     {"resumed": {3: 5.25, 4: math.nan}}, {"resumed": {3: 5.25, 4: math.nan}, "exact": False}, {"lines": (1, 2)},
     {"lines": (0, 0)}, {"apart": 1e-16}, {"apart": 2e-12, "limit": 1e-12, "exact": False},
     {"apart": math.nan, "limit": 1e-12, "exact": False}, {"apart": math.inf, "limit": math.inf, "exact": False}],
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


def test_losses_of_another_layout_are_of_other_samples() -> None:
    """A loss of GRPO is near 0 by its nature: a share of it is no measure."""
    other = replace(ROW, uninterrupted={3: -0.1, 4: 1e-4}, resumed={3: -0.1044, 4: -1e-3}, exact=False)
    assert replace(other, apart=1e-15, limit=1e-12).passed


def test_the_limit_grows_with_what_fp32_shows() -> None:
    exact = torch.zeros(5, 6, dtype=torch.float64)
    assert command.rounding_limit(exact, exact + 2.0**-20, 10_000) == pytest.approx(
        2 * (2 * 10_000 * 7) ** 0.5 * 2.0**-49
    )
    assert not command.rounding_limit(exact, exact * math.nan, 10) >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_furthest_away(value: float) -> None:
    one = torch.zeros(2, 3, dtype=torch.float64)
    other = one.clone()
    other[1, 2] = value
    assert command.furthest([one, one], [one, other]) == math.inf
    assert command.furthest([one, one + 0.5], [one]) == 0.5, "ranks of the source that do not agree"
    assert command.furthest([one], [one, one - 0.25]) == 0.25


def test_the_readme_shows_what_the_demo_prints() -> None:
    shown = re.search(
        r"^resumed on.*?^```$", (PROJECT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert shown is not None
    lines, report = shown[0].splitlines()[:-1], DemoReport((ROW,), 1.0)
    header = table(report)[0].replace("loss 3 ", "loss 11 ").replace("loss 4 ", "loss 12 ")
    assert lines[0].split() == header.split()
    assert re.sub(r"in \d+ s", "in 1 s", "\n".join(lines[lines.index("") + 1 :])) == command.verdict(report)


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
