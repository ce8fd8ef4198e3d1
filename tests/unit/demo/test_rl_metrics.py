"""The metrics file: exact, appended, and a witness of what a resume did."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mcore_rlhf.demo.rl.metrics import MetricsLog, differences, read_metrics
from mcore_rlhf.errors import Corrupt, NotACheckpoint, StorageError


def write(path: Path, *lines: dict[str, object]) -> None:
    with MetricsLog(path) as log:
        for line in lines:
            log.append(line)  # type: ignore[arg-type]


def test_floats_survive_to_the_last_bit(tmp_path: Path) -> None:
    values = {"a": 0.1, "b": math.pi, "c": 5e-324, "d": -0.0, "e": math.inf, "f": math.nan}
    write(tmp_path / "deep" / "metrics.jsonl", {"step": 3, "ids": [1, 2], "digest": "ab", "gone": None, **values})
    (text,) = read_metrics(tmp_path / "deep" / "metrics.jsonl").values()
    found = json.loads(text)
    assert [float.fromhex(found[name]) for name in "abcde"] == [values[name] for name in "abcde"]
    assert math.copysign(1, float.fromhex(found["d"])) == -1
    assert math.isnan(float.fromhex(found["f"]))
    assert (found["step"], found["ids"], found["digest"]) == (3, [1, 2], "ab")
    assert "gone" not in found


def test_a_resumed_run_appends_and_equal_repetitions_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, {"step": 1}, {"step": 2, "loss": 0.5})
    write(path, {"step": 2, "loss": 0.5}, {"step": 3})
    assert len(path.read_text().splitlines()) == 4
    assert list(read_metrics(path)) == [1, 2, 3]


def test_a_step_that_came_out_otherwise_is_found(tmp_path: Path) -> None:
    write(tmp_path / "m", {"step": 2, "loss": 0.5, "kl": 1.0}, {"step": 2, "loss": 0.5000000000000001, "lr": 1.0})
    with pytest.raises(Corrupt, match=r"m:2: step 2 was repeated .*: loss, kl, lr$"):
        read_metrics(tmp_path / "m")


@pytest.mark.parametrize("keep", [1, 5, 10])
def test_a_line_that_a_kill_cut_short_is_not_there(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m"
    write(path, {"step": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:keep])
    assert list(read_metrics(path)) == [1]
    write(path, {"step": 2})
    assert path.read_bytes() == whole + b'{"step":2}\n'


def test_a_file_that_is_nothing_but_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"st')
    write(tmp_path / "m", {"step": 1})
    assert (tmp_path / "m").read_bytes() == b'{"step":1}\n'


@pytest.mark.parametrize("line", ["hello", "[1]", '{"loss": 1}', '{"step": "1"}', ""])
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "m").write_text(f'{{"step":1}}\n{line}\n')
    with pytest.raises(Corrupt, match="m:2: expected a JSON object with a step"):
        read_metrics(tmp_path / "m")


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        read_metrics(tmp_path / "absent")
    (tmp_path / "m").write_bytes(b"\xff\xfe\n")
    with pytest.raises(NotACheckpoint, match="no file of metrics"):
        read_metrics(tmp_path / "m")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")


def test_differences_are_named_once() -> None:
    assert differences('{"a": 1, "b": 2, "c": null}', '{"a": 1, "b": 3}') == ["b", "c"]
