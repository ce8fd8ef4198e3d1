"""What is said of an option that a command does not have: which of its own may be meant, or whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import click

from mcore_rlhf.suggestions import FLAGS, same, similar

_SHOWN = 3


@contextmanager
def answered(ctx: click.Context, args: Sequence[str]) -> Iterator[None]:
    """Let what is wrong with a command line be said with how the command is typed, and of an option that there is not, what may be meant.

    Args:
        ctx: Of the command that reads it.
        args: All of it; click takes its own copy apart.
    """
    typed = list(args)
    try:
        yield
    except click.NoSuchOption as error:
        raise click.UsageError(_not_an_option(error.option_name, typed, ctx), ctx) from None
    except click.UsageError as error:
        error.ctx = error.ctx or ctx
        raise


def _not_an_option(name: str, typed: Sequence[str], ctx: click.Context) -> str:
    """The message.

    Args:
        name: As the parser has it: of ``-tp``, ``-t``.
        typed: The whole command line.
        ctx: Of the command.
    """
    word = next((one.partition("=")[0] for one in typed if one.startswith(name)), name)
    params = ctx.command.get_params(ctx)
    options = [one for one in _names(params) if one.startswith("--")]
    places = [typed_as(param) for param in params if isinstance(param, click.Argument)]
    found = same(word, [*options, *places], FLAGS)
    if found is None and places and same(word, ("SRC",), FLAGS):
        found = places[0]
    if found in places:
        return f"no such option: {word}; it is given by its place, as {found}"
    if found is None and (whose := _of_another(word, ctx)):
        return f"no such option: {word}; {whose}"
    found = found or similar(word, options)
    return f"no such option: {word}" + (f"; did you mean {found}?" if found else "")


def _of_another(word: str, ctx: click.Context) -> str:
    """Whose option it is, where it is one of the program's or of another command's; or nothing."""
    root = ctx.find_root()
    if not isinstance(root.command, click.Group):
        return ""
    if ctx is not root and word in _names(root.command.get_params(root)):
        return f"it stands before the command: {root.info_name} {word} {ctx.info_name} …"
    commands = [
        name for name, one in root.command.commands.items() if word in _names(one.get_params(click.Context(one)))
    ]
    if not commands:
        return ""
    if ctx is root:
        return f"it stands behind the command: {root.info_name} {commands[0] if len(commands) == 1 else 'COMMAND'} … {word}"
    return f"it is an option of {', '.join(commands[:_SHOWN])}{', …' if len(commands) > _SHOWN else ''}"


def typed_as(param: click.Parameter) -> str:
    """What an option or argument is called on the command line."""
    return str(param.metavar).strip("[].") if isinstance(param, click.Argument) else max(param.opts, key=len)


def _names(params: Iterable[click.Parameter]) -> list[str]:
    return [
        name for param in params if isinstance(param, click.Option) for name in (*param.opts, *param.secondary_opts)
    ]
