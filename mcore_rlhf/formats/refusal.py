"""What every target under a module's names refuses: sources of another family."""

from __future__ import annotations

from mcore_rlhf.errors import Unsupported

from .base import Source
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
