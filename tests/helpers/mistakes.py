"""``docs/reference/errors.md``: mistakes that people make, each made here, with what is said. ``python -m tests.helpers.mistakes``.

Every command runs in a folder that :func:`scene` fills; what it prints stands on the page as it came out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "reference" / "errors.md"
GOLDENS = PROJECT / "tests" / "goldens"
ITERATION = "iter_0000002/mp_rank_00"

HEAD = """# What is said when something is wrong

Mistakes that people make, and damage that happens, each with what the command line says of it: what is wrong, where, what was expected and
found, and what to do. The exit code stands behind each: 1 is a checkpoint's fault, 2 the command's, the disk's or the store's
([all of them](cli.md#exit-codes)). `--json` says the same as an object. Made by a test, which makes every one of them.
"""


@dataclass(frozen=True)
class Mistake:
    """One of them.

    Args:
        what: What somebody did, for the heading.
        command: What was typed behind ``mcore-rlhf``.
        made: Makes the damage in the scene, where there is any.
        code: How it ends.
    """

    what: str
    command: str
    made: Callable[[], None] = lambda: None
    code: int = 2


def _flip(path: str, at: float = 0.5) -> Callable[[], None]:
    def flip() -> None:
        data = bytearray(Path(path).read_bytes())
        data[int(len(data) * at)] ^= 4
        Path(path).write_bytes(data)

    return flip


def _cut(path: str) -> Callable[[], None]:
    return lambda: os.truncate(path, os.path.getsize(path) // 2)


def _gone(path: str) -> Callable[[], None]:
    return lambda: shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _written(path: str, text: str) -> Callable[[], None]:
    def write() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    return write


def _job(line: str) -> Callable[[], None]:
    return _written("job.yaml", f"source: one\ntarget: out\n{line}\n")


def _config(**fields: object) -> Callable[[], None]:
    def change() -> None:
        path = Path("model/config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def _calls(name: str) -> Callable[[], None]:
    from mcore_rlhf.storage.torchzip import archive

    def write() -> None:
        module, _, last = name.rpartition(".")
        data = b"\x80\x02c" + f"{module}\n{last}\n".encode() + b"X\x04\x00\x00\x00true\x85R."
        members = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
        Path(f"one/{ITERATION}/model_optim_rng.pt").write_bytes(archive("model_optim_rng", members)[0])

    return write


SECTIONS: dict[str, tuple[Mistake, ...]] = {
    "The command line": (
        Mistake("A command that there is not", "inspekt one"),
        Mistake("An option of Megatron's", "convert one out --tensor-model-parallel-size 2"),
        Mistake("Another one, short", "convert one out -tp 2"),
        Mistake("The source as an option", "convert --load one out"),
        Mistake("An option of another command", "verify one --tp 2"),
        Mistake("An option before its command", "--json inspect one"),
        Mistake("The program's option behind a command", "inspect one --debug"),
        Mistake("An option without its value", "convert one out --to"),
        Mistake("A number that is none", "convert one out --tp two"),
        Mistake("A degree of nought", "convert one out --tp 0"),
        Mistake("A format by another name", "convert one out --to huggingface"),
        Mistake("A format that nobody knows", "convert one out --to onnx"),
        Mistake("A dtype with a slip", "convert one out --dtype bf17"),
        Mistake("A dtype that is no floating-point type", "convert one out --dtype int8"),
        Mistake("An option that means nothing for the target", "convert one out --to hf --tp 2 --reference-config model"),
        Mistake("No target", "convert one"),
        Mistake("Two that contradict each other", "verify one --quick --deep"),
        Mistake("Much and nothing", "inspect one -v -q"),
        Mistake("A size that is none", "convert one out --max-memory lots"),
        Mistake("A job that does not come with it", "configs show qwen2.5-7b-eval-tp2"),
    ),
    "Paths": (
        Mistake("Nothing is there", "inspect nowhere"),
        Mistake("A model of the Hub", "inspect Qwen/Qwen2.5-7B"),
        Mistake("The address of a model's page", "inspect https://huggingface.co/Qwen/Qwen2.5-7B"),
        Mistake("A model of the Hub where a folder is needed", "convert one out --to hf --reference-config Qwen/Qwen2.5-7B"),
        Mistake("A variable that is not set", "convert '' out"),
        Mistake("A file", "inspect notes.txt"),
        Mistake("A file of a checkpoint", f"inspect one/{ITERATION}/model_optim_rng.pt"),
        Mistake("A step with a slip", "inspect run/global_step_3"),
        Mistake("Source and target swapped", "convert out one"),
        Mistake("A folder of other things", "inspect docs"),
        Mistake("A target that exists", "convert one run --tp 1"),
        Mistake("A target that is a file", "convert one notes.txt --tp 1"),
        Mistake("A target below a file", "convert one notes.txt/out --tp 1"),
        Mistake("A target in the source", "convert one one/new --tp 1"),
        Mistake("Something else to overwrite", "convert one docs --tp 1 --overwrite"),
        Mistake("A page over a file of somebody's", "report one -o notes.txt"),
        Mistake("A scheme that nobody knows", "inspect ftp://host/run"),
        Mistake("A link out of the checkpoint", "inspect one", lambda: _linked(), 1),
    ),
    "Runs and roles": (
        Mistake("A role with a slip", "inspect step --role aktor"),
        Mistake("Two models, and none named", "convert step out --to hf", code=2),
        Mistake("A step that is not there", "inspect one --step 7"),
        Mistake("Another step than the folder's", "plan run/global_step_2 --step 3"),
        Mistake("Steps of something else", "steps docs"),
        Mistake("Nothing to keep", "prune run --keep-last 0"),
        Mistake("A step in place of the root", "prune run/global_step_2 --keep-last 1"),
    ),
    "Layouts": (
        Mistake("Heads that cannot be cut so", "convert one out --tp 3", code=1),
        Mistake("More stages than layers", "convert one out --pp 5", code=1),
        Mistake("Experts of a model without", "convert one out --ep 2"),
        Mistake("Layers that do not add up", "convert one out --pp 2 --pipeline-layout 3,2"),
        Mistake("A ZeRO stage that there is not", "convert model out --to deepspeed --zero-stage 9"),
    ),
    "Damage": (
        Mistake("A bit has flipped", "verify one", _flip(f"one/{ITERATION}/distrib_optim.pt"), 1),
        Mistake("A file is cut off", "inspect one", _cut(f"one/{ITERATION}/model_optim_rng.pt"), 1),
        Mistake("A rank is missing", "inspect run/global_step_2/actor", _gone("run/global_step_2/actor/iter_0000002/mp_rank_01_001"), 1),
        Mistake("An optimizer's file is missing", "convert one out", _gone(f"one/{ITERATION}/distrib_optim.pt"), 1),
        Mistake("The tracker is no number", "inspect one", _written("one/latest_checkpointed_iteration.txt", "latest\n"), 1),
        Mistake("The tracker names nothing", "inspect one", _written("one/latest_checkpointed_iteration.txt", "9\n")),
        Mistake("A config that is no JSON", "inspect model", _written("model/config.json", "{"), 1),
        Mistake("A config of another model", "inspect model", _config(num_hidden_layers=9), 1),
        Mistake("A config that says tied", "convert model out --to dcp", _config(tie_word_embeddings=False), 1),
        Mistake("A config that says biases", "inspect model", _config(attention_bias=True), 1),
        Mistake("A shard is missing", "inspect model", _gone("model/model-00001-of-00002.safetensors"), 1),
    ),
    "What would run code": (
        Mistake("A pickle that reaches the system", "inspect one", _calls("os.system"), 1),
        Mistake("A class of one's own", "inspect one", _calls("my_code.MyConfig"), 1),
    ),
    "Job files and rules": (
        Mistake("A key with a slip", "convert --config job.yaml", _job("tensor_parallel_size: 2")),
        Mistake("A key that is there twice", "convert --config job.yaml", _job("tp: 2\ntp: 4")),
        Mistake("Source and target by other names", "convert --config job.yaml", _written("job.yaml", "src: one\ndst: out\n")),
        Mistake("A value of another kind", "convert --config job.yaml", _job("tp: many")),
        Mistake("YAML that is none", "convert --config job.yaml", _written("job.yaml", "source: [one\n")),
        Mistake("No such file", "convert --config jobs.yaml"),
        Mistake("A rule that is none", "convert one out --rules rules.yaml", _written("rules.yaml", "rules:\n  - split: 0\n")),
    ),
}  # fmt: skip


def _linked() -> None:
    Path("secret").write_text("secret")
    path = Path("one/latest_checkpointed_iteration.txt")
    path.unlink()
    path.symlink_to(Path("secret").absolute())


@contextmanager
def scene() -> Iterator[Path]:
    """A folder with checkpoints, in which mistakes are made; the working directory meanwhile."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(os.path.realpath(folder))
        shutil.copytree(GOLDENS / "megatron" / "tp1_bf16_do", place / "one")
        step = place / "run" / "global_step_2"
        shutil.copytree(GOLDENS / "megatron" / "tp2pp2dp2_bf16_do", step / "actor")
        for role in ("actor", "critic"):
            shutil.copytree(GOLDENS / "megatron" / "tp1_bf16_do", place / "step" / role)
        shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", place / "model")
        (place / "docs").mkdir()
        (place / "docs" / "thesis.md").write_text("# Thesis\n")
        (place / "notes.txt").write_text("mine\n")
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(before)


def said(mistake: Mistake) -> str:
    """What is said of it, after it was seen that the command ends as it should, and without a traceback."""
    from mcore_rlhf.cli.app import app

    with scene() as place:
        mistake.made()
        result = CliRunner().invoke(app, shlex.split(mistake.command), prog_name="mcore-rlhf", terminal_width=200)
        output = result.output if mistake.command.startswith("verify") and mistake.code == 1 else result.stderr
    lines = [
        line
        for line in output.replace(f"{place}/", "…/").splitlines()
        if not re.match(r"(converting|checking|verifying)\b", line)
    ]
    text = re.sub(r"read in [^)]*", "read in …", "\n".join(line.rstrip() for line in lines).strip())
    assert result.exit_code == mistake.code, f"{mistake.command}: ended with {result.exit_code}\n{output}"
    assert "Traceback" not in output
    return text


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, mistakes in SECTIONS.items():
        parts.append(f"\n## {section}\n")
        for mistake in mistakes:
            shown = said(mistake)
            parts.append(
                f"\n**{mistake.what}**: `mcore-rlhf {mistake.command}` → {mistake.code}\n\n```text\n{shown}\n```\n"
            )
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {sum(map(len, SECTIONS.values()))} mistakes\n")
