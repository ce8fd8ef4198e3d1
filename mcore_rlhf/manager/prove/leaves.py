"""Comparing two trees of values, as ``.pt`` and JSON files hold them, leaf by leaf and bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.stubs import NAMESPACES, Stub

from .findings import Finding, Tally, shown
from .volatile import Ignored, Neutral

_ABSENT = object()
TensorComparer = Callable[[StoredTensor, StoredTensor], "str | None"]
"""Compares the bytes of two stored tensors of one shape and type: None where they are equal, otherwise what differs."""


def children(value: object) -> dict[str, object] | None:
    """The values inside a value, by the name of their place; None where it is a leaf."""
    if isinstance(value, dict):
        return {_name(key): item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    if isinstance(value, NAMESPACES):
        return dict(vars(value))
    if isinstance(value, Stub):
        parts = {"args": value.stub_args, "state": value.stub_state, "items": value.stub_items}
        return {name: part for name, part in parts.items() if part not in (None, ())}
    return None


def _name(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


@dataclass(frozen=True, slots=True)
class LeafComparer:
    """Compares the two trees of one file.

    Args:
        file: Its path in the step.
        tensors: Compares stored tensors.
        ignored: What is not compared.
        neutral: For either run: takes its own folder out of a text.
        tally: Counts.
    """

    file: str
    tensors: TensorComparer
    ignored: Ignored
    neutral: tuple[Neutral, Neutral]
    tally: Tally

    def compare(self, a: Any, b: Any) -> None:
        """Compare, and count what is found."""
        for key, first, second in _pairs(a, b, ""):
            if self.ignored.value(self.file, key):
                self.tally.ignored += 1
                continue
            finding = self._difference(key, first, second)
            if finding is None:
                self.tally.same()
            else:
                self.tally.differs(finding)

    def _difference(self, key: str, a: object, b: object) -> Finding | None:
        if isinstance(a, StoredTensor) and isinstance(b, StoredTensor) and _kind(a) == _kind(b):
            detail = self.tensors(a, b)
            return Finding(self.file, key, _kind(a), _kind(b), detail) if detail is not None else None
        if type(a) is str and type(b) is str:
            a, b = self.neutral[0](a), self.neutral[1](b)
        return None if same_leaf(a, b) else Finding(self.file, key, _text(a), _text(b))


def _pairs(a: object, b: object, at: str) -> Iterator[tuple[str, object, object]]:
    """Leaves that stand at the same place; where the two trees have other shapes, the place itself."""
    inside_a, inside_b = children(a), children(b)
    if inside_a is None or inside_b is None or type(a) is not type(b) or not (inside_a or inside_b):
        yield at, a, b
        return
    for name in dict.fromkeys([*inside_a, *inside_b]):
        place = f"{at}/{name}" if at else name
        yield from _pairs(inside_a.get(name, _ABSENT), inside_b.get(name, _ABSENT), place)


def same_leaf(a: object, b: object) -> bool:
    """Whether two values are the same: of one type, and to the last bit. NaN is NaN, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b) or (isinstance(a, complex) and repr(a) == repr(b))


def _kind(tensor: StoredTensor) -> str:
    return f"{tensor.record.dtype} {list(tensor.shape)}"


def _text(value: object) -> str:
    if value is _ABSENT:
        return "not there"
    if isinstance(value, StoredTensor):
        return _kind(value)
    inside = children(value)
    return f"{type(value).__name__} of {len(inside)}" if inside else shown(value)
