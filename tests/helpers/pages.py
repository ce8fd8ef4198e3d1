"""Pages as a reader has them: every ``console`` block of a page is run, in order, and compared with what it prints.

``python -m tests.helpers.pages PAGE…`` (all pages without names) writes into the blocks what came out, where that differs.

A page is pasted from its top into one shell, in a folder that looks like a clone: files first. A block of Python or YAML
whose first line is a comment with a file's name (``# train.py``) is that file (``# train.py, continued``: more of it).
In what a page prints, ``…`` stands for anything in a line and a line of ``…`` for any lines, but for no error; times and
rates are not compared. Progress, which a terminal shows as a bar that goes away, is left out. A ``bash`` block cannot be
pasted, and its first line says why: ``# fragment: needs two nodes``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PAGES = (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")))
CLONE = "~/mcore_rlhf"  # where pages have the clone, wherever it is
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/.-]+\.(?:py|ya?ml))(, continued)?$", re.MULTILINE)
_PROGRESS = re.compile(
    r"(stage \d+ of \d+\W+)?(converting|checking|verifying|comparing|reading|writing|planning)\b.*( …|: .*)$"
    r"|run [ABCD]: (?!.*differ)|comparing run [ABC] with"
)
_VARIES = (
    (re.compile(r"[\d.,]+ ([KMGT]i?)?B read in"), "SIZE read in"),
    (re.compile(r"\b[\d.,]+ ([KMGT]i?)?B/s"), "RATE"),
    (re.compile(r"\b[\d.,]+ (h|min|s|ms)\b( \d+ (min|s)\b)*"), "TIME"),
    (re.compile(r"[\d.,]+ ([KMGT]i?)?B(?=.*\b20\d\d-)"), "SIZE"),
    (re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?"), "DATE"),
    (re.compile(r"\b(stall_s|copy_s|seconds|bytes|gb_per_s)=[\d.e+-]+"), r"\1=N"),
)  # fmt: skip
_END = "\x1e"
# A shell that goes on after an error, as a reader's does; $? of a command is there for the next one.
_AFTER = f"\n__code=$?; printf '\\n{_END}%s\\n' $__code; (exit $__code)\n"


@dataclass(slots=True)
class Command:
    """One command of a page, with what the page says that it prints, and what it printed."""

    text: str
    shown: str
    printed: str = ""
    code: int = 0

    @property
    def holds(self) -> bool:
        """Whether it printed what the page says; a failure that the page does not show is none that it says."""
        said = self.shown.replace("…", "").strip()
        errors = [line for line in self.printed.splitlines() if re.match(r"error\b|Traceback|Usage:", line)]
        if any(line not in self.shown for line in errors) or (self.code and not said):
            return False
        return _pattern(self.shown).fullmatch(masked(self.printed)) is not None

    def rewritten(self) -> str:
        """The command and its output as a page has them."""
        output = self.shown if self.holds else self.printed
        return "$ " + self.text + output


def masked(text: str) -> str:
    """The same without what is another at every run."""
    for pattern, name in _VARIES:
        text = pattern.sub(name, text)
    return "".join(
        re.sub(" +", " ", line).rstrip() + "\n" for line in text.splitlines()
    )  # columns are as wide as what varies


def _pattern(shown: str) -> re.Pattern[str]:
    parts = []
    for line in masked(shown).splitlines():
        parts.append(r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line).replace("…", ".*") + r"\n")
    return re.compile("".join(parts))


def commands(block: str) -> list[Command]:
    """The commands of a block: a line behind ``$``, with the lines that belong to it, then what it prints."""
    found: list[Command] = []
    for line in block.splitlines(keepends=True):
        if found and _goes_on(found[-1].text):
            found[-1].text += line
        elif line.startswith("$ "):
            found.append(Command(line[2:], ""))
        else:
            found[-1].shown += line
    return found


def _goes_on(command: str) -> bool:
    """Whether the end of a heredoc is still to come, or the last line ends in a backslash."""
    first, *others = command.splitlines()
    if heredoc := re.search(r"<<-?\s*['\"]?(\w+)", first):
        return heredoc[1] not in others
    return command.endswith("\\\n")


@dataclass(slots=True)
class Page:
    """A page's files, as what the shell makes them with, and its commands, in its order."""

    path: Path
    text: str
    steps: list[str | list[Command]]

    @classmethod
    def read(cls, path: Path) -> Page:
        """Take a page apart."""
        text = path.read_text(encoding="utf-8")
        steps: list[str | list[Command]] = []
        for language, body in FENCE.findall(text):
            if language == "console":
                steps.append(commands(body))
            elif language in ("python", "yaml") and (name := _FILE.match(body)):
                folder, more = os.path.dirname(name[1]) or ".", ">>" if name[2] else ">"
                steps.append(f"mkdir -p {folder}\ncat {more}{name[1]} <<'{_END}'\n{body}{_END}\n")
        return cls(path, text, steps)

    @property
    def blocks(self) -> list[list[Command]]:
        """The console blocks."""
        return [step for step in self.steps if isinstance(step, list)]

    def run(self, clone: Path, seconds: float = 280, first: Path | None = None) -> None:
        """Paste all of it into a shell in ``clone``, which looks for commands in a folder before all others."""
        script = clone / ".page.sh"
        with script.open("w", encoding="utf-8") as out:
            for step in self.steps:
                out.writelines([step] if isinstance(step, str) else [command.text + _AFTER for command in step])
        output = _bash(script, clone, seconds, first).replace(str(clone), CLONE)
        done = [command for block in self.blocks for command in block]
        for command, printed in zip(done, _outputs(output, len(done)), strict=True):
            command.printed, command.code = printed

    def rewritten(self) -> str:
        """The page with what came out."""
        bodies = iter(["".join(command.rewritten() for command in block) for block in self.blocks])
        return FENCE.sub(
            lambda found: f"```console\n{next(bodies)}```" if found[1] == "console" else found[0], self.text
        )


def _outputs(output: str, count: int) -> Iterator[tuple[str, int]]:
    parts = re.split(rf"\n{_END}(\d+)\n", output)
    if len(parts) != 2 * count + 1:
        raise AssertionError(f"{len(parts) // 2} of {count} commands ended:\n{output[-2000:]}")
    for printed, code in zip(parts[::2], parts[1::2], strict=False):
        lines = [_of_shell(line.rstrip()) for line in printed.splitlines() if not _PROGRESS.match(line)]
        yield "".join(f"{line}\n" for line in lines), int(code)


def _of_shell(line: str) -> str:
    """What bash says of itself, as it says it to a reader rather than of a script."""
    said = re.sub(r"^\.page\.sh: line \d+: +", "bash: ", line)
    return "Killed" if re.match(r"bash: \d+ Killed ", said) else said


def environment(**more: str) -> dict[str, str]:
    """What a page's shell sees."""
    nowhere = "http://127.0.0.1:9"
    found = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MCORE_RLHF_"))}
    return {
        **found, "PATH": f"{Path(sys.executable).parent}:{found['PATH']}", "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1", "TERM": "dumb", "COLUMNS": "140", "LC_ALL": "C.UTF-8",
        "http_proxy": nowhere, "https_proxy": nowhere, "HF_HUB_OFFLINE": "1", **more,
    }  # fmt: skip


def _bash(script: Path, clone: Path, seconds: float, first: Path | None) -> str:
    """All that the script writes; whatever it started and left is ended."""
    seen = environment(TMPDIR=str(clone / ".tmp"))
    seen["PATH"] = seen["PATH"] if first is None else f"{first}:{seen['PATH']}"
    (clone / ".tmp").mkdir()
    process = subprocess.Popen(
        ["bash", "--noprofile", "--norc", script.name], cwd=clone, env=seen, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        with suppress(ProcessLookupError):  # as it should be: nothing was left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_clone(folder: Path) -> Path:
    """A folder that has what a clone has and pages read: goldens, jobs, tools."""
    (folder / "tests").mkdir(parents=True)
    for name in ("tests/goldens", "configs", "tools"):
        (folder / name).symlink_to(PROJECT / name)
    return folder


def _main(names: list[str]) -> None:
    for path in [Path(name).resolve() for name in names] or PAGES:
        page = Page.read(path)
        if page.blocks:
            with tempfile.TemporaryDirectory() as folder:
                page.run(make_clone(Path(folder).resolve() / "clone"), seconds=3600)
            path.write_text(page.rewritten(), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
