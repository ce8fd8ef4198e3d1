"""Which stored param group each live one is: the one that has its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.source import ParamGroup


def matched_groups(live: Sequence[Sequence[str]], stored: Sequence[ParamGroup], problems: Problems) -> list[ParamGroup]:
    """For every live param group the stored one whose parameters it has: each keeps its own settings.

    Args:
        live: The names of every group's parameters, as the checkpoint calls them.
        stored: The checkpoint's groups.
        problems: Told where there is none.

    Returns:
        As many as there are live ones, if there are no problems.
    """
    found: list[ParamGroup] = []
    for number, params in enumerate(live):
        names = set(params)
        same = [group for group in stored if set(group.params) == names]
        within = same or [group for group in stored if names and names <= set(group.params)]
        if not names and number < len(stored):
            within = [stored[number]]
        if not within:
            some = ", ".join(sorted(names)[:3])
            text = f"param group {number} ({some}, …): its parameters are in no single param group of the checkpoint"
            problems.add(
                LayoutMismatch, text, "Group the parameters as the saved run did, or load with optimizer=False."
            )
        found += within[:1]
    return found
