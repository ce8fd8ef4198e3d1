"""Comparing two checkpoints, whatever their formats and layouts: every logical tensor in every state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from mcore_rlhf.core.cast import as_floats, differing_after_rounding
from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, Box, Chunk, TensorEntry, TensorName
from mcore_rlhf.core.execute import SourceBytes
from mcore_rlhf.families.source import Source

from .audit import paired

_Compare: TypeAlias = Callable[[Chunk, Chunk], tuple[int, float]]
"""Elements of two chunks that differ, and by how much at most."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two values count as equal: ``|a - b| <= atol + rtol * |b|``. Both 0 compares bits."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bits are compared."""
        return self.atol == 0.0 and self.rtol == 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not equal.

    Args:
        name: The tensor, or the value.
        what: What is different.
        differing: Number of elements that differ.
        max_abs: Largest absolute difference, where values were compared.
    """

    name: str
    what: str
    differing: int = 0
    max_abs: float = 0.0


@dataclass(slots=True)
class Comparison:
    """What comparing found.

    Args:
        tensors: Tensors compared.
        elements: Elements compared.
        differences: What is not equal.
        notes: What was left out, and why.
    """

    tensors: int = 0
    elements: int = 0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


@dataclass(slots=True)
class Differ:
    """Compares two opened checkpoints.

    Args:
        a, b: The checkpoints.
        bytes_a, bytes_b: Where their bytes are.
        tolerance: When values count as equal.
        states: States to compare, or None for all.
        progress: Called with the number of bytes just compared.
    """

    a: Source
    b: Source
    bytes_a: SourceBytes
    bytes_b: SourceBytes
    tolerance: Tolerance = field(default_factory=Tolerance)
    states: Sequence[str] | None = None
    progress: Callable[[int], None] = lambda nbytes: None
    result: Comparison = field(default_factory=Comparison)

    def compare(self) -> Comparison:
        """Compare every tensor of both, and the training state."""
        for name in self._names():
            self._compare_tensor(name)
        self._compare_states()
        return self.result

    def _names(self) -> Iterator[TensorName]:
        """Names of both, in the order of the first; roles need not be equal."""
        names: dict[tuple[str, str], TensorName] = {}
        for catalog in (self.a.catalog, self.b.catalog):
            for name in catalog:
                if self.states is None or name.state in self.states:
                    names.setdefault((name.param, name.state), name)
        yield from names.values()

    def _compare_tensor(self, name: TensorName) -> None:
        label = f"{name.param} ({name.state})"
        count, master = self._compare_chunks, name._replace(state=MASTER)
        a, b = _entry(self.a, name), _entry(self.b, name)
        if name.state == PARAM and (a is None) != (b is None):
            a, b = a or _entry(self.a, master), b or _entry(self.b, master)
            count = self._compare_rounded if self.tolerance.exact else count
            if a is not None and b is not None:
                self._note("one stores masters only: rounded, they were compared with the parameters of the other")
        if a is None or b is None:
            if name.param in self.a.model.unused | self.b.model.unused:
                self._note(f"{name.param}: only one layout has it, and neither uses it: not compared")
            else:
                self._missing(label, name, in_a=a is not None)
            return
        common = self._common_shape(label, a, b, name)
        if common is None:
            return
        if a.dtype != b.dtype and self.tolerance.exact and count == self._compare_chunks:
            self._differs(label, f"dtype {a.dtype} and {b.dtype}; give --atol or --rtol to compare values")
            return
        self.result.tensors += 1
        self._compare_values(label, a, b, common, count)

    def _missing(self, label: str, name: TensorName, in_a: bool) -> None:
        self._differs(label, f"only in {'the first' if in_a else 'the second'}")

    def _common_shape(self, label: str, a: TensorEntry, b: TensorEntry, name: TensorName) -> tuple[int, ...] | None:
        """The shape to compare: that of both, or, for a padded vocabulary, the words that both have."""
        if a.global_shape == b.global_shape:
            return a.global_shape
        spec = self.a.model.get(name.param)
        if spec is None or not spec.partition.vocabulary or a.global_shape[1:] != b.global_shape[1:]:
            self._differs(label, f"shape {a.global_shape} and {b.global_shape}")
            return None
        rows = min(a.global_shape[0], b.global_shape[0])
        note = (
            f"padded vocabularies of {a.global_shape[0]} and {b.global_shape[0]} rows: the first {rows} were compared"
        )
        self._note(note)
        return (rows, *a.global_shape[1:])

    def _compare_values(
        self, label: str, a: TensorEntry, b: TensorEntry, shape: tuple[int, ...], compare: _Compare
    ) -> None:
        whole, differing, max_abs = Box.whole(shape), 0, 0.0
        for chunk_b in b.primary():
            wanted = chunk_b.box.intersect(whole)
            for chunk_a in a.primary() if wanted is not None else ():
                part = chunk_a.box.intersect(wanted) if wanted is not None else None
                if part is not None:
                    count, largest = compare(chunk_a.narrow(part), chunk_b.narrow(part))
                    differing, max_abs = differing + count, max(max_abs, largest)
        self.result.elements += whole.numel
        if differing:
            self._differs(label, f"{differing} of {whole.numel} elements", differing, max_abs)

    def _compare_chunks(self, a: Chunk, b: Chunk) -> tuple[int, float]:
        differing, max_abs = 0, 0.0
        for _, left, right in paired(self.bytes_a, a, self.bytes_b, b):
            self.progress(left.nbytes)
            if a.record.dtype == b.record.dtype and np.array_equal(left, right):
                continue
            x, y = as_floats(left, a.record.dtype), as_floats(right, b.record.dtype)
            gap = np.abs(x - y)
            tolerance = self.tolerance
            close = left == right if tolerance.exact else gap <= tolerance.atol + tolerance.rtol * np.abs(y)
            differing += int((~close).sum())
            max_abs = max(max_abs, float(np.nanmax(gap, initial=0.0)))
        return differing, max_abs

    def _compare_rounded(self, a: Chunk, b: Chunk) -> tuple[int, float]:
        """How many elements of a master are not the parameter, once rounded to its type; either may be the master."""
        master, param = (a, b) if a.record.dtype.itemsize >= b.record.dtype.itemsize else (b, a)
        high_bytes, low_bytes = (self.bytes_a, self.bytes_b) if master is a else (self.bytes_b, self.bytes_a)
        differing = 0
        for copy, high, low in paired(high_bytes, master, low_bytes, param):
            self.progress(high.nbytes)
            differing += differing_after_rounding(high, low, copy.source.dtype, copy.target.dtype)
        return differing, 0.0

    def _compare_states(self) -> None:
        if self.states is not None:
            return
        a, b = self.a.state, self.b.state
        if a.iteration != b.iteration:
            self._differs("iteration", f"{a.iteration} and {b.iteration}")
        if a.scheduler != b.scheduler:
            self._differs("scheduler", f"{a.scheduler} and {b.scheduler}")
        groups_a, groups_b = (
            [_identity(group.fields) for group in state.groups if not group.expert] for state in (a, b)
        )
        if sorted(groups_a, key=repr) != sorted(groups_b, key=repr):
            self._differs("param_groups", "the optimizer's param groups are not the same")
        for counter in ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"):
            if a.args.get(counter) != b.args.get(counter):
                self._differs(counter, f"{a.args.get(counter)} and {b.args.get(counter)}")
        self.result.notes.append("RNG states and the other arguments were not compared: they belong to a layout")

    def _note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)

    def _differs(self, name: str, what: str, differing: int = 0, max_abs: float = 0.0) -> None:
        self.result.differences.append(Difference(name, what, differing, max_abs))


def _entry(source: Source, name: TensorName) -> TensorEntry | None:
    """A tensor of a checkpoint. An fp32 parameter is its own master where the optimizer stores none."""
    entry = source.catalog.get(name._replace(role=source.role))
    if entry is None and name.state == MASTER and source.optimizer is not None:
        param = source.catalog.get(name._replace(role=source.role, state=PARAM))
        return param if param is not None and param.dtype == FLOAT32 else None
    return entry


def _identity(fields: object) -> object:
    return sorted(fields.items()) if isinstance(fields, dict) else fields
