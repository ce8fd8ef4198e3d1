"""The options of all commands: those of the table (:mod:`mcore_rlhf.families.options`), made for typer, and the few around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mcore_rlhf.families.options import Option, ReadOptions, of_command, placed, read_values

from .guard import DEBUG, JSON

Command = TypeVar("Command", bound=Callable[..., None])
Group = TypeVar("Group")


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[JSON] = value
    return value


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = value
    return value


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **more)


# Everywhere
Debug = Annotated[bool, _option("--debug", help="Show the traceback of an error.", callback=_remember_debug)]
Json = Annotated[
    bool, _option("--json", help="Print JSON alone on standard output.", callback=_remember_json, is_eager=True)
]
CheckpointPath = Annotated[
    Path,
    typer.Argument(
        help="A run's root, a step, a role's folder, or a checkpoint's own folder.", metavar="PATH", show_default=False
    ),
]

# Of a conversion
SourceFolder = Annotated[
    str | None,
    typer.Argument(
        help="A run's root, a step, a role's folder, or a checkpoint's own; may come from --config.",
        metavar="SRC",
        show_default=False,
    ),
]
TargetFolder = Annotated[
    str | None,
    typer.Argument(
        help="The folder to write, as its framework is given it to load; may come from --config.",
        metavar="DST",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    _option("--config", help="YAML conversion job; options given here win over the file.", metavar="FILE"),
]


# Of single commands
@dataclass(frozen=True, slots=True)
class CostOptions:
    """What ``interval`` is told; None where nothing is said. See :class:`~mcore_rlhf.manager.run.interval.Costs`."""

    step_seconds: Annotated[float | None, typer.Option(help="Time of a training step.", metavar="S")] = None
    save_seconds: Annotated[
        float | None, typer.Option(help="Time from the start of a save until it is committed.", metavar="S")
    ] = None
    stall_seconds: Annotated[
        float | None,
        typer.Option(help="How long an asynchronous save stops training. [default: all of it]", metavar="S"),
    ] = None
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean time between failures of the whole job.", metavar="H")
    ] = None
    restart_seconds: Annotated[float, typer.Option(help="From a failure until training goes on.", metavar="S")] = 0.0
    steps: Annotated[int, typer.Option(help="Length of the run.", metavar="N")] = 1000
    size: Annotated[str | None, typer.Option(help="Size of one step, such as 1.2TB.", metavar="SIZE")] = None
    keep_last: Annotated[int | None, typer.Option(help="Steps kept at a time, for the disk use.", metavar="N")] = None


@dataclass(frozen=True, slots=True)
class ResumeCheckOptions:
    """What ``resume-check`` is told besides its command."""

    steps: Annotated[int, typer.Option(help="Kill once this step is committed.", metavar="N", min=1)] = 3
    more: Annotated[int, typer.Option(help="Steps after it, to the end of the run.", metavar="M", min=1)] = 2
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where to work; new or empty. [default: removed again]", metavar="DIR")
    ] = None
    kill_after: Annotated[
        str, typer.Option(help="The moment: step-commit, during-save or random.", metavar="MOMENT")
    ] = "step-commit"
    runs: Annotated[int, typer.Option(help="How many runs are killed and resumed.", metavar="K", min=1)] = 1
    seed: Annotated[int, typer.Option(help="Draws random moments.", metavar="S")] = 0
    timeout: Annotated[float, typer.Option(help="Seconds that one start may take.", metavar="S", min=1.0)] = 3600.0
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A value that may differ, with *; may be repeated.", metavar="FILE:KEY|metrics:NAME"),
    ] = None
    environment: Annotated[
        bool, typer.Option("--environment", help="The command reads MCORE_RLHF_CHECK_DIR, …_STEPS and so on.")
    ] = False
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints although all is well.")] = False
    demo: Annotated[bool, typer.Option("--demo", help="Check the demo's trainer; COMMAND is options for it.")] = False
    algorithm: Annotated[str, typer.Option(help="With --demo: grpo or ppo.", metavar="NAME")] = "grpo"
    tp: Annotated[int, typer.Option(help="With --demo: tensor-parallel ranks.", metavar="N", min=1)] = 1
    pp: Annotated[int, typer.Option(help="With --demo: pipeline stages.", metavar="N", min=1)] = 1
    print_commands: Annotated[
        bool, typer.Option("--print-commands", help="Print what to run by hand, on several nodes; run nothing.")
    ] = False
    make_control: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Copy killed run B to C, and break it.", metavar="B C")
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Only compare two runs that were done by hand.", metavar="A B")
    ] = None
    control: Annotated[
        Path | None, typer.Option(help="With --compare: the control, which must differ.", metavar="C")
    ] = None


def takes(command: str, group: type | None = None, before: str = "") -> Callable[[Command], Command]:
    """Give a command's function further options, as keyword arguments: those that the table has for it, and those of a group.

    Args:
        command: The command, as the table names it.
        group: A class above, whose fields are options; :func:`taken` makes one of what was given.
        before: The parameter before which they stand in the help; ``config`` or ``json`` where it is not said.
    """

    def with_options(function: Command) -> Command:
        signature = inspect.signature(function, eval_str=True)
        own = [param for param in signature.parameters.values() if param.kind is not param.VAR_KEYWORD]
        at = next(number for number, param in enumerate(own) if param.name in ((before,) if before else _LAST))
        rows = [*_parameters(group), *(_parameter(row) for row in of_command(command))]
        function.__signature__ = signature.replace(parameters=[*own[:at], *rows, *own[at:]])  # type: ignore[attr-defined]
        return function

    return with_options


_LAST = ("config", "json")


def _parameters(group: type | None) -> list[inspect.Parameter]:
    if group is None:
        return []
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            place.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=place.default, annotation=hints[place.name]
        )
        for place in fields(group)
    ]


def taken(group: type[Group], given: dict[str, Any]) -> Group:
    """Take a group's options out of what was given."""
    return group(**{place.name: given.pop(place.name) for place in fields(group)})  # type: ignore[arg-type]


def _parameter(row: Option) -> inspect.Parameter:
    """An option for typer; not given, it is None, so that the ``--config`` file or the default decides."""
    kind = row.kind
    word: Any = list[str] if kind.repeated else kind.word
    help = f"{row.help} [default: {row.default}]" if row.default else row.help
    spelled = f"{row.flag}/{row.opposite}" if row.opposite else row.flag
    option = _option(spelled, help=help, metavar=kind.metavar, min=kind.least, max=kind.most)
    return inspect.Parameter(
        row.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[word | None, option]
    )


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
