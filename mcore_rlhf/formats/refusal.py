"""What every target under a module's names refuses: sources of another family, and options that mean nothing for it."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_rlhf.errors import Unsupported, UsageError

from .base import Source, WriteOptions
from .module_state import ModuleState


def module_state_of(source: Source, to: str) -> ModuleState:
    """What a source keeps besides tensors.

    Args:
        source: An opened checkpoint.
        to: Name of the target's format.

    Raises:
        Unsupported: The source's names are not a module's own.
    """
    if not isinstance(source.native, ModuleState):
        raise Unsupported(f"from {source.format} to {to}: this pair of formats is not supported yet")
    return source.native


def refuse_options(options: WriteOptions, names: Iterable[str], why: str) -> None:
    """Refuse options that a format does not look at.

    Args:
        options: What the user asked for.
        names: Fields that mean nothing; None is what was not given.
        why: Follows the options in the message.

    Raises:
        UsageError: Some are given; all are named.
    """
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        raise UsageError(f"{', '.join('--' + name.replace('_', '-') for name in given)}: {why}")
