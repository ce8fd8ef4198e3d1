"""What a saved object consists of, key by key, and the same with one of them gone."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


_DEEPEST, _STATES = 4, (0, 1)


def copies_without(root: Path, folder: Path, passed_over: Collection[str] = ()) -> Iterator[tuple[Path, str]]:
    """Copies of a run, each without one file, or without one key of one file, and which.

    Args:
        root: The run, or a step of it.
        folder: Where each copy lies in a folder of its own, under its own name.
        passed_over: Names of files that stay as they are.
    """
    number = 0
    for file in sorted(path for path in root.rglob("*") if path.is_file() and path.name not in passed_over):
        load, keys, save = _how(file)
        for at in [None, *(keys(load(file)) if load is not None else ())]:
            number += 1
            copy = Path(shutil.copytree(root, folder / f"copy-{number}" / root.name))
            there = copy / file.relative_to(root)
            if at is None:
                there.unlink()
            else:
                save(load(file), at, there)
            yield copy, file.name if at is None else f"{file.name}: {'/'.join(map(str, at))}"


def _how(file: Path) -> tuple[Any, Any, Any]:
    """How a file is read, which keys are taken, and how it is written without one."""
    if file.suffix == ".json":
        return (
            lambda path: json.loads(path.read_text()),
            lambda tree: [(key,) for key in tree],
            lambda tree, at, path: path.write_text(json.dumps(without_key(tree, at))),
        )
    if file.name == ".metadata":
        return (
            lambda path: pickle.loads(path.read_bytes()),
            lambda found: _names(found.state_dict_metadata),
            without_names,
        )
    if file.suffix == ".safetensors":
        return load_file, _names, lambda tree, at, path: save_file(without_key(tree, at), path, {"format": "pt"})
    if file.suffix in (".pt", ".pth", ".bin", ".pkl") and zipfile.is_zipfile(file):
        return (
            lambda path: torch.load(path, weights_only=False),
            lambda tree: filter(_is_told_apart, keys_of(tree)),
            lambda tree, at, path: torch.save(without_key(tree, at), path),
        )
    return None, None, None


def _names(there: Collection[str]) -> list[At]:
    """Names of tensors; of those that differ in numbers alone, or in the parameter, two; and those of all param groups at once."""
    seen: dict[str, list[str]] = {}
    for name in there:
        alike = re.sub(r"layers\.\d+\.[\w.]*?(weight|bias)|[\w.]*(embed_tokens|norm|lm_head)\.weight", "P", name)
        seen.setdefault(alike, []).append(name)
    groups = tuple(name for name in there if ".param_groups." in name)
    return [(name,) for names in seen.values() for name in names[:2]] + ([groups] if groups else [])


def _is_told_apart(at: At) -> bool:
    """Of states that are alike two are enough; DeepSpeed's configuration is not loaded; of lists, param groups and their rates alone."""
    numbered = [after for key, after in itertools.pairwise(at) if key == "state" and isinstance(after, int)]
    is_item = isinstance(at[-1], int) and at[-2:-1] not in (("state",), ("base_lrs",), ("param_groups",))
    return len(at) <= _DEEPEST and {*numbered} <= {*_STATES} and "ds_config" not in at[:-1] and not is_item
