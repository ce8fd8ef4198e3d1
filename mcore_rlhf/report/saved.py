"""Roles of a step whose files no reader knows as a model: what their manifest and the files themselves say.

``TorchEngine`` saves ``torch.save``'s own tree, with a module or without, beside other models or alone: there are names, shapes and types,
and no table of what they mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import TypedDict

from mcore_rlhf.errors import CheckpointError, headline
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.stored import StoredTensor

_MODEL, _OPTIMIZER, _RECORD = "model", "optimizer", "optimizer_params"
"""Parts of the file that :class:`~mcore_rlhf.TorchEngine` writes."""
_FILES = 16
"""Files of a role that are opened: their tables, never their tensors."""
_TENSORS = 2_000
"""Tensors that a page lists of a role."""
_NODES, _DEEPEST = 500_000, 32
"""Values of a file that are looked at, and how far below one another: a tree may hold itself."""


class SavedTensor(TypedDict):
    """A tensor of a file, by where it stands in the tree."""

    name: str
    shape: list[int]
    dtype: str


class DrawnOptimizer(TypedDict):
    """An optimizer: its class where the file says it, dtypes of its ``states`` by name, numbers of each of its ``groups``."""

    kind: str | None
    states: dict[str, str]
    groups: list[dict[str, float]]


class SavedRole(TypedDict):
    """A role.

    ``bytes`` of its ``files``, and ``live``, the tensors that its engine held when it was saved, are the manifest's (null in older
    ones). The rest is of the files: ``parts`` of the tree, ``parameters`` by dtype and the ``tensors`` of the model, of which
    ``omitted`` are not listed; null and empty where there is no such file, or ``why`` it could not be opened.
    """

    role: str
    format: str
    parallel: str
    files: int
    bytes: int
    live: dict[str, int] | None
    parts: list[str]
    dtypes: dict[str, int]
    tensors: list[SavedTensor]
    omitted: int
    optimizer: DrawnOptimizer | None
    why: str


def saved_roles(folder: ReadablePath, manifest: Manifest, known: Sequence[str]) -> list[SavedRole]:
    """Tell of every role that has no reader.

    Args:
        folder: The step's folder.
        manifest: Its manifest.
        known: Roles that were opened as models.
    """
    roles = {str(part.get("role")): part for part in manifest.parts}
    live = manifest.live
    return [_role(folder, manifest, part, role, live.get(role)) for role, part in roles.items() if role not in known]


def _role(
    folder: ReadablePath, manifest: Manifest, part: Mapping[str, object], role: str, live: dict[str, int] | None
) -> SavedRole:
    files = {path: entry.nbytes for path, entry in manifest.files.items() if path.startswith(f"{role}/")}
    found, why = _Found(), ""
    stored = [path for path in files if path.endswith(".pt")][:_FILES]
    for path in stored:
        try:
            found.add(read_pt(folder, path).tree, "" if len(stored) == 1 else f"{path.partition('/')[2]}: ")
        except CheckpointError as error:
            why = headline(str(error))
    return {
        "role": role,
        "format": str(part.get("format", "")),
        "parallel": str(part.get("parallel", "")),
        "files": len(files),
        "bytes": sum(files.values()),
        "live": live,
        "parts": list(found.parts),
        "dtypes": dict(found.dtypes),
        "tensors": found.tensors,
        "omitted": found.omitted,
        "optimizer": found.optimizer,
        "why": why,
    }


@dataclass(slots=True)
class _Found:
    """What the trees of a role's files hold."""

    parts: dict[str, None] = field(default_factory=dict)
    dtypes: Counter[str] = field(default_factory=Counter)
    tensors: list[SavedTensor] = field(default_factory=list)
    omitted: int = 0
    optimizer: DrawnOptimizer | None = None

    def add(self, tree: object, prefix: str) -> None:
        """Look at one tree; a tensor that the model has under two names counts twice, as in its state dictionary."""
        if not isinstance(tree, Mapping):
            return
        self.parts.update(dict.fromkeys(str(name) for name in tree if name != _RECORD))
        for name, tensor in _tensors(tree.get(_MODEL)):
            self.dtypes[str(tensor.record.dtype)] += prod(tensor.shape)
            if len(self.tensors) >= _TENSORS:
                self.omitted += 1
                continue
            self.tensors.append(
                {"name": f"{prefix}{name}", "shape": list(tensor.shape), "dtype": str(tensor.record.dtype)}
            )
        if isinstance(stored := tree.get(_OPTIMIZER), Mapping):
            record = tree.get(_RECORD)
            self.optimizer = _optimizer(stored, record if isinstance(record, Mapping) else {})


def _optimizer(stored: Mapping[object, object], record: Mapping[object, object]) -> DrawnOptimizer:
    groups = stored.get("param_groups")
    states: dict[str, str] = {}
    for name, tensor in _tensors(stored.get("state")):
        states.setdefault(name.rpartition(".")[2], str(tensor.record.dtype))
    kind = record.get("class")
    return {
        "kind": kind if isinstance(kind, str) else None,
        "states": states,
        "groups": [_numbers(group) for group in groups if isinstance(group, Mapping)]
        if isinstance(groups, list | tuple)
        else [],
    }


def _numbers(group: Mapping[object, object]) -> dict[str, float]:
    """The fields of a group that are numbers, as its learning rate."""
    return {
        str(name): value
        for name, value in group.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    }


def _tensors(tree: object) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor below, in order, by its keys joined with dots."""
    stack: list[Iterator[tuple[str, object]]] = [iter([("", tree)])]
    for _ in range(_NODES):
        while stack and (found := next(stack[-1], None)) is None:
            stack.pop()
        if not stack or found is None:
            return
        name, value = found
        if isinstance(value, StoredTensor):
            yield name, value
        elif len(stack) <= _DEEPEST and isinstance(value, Mapping | list | tuple):
            stack.append(_below(name, value))


def _below(name: str, value: Mapping[object, object] | Sequence[object]) -> Iterator[tuple[str, object]]:
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield f"{name}.{key}" if name else str(key), item
