from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rlhf.cli import progress
from mcore_rlhf.cli.output import Column, count, duration, plain, print_table, rate, size
from mcore_rlhf.storage.paths import parse_size

from .conftest import Cli


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.00 KiB"),
        (3_446_711_910, "3.21 GiB"),
        (1 << 60, "1024.00 PiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GB", 2 * 10**9), ("2 gib", 2 << 30), ("2G", 2 << 30), ("1.5MB", 1_500_000), ("500000", 500_000), ("7B", 7)],
)
def test_sizes_that_people_write(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2XB", "1e9", "two"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="should be a size"):
        parse_size(text)


def test_counts_rates_and_durations() -> None:
    assert (count(1, "file"), count(2000, "file"), count(0, "copy")) == ("1 file", "2,000 files", "0 copies")
    assert (rate(3 << 30, 2), rate(1 << 20, 1), rate(0, 0)) == ("1.50 GiB/s", "1.0 MiB/s", "0.0 MiB/s")
    assert (duration(0.44), duration(60), duration(3600 + 5 * 60)) == ("0.4 s", "1 min 00 s", "1 h 05 min")


def test_json_takes_everything() -> None:
    assert plain({"a": (1, None), 2: float("inf"), "t": object}) == {"a": [1, None], "2": "inf", "t": str(object)}


def test_lines_first_every_few_seconds_and_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.shown_progress() as shown:
        shown.stage("converting", 10 << 20)
        for _ in range(10):
            now[0] += 1
            shown.advance(1 << 20)
        shown.stage("checking", 0)
        now[0] += 2
    assert capsys.readouterr().err.splitlines() == [
        "converting: 10.00 MiB",
        "converting: 5.00 of 10.00 MiB (50 %), 1.0 MiB/s, 5.0 s left",
        "converting: 10.00 of 10.00 MiB (100 %), 1.0 MiB/s, 0.0 s left",
        "converting: done, 10.00 MiB in 10.0 s, 1.0 MiB/s",
        "checking …",
        "checking: done, 2.0 s",
    ]


def test_stages_are_numbered_and_never_beyond_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.shown_progress(2) as shown:
        shown.stage("converting", 1 << 20)
        now[0] += 6
        shown.advance(3 << 20)  # more than was thought
        shown.stage("checking", 0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "converting (stage 1 of 2): 1.00 MiB"
    assert "1.00 of 1.00 MiB (100 %)" in said[1]
    assert said[3] == "checking (stage 2 of 2) …"


def test_json_lines_for_schedulers(tp1: Path, tmp_path: Path, cli: Cli) -> None:
    outcome = cli("convert", tp1, tmp_path / "new", "--verify", "--progress", "json", "--json")
    lines = [json.loads(line) for line in outcome.stderr.splitlines()]
    ended = [line for line in lines if line["done"]]
    assert [line["stage"].split()[0] for line in ended] == ["converting", "checking", "verifying", "comparing"]
    assert [(line["number"], line["stages"]) for line in ended] == [(n, 4) for n in (1, 2, 3, 4)]
    assert all(line["total"] is None or line["bytes"] <= line["total"] for line in lines)
    by_stage = {line["stage"].split()[0]: line for line in ended}
    for stage in ("converting", "checking", "verifying", "comparing"):  # what was foreseen is what was read
        assert by_stage[stage]["bytes"] == (by_stage[stage]["total"] or 0), stage
    assert cli("verify", tp1, "--progress", "none").stderr == ""


def test_a_stage_that_fails_is_not_said_to_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress.shown_progress() as shown:
            shown.stage("converting", 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert capsys.readouterr().err == "converting: 10 bytes\n"


def test_a_closed_log_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(progress.sys, "stderr", Closed())
    with progress.shown_progress() as shown:
        shown.stage("converting", 10)
        shown.advance(10)


def test_a_table_of_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        [Column("name"), Column("n", right=True), Column("")], [["a\x1b[31m", "10", ""], ["bc", "9", ""]], limit=1
    )
    assert capsys.readouterr().out == "  name        n\n  a\\x1b[31m  10\n  … and 1 more\n"


def test_on_a_narrow_terminal_the_widest_cells_are_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "24")
    print_table([Column("name"), Column("n", right=True)], [["abcdefghijklmnopqrstuvwxyz", "7"]])
    assert capsys.readouterr().out.splitlines()[1:] == ["  abcdefghijklmnopqrs  7", "  tuvwxyz"]
