"""What a saved object consists of, key by key, and the same with one of them gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEPTH, _ALIKE = 6, 30
At = tuple[str | int, ...]


def keys_of(tree: Any, at: At = ()) -> Iterator[At]:
    """Where there is something to take, attributes of ``args`` included; of many alike the first and the last."""
    if at:
        yield at
    found = dict(enumerate(tree)) if isinstance(tree, list) else _below(tree)
    keys = list(found)
    if len(at) < _DEPTH:
        for key in keys if len(keys) <= _ALIKE else [*keys[:3], *keys[-2:]]:
            yield from keys_of(found[key], (*at, key))


def _below(tree: Any) -> Any:
    """What has keys: a dictionary or a list itself, and what ``args`` holds."""
    return tree if isinstance(tree, dict | list) else vars(tree) if type(tree).__name__ == "Namespace" else {}


def without_key(tree: Any, at: At) -> Any:
    """The same without what lies there."""
    inner = tree
    for key in at[:-1]:
        inner = _below(inner)[key]
    del _below(inner)[at[-1]]
    return tree
