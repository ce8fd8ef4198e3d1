"""Optimizers whose state dict goes by names in one level, as VeOmni's of several have it: ``state.NAME.exp_avg``, ``param_groups.NAME.lr``.

Sources: veomni 0.1.12, ``veomni/optim/optimizer.py`` (``MultiOptimizer.state_dict``: Muon, or experts cut apart from the rest), which
verl's engine of that name gives to its manager; torch 2.13.0, ``distributed/checkpoint/state_dict.py`` (``_flatten_optim_state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rlhf.core.facts import distinct
from mcore_rlhf.storage.dcp.rankfile import RankFile

from .rank_items import NAMES

STATE, GROUPS = "state", "param_groups"


def is_flat(tree: object) -> bool:
    """Whether it is such a state dict."""
    return isinstance(tree, Mapping) and STATE not in tree and any(str(key).startswith(f"{STATE}.") for key in tree)


def nested(file: RankFile) -> RankFile:
    """A rank's file with its states by parameter and its groups as lists of names; another file as it is."""
    if not is_flat(file.tree):
        return file
    found: dict[str, dict[str, dict[str, object]]] = {STATE: {}, GROUPS: {}}
    rest: dict[str, object] = {}
    for key, value in file.tree.items():
        kind, _, inner = str(key).partition(".")
        name, _, field = inner.rpartition(".")
        if kind in found and name:
            found[kind].setdefault(name, {})[field] = value
        else:
            rest[str(key)] = value
    return replace(file, tree={STATE: found[STATE], GROUPS: _grouped(found[GROUPS]), **rest})


def _grouped(settings: Mapping[str, Mapping[str, object]]) -> list[dict[str, Any]]:
    """Parameters of the same settings in one group."""
    groups = list[dict[str, Any]]()
    for first, names in distinct(settings):
        groups.append({**first, NAMES: names})
    return groups


def flat(states: Mapping[Any, Mapping[str, object]], groups: list[dict[str, Any]]) -> dict[str, object]:
    """The other way round.

    Args:
        states: By parameter.
        groups: Each with its parameters' names.
    """
    by_name = {f"{STATE}.{name}.{key}": value for name, of in states.items() for key, value in of.items()}
    fields = ((name, {k: v for k, v in group.items() if k != NAMES}) for group in groups for name in group[NAMES])
    return by_name | {f"{GROUPS}.{name}.{key}": value for name, of in fields for key, value in of.items()}
