"""What is said of a word that is not known; what the tables send people to exists."""

from __future__ import annotations

import shlex

import click
import pytest
import yaml
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.core.yaml_text import wrong_yaml
from mcore_rlhf.formats.registry import FORMATS as KNOWN
from mcore_rlhf.suggestions import FLAGS, FORMATS, did_you_mean, hub_name, meant
from mcore_rlhf.trainers.known import TRAINERS


def test_the_tables_lead_to_what_there_is() -> None:
    convert = app.commands["convert"]
    params = convert.get_params(click.Context(convert))
    options = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    assert {option for option in FLAGS.values() if option.startswith("--")} <= options
    assert {place for place in FLAGS.values() if not place.startswith("--")} == {"SRC", "DST"}
    names = {known.name for known in KNOWN} | {one.name for one in TRAINERS if one.formats}
    assert set(FORMATS.values()) <= names
    # A word that is right already leads nowhere else.
    assert not set(FORMATS) & names


@pytest.mark.parametrize(
    ("word", "known", "others", "found"),
    [
        ("HF", ["hf", "dcp"], FORMATS, "hf"),
        ("Hugging-Face", ["hf"], FORMATS, "hf"),
        ("torch_dist", ["megatron-dist", "megatron"], FORMATS, "megatron-dist"),
        ("megtron", ["megatron-dist", "megatron"], FORMATS, "megatron"),
        ("onnx", ["hf", "dcp"], FORMATS, None),
        ("--Tensor_Model_Parallel_Size", ["--tp", "--pp"], FLAGS, "--tp"),
        ("tp", ["step", "--role"], None, None),  # a few letters that two words share are no slip
        ("options", ["connections", "tp"], None, None),
        ("iter_2", ["iter_0000002", "iter_0000010"], None, "iter_0000002"),
        ("fsdp", ["hf"], FORMATS, None),  # what is not known here is not meant
        ("", ["actor"], None, None),
    ],
)
def test_what_was_meant(word: str, known: list[str], others: dict[str, str] | None, found: str | None) -> None:
    assert meant(word, known, others) == found
    assert did_you_mean(word, known, others) == (f"; did you mean {found!r}?" if found else "")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("Qwen/Qwen2.5-7B", "hf://Qwen/Qwen2.5-7B"),
        ("hf:Qwen/Qwen2.5-7B", "hf://Qwen/Qwen2.5-7B"),
        ("https://huggingface.co/Qwen/Qwen2.5-7B/tree/main", "hf://Qwen/Qwen2.5-7B"),
        *((path, "") for path in ("runs/a/b", "/a/b", "./a", "https://example.com/a/b", "https://huggingface.co/Qwen")),
    ],
)
def test_a_model_of_the_hub(path: str, meant: str) -> None:
    said = hub_name(path)
    assert said.endswith(f"That is {meant}.") if meant else said == ""


def test_a_model_of_the_hub_where_only_a_folder_will_do() -> None:
    assert "hf download Qwen/Qwen2.5-7B" in hub_name("Qwen/Qwen2.5-7B", local=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("steps run --role actor", "no such option: --role; it is an option of inspect, plan, convert, …"),
        ("verify one --part 1/2", "no such option: --part; it is an option of convert"),
        ("--tp 2 convert one out", "no such option: --tp; it stands behind the command: mcore-rlhf COMMAND … --tp"),
        ("--keep-last 2 prune run", "no such option: --keep-last; it stands behind the command: mcore-rlhf COMMAND … --keep-last"),
        ("--part 1/2 one", "no such option: --part; it stands behind the command: mcore-rlhf convert … --part"),
        ("configs --debug list", "no such option: --debug; it stands before the command: mcore-rlhf --debug configs …"),
        ("inspect --load one", "no such option: --load; it is given by its place, as PATH"),
        ("convert one -o out", "no such option: -o; it is given by its place, as DST"),
        ("convert one out --use-distributed-optimizer", "no such option: --use-distributed-optimizer; did you mean --optimizer?"),
        ("convert one out --quiett", "no such option: --quiett; did you mean --quiet?"),
        ("diff a", "missing argument 'B'"),
        ("inspect a b", "got unexpected extra argument (b)"),
        ("inspect a --role", "option '--role' requires an argument"),
        ("inspect ''", "PATH: should be a path, found ''"),
        ("report a -o ''", "--output: should be a path, found ''"),
        ("diff a b --atol x", "--atol: should be a number, found 'x'"),
        ("diff a b --rtol nan", "--rtol: should be a number, found 'nan'"),
        ("interval --mtbf-hours 0", "--mtbf-hours: should be greater than 0, found 0"),
        ("interval --restart-seconds -1", "--restart-seconds: should be greater than or equal to 0, found -1"),
        ("convert a b --progress bar", "--progress: should be 'auto', 'json' or 'none', found 'bar'"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_line_that_cannot_be_read(line: str, said: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line), prog_name="mcore-rlhf")
    usage, _, message = result.stderr.partition("\n\n")
    assert usage.startswith("Usage: mcore-rlhf")
    assert (result.exit_code, message) == (2, f"error: {said}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "line 2, column 1: expected ',' or ']', but got '<stream end>' while parsing a flow sequence"),
        ("a: b: c\n", "line 1, column 5: mapping values are not allowed here"),
        (
            "a: \tb\n",
            "line 1, column 4: found character '\\t' that cannot start any token while scanning for the next token",
        ),
        ("a: *x\n", "line 1, column 4: found undefined alias 'x'"),
    ],
)
def test_what_is_wrong_with_yaml_stands_in_one_line(text: str, said: str) -> None:
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load(text)
    assert wrong_yaml(raised.value) == said


def test_yaml_without_a_place() -> None:
    assert wrong_yaml(yaml.YAMLError("nested\n  too deeply")) == "nested too deeply"
