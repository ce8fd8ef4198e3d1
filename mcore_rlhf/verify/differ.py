"""Comparing two checkpoints, whatever their formats and layouts: every logical tensor in every state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mcore_rlhf.core.account import named
from mcore_rlhf.core.cast import as_floats, differing_after_rounding
from mcore_rlhf.core.catalog import FLOAT32, FLOATING, MASTER, PARAM, Box, Chunk, TensorEntry, TensorName
from mcore_rlhf.core.execute import SourceBytes
from mcore_rlhf.core.facts import Item, Kind, same
from mcore_rlhf.errors import CheckpointError, shown
from mcore_rlhf.families.inventory import OPAQUE, inventory_of
from mcore_rlhf.families.megatron.state import MegatronState, opaque_item
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.dcp.folder import DcpObject
from mcore_rlhf.storage.reading import opened
from mcore_rlhf.storage.stored import StoredTensor, map_tensors

from .audit import paired


class _Gap(NamedTuple):
    """How many elements differ, and by how much at most: absolute, relative to the second, in units in the last place."""

    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulps: int = 0

    def with_(self, other: _Gap) -> _Gap:
        """Both, as one."""
        return _Gap(self.differing + other.differing, *map(max, self[1:], other[1:]))  # type: ignore[arg-type]


_Compare: TypeAlias = Callable[[Chunk, Chunk], _Gap]


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
        max_rel: Largest difference relative to the second checkpoint's value, where that is not 0.
        max_ulps: Largest difference in units in the last place, where both are of one floating type.
        tensor: The tensor; None for another value.
    """

    name: str
    what: str
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulps: int = 0
    tensor: TensorName | None = None


@dataclass(slots=True)
class Comparison:
    """What comparing found.

    Args:
        tensors: Tensors compared.
        elements: Elements compared.
        differences: What is not equal.
        notes: What was left out, and why.
        names: The tensors that were compared.
    """

    tensors: int = 0
    elements: int = 0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: list[TensorName] = field(default_factory=list)

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
        """Names of both, in the order of the first; roles need not be equal. What has a master only is a parameter all the same."""
        names: dict[tuple[str, str], TensorName] = {}
        for catalog in (self.a.catalog, self.b.catalog):
            for name in catalog:
                if self.states is None or name.state in self.states:
                    names.setdefault((name.param, name.state), name)
                elif name.state == MASTER and PARAM in self.states:
                    names.setdefault((name.param, PARAM), name._replace(state=PARAM))
        yield from names.values()

    def _compare_tensor(self, name: TensorName) -> None:
        label = f"{name.param} ({name.state})"
        count, master = self._compare_chunks, name._replace(state=MASTER)
        a, b = _entry(self.a, name), _entry(self.b, name)
        if name.state in (PARAM, MASTER) and (a is None) != (b is None):
            a, b = (one or self._owned(of, name) for one, of in ((a, self.a), (b, self.b)))
        if name.state == PARAM and (a is None or b is None):
            apart = a is not None or b is not None
            a, b = (one or _entry(of, master) or self._owned(of, master) for one, of in ((a, self.a), (b, self.b)))
            count = self._compare_rounded if self.tolerance.exact and apart else count
            if a is not None and b is not None and apart:
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
            what = f"dtype {a.dtype} and {b.dtype}; give --atol or --rtol to compare values"
            self._differs(label, what, tensor=name)
            return
        self.result.tensors += 1
        self.result.names.append(name)
        self._compare_values(name, a, b, common, count)

    def _owned(self, source: Source, name: TensorName) -> TensorEntry | None:
        """What a checkpoint has under a tied tensor's first name, where the other has it under its second one, too."""
        module = ModuleState.of(source)
        owner = None if module is None else module.shared.get(name.param)
        found = None if owner is None else _entry(source, name._replace(param=owner))
        if found is not None:
            self._note(
                f"{name.param}: {'the first' if source is self.a else 'the second'} ties it to {owner}, which was compared with it"
            )
        return found

    def _missing(self, label: str, name: TensorName, in_a: bool) -> None:
        self._differs(label, f"only in {'the first' if in_a else 'the second'}", tensor=name)

    def _common_shape(self, label: str, a: TensorEntry, b: TensorEntry, name: TensorName) -> tuple[int, ...] | None:
        """The shape to compare: that of both, or, for a padded vocabulary, the words that both have."""
        if a.global_shape == b.global_shape:
            return a.global_shape
        spec = self.a.model.get(name.param)
        if spec is None or not spec.partition.vocabulary or a.global_shape[1:] != b.global_shape[1:]:
            self._differs(label, f"shape {a.global_shape} and {b.global_shape}", tensor=name)
            return None
        rows = min(a.global_shape[0], b.global_shape[0])
        note = (
            f"padded vocabularies of {a.global_shape[0]} and {b.global_shape[0]} rows: the first {rows} were compared"
        )
        self._note(note)
        return (rows, *a.global_shape[1:])

    def _compare_values(
        self, name: TensorName, a: TensorEntry, b: TensorEntry, shape: tuple[int, ...], compare: _Compare
    ) -> None:
        whole, gap, firsts = Box.whole(shape), _Gap(), a.primary()
        for chunk_b in b.primary():
            wanted = chunk_b.box.intersect(whole)
            for chunk_a in firsts if wanted is not None else ():
                part = chunk_a.box.intersect(wanted) if wanted is not None else None
                if part is not None:
                    gap = gap.with_(compare(chunk_a.narrow(part), chunk_b.narrow(part)))
        self.result.elements += whole.numel
        if gap.differing:
            what = f"{gap.differing} of {whole.numel} elements"
            self._differs(f"{name.param} ({name.state})", what, gap, name)

    def _compare_chunks(self, a: Chunk, b: Chunk) -> _Gap:
        found = _Gap()
        for _, left, right in paired(self.bytes_a, a, self.bytes_b, b):
            self.progress(left.nbytes)
            if a.record.dtype == b.record.dtype and np.array_equal(left, right):
                continue
            x, y = as_floats(left, a.record.dtype), as_floats(right, b.record.dtype)
            alike = left == right if a.record.dtype == b.record.dtype else x == y
            ulps = _ulps(left, right) if a.record.dtype == b.record.dtype and a.record.dtype in FLOATING else 0
            found = found.with_(_gap(x, y, alike, self.tolerance)._replace(max_ulps=ulps))
        return found

    def _compare_rounded(self, a: Chunk, b: Chunk) -> _Gap:
        """How many elements of a master are not the parameter, once rounded to its type; either may be the master."""
        master, param = (a, b) if a.record.dtype.itemsize >= b.record.dtype.itemsize else (b, a)
        high_bytes, low_bytes = (self.bytes_a, self.bytes_b) if master is a else (self.bytes_b, self.bytes_a)
        differing = 0
        for copy, high, low in paired(high_bytes, master, low_bytes, param):
            self.progress(high.nbytes)
            differing += differing_after_rounding(high, low, copy.source.dtype, copy.target.dtype)
        return _Gap(differing)

    def _compare_states(self) -> None:
        if self.states is not None:
            return
        a, b = self.a.state, self.b.state
        if a.iteration != b.iteration:
            self._differs("iteration", f"{a.iteration} and {b.iteration}")
        if not same(a.scheduler, b.scheduler):
            self._differs("scheduler", f"{a.scheduler} and {b.scheduler}")
        for expert in (False, True):
            of_a, of_b = ([group.fields for group in s.groups if group.expert == expert] for s in (a, b))
            starts = [_START in fields for fields in (*of_a, *of_b)]
            says_start = all(starts)
            if any(starts) and not says_start:
                self._note(f"{_START} of param groups: not all have it, and it was not compared")
            if expert and not (of_a and of_b):
                continue  # where experts are not dealt over ranks, they are in the others' groups
            if not same(_distinct(of_a, says_start), _distinct(of_b, says_start)):
                whose = "experts' " if expert else ""
                text = f"the optimizer's {whose}param groups are not the same: {_fields_apart(of_a, of_b)}"
                self._differs(f"{whose}param_groups", text)
        for counter in _COUNTERS:
            if a.args.get(counter) != b.args.get(counter):
                self._differs(counter, f"{a.args.get(counter)} and {b.args.get(counter)}")
        self._compare_opaque()
        self._compare_the_rest()

    def _compare_opaque(self) -> None:
        """Hold values under parameters' names that are no tensors against each other, whichever ranks have them."""
        a, b = (MegatronState.of(source) for source in (self.a, self.b))
        if a is None or b is None:
            return
        in_a, in_b = a.opaque(), b.opaque()
        for name in dict.fromkeys((*in_a, *in_b)):
            if (name in in_a) != (name in in_b):
                self._differs(name, f"an opaque value that only {'the first' if name in in_a else 'the second'} has")
            elif {value.digest for value in in_a[name]} != {value.digest for value in in_b[name]}:
                self._differs(name, "opaque values that are not the same")

    def _compare_the_rest(self) -> None:
        """Say of all other values whether they are the same. Two runs may differ in them, as a conversion makes them do: no difference."""
        if self.a.format != self.b.format:
            self._note("RNG states, loss scaler, client state and the other arguments were not compared")
            return
        same_ranks = self.a.parallel == self.b.parallel
        if not same_ranks:
            self._note("RNG states, and what else belongs to ranks, were not compared: the ranks are not the same")
        a, b = _rest(self.a, self.bytes_a, same_ranks), _rest(self.b, self.bytes_b, same_ranks)
        if both := sorted({*self.a.unplaced} & {*self.b.unplaced}):
            self._note(f"not known, and not compared: {', '.join(both)}")
        items = dict.fromkeys((*a, *b))
        apart = [item for item in items if not same(a.get(item, _NOTHING), b.get(item, _NOTHING))]
        if apart:
            self._note(f"other values that are not the same: {named(apart)}")
        elif items:
            kinds = {item.kind for item in items}
            which = ", ".join(what for kind, what in _WORDS.items() if kind in kinds)
            self._note(f"all other values are the same: {which}")

    def _note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)

    def _differs(self, name: str, what: str, gap: _Gap | None = None, tensor: TensorName | None = None) -> None:
        self.result.differences.append(Difference(name, what, *(gap or _Gap()), tensor))


def _gap(x: Any, y: Any, alike: Any, tolerance: Tolerance) -> _Gap:
    """How far two arrays are from one another; what is infinite or no number is near to nothing but itself."""
    with np.errstate(invalid="ignore"):
        gap = np.where(alike, 0.0, np.abs(x - y))
        near = (gap <= tolerance.atol + tolerance.rtol * np.abs(y)) & np.isfinite(x) & np.isfinite(y)
        relative = gap[y != 0] / np.abs(y[y != 0])
    close = alike if tolerance.exact else alike | near
    return _Gap(int((~close).sum()), _largest(gap), _largest(relative))


def _largest(values: Any) -> float:
    return float(np.nanmax(values, initial=0.0))


def _ulps(a: Any, b: Any) -> int:
    """How many numbers of their type lie between two arrays of floating numbers at most, given as words of their bits."""
    keys = []
    for words in (a, b):
        signed = words.view(f"i{words.itemsize}").astype(np.int64)
        keys.append(np.where(signed < 0, -(signed & ((1 << (8 * words.itemsize - 1)) - 1)), signed))
    return int(np.abs(keys[0] - keys[1]).max(initial=0))


def _entry(source: Source, name: TensorName) -> TensorEntry | None:
    """A tensor of a checkpoint. An fp32 parameter is its own master where the optimizer stores none."""
    entry = source.catalog.get(name._replace(role=source.role))
    if entry is None and name.state == MASTER and source.optimizer is not None:
        param = source.catalog.get(name._replace(role=source.role, state=PARAM))
        return param if param is not None and param.dtype == FLOAT32 else None
    return entry


_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_START = "initial_lr"
"""What torch's schedulers add to a group: the schedule says it as well, and not every format keeps it in both."""
_COMPARED = {Item(Kind.VALUE, "iteration"), *(Item(Kind.ARGUMENT, counter) for counter in _COUNTERS)}
_WORDS = {
    Kind.RNG: "RNG states", Kind.SCALER: "loss scaler", Kind.ARGUMENT: "arguments", Kind.CONFIG: "configuration",
    Kind.OPTIMIZER: "others of the optimizer", Kind.MODEL: "others of the model", Kind.VALUE: "others of the run",
    Kind.FILE: "files beside",
}  # fmt: skip
_LOOKED_INTO = 1 << 24
"""Bytes of a file beside up to which it is compared as a whole."""
_NOTHING = object()
"""Where one has a value that the other has not."""


def _rest(source: Source, where: SourceBytes, of_ranks: bool) -> dict[Item, object]:
    """What a source has besides what is compared by name, read; with what belongs to single ranks, or without."""
    left_out = (Kind.TENSOR, Kind.GROUP, Kind.SCHEDULER, *(() if of_ranks else (Kind.RNG,)))
    megatron = MegatronState.of(source)
    opaque = {OPAQUE} if megatron is None else set(map(opaque_item, megatron.opaque()))
    named = _COMPARED | opaque if megatron is not None or not of_ranks else _COMPARED
    items = inventory_of(source).items()
    rest = {item: _read(value, where) for item, value in items if item.kind not in left_out and item not in named}
    return {**rest, **{Item(Kind.VALUE, name): True for name in source.unplaced}, **_beside(source)}


def _beside(source: Source) -> dict[Item, object]:
    """The files that go along, by what is in them; of a large one, its length."""
    carried = source.carried
    files = [] if carried is None else [(carried.folder / one.path, one) for one in carried.found if one.reason is None]
    found = dict[Item, object]()
    for path, one in files:
        with suppress(CheckpointError, OSError), opened(path) as file:  # `verify` speaks of what cannot be read
            found[Item(Kind.FILE, one.path)] = file.read(0, one.nbytes) if one.nbytes <= _LOOKED_INTO else one.nbytes
    return found


def _read(value: object, where: SourceBytes) -> object:
    """A value with the bytes of its tensors in their place: two files have the same ones elsewhere."""
    if isinstance(value, DcpObject):
        with suppress(CheckpointError):  # a class that is not known; `verify` speaks of damage
            return value.load()
        return bytes(where.view(value.folder.path(value.place.file), value.place.offset, value.place.length))
    if type(value) is tuple:
        return tuple(_read(part, where) for part in value)  # of every rank

    def content(stored: StoredTensor) -> object:
        record = stored.record
        data = bytes(where.view(record.file, record.byte_offset, record.nbytes))
        return record.dtype, stored.start, stored.shape, stored.strides, data

    return map_tensors(value, content)


def _fields_apart(of_a: Sequence[Mapping[str, object]], of_b: Sequence[Mapping[str, object]]) -> str:
    """The fields whose values are not the same in two checkpoints' groups."""
    said = [
        {name: {repr(of.get(name, _NOTHING)) for of in groups} for of in groups for name in of}
        for groups in (of_a, of_b)
    ]
    apart = [name for name in dict.fromkeys((*said[0], *said[1])) if said[0].get(name) != said[1].get(name)]
    return ", ".join(map(shown, apart)) or "they go together otherwise"


def _distinct(groups: Iterable[Mapping[str, object]], says_start: bool) -> list[object]:
    """What groups say, in one order: two that say the same are one, as trainers deal them."""
    said: dict[str, object] = {}
    for fields in groups:
        one = sorted((key, value) for key, value in fields.items() if says_start or key != _START)
        said[repr(one)] = one
    return [said[key] for key in sorted(said)]
