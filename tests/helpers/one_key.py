"""What a saved object consists of, key by key, and the same with one of them gone."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator
from pathlib import Path
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


def without_names(metadata: Any, names: Collection[str], path: Path) -> None:
    """What torch's ``.metadata`` says, with nothing of some names, written anew."""
    for name in names:
        del metadata.state_dict_metadata[name]
        if metadata.planner_data is not None:
            metadata.planner_data.pop(name, None)
    for index in [one for one in metadata.storage_data if one.fqn in names]:
        del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))
