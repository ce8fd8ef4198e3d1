"""Command lines that cannot be: one line for each mistake, and no traceback of Megatron's."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from mcore_rlhf.demo.rl.options import in_own_words, parse
from mcore_rlhf.errors import Corrupt, LayoutMismatch

PACKAGE = Path(__file__).resolve().parents[3] / "mcore_rlhf"
GOLDEN = Path(__file__).resolve().parents[2] / "goldens" / "megatron" / "tp1_bf16_do"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The lines behind ``error:`` of a command line that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        parse([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--dropout 2", "--dropout: expected a probability from 0 to less than 1, found 2.0"),
        ("--dropout -0.1", "--dropout"),
        ("--dropout nan", "--dropout"),
        ("--lr nan", "--lr: expected a positive number, found nan"),
        ("--lr inf", "--lr"),
        ("--lr 0", "--lr"),
        ("--lr-decay-steps 5", "--lr-decay-steps: expected at least 6"),
        ("--seed -1", "--seed: expected a number from 0 to 4294967295, found -1"),
        ("--seed 4294967296", "--seed"),
        ("--seed 4294967295 --pp 2", "--seed"),
        ("--vpp 2", "--vpp: 2 model chunks per stage need more than one stage"),
        ("--vpp 2 --pp 2 --micro-batches 3", "--micro-batches: expected a multiple of --pp 2 with --vpp, found 3"),
        ("--tp 3", "--tp: expected a divisor of the 4 attention heads, found 3"),
        ("--hidden-size 3", "--hidden-size: expected at least 4"),
    ],
)
def test_each_mistake_is_one_line(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    (line,) = refused(capsys, *text.split())
    assert line.startswith(message)


def test_all_mistakes_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, "--dropout", 2, "--lr", "nan", "--seed", -1, "--vpp", 2)
    assert [line.partition(":")[0] for line in lines] == ["--dropout", "--lr", "--seed", "--vpp"]


def test_what_lies_at_the_edge_is_taken() -> None:
    text = "--dropout 0.99 --lr 1e-9 --lr-decay-steps 6 --seed 4294967295 --tp 4 --vpp 1"
    found = parse(text.split())
    assert (found.seed, found.tp, found.vpp) == (4294967295, 4, None)


@pytest.mark.parametrize("below", ["actor", "actor/iter_0000002"])
def test_a_model_of_a_step_names_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str) -> None:
    step = tmp_path / "run" / "global_step_2"
    shutil.copytree(GOLDEN, step / "actor")
    (line,) = refused(capsys, "--resume", step / below)
    assert line.startswith("--resume: ")
    assert line.endswith(f"give the step's folder: {step}")
    assert parse(["--resume", str(step)]).resume == str(step)


def test_a_model_of_no_step_says_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN, tmp_path / "alone")
    monkeypatch.setenv("WHERE", str(tmp_path))
    (line,) = refused(capsys, "--resume", "$WHERE/alone")
    assert f"{tmp_path}/alone is one model, and a run has several; give a step's folder, global_step_N" in line


def test_a_step_that_is_not_there_is_left_to_the_manager(tmp_path: Path) -> None:
    assert parse(["--resume", str(tmp_path / "none")]).resume == str(tmp_path / "none")


def test_another_schedule_is_explained_by_what_this_trainer_has() -> None:
    """The advice is read off the engine's source: importing it takes Megatron."""
    source = ast.parse((PACKAGE / "engines" / "megatron" / "load.py").read_text())
    texts = [node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    (advice,) = [text for text in texts if "opt_param_scheduler" in text]
    what = "actor: learning-rate schedule: class input value 0.1 and checkpoint value 0.002 do not match"
    told = in_own_words(LayoutMismatch(f"{what}\n{advice}"))
    assert type(told) is LayoutMismatch
    first, second = str(told).splitlines()
    assert first == what
    assert "give --lr, --lr-decay-steps" in second
    assert "opt_param_scheduler" not in second


def test_other_errors_stay_what_they_are() -> None:
    error = Corrupt("a\nb")
    assert in_own_words(error) is error
