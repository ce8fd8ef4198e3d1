"""Strict JSON that loses nothing: what JSON has no words for becomes an object with one ``$`` key.

Tensors are described there, and kept in files of their own. Dataclasses are records; see :mod:`mcore_rlhf.storage.records`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch

from ...errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported, UsageError
from ...storage import exact_json
from ...storage.exact_json import Encoder, Marked
from ...storage.records import shorten, under

_KEPT = "numbers, strings, booleans, None, lists, tuples, dicts"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor's place in the JSON.

    Args:
        key: Its name in the tensor file.
        form: Its dtype and shape: ``float32[2, 3]``.
    """

    key: str
    form: str


def dumps(tree: object, place: str) -> str:
    """Write a tree as strict JSON.

    Args:
        tree: Nested dicts, lists and tuples of plain values; numpy scalars count as Python's.
        place: What it is, for messages.

    Raises:
        UsageError: Something in it cannot be kept; every such place is named.
    """
    encoder = Encoder(kinds=_KINDS)
    try:
        encoded = encoder.encode(_plain(tree), place)
        if encoder.lost:
            raise UsageError(
                "\n".join([*(f"{what}: cannot be kept in JSON" for what in encoder.lost), f"It keeps {_KEPT}."])
            )
        return json.dumps(encoded, indent=1, allow_nan=False) + "\n"
    except RecursionError:
        raise UsageError(f"{place}the values are nested too deeply, or contain themselves.") from None


def loads(text: str | bytes, where: str) -> object:
    """Read strict JSON, with the marked values still as they stand; :func:`decode` turns them back.

    Raises:
        Corrupt: It is not JSON, or holds the constants ``NaN`` or ``Infinity``, which JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: is not valid JSON: {error}.\nUse an older step.") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def decode(tree: object, place: str, problems: Problems) -> object:
    """What a tree of JSON stands for; what it cannot stand for is noted."""
    try:
        return exact_json.decode(tree, place, kinds=_KINDS)
    except CheckpointError as error:
        problems.add_error(error)
        return None


_KINDS = (
    exact_json.FLOAT,
    exact_json.TUPLE,
    Marked(
        "$tensor",
        lambda value: type(value) is TensorRef,
        lambda ref: [ref.key, ref.form],
        lambda parts: TensorRef(*map(str, exact_json.as_list(parts))),
    ),
    replace(next(kind for kind in exact_json.KINDS if kind.tag == "$dict"), tag="$items"),
)


def _plain(tree: object) -> object:
    """A tree in which a number of numpy's, an enumeration's, or another that is one of Python's as well, is Python's."""
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, dict):
        return {_plain(key): _plain(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        items = [_plain(item) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    if isinstance(tree, str):
        return str.__str__(tree)  # an enumeration's own would be its name
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        return tree
    return int(tree) if isinstance(tree, int) else float(tree)


def form(tensor: torch.Tensor) -> str:
    """Dtype and shape, as the JSON names them: ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def forms(tensors: Mapping[Any, object], place: str, problems: Problems) -> dict[str, str]:
    """What the JSON says about named tensors; whatever is not a tensor is noted."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            problems.add(UsageError, f"{under(place, name)}: expected a tensor under a string, found {shorten(tensor)}")
    return {name: form(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def pick(content: object, expected: Mapping[str, str], where: str, problems: Problems) -> dict[str, torch.Tensor]:
    """The tensors that the JSON describes, out of what a tensor file holds.

    Args:
        content: What was read: a dict of tensors.
        expected: Their names and forms.
        where: The file, and the place in it, for messages.
        problems: Notes tensors that are missing, unknown, or of another form.
    """
    if not isinstance(content, Mapping):
        problems.add(Corrupt, f"{where}: expected a dict of tensors, found {shorten(content)}")
        return {}
    for name in sorted(content.keys() - expected.keys(), key=str):
        problems.add(Unsupported, f"{where}: tensor {name!r} is not named in rlhf_state.json")
    for name in sorted(expected.keys() - content.keys()):
        problems.add(Incomplete, f"{where}: tensor {name!r} is missing; rlhf_state.json names it")
    found = {name: content[name] for name in expected if name in content}
    for name, tensor in found.items():
        actual = form(tensor) if isinstance(tensor, torch.Tensor) else shorten(tensor)
        if actual != expected[name]:
            problems.add(Corrupt, f"{where}: tensor {name!r}: expected {expected[name]}, found {actual}")
    return found


def split(tree: object, key: str, found: dict[str, torch.Tensor]) -> object:
    """The tree with every tensor replaced by a reference; the tensors go into ``found``.

    Args:
        tree: Nested dicts, lists and tuples.
        key: JSON pointer (RFC 6901) to the tree, which names the tensors in it; empty for the root. Members of a dict
            whose keys are not all strings go by their place.
        found: Where the tensors are put.
    """
    if isinstance(tree, torch.Tensor):
        found[key] = tree
        return TensorRef(key, form(tree))
    if isinstance(tree, dict):
        steps = _steps(tree)
        return {
            name: split(item, f"{key}/{step}", found) for (name, item), step in zip(tree.items(), steps, strict=True)
        }
    if isinstance(tree, (list, tuple)):
        items = [split(item, f"{key}/{index}", found) for index, item in enumerate(tree)]
        return tuple(items) if isinstance(tree, tuple) else items
    return tree


def _steps(tree: Mapping[object, object]) -> list[str]:
    """What leads to each member: its key or, where not all keys are strings, its place, since 1 and "1" may both be."""
    if not all(isinstance(name, str) for name in tree):
        return [str(index) for index in range(len(tree))]
    return [str(name).replace("~", "~0").replace("/", "~1") for name in tree]


def references(tree: object) -> dict[str, str]:
    """Keys and forms of all tensors that a tree refers to."""
    if isinstance(tree, TensorRef):
        return {tree.key: tree.form}
    if isinstance(tree, dict):
        tree = list(tree.values())
    found: dict[str, str] = {}
    for item in tree if isinstance(tree, (list, tuple)) else ():
        found |= references(item)
    return found


def join(tree: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """The inverse of :func:`split`."""
    if isinstance(tree, TensorRef):
        return tensors.get(tree.key)
    if isinstance(tree, dict):
        return {name: join(item, tensors) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [join(item, tensors) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    return tree


def refill(live: dict[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    """Make a live dict hold the stored tensors, in place where a live tensor of the same form can take them."""
    with torch.no_grad():
        kept = {name: _taken(live.get(name), tensor) for name, tensor in stored.items()}
    live.clear()
    live.update(kept)


def _taken(live: torch.Tensor | None, stored: torch.Tensor) -> torch.Tensor:
    if live is None or live is stored or form(live) != form(stored) or not _writable(live):
        return stored
    return live.copy_(stored)


def _writable(tensor: torch.Tensor) -> bool:
    """Whether a copy into the tensor cannot fail: not expanded, sparse, on ``meta`` or made in inference mode."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_inference():
        return False
    return tensor.is_contiguous()


def cloned(tree: object) -> object:
    """A nested dict with copies of its tensors; all else as it is."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    return {name: cloned(item) for name, item in tree.items()} if isinstance(tree, Mapping) else tree
