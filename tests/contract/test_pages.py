"""README and docs can be pasted: every ``console`` block prints what the page says, and fragments name options that exist."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mcore_rlhf.cli.app import app
from tests.helpers.forked_cli import forking
from tests.helpers.pages import FENCE, PAGES, PROJECT, Command, Page, environment, make_clone, masked

# Those that start torchrun, wait, or convert the most.
SLOW = {
    "README.md", "docs/how-to/check-resume-in-ci.md", "docs/how-to/commit-your-trainers-checkpoints.md",
    "docs/how-to/export-to-hugging-face.md", "docs/how-to/for-transformers-users.md", "docs/how-to/fsdp-runs.md",
    "docs/how-to/move-between-fsdp-and-megatron.md", "docs/reference/formats-torch.md",
}  # fmt: skip
MISTAKES = PROJECT / "docs" / "reference" / "errors.md"  # made by a test of its own: its commands are wrong on purpose
_GOLDENS = PROJECT / "tests" / "goldens"
_CALL = re.compile(r"^(?:\$ )?\s*(?:[A-Z_]+=\S+ )*mcore-rlhf (.*)$")


def _name(page: Path) -> str:
    return str(page.relative_to(PROJECT))


def _pages() -> Iterator[object]:
    for path in PAGES:
        if Page.read(path).blocks:
            yield pytest.param(path, id=_name(path), marks=[pytest.mark.slow] if _name(path) in SLOW else [])


def _state() -> dict[str, tuple[int, int]]:
    found = (path for folder in (_GOLDENS, PROJECT / "configs", PROJECT / "tools") for path in folder.rglob("*"))
    return {
        _name(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in found
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def forked_cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forking(tmp_path_factory.mktemp("bin"), environment()) as folder:
        yield folder


@pytest.mark.parametrize("path", list(_pages()))
def test_a_page_prints_what_it_says(path: Path, forked_cli: Path, tmp_path: Path) -> None:
    """Those that are slow, the README among them, start every command as it is installed."""
    page, before = Page.read(path), _state()
    page.run(make_clone(tmp_path / "clone"), first=None if _name(path) in SLOW else forked_cli)
    differences = [_difference(command) for block in page.blocks for command in block if not command.holds]
    assert not differences, f"{_name(path)}: python -m tests.helpers.pages writes what came out\n" + "\n".join(
        differences
    )
    assert _state() == before, "the page changed the clone"


def _difference(command: Command) -> str:
    shown, printed = masked(command.shown).splitlines(), masked(command.printed).splitlines()
    lines = difflib.unified_diff(shown, printed, "page", "printed", lineterm="")
    return f"$ {command.text}exit code {command.code}\n" + "\n".join(lines)


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_a_block_is_run_or_says_why_not(path: Path) -> None:
    for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
        assert language not in ("sh", "shell"), f"{_name(path)}: console if it can be pasted, bash if not"
        if language == "bash":
            assert body.startswith("# fragment: "), f"{_name(path)}: neither console nor a fragment:\n{body}"
        if language not in ("bash", "console"):
            assert not re.search(r"^(\$ )?mcore-rlhf ", body, re.MULTILINE), (
                f"{_name(path)}: a command in {language}:\n{body}"
            )


@pytest.mark.parametrize("path", [path for path in PAGES if path != MISTAKES], ids=_name)
def test_every_option_that_is_shown_exists(path: Path) -> None:
    problems = [
        f"{call}: {problem}" for call in _calls(path.read_text(encoding="utf-8")) if (problem := _problem(call))
    ]
    assert not problems, "\n".join(problems)


def _calls(text: str) -> Iterator[str]:
    """Every call of the command line in a page: in blocks that are not run, and between backticks."""
    for language, body in FENCE.findall(text):
        if language != "console":
            for line in body.replace("\\\n", " ").splitlines():
                if found := _CALL.match(line):
                    yield found[1]
    yield from (call.replace("\n", " ") for call in re.findall(r"`mcore-rlhf ([a-z][^`]*)`", FENCE.sub("", text)))


def _problem(call: str) -> str | None:
    """What the command line's own parser has against a call; values of options too, but for paths."""
    name, *arguments = shlex.split(re.sub(r"[\[\]]", "", call.replace("\\|", "|")), comments=True)
    if (command := app.commands.get(name)) is None:
        return f"no command {name}"
    context = click.Context(command, info_name=name)
    arguments = [word.partition("|")[0] for word in arguments if word != "…"]  # usage: --rng keep|drop
    if arguments[-1:] == ["--tensors"]:
        arguments.append("*")  # the one option whose value may be left out
    try:
        values, _, _ = command.make_parser(context).parse_args(arguments)
        for option in command.params:
            value = values.get(option.name or "")
            if isinstance(option.type, (click.Choice, click.types.IntParamType)) and not str(value).isupper():  # STEP
                option.type_cast_value(context, value)
    except click.UsageError as error:
        return error.format_message()
    return None


@pytest.mark.parametrize(
    ("shown", "printed", "code", "holds"),
    [
        ("took 3.1 s\n", "took 0.7 s\n", 0, True), ("8 files\n", "9 files\n", 0, False), ("a … c\n…\nend\n", "a b c\nx\ny\nend\n", 0, True),
        ("…\n", "error: no such file\n", 0, False), ("…\n", "done\n", 1, False), ("error: no\n", "error: no\n", 2, True),
        ("", "unsaid\n", 0, False), ("one\n", "one\ntwo\n", 0, False),
    ],
)  # fmt: skip
def test_what_differs_is_seen(shown: str, printed: str, code: int, holds: bool) -> None:
    assert Command("x\n", shown, printed, code).holds is holds


def test_a_shell_goes_on_within_a_page(tmp_path: Path) -> None:
    text = "$ export A=1 && mkdir x\n$ cd x\n$ cat <<'END'\n  $ no\nEND\n  $ no\n$ echo $A \\\n    b\n1 b\n$ false\n$ echo $?\n1\n"
    text = f"```python\n# y/y.py\n```\n```python\n# y/y.py, continued\n```\n```console\n{text}```\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    page = Page.read(tmp_path / "page.md")
    (found,) = page.blocks
    assert [command.shown for command in found] == ["", "", "  $ no\n", "1 b\n", "", "1\n"]
    page.run(make_clone(tmp_path / "clone"))
    assert [command.printed for command in found] == [command.shown for command in found]
    assert (tmp_path / "clone/y/y.py").read_text() == "# y/y.py\n# y/y.py, continued\n"
    assert page.rewritten() == page.text
