"""The parts of ``resume-check``: commands and their processes, the moment of the kill, comparing, the broken control."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, Unsupported, UsageError
from mcore_rlhf.manager.prove.check import CheckOptions, ResumeCheck, compare_outputs
from mcore_rlhf.manager.prove.command import RunningCommand, RunPlaces, Template
from mcore_rlhf.manager.prove.compare import StepComparer
from mcore_rlhf.manager.prove.control import chosen, flipped, make_control
from mcore_rlhf.manager.prove.ignored import Ignored
from mcore_rlhf.manager.prove.killing import KillPlan, Watch
from mcore_rlhf.manager.prove.metrics import MetricsComparer, read_lines
from mcore_rlhf.manager.prove.places import root_of
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage.manifest import FileEntry, Manifest, check, crc_of_file
from tests.helpers.damage import flip_a_bit
from tests.unit.manager.roots import make_step

# The command


def test_missing_placeholders_are_all_named_and_near_ones_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ResumeCheck(Template(["train", "{step}", "{metrics}"]), tmp_path / "check", CheckOptions(3, 2))
    assert "no {dir}" in str(caught.value)
    assert "no {steps}: the step to end at, counted from the start of training (it has {step})" in str(caught.value)
    with pytest.raises(UsageError, match="no command was given"):
        Template([]).check()
    Template(["train"], by_environment=True).check()


def test_only_placeholders_are_filled_in() -> None:
    places = RunPlaces(Path("/check it"), "A")
    template = Template(["train", "--out={dir}/x", '{"a": {steps}}', "{other}", "{metrics}", "{resume}"])
    filled = template.filled(places, 5)
    assert filled == ["train", "--out=/check it/A/x", '{"a": 5}', "{other}", "/check it/A.metrics.jsonl", "auto"]
    assert template.environment(places, 5)["MCORE_RLHF_CHECK_DIR"] == "/check it/A"
    assert "'--out=/check it/A/x'" in template.shell(places, 5)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    template = Template(["no-such-program", "{dir}", "{steps}"])
    with pytest.raises(UsageError, match="no-such-program: there is no such program"):
        ResumeCheck(template, tmp_path / "check", CheckOptions(3, 2)).run()


def script(tmp_path: Path, text: str) -> Template:
    (tmp_path / "script.sh").write_text(text)
    return Template(["/bin/sh", str(tmp_path / "script.sh"), "{dir}", "{steps}"])


def test_the_end_of_a_failing_commands_log_is_shown(tmp_path: Path) -> None:
    template = script(tmp_path, 'i=0; while [ $i -lt 30 ]; do echo "line $i"; i=$((i+1)); done; exit 3')
    with pytest.raises(UsageError, match="run A failed: exit code 3\nThe last 20 lines") as caught:
        ResumeCheck(template, tmp_path / "check", CheckOptions(3, 2)).run()
    assert "line 29" in str(caught.value)
    assert "line 9\n" not in str(caught.value)
    assert (tmp_path / "check" / "A.log").read_text().startswith("line 0\n")


def test_a_command_that_saves_nothing_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no folder global_step_N is in it"):
        ResumeCheck(script(tmp_path, "exit 0"), tmp_path / "check", CheckOptions(3, 2)).run()


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.01)
    raise TimeoutError(path)


LAUNCHER = """
setsid sh -c 'setsid sleep 300 & echo $! > {pid}; wait' &
{end}
"""


@pytest.mark.parametrize("end", ["wait", "sleep 0.3; exit 1", "kill -9 $$"], ids=["timeout", "fails", "killed"])
def test_no_process_survives_in_whatever_session_it_is(tmp_path: Path, end: str) -> None:
    pid = tmp_path / "pid"
    template = script(tmp_path, LAUNCHER.format(pid=pid, end=end))
    expected = "longer than 0.5 s" if end == "wait" else "failed: exit code"
    with pytest.raises(UsageError, match=expected):
        ResumeCheck(template, tmp_path / "check", CheckOptions(3, 2, timeout=0.5)).run()
    if pid.exists():
        assert not is_alive(int(pid.read_text()))


@pytest.mark.parametrize("ready", [True, False])
def test_a_worker_without_the_mark_is_found_by_its_parent(tmp_path: Path, ready: bool) -> None:
    pid = tmp_path / "pid"
    words = ["/bin/sh", "-c", f"env -i setsid sleep 300 & echo $! > {pid}; wait"]
    with RunningCommand(words, {}, tmp_path / "log") as command:
        worker = wait_for(pid)
        assert is_alive(worker)
        if ready:
            command.get_ready()
        assert command.kill() == 2
    assert not is_alive(worker)
    assert is_alive(os.getpid())


def test_interrupting_ends_the_command(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunningCommand(["sleep", "300"], {}, tmp_path / "log") as command:
        raise KeyboardInterrupt
    assert command.exit_code == -9


# The moment


class FakeCommand:
    """Runs until it is killed, or for some polls."""

    seconds = 1.0

    def __init__(self, polls: int = 10**6) -> None:
        self.polls, self.killed = polls, False

    def ended(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def get_ready(self) -> None:
        pass

    def kill(self) -> int:
        self.killed = True
        return 2


def writing(root: Path, step: int) -> Path:
    """A step that is being written, with messages of ranks but no file yet."""
    folder = root / f".global_step_{step}.partial-0"
    (folder / ".parts").mkdir(parents=True)
    return folder


def test_during_save_waits_for_files_of_a_later_step(tmp_path: Path) -> None:
    make_step(tmp_path, 3)
    folder = writing(tmp_path, 3)
    (folder / "actor").mkdir()
    (folder / "actor" / "early.pt").write_bytes(b"x")
    polls = 0

    def tick() -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            (writing(tmp_path, 4) / "actor").mkdir()
        if polls == 6:
            (tmp_path / ".global_step_4.partial-0" / "actor" / "state.pt").write_bytes(b"12345")

    command, plan = FakeCommand(), KillPlan("during-save", 3, 5, 0.0, random.Random(0))
    shutil.rmtree(folder)
    kill = plan.strike(command, Watch(tmp_path), tick)  # type: ignore[arg-type]
    assert command.killed
    assert kill is not None
    assert (kill.resumes_from, polls) == (3, 6)
    assert kill.phase == "in the middle of the save of step 4: 1 of its files were there, 5 bytes"


def test_nothing_is_killed_before_step_n_is_committed(tmp_path: Path) -> None:
    make_step(tmp_path, 2)
    (make_step(tmp_path, 3) / "actor" / "weights.bin").unlink()  # there, but not whole
    command, plan = FakeCommand(polls=20), KillPlan("step-commit", 3, 5, 0.0, random.Random(0))
    assert plan.strike(command, Watch(tmp_path), lambda: None) is None  # type: ignore[arg-type]
    assert not command.killed


@pytest.mark.parametrize("moment", ["step-commit", "during-save", "random"])
def test_a_kill_after_the_last_commit_is_a_miss(tmp_path: Path, moment: str) -> None:
    for step in (3, 5):
        make_step(tmp_path, step)
    plan = KillPlan(moment, 3, 5, 0.0, random.Random(0))  # type: ignore[arg-type]
    assert plan.strike(FakeCommand(polls=50), Watch(tmp_path), lambda: None) is None  # type: ignore[arg-type]


def test_a_kill_that_came_too_late_is_a_miss_and_no_failure_of_the_command(tmp_path: Path) -> None:
    """It was killed, so that its exit code says nothing; the step that was being written was whole by then."""
    check = ResumeCheck(script(tmp_path, "sleep 60"), tmp_path / "check", CheckOptions(1, 2))
    places = RunPlaces(check.folder, "B")

    class Late(KillPlan):
        def strike(self, command: RunningCommand, *others: object) -> None:  # type: ignore[override]
            command.kill()

    assert check._kill_once(places, Late("during-save", 1, 3, 0.0, random.Random(0)), 0) is None


def test_two_roots_are_ambiguous(tmp_path: Path) -> None:
    make_step(tmp_path / "a" / "checkpoints", 1)
    assert root_of(tmp_path) == tmp_path / "a" / "checkpoints"
    make_step(tmp_path / "b", 1)
    with pytest.raises(UsageError, match="2 folders hold steps: a/checkpoints, b"):
        root_of(tmp_path)


# Comparing steps


def save_step(root: Path, step: int, files: dict[str, object]) -> Path:
    """A committed step: trees become .pt files, text stays text."""
    folder = root / f"global_step_{step}"
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            torch.save(content, path)
    entries = {name: FileEntry((folder / name).stat().st_size, crc_of_file(folder / name)) for name in files}
    (folder / "manifest.json").write_text(Manifest(entries, step=step, transaction=str(root)).to_json())
    return folder


def tree(root: Path) -> dict[str, object]:
    """Every kind of value that is found in a step."""
    flat = torch.arange(24, dtype=torch.float32)
    return {
        "views": [flat[:12].view(3, 4), flat[12:].view(4, 3).t()],
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "args": Namespace(save=f"{root}/checkpoints", lr=0.1, iteration=hash(root) % 7, master_port=hash(root) % 100),
        "ordered": OrderedDict(a=1, b=(2, None)),
        "nan": float("nan"),
        "numpy": np.arange(3),
        "flag": True,
    }


def compared(tmp_path: Path, change: object = None, **files: object) -> tuple[list[str], int]:
    """Differences between a step and one that was changed, and how many values were ignored."""
    folders = []
    for name in "AB":
        content = tree(tmp_path / name)
        if name == "B" and callable(change):
            change(content)
        folders.append(save_step(tmp_path / name, 5, {"actor/state.pt": content, **files}))
    found = StepComparer((tmp_path / "A", tmp_path / "B")).compare(folders[0], folders[1])
    shown = [f"{f.where}:{f.key}: {f.first} {f.second} {f.detail}".strip() for f in found.tally.findings]
    assert found.tally.differing == len(shown)
    return shown, found.tally.ignored


def test_equal_steps_are_equal_although_runs_have_names(tmp_path: Path) -> None:
    found, ignored = compared(tmp_path, **{"rlhf/rlhf_state.json": '{"a": [1.0, NaN]}', "note.txt": "x"})
    assert (found, ignored) == ([], 1 + 2 * 3 + 2 + 1)


def put(key: str, value: object) -> object:
    return lambda content: content.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c["views"][0][1].__setitem__(2, 6.5), ":views/0: {f} {f} 1 of 12 elements; first: [1, 2] is 6.0 and 6.5"),
        (lambda c: c["views"][1][2].__setitem__(3, -1.0), ":views/1: {f} {f} 1 of 12 elements; first: [2, 3] is 23.0 and -1.0"),
        (put("bf16", torch.tensor([1, 1.0078125, 2]).bfloat16()), ":bf16: {b} {b} 2 of 3 elements; first: [1] is 1.0 and 1.0078125"),
        (put("bf16", torch.ones(3)), ":bf16: bfloat16 [3] float32 [3]"),
        (put("empty", torch.empty(1)), ":empty: float32 [0] float32 [1]"),
        (put("ordered", {"a": 1, "b": (2, None)}), ":ordered: OrderedDict of 2 dict of 2"),
        (lambda c: c["ordered"].pop("b"), ":ordered/b: tuple of 2 not there"),
        (lambda c: c.update(more=1), ":more: not there 1"),
        (put("nan", 0.0), ":nan: nan 0.0"),
        (put("flag", 1), ":flag: True 1"),
        (put("numpy", np.arange(3, dtype=np.int32)), ":numpy: array([0, 1, 2]) array([0, 1, 2], dtype=int32)"),
        (lambda c: setattr(c["args"], "lr", 0.2), ":args/lr: 0.1 0.2"),
        (lambda c: setattr(c["args"], "save", "/elsewhere"), ":args/save:"),
    ],
)  # fmt: skip
def test_one_different_value_is_named(tmp_path: Path, change: object, expected: str) -> None:
    (found,), _ = compared(tmp_path, change)
    assert found.startswith("actor/state.pt" + expected.format(f="float32 [3, 4]", b="bfloat16 [3]")), found


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    folders = [save_step(tmp_path / name, 1, {"x.pt": {"a": zero}}) for name, zero in (("A", 0.0), ("B", -0.0))]
    assert not StepComparer((tmp_path / "A", tmp_path / "B")).compare(*folders).tally.equal


def test_files_and_numbers_in_json_are_compared(tmp_path: Path) -> None:
    a = save_step(tmp_path / "A", 1, {"s.json": '{"kl": [0.10, 1, "2.0"]}', "only.txt": "", "t.txt": "one"})
    b = save_step(tmp_path / "B", 1, {"s.json": '{"kl": [0.1, 1, 2.0]}', "t.txt": "two"})
    found = StepComparer((tmp_path / "A", tmp_path / "B")).compare(a, b).tally.findings
    assert [(f.where, f.key, f.first, f.second) for f in found] == [
        ("manifest.json", "files/only.txt", "dict of 2", "not there"),
        ("only.txt", "", "there", "not there"),
        ("s.json", "kl/0", "0.10", "0.1"),
        ("s.json", "kl/2", "'2.0'", "2.0"),
        ("t.txt", "", "3 bytes", "3 bytes"),
    ]


def test_what_the_user_ignores_is_counted(tmp_path: Path) -> None:
    folders = [save_step(tmp_path / name, 1, {"s.json": json.dumps({"host": name, "b": 1})}) for name in "AB"]
    comparer = StepComparer((tmp_path / "A", tmp_path / "B"), Ignored(("s.json:host",)))
    tally = comparer.compare(*folders).tally
    assert (tally.equal, tally.ignored) == (True, 1 + 2 + 1 + 1)


def test_a_damaged_step_is_not_compared(tmp_path: Path) -> None:
    a, b = (save_step(tmp_path / name, 1, {"x.pt": {"a": torch.ones(100)}}) for name in "AB")
    flip_a_bit(b / "x.pt")
    with pytest.raises(CheckpointError, match="is damaged"):
        StepComparer((tmp_path / "A", tmp_path / "B")).compare(a, b)


def test_finished_runs_can_be_compared(tmp_path: Path) -> None:
    for name in "AB":
        save_step(tmp_path / name / "x", 5, {"x.pt": {"a": torch.ones(3)}})
    options = CheckOptions(3, 2)
    found = compare_outputs(tmp_path / "A", tmp_path / "B", 5, options)
    assert (found.equal, found.metrics) == (True, None)
    (tmp_path / "A.metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(NotACheckpoint, match=r"B\.metrics\.jsonl"):
        compare_outputs(tmp_path / "A", tmp_path / "B", 5, options)
    with pytest.raises(NotACheckpoint, match="run A has not committed step 6; committed: 5"):
        compare_outputs(tmp_path / "A", tmp_path / "B", 6, options)


# Comparing metrics


def metrics(tmp_path: Path, a: str, b: str) -> tuple[list[str], int, list[int]]:
    for name, text in (("a", a), ("b", b)):
        (tmp_path / name).write_text(text)
    found = MetricsComparer().compare(tmp_path / "a", tmp_path / "b")
    shown = [f"{f.key}: {f.first} {f.second} {f.detail}".strip() for f in found.tally.findings]
    return shown, found.equal, found.began_again


WHOLE = '{"step":1,"x":0.5,"seconds":1}\n{"step":2,"x":0.25}\n{"step":3,"x":NaN}\n'


@pytest.mark.parametrize(
    ("text", "expected", "equal", "again"),
    [
        (WHOLE, [], 3, []),
        ('{"step":1,"x":0.5,"seconds":7}\n{"step":2,"x":0.25}\n{"step":2,"x":0.25}\n{"step":3,"x":NaN}\n', [], 4, [2]),
        ('{"step":1,"x":0.5}\n{"step":2,"x":0.25}\n{"step":2,"x":0.26}\n{"step":3,"x":NaN}', ["step 2/x: 0.25 0.26 done again"], 3, [2]),
        ('{"step":1,"x":0.5}\n{"step":2,"x":0.250}\n{"step":3,"x":1.0}\n', ["step 2/x: 0.25 0.250", "step 3/x: NaN 1.0"], 1, []),
        ('{"step":1,"x":0.5}\n{"step":3,"x":NaN,"y":1}\n', ["step 3/y: not there 1", "step 2: there not there"], 1, []),
        ('{"step":1,"x":0.5}\n{"step":2,"x{"step":2,"x":0.25}\n{"step":3,"x":NaN}\n{"st', [], 3, []),  # torn by the kill
        (WHOLE + '{"step":4}\n', ["step 4: not there there"], 3, []),
    ],
)  # fmt: skip
def test_lines_of_metrics(tmp_path: Path, text: str, expected: list[str], equal: int, again: list[int]) -> None:
    assert metrics(tmp_path, WHOLE, text) == (expected, equal, again)


@pytest.mark.parametrize("text", ["loss 0.5\n", '{"loss": 1}\n', '{"step": "one"}\n', '{"step": true}\n'])
def test_what_is_no_line_of_metrics_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(CheckpointError, match="a:1: "):
        read_lines(tmp_path / "a")


# The control


def test_flipping_moves_every_number_by_its_last_bit() -> None:
    for dtype, word in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        numbers = torch.tensor([1.0, -2.5, 0.0, 3.0], dtype=dtype)
        data = bytearray(flipped(numbers.view(torch.uint8).numpy().tobytes(), dtype.itemsize))
        changed = torch.frombuffer(data, dtype=dtype).view(word) ^ numbers.view(word)
        assert changed.tolist() == [1, 1, 1, 1]


def control_source(tmp_path: Path, optimizer: object) -> Path:
    state = {"model": {"w": torch.ones(50)}, "optimizer": optimizer}
    save_step(tmp_path / "B" / "x", 3, {"actor/state.pt": state, "rng/rng_state.pt": {"exp_avg": torch.ones(99)}})
    save_step(tmp_path / "B" / "x", 4, {"actor/state.pt": state})
    writing(tmp_path / "B" / "x", 5)
    (tmp_path / "B" / "config.yaml").write_text("kept")
    return tmp_path / "B"


def test_the_control_is_broken_in_one_tensor_and_intact_by_every_checksum(tmp_path: Path) -> None:
    adam = {"state": {0: {"exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(7)}, 1: {"exp_avg": torch.ones(6)}}}
    broken = make_control(control_source(tmp_path, adam), tmp_path / "C", 3)
    assert broken.key == "optimizer/state/1/exp_avg"
    folder = tmp_path / "C" / "x" / "global_step_3"
    assert sorted(path.name for path in (tmp_path / "C").rglob("*") if path.is_file()) == [
        "config.yaml", "manifest.json", "rng_state.pt", "state.pt",
    ]  # fmt: skip
    assert not check(folder, steps.read_manifest(folder))
    assert zipfile.ZipFile(folder / "actor" / "state.pt").testzip() is None
    was = torch.load(tmp_path / "B" / "x" / "global_step_3" / "actor" / "state.pt", weights_only=True)
    now = torch.load(folder / "actor" / "state.pt", weights_only=True)
    moved = now["optimizer"]["state"][1].pop("exp_avg") - was["optimizer"]["state"][1].pop("exp_avg")
    assert moved.tolist() == [2.0**-23] * 6
    assert str(now) == str(was)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"state": {0: {"momentum_buffer": torch.ones(3)}}}, "optimizer/state/0/momentum_buffer"),
        ({"state": {}}, "model/w"),
        ({"state": {0: {"step": torch.tensor(1.0)}}}, "optimizer/state/0/step"),
    ],
)
def test_what_is_broken_where_there_is_no_adam(tmp_path: Path, optimizer: object, expected: str) -> None:
    source = control_source(tmp_path, optimizer)
    assert chosen(source / "x" / "global_step_3").key == expected


def test_nothing_to_break_is_said(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 3, {"actor/state.pt": {"tokens": torch.arange(3)}, "rng/r.pt": {"a": torch.ones(3)}})
    with pytest.raises(Unsupported, match="nothing to break"):
        chosen(folder)
