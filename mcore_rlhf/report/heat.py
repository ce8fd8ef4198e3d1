"""The heat map of a comparison: how much every tensor of every layer differs, experts of a layer as their worst."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from mcore_rlhf.verify.differ import Comparison, Difference

from .shards import Span, pattern_of, spans


class Cell(TypedDict):
    """A tensor that differs, or the worst of a layer's experts; ``column`` is its layer."""

    column: int
    what: str
    differing: int
    max_abs: float
    max_rel: float
    ulps: int


class HeatRow(TypedDict):
    """Tensors of a name, layer by layer; ``compared`` are those at which somebody looked, ``columns`` how many layers there are."""

    pattern: str
    state: str
    columns: int
    compared: list[Span]
    cells: list[Cell]


class HeatMap(TypedDict):
    """All of it; without a cell, everything is equal."""

    rows: list[HeatRow]


def heat_map(comparison: Comparison) -> HeatMap:
    """Put a comparison's tensors and differences in rows and columns.

    Args:
        comparison: What comparing found.
    """
    lines: dict[tuple[str, str], dict[int, list[Difference]]] = {}
    different = {item.tensor: item for item in comparison.differences if item.tensor is not None}
    for name in dict.fromkeys((*comparison.names, *different)):
        pattern, numbers = pattern_of(name.param)
        column = numbers[0] if numbers else 0
        found = lines.setdefault((pattern, name.state), {}).setdefault(column, [])
        if name in different:
            found.append(different[name])
    return {"rows": [_row(pattern, state, line) for (pattern, state), line in lines.items()]}


def _row(pattern: str, state: str, line: dict[int, list[Difference]]) -> HeatRow:
    return {
        "pattern": pattern,
        "state": state,
        "columns": max(line) + 1,
        "compared": spans(line),
        "cells": [_cell(column, found) for column, found in sorted(line.items()) if found],
    }


def _cell(column: int, found: Iterable[Difference]) -> Cell:
    """The worst of each kind, and in words the first."""
    listed = list(found)
    more = f", and {len(listed) - 1} more" if len(listed) > 1 else ""
    return {
        "column": column,
        "what": f"{listed[0].what}{more}",
        "differing": sum(one.differing for one in listed),
        "max_abs": max(one.max_abs for one in listed),
        "max_rel": max(one.max_rel for one in listed),
        "ulps": max(one.max_ulps for one in listed),
    }
