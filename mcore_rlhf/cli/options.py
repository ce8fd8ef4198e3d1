"""The options of all commands: those of the table (:mod:`mcore_rlhf.families.options`), made for typer, and the few around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from mcore_rlhf.families.options import Option, ReadOptions, of_command, placed, read_values

from .guard import DEBUG, JSON

Command = TypeVar("Command", bound=Callable[..., None])


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


def takes(command: str) -> Callable[[Command], Command]:
    """Give a command's function the options that the table has for it, as keyword arguments.

    Args:
        command: The command, as the table names it.
    """

    def with_options(function: Command) -> Command:
        signature = inspect.signature(function, eval_str=True)
        own = [param for param in signature.parameters.values() if param.kind is not param.VAR_KEYWORD]
        at = next(number for number, param in enumerate(own) if param.name in _LAST)
        rows = [_parameter(row) for row in of_command(command)]
        function.__signature__ = signature.replace(parameters=[*own[:at], *rows, *own[at:]])  # type: ignore[attr-defined]
        return function

    return with_options


_LAST = ("config", "json")


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
