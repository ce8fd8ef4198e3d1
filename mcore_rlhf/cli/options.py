"""The options of all commands: those of the table (:mod:`mcore_rlhf.families.options`), made for click, and the few around them; three
examples for the help of every command; and the installation of completion.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import click
from click.shell_completion import get_completion_class

from mcore_rlhf.errors import UsageError
from mcore_rlhf.families import option_types
from mcore_rlhf.families.option_types import GROUPS, STORES
from mcore_rlhf.families.options import ReadOptions, StoreOptions, of_command, placed, read_values
from mcore_rlhf.formats.known import KNOWN, for_people
from mcore_rlhf.storage.beneath import make_folder
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import replace_text
from mcore_rlhf.storage.settings import stores_with

from . import logs
from .completing import completion, formats, roles_of, steps_of
from .examples import EXAMPLES
from .guard import DEBUG, JSON, PROGRESS
from .mistyped import answered

_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/mcore-rlhf",
    "zsh": "~/.zfunc/_mcore-rlhf",
    "fish": "~/.config/fish/completions/mcore-rlhf.fish",
}
_THEN = {
    "bash": "New shells have it (with the package bash-completion).",
    "zsh": "Put this into ~/.zshrc, once: fpath+=~/.zfunc; autoload -Uz compinit; compinit",
    "fish": "New shells have it.",
}


def install_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    """Write a shell's completion script where the shell looks for it, and say so.

    Raises:
        UsageError: The shell is none that is known.
    """
    if shell is None or ctx.resilient_parsing:
        return
    from .output import say

    name = Path(os.environ.get("SHELL", "")).name if shell == "auto" else shell
    maker = get_completion_class(name)
    if name not in _PLACES or maker is None:
        raise UsageError(f"--install-completion: {name or 'no shell'} is not known\nName one: {', '.join(_PLACES)}.")
    place = Path(_PLACES[name]).expanduser()
    text = maker(ctx.command, {}, "mcore-rlhf", "_MCORE_RLHF_COMPLETE").source()
    try:
        make_folder(place.parent)
        replace_text(place, text)
    except OSError as error:
        raise storage_error(error, place, "write") from error
    say(f"{place} is written. {_THEN[name]}")
    ctx.exit()


Group = TypeVar("Group")


class PlaceName(click.Path):
    """A path; an empty one is a variable that is not set, and not the folder here.

    Whether it can be read is said when it is, in our words.
    """

    def __init__(self, path_type: type | None = None) -> None:
        super().__init__(path_type=path_type, readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        if value == "":
            self.fail("should be a path, found ''", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = PlaceName(Path)
_FOLDER_TEXT = PlaceName()
_OTHERS = "Options"


class Integer(click.IntRange):
    """A whole number within limits."""

    name = "integer"  # what is no number is no valid integer, whatever the limits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it; what is wrong is said as the table's options say it of a job's."""
        try:
            found = int(value)
        except ValueError:
            self.fail(f"should be a valid integer, found {value!r}", param, ctx)
        if self.min is not None and found < self.min:
            self.fail(f"should be greater than or equal to {self.min}, found {found}", param, ctx)
        if self.max is not None and found > self.max:
            self.fail(f"should be less than or equal to {self.max}, found {found}", param, ctx)
        return found


class Real(click.FloatRange):
    """A number within limits, said as :class:`Integer` says it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it; no comparison refuses what is no number (nan), so that it is refused first."""
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if math.isnan(found):
            self.fail(f"should be a number, found {value!r}", param, ctx)
        if self.min is not None and (found <= self.min if self.min_open else found < self.min):
            wanted = "greater than" if self.min_open else "greater than or equal to"
            self.fail(f"should be {wanted} {self.min:g}, found {found:g}", param, ctx)
        return found


class Word(click.Choice[str]):
    """One of a few words, said as the table's options say it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Read it."""
        if value not in self.choices:
            *most, last = map(repr, self.choices)
            self.fail(f"should be {', '.join(most)} or {last}, found {value!r}", param, ctx)
        return str(value)


class HeadedOption(click.Option):
    """An option that stands under a heading of the help.

    Args:
        names: Its names, as click takes them: ``--tp``; with its field, where that has another one: ``folder``, ``--dir``.
        group: The heading.
        more: See :class:`click.Option`.
    """

    def __init__(self, *names: str, group: str = _OTHERS, **more: Any) -> None:
        super().__init__(list(names), **more)
        self.group = group


class Command(click.Command):
    """A command whose help has its options under headings, and whose stores are asked, and work is told of, as its options say."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own, those that every command has, and --help."""
        *own, help_option = super().get_params(ctx)
        return [*own, *LOG_OPTIONS, help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; of an option that there is not, say which may be meant."""
        with answered(ctx, args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. What a job file says of stores is said by :func:`.job.make_job`."""
        rows = (
            {}
            if "config" in ctx.params
            else {row.name for row in of_command(str(ctx.info_name)) if row.group == STORES}
        )
        values = read_values({name: ctx.params.pop(name) for name in rows})
        with logs.logged(ctx), stores_with(StoreOptions(**placed(values)["store"]).settings()):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those of no group of the table last."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in (*GROUPS, _OTHERS)}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                groups[param.group if isinstance(param, HeadedOption) else _OTHERS].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, and which formats there are."""
        write_examples(self.name or "", formatter)


class CommandGroup(click.Group):
    """Commands of one subject, with examples."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read what stands before the command."""
        with answered(ctx, args):
            return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples."""
        write_examples(self.name or "", formatter)


_OF_CHECKPOINTS = ("inspect", "plan", "convert", "verify", "diff", "report")


def write_examples(command: str, formatter: click.HelpFormatter) -> None:
    """Write a command's examples, each in a line of its own, however long: they are pasted."""
    if command in EXAMPLES:
        with formatter.section("Examples"):
            formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in EXAMPLES[command]))
    if command in _OF_CHECKPOINTS:
        known = sorted(KNOWN, key=lambda one: for_people(one.name, one.family))
        listed = ", ".join(f"{one.name} ({one.also})" if one.also else one.name for one in known)
        formatter.write_paragraph()
        said = f"Formats: {listed}; they are detected."
        formatter.write(fill(said, formatter.width, break_on_hyphens=False) + "\n")


def _remember(key: str) -> Any:
    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        ctx.meta[key] = value
        return value

    return remember


def flag(*names: str, help: str, **more: Any) -> HeadedOption:
    """An option without a value."""
    return HeadedOption(*names, is_flag=True, help=help, **more)


def argument(metavar: str, help: str, name: str = "", kind: Any = FOLDER, **more: Any) -> click.Argument:
    """What is given by its place.

    Args:
        metavar, help: What stands in the help.
        name: The function's parameter; the metavar's where it is empty.
        kind: click's type.
        more: See :class:`click.Argument`.
    """
    shown = metavar if more.get("required", True) else f"[{metavar}]"
    return click.Argument([name or metavar.lower()], type=kind, metavar=shown, help=help, **more)


# Everywhere
DEBUG_OPTION = flag("--debug", help="Show the traceback of an error.", callback=_remember(DEBUG), expose_value=False)
COMPLETION_OPTION = HeadedOption(
    "--install-completion",
    help="Install completion for the shell in use, or for bash, zsh or fish.",
    metavar="[SHELL]",
    is_flag=False,
    flag_value="auto",
    is_eager=True,
    expose_value=False,
    callback=install_completion,
)
JSON_OPTION = flag("--json", help="Print JSON alone on standard output.", callback=_remember(JSON), is_eager=True)
PROGRESS_OPTION = HeadedOption(
    "--progress",
    help="How far it is, on standard error: a bar or lines (auto), JSON lines for schedulers, or none.",
    type=Word(["auto", "json", "none"]),
    default="auto",
    show_default=True,
    callback=_remember(PROGRESS),
    expose_value=False,
)
LOG_OPTIONS = (
    HeadedOption(
        "--verbose", "-v", help="Say what is done; -vv: what is asked of stores, too.", count=True,
        callback=_remember(logs.VERBOSE), expose_value=False,
    ),
    flag(
        "--quiet", "-q", help="Say nothing but results and errors.", callback=_remember(logs.QUIET), expose_value=False
    ),
    HeadedOption(
        "--log-file", help="Append everything that is done to this file, with the time.", metavar="FILE", type=FOLDER,
        callback=_remember(logs.FILE), expose_value=False,
    ),
)  # fmt: skip
CHECKPOINT = argument("PATH", "A run's root, a step, a role's folder, or a checkpoint's own folder.")

# Of a conversion
SOURCE = argument(
    "SRC",
    "A run's root, a step, a role's folder, or a checkpoint's own; may come from --config.",
    "source",
    _FOLDER_TEXT,
    required=False,
)
TARGET = argument(
    "DST",
    "The folder to write, as its framework is given it to load; may come from --config.",
    "target",
    _FOLDER_TEXT,
    required=False,
)
CONFIG = HeadedOption(
    "--config", help="YAML conversion job; options given here win over the file.", metavar="FILE", type=FOLDER
)


# Of single commands
def _own(metavar: str, help: str, value: Any = None, *names: str, **more: Any) -> Any:
    """A field that is an option of one command, with its default."""
    return field(default=value, metadata={"names": names, "metavar": metavar, "help": help, **more})


_PAIR = {"type": FOLDER, "nargs": 2}
_POSITIVE = {"type": Integer(1)}
_ABOVE_0 = {"type": Real(0.0, min_open=True)}


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What ``watch`` is told besides what ``convert`` takes. See :class:`~mcore_rlhf.manager.watch.Watcher`."""

    into: str = _own("DIR", "Folder, or URL, of the results, global_step_N each.", type=_FOLDER_TEXT, required=True)
    every: float = _own("S", "Seconds from one look to the next.", 30.0, type=Real(0.1))
    settle: float = _own("S", "Seconds for which a step without a manifest must stay as it is.", 60.0, type=Real(0.0))
    keep_last: int | None = _own("N", "Keep the newest N results.", **_POSITIVE)
    keep_every: int | None = _own("N", "Keep results of multiples of N.", **_POSITIVE)
    run: str = _own("COMMAND", "Run this on each result, without a shell: 'eval.sh {path} {step}'.", "")
    run_timeout: float = _own("S", "Seconds that it may take.", 3600.0, type=Real(0.1))
    once: bool = _own("", "End when nothing is left to do.", False)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What ``interval`` is told; None where nothing is said. See :class:`~mcore_rlhf.manager.run.interval.Costs`."""

    step_seconds: float | None = _own("S", "Time of a training step.", **_ABOVE_0)
    save_seconds: float | None = _own("S", "Time from the start of a save until it is committed.", **_ABOVE_0)
    stall_seconds: float | None = _own(
        "S", "How long an asynchronous save stops training. [default: all of it]", type=Real(0.0)
    )
    mtbf_hours: float | None = _own("H", "Mean time between failures of the whole job.", **_ABOVE_0)
    restart_seconds: float = _own("S", "From a failure until training goes on.", 0.0, type=Real(0.0))
    steps: int = _own("N", "Length of the run.", 1000, **_POSITIVE)
    size: str | None = _own("SIZE", "Size of one step, such as 1.2TB.")
    keep_last: int | None = _own("N", "Steps kept at a time, for the disk use.", **_POSITIVE)


@dataclass(frozen=True, slots=True)
class ResumeCheckOptions:
    """What ``resume-check`` is told besides its command."""

    steps: int = _own("N", "Kill once this step is committed.", 3, **_POSITIVE)
    more: int = _own("M", "Steps after it, to the end of the run.", 2, **_POSITIVE)
    folder: Path | None = _own(  # noqa: RUF009
        "DIR", "Where to work; new or empty. [default: removed again]", None, "--dir", type=FOLDER
    )
    kill_after: str = _own("MOMENT", "The moment: step-commit, during-save or random.", "step-commit")
    runs: int = _own("K", "How many runs are killed and resumed.", 1, **_POSITIVE)
    seed: int = _own("S", "Draws random moments.", 0)
    timeout: float = _own("S", "Seconds that one start may take.", 3600.0, type=Real(1.0))
    ignore: tuple[str, ...] = _own(
        "FILE:KEY|metrics:NAME", "A value that may differ, with *; may be repeated.", (), multiple=True
    )
    profile: str = _own("NAME", "What may be off: exact, fp32-reduction, bf16-reduction or loose.", "exact")
    environment: bool = _own("", "The command reads MCORE_RLHF_CHECK_DIR, …_STEPS and so on.", False)
    keep: bool = _own("", "Keep the checkpoints although all is well.", False)
    demo: bool = _own("", "Check the demo's trainer; COMMAND is options for it.", False)
    algorithm: str = _own("NAME", "With --demo: grpo or ppo.", "grpo")
    tp: int = _own("N", "With --demo: tensor-parallel ranks.", 1, **_POSITIVE)
    pp: int = _own("N", "With --demo: pipeline stages.", 1, **_POSITIVE)
    print_commands: bool = _own("", "Print what to run by hand, on several nodes; run nothing.", False)
    make_control: tuple[Path, Path] | None = _own("B C", "Copy killed run B to C, and break it.", **_PAIR)
    compare: tuple[Path, Path] | None = _own("A B", "Only compare two runs that were done by hand.", **_PAIR)
    control: Path | None = _own("C", "With --compare: the control, which must differ.", type=FOLDER)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What ``report`` is told besides its paths."""

    output: Path | None = _own("FILE", "The page. [default: report.html]", None, "-o", "--output", type=FOLDER)  # noqa: RUF009
    trace: Path | None = _own("FILE", "Write the run's timeline as a Chrome trace, too.", type=FOLDER)  # noqa: RUF009
    events: Path | None = _own("FILE", "The run's events. [default: events.jsonl in its root]", type=FOLDER)  # noqa: RUF009
    resume_check: Path | None = _own("FILE", "What resume-check --json printed, to be shown.", type=FOLDER)  # noqa: RUF009
    verify: bool = _own("", "Read every byte, and hold it against its checksum.", False)
    no_values: bool = _own("", "Of two, compare no values: draw both only.", False)


def options_of(group: type) -> list[HeadedOption]:
    """The options that are the fields of a class above; :func:`taken` makes one of what was given."""
    return [_option_of(place.name, place.default, **place.metadata) for place in fields(group)]


def _option_of(name: str, default: Any, names: tuple[str, ...], metavar: str, **more: Any) -> HeadedOption:
    spelled = names or (f"--{name.replace('_', '-')}",)
    if default is False:
        return flag(name, *spelled, **more)
    return HeadedOption(name, *spelled, metavar=metavar, default=default, show_default=True, **more)


def taken(group: type[Group], given: dict[str, Any]) -> Group:
    """Take a group's options out of what was given."""
    return group(**{place.name: given.pop(place.name) for place in fields(group)})  # type: ignore[arg-type]


def table(command: str) -> list[HeadedOption]:
    """The options that the table has for a command; not given, they are None, so that the ``--config`` file or the default decides."""
    return [_of_row(row) for row in of_command(command)]


_COMPLETED = {"to": formats, "dtype": lambda _: ("bf16", "fp16", "fp32"), "role": roles_of, "step": steps_of}
"""What a shell completes values to, of options whose words the table does not say."""


def _of_row(row: option_types.Option) -> HeadedOption:
    kind = row.kind
    help = f"{row.help} [default: {row.default}]" if row.default else row.help
    if kind.word is bool:
        return flag(row.name, f"{row.flag}/{row.opposite}", help=help, group=row.group, default=None)
    word = Integer(kind.least, kind.most) if kind.word is int else _FOLDER_TEXT if kind.path else click.STRING
    more: dict[str, Any] = {"type": word, "metavar": kind.metavar, "multiple": kind.repeated}
    words = _COMPLETED.get(row.name) or (lambda _: kind.words)
    more["shell_complete"] = None if kind.path else completion(words)
    return HeadedOption(row.name, row.flag, help=help, group=row.group, **more)


def read_options(given: Mapping[str, Any]) -> ReadOptions:
    """How the commands that only read open a checkpoint.

    Raises:
        UsageError: Values that an option cannot have; all of them.
    """
    return ReadOptions(**placed(read_values(given))["read"])


def default_workers() -> int:
    """One per CPU that this process may use, at most 8: more do not make a disk faster."""
    import os

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, usable)
