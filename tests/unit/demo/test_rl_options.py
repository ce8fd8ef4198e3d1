"""The command line of the trainer, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.rl.options import Options, parse
from mcore_rlhf.demo.rl.task import Reversal
from mcore_rlhf.errors import UsageError


def test_nothing_given_means_the_defaults() -> None:
    assert parse([]) == Options()


def test_everything_of_the_command_line_arrives() -> None:
    text = (
        "--algorithm ppo --tp 2 --pp 4 --vpp 3 --steps 7 --save-interval 2 --output-dir out --experiment-name e --async-save"
        " --resume 20 --keep-last 3 --metrics m --seed 5 --dropout 0.25 --dtype fp32 --optimizer plain --layers 24"
        " --hidden-size 32 --lr 0.5 --lr-decay-steps 9 --prompts-per-step 6 --group-size 4 --micro-batches 8"
    )
    assert parse(text.split()) == Options(
        "ppo", 2, 4, 3, 7, 2, Path("out"), "e", True, "20", 3, Path("m"), 5, 0.25, "fp32", "plain", 24, 32, 0.5, 9, 6, 4, 8
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["--algorithm dpo", "--tp 0", "--steps -1", "--save-interval -1", "--keep-last 0", "--tp two", "--unknown"]
)
def test_mistakes_end_with_a_message(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(text.split())
    assert ended.value.code == 2
    assert text.split()[0] in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    assert "--save-interval" in capsys.readouterr().out


def test_checkpoints_lie_where_the_manager_documents_it() -> None:
    assert parse(["--output-dir", "o", "--experiment-name", "e"]).root == Path("o/e/checkpoints")


def test_data_parallelism_is_what_is_left_of_the_world() -> None:
    options = Options(tp=2, pp=2, vpp=2, layers=8)
    assert options.parallel(12) == Parallel(tp=2, pp=2, vpp=2, dp=3)


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [(Options(tp=2, pp=2), 6, "6 processes cannot be divided into TP2×PP2"), (Options(tp=2), 1, "1 processes"),
     (Options(pp=2, vpp=2), 2, "2 layers cannot be divided into 4 model chunks")],
)  # fmt: skip
def test_layouts_that_do_not_work_out(options: Options, world: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.parallel(world)


@pytest.mark.parametrize(
    ("dp", "message"), [(3, "16 prompts per step"), (16, "8 answers of a rank"), (32, "16 prompts")]
)
def test_batches_that_do_not_work_out(dp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(Options(), micro_batches=3 if dp == 16 else 1).training(dp)


def test_batches_are_cut_by_rank_and_by_stage() -> None:
    training = Options(pp=4, prompts_per_step=8, group_size=4).training(dp=2)
    assert (training.global_batch_size, training.micro_batch_size) == (32, 4)
    assert training.num_microbatches(dp=2) == 4


def test_no_layout_up_to_tp4_pads_the_vocabulary() -> None:
    model = Options().model(Reversal())
    assert {model.padded_vocab_size(tp) for tp in (1, 2, 4)} == {model.vocab_size}
