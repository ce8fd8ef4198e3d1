"""``tools/reshape_megatron.py``: the flags of Megatron's own script, and what becomes of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mcore_rlhf.convert import ConvertOptions
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint

PROJECT = Path(__file__).resolve().parents[3]
SCRIPT = PROJECT / "tools" / "reshape_megatron.py"
MODULE = PROJECT / "mcore_rlhf" / "cli" / "tools" / SCRIPT.name
GOLDEN = PROJECT / "tests" / "goldens" / "megatron" / "tp2pp2dp2_bf16_do"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reshape_megatron", MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _argv(target: Path, *more: str, source: Path = GOLDEN) -> list[str]:
    return ["--model-type", "GPT", "--loader", "mcore", "--load-dir", str(source), "--save-dir", str(target), *more]


def test_it_reshapes_and_says_what_megatron_drops(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = ("--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "1")
    assert tool.main(_argv(tmp_path / "new", "--saver", "core", *degrees)) == 0
    out = capsys.readouterr().out
    assert "TP2×PP2×DP2 -> TP4×PP1×DP2" in out
    assert "kept, which Megatron's own converter drops:\n  master, exp_avg, exp_avg_sq of 27 parameters" in out
    assert "2 param groups with their step" in out
    assert "the learning-rate scheduler" in out
    new = open_checkpoint(tmp_path / "new", ReadOptions())
    assert (new.parallel.tp, new.parallel.pp, new.parallel.dp) == (4, 1, 2)
    assert new.states == ("master", "exp_avg", "exp_avg_sq")


def test_it_runs_as_a_script(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *_argv(tmp_path / "new", source=tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(PROJECT)},
    )
    assert ran.returncode == 2
    assert ran.stderr == f"error: {tmp_path / 'none'}: no such file or folder\n"


def test_every_flag_reaches_the_library(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ConvertOptions] = []

    def convert(source: Path, target: Path, options: ConvertOptions) -> None:
        seen.append(options)
        raise CheckpointError("far enough")

    monkeypatch.setattr(tool, "convert", convert)
    flags = (
        "--target-tensor-parallel-size 4 --target-pipeline-parallel-size 8 --target-expert-parallel-size 2 "
        "--target-expert-tensor-parallel-size 1 --target-virtual-pipeline-parallel-size 3 "
        "--target-data-parallel-size 16 --true-vocab-size 131 --workers 5 --overwrite"
    )
    assert tool.main(_argv(tmp_path / "new", *flags.split())) == 1
    write = seen[0].write
    assert (write.tp, write.pp, write.ep, write.etp, write.vpp, write.dp) == (4, 8, 2, 1, 3, 16)
    assert (write.vocab_size, seen[0].read.vocab_size, seen[0].workers, seen[0].overwrite) == (131, 131, 5, True)


def test_defaults_are_megatrons(tool: ModuleType) -> None:
    args = tool.parser().parse_args(_argv(Path("new")))
    assert args.target_tensor_parallel_size is None
    assert args.target_pipeline_parallel_size is None
    assert args.target_expert_parallel_size == 1
    assert args.target_virtual_pipeline_parallel_size == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loader llama_mistral", "--loader llama_mistral: this script reshapes Megatron's own checkpoints"),
        ("--saver mixtral_hf", "--saver mixtral_hf"),
        ("--loader mcore --saver megatron", "both must be the same kind"),
        ("--model-type BERT", "only GPT models"),
        ("--saver-transformer-impl transformer_engine", "load the result with --transformer-impl local"),
    ],
)
def test_what_it_cannot_do_is_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert tool.main(_argv(tmp_path / "new", *flags.split())) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_harmless_flags_are_ignored_aloud(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--megatron-path /opt/megatron --max-queue-size 50 --no-checking --position-embedding-type rope"
    assert tool.main(_argv(tmp_path / "new", *flags.split(), "--saver-transformer-impl", "local")) == 0
    out = capsys.readouterr().out
    assert [line.partition(" is ignored")[0] for line in out.splitlines() if line.startswith("note: --")] == [
        "note: --megatron-path", "note: --max-queue-size", "note: --no-checking", "note: --position-embedding-type",
    ]  # fmt: skip


def test_a_flag_that_nobody_knows_is_an_error(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        tool.main(_argv(tmp_path / "new", "--target-tensor-parallel", "4"))
    assert exit_info.value.code == 2


def test_a_vocabulary_file_is_counted(tool: ModuleType, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({f"word{n}": n for n in range(132)}))
    assert tool.true_vocab_size(None, vocabulary) == tool.true_vocab_size(132, vocabulary) == 132
    assert tool.true_vocab_size(7, None) == 7


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        ("[UNK]\nthe\n", None, "give the number of words with --true-vocab-size"),
        ('{"model": {"vocab": {}}}', None, "give the number of words with --true-vocab-size"),
        ('{"a": 0}', 2, "--true-vocab-size 2, but"),
        (None, None, "no such file"),
    ],
)
def test_other_vocabularies_are_refused(
    tool: ModuleType, tmp_path: Path, content: str | None, given: int | None, message: str
) -> None:
    vocabulary = tmp_path / "vocab"
    if content is not None:
        vocabulary.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        tool.true_vocab_size(given, vocabulary)


def test_an_existing_target_is_left_alone(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    assert tool.main(_argv(tmp_path / "new")) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.txt"]
