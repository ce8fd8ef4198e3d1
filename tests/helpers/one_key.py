"""What a saved object consists of, key by key, and the same with one of them gone."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

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


def object_in(folder: Path, name: str) -> Any:
    """What a DCP folder has under a name, where that is no tensor; None where there is no such name."""
    stored = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    info = next((at for index, at in stored.items() if index.fqn == name), None)
    if info is None:
        return None
    whole = (folder / info.relative_path).read_bytes()
    return torch.load(io.BytesIO(whole[info.offset : info.offset + info.length]), weights_only=False)


def without_in_object(folder: Path, name: str, at: At) -> None:
    """Take one key out of an object of a DCP folder: it is written anew behind all that its file has."""
    metadata, written = pickle.loads((folder / ".metadata").read_bytes()), io.BytesIO()
    torch.save(without_key(object_in(folder, name), at), written)
    index, info = next((index, at) for index, at in metadata.storage_data.items() if index.fqn == name)
    file = folder / info.relative_path
    moved = dataclasses.replace(info, offset=file.stat().st_size, length=len(written.getvalue()))
    with file.open("ab") as end:
        end.write(written.getvalue())
    metadata.storage_data[index] = moved
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
