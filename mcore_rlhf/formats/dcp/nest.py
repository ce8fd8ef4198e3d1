"""Nests of dictionaries and lists, and the paths that DCP takes them apart into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rlhf.storage.dcp import Path_


def leaves(value: object, path: Path_ = ()) -> Iterator[tuple[Path_, object]]:
    """Take a nest apart as torch does.

    Dictionaries are always entered, and lists that hold dictionaries or tensors; everything else is a leaf.
    Source: torch 2.13.0, ``distributed/checkpoint/_traverse.py`` (``traverse_state_dict``).
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, list) and not _is_leaf(value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def _is_leaf(value: list[Any]) -> bool:
    import torch

    return not any(
        isinstance(item, Mapping | torch.Tensor) or (isinstance(item, list) and not _is_leaf(item)) for item in value
    )


def nest(values: Mapping[Path_, object]) -> dict[str, Any]:
    """Put a nest together again: an int in a path is an index of a list.

    Args:
        values: Leaves by path; no path is empty.
    """
    root: dict[str | int, Any] = {}
    for path, value in values.items():
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if type(value) is not dict:
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and sorted(items, key=str) == sorted(range(len(items)), key=str) and all(type(k) is int for k in items):
        return [items[index] for index in range(len(items))]
    return {str(key): item for key, item in items.items()}
