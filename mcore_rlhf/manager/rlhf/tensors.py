"""The tensors of the RLHF state: held by name, described in the JSON, kept in files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import Corrupt, Incomplete, Problems, Unsupported, UsageError
from .json_values import TensorRef, shorten, under


@dataclass(eq=False)
class Buffer:
    """A replay or rollout buffer: tensors by name, streamed into a file of its own, and what a person may read.

    Args:
        tensors: The contents; any shapes and dtypes.
        meta: What belongs to them: plain values that JSON can hold.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meta: dict[str, object] = field(default_factory=dict)


@dataclass(eq=False)
class InFlightPrompt:
    """A prompt that was given out, and whose samples have not all been trained on.

    Args:
        epoch: The epoch that it was drawn in.
        prompt_id: Its identity in the data set.
        samples: Indices, within its group, of the samples that are still out.
        weight_version: Version of the policy that samples it.
        attempt: How often it was given out before.
        tensors: What was sampled so far, by a name of the trainer's choice: tokens, log-probabilities.
    """

    epoch: int
    prompt_id: int | str
    samples: tuple[int, ...]
    weight_version: int
    attempt: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


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
    """A nest of dicts with copies of its tensors; all else as it is."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    return {name: cloned(item) for name, item in tree.items()} if isinstance(tree, Mapping) else tree
