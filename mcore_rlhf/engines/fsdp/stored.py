"""What a checkpoint holds besides tensors, as an FSDP trainer wants it back: of a DCP folder all of it, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.dcp.native import DcpState
from mcore_rlhf.formats.dcp.rest import SCHEDULER, SCHEDULERS, VERSION

_OWN = frozenset({SCHEDULER, SCHEDULERS, VERSION})


def schedules_of(source: Source) -> list[dict[str, object]]:
    """The state of every learning-rate schedule, in the order in which they were given to the engine."""
    listed = source.native.rest.get(SCHEDULERS) if isinstance(source.native, DcpState) else None
    if isinstance(listed, list) and all(isinstance(state, dict) for state in listed):
        return cast("list[dict[str, object]]", listed)
    return [source.state.scheduler] if source.state.scheduler else []


def values_of(source: Source) -> Mapping[str, Mapping[str, object]]:
    """What is stored once per parameter and is no tensor of its shape: parameter → key → value, such as ``step``."""
    return source.native.scalars if isinstance(source.native, DcpState) else {}


def settled_lines(source: Source) -> frozenset[str]:
    """Lines of the report that do not hold here: of steps that differ within a group, which others have one place for."""
    return frozenset(source.native.differing) if isinstance(source.native, DcpState) else frozenset()


def others_of(source: Source) -> dict[str, object]:
    """What the training script gave to the save; of another format, everything that it keeps at the top."""
    held = source.native.rest if isinstance(source.native, DcpState) else source.state.other
    return {key: value for key, value in held.items() if key not in _OWN}


def extra_states_of(source: Source, names: Mapping[str, object]) -> dict[str, object]:
    """The stored extra state of modules that have one.

    Args:
        source: The checkpoint.
        names: Their names in the state dict.
    """
    held = source.native.rest if isinstance(source.native, DcpState) else {}
    return {name: held[name] for name in names if name in held}
