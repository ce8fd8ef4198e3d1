"""What a shell completes a value to that depends on the checkpoint before it on the line. A shell waits, and never hears of an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import click

from mcore_rlhf.storage.paths import ReadablePath, local_path

Completion = Callable[[click.Context, click.Parameter, str], list[str]]

_PLACES = ("path", "source", "root", "paths", "a", "folder")
"""Arguments of commands that name a checkpoint, by their parameters."""


def completion(words: Callable[[click.Context], Iterable[object]]) -> Completion:
    """What click asks for the values of an option or argument.

    Args:
        words: All of them; what it raises is as if there were none.
    """

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
        del param
        with suppress(Exception):
            return [str(word) for word in words(ctx) if str(word).startswith(begun)]
        return []

    return complete


def roles_of(ctx: click.Context) -> Iterable[str]:
    """The roles of the steps that the command's path holds."""
    from mcore_rlhf.formats.registry import roles_in
    from mcore_rlhf.manager.run.steps import found_at
    from mcore_rlhf.manager.runs import listed_steps

    place = _place(ctx)
    if place is None:
        return []
    step = found_at(place)
    steps = listed_steps(place) if step is None else [step]
    return sorted({role for step in steps for role in step.roles}) or roles_in(place)


def steps_of(ctx: click.Context) -> Iterable[int]:
    """The steps of the run that the command's path is, the newest first."""
    from mcore_rlhf.manager.runs import listed_steps

    place = _place(ctx)
    return [] if place is None else sorted((step.step for step in listed_steps(place)), reverse=True)


def formats(ctx: click.Context) -> Iterable[str]:
    """What a checkpoint can be converted to: formats, and runs of trainers."""
    from mcore_rlhf.formats.known import KNOWN
    from mcore_rlhf.trainers.known import TRAINERS

    del ctx
    return [*(known.name for known in KNOWN), *(one.name for one in TRAINERS if one.formats)]


def names_of_configs(ctx: click.Context) -> Iterable[str]:
    """The jobs and runs that come with the package."""
    from .jobs import known

    del ctx
    return known()


def _place(ctx: click.Context) -> ReadablePath | None:
    """The checkpoint on the line; a store is not asked, since a shell waits.

    Behind an option that has no value yet click gives up, and what is given by its place is left among the arguments.
    """
    named = [ctx.params.get(name) for name in _PLACES]
    given = next((one for one in (*named, *ctx.args) if one), None)
    text = str(given[0] if isinstance(given, tuple) else given)
    return None if given is None or "://" in text else local_path(text)
