"""A plan, written down once while it is made: every file of a target with its records, its content and its copies, a line each.

Execution, parts, saved plans and the fingerprint read these lines; nothing is laid out, pickled or planned twice. They are JSON, each
behind its own CRC-32, as in a journal: in memory while they are few, in a temporary file otherwise, and as they are in a plan that is
saved. What decides the bytes of a file stands in its line and nowhere else, so that the line's digest is the file's.

Nothing of a line is run, and every value in it is looked at when it is read: a saved plan may be anybody's.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from mcore_rlhf.core.catalog import Record, Shape, dtype_of
from mcore_rlhf.core.plan import Copies, FilePlan, Movement
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.storage.beneath import Scratch
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.containers import container_of
from mcore_rlhf.storage.reading import parse_json
from mcore_rlhf.storage.record_file import Container, Layout, naturals

_IN_MEMORY = 16 << 20
_LONGEST = 1 << 63
_COLUMNS = (("movement", "<i4"), ("source", "<i4"), ("source_start", "<i8"), ("target", "<i4"), ("target_start", "<i8"))


class SpoolLine(NamedTuple):
    """Where a line stands.

    Args:
        offset, nbytes: In the plan.
    """

    offset: int
    nbytes: int


class Task(NamedTuple):
    """A file to be written.

    Args:
        path: In the folder that is published.
        nbytes: Of its records.
        place: Its line.
        digest: SHA-256 of that line.
    """

    path: str
    nbytes: int
    place: SpoolLine
    digest: str

    @property
    def told(self) -> str:
        """What decides its bytes, for a fingerprint."""
        return f"{self.path} {self.nbytes} {self.digest}"


@dataclass(frozen=True)
class PlannedFile:
    """A file of the target, planned, and what kind of file it is."""

    plan: FilePlan
    records: Sequence[Record]
    container: Container

    @cached_property
    def layout(self) -> Layout:
        """Where everything lies in it."""
        return self.container.layout(self.plan.file)


class SpoolLines(Protocol):
    """Where lines stand."""

    def read(self, place: SpoolLine) -> bytes:
        """Bytes of it."""
        ...


def line_of(value: object) -> bytes:
    """A value of JSON as a line."""
    data = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(data), data)


def value_of(line: bytes) -> Any:
    """What a line says.

    Raises:
        ValueError: It has not its checksum.
    """
    crc, _, text = line.partition(b" ")
    if line[-1:] != b"\n" or int(crc, 16) != crc32(text[:-1]):
        raise ValueError("has not its checksum")
    return parse_json(text)


class Spool:
    """A plan while it is made, and afterwards. For several threads."""

    def __init__(self) -> None:
        self._lines = Scratch(_IN_MEMORY)

    def add(self, line: bytes) -> SpoolLine:
        """A further line; where it stands."""
        return SpoolLine(self._lines.add(line), len(line))

    def read(self, place: SpoolLine) -> bytes:
        """See :class:`SpoolLines`."""
        return self._lines.read(*place)

    def write(self, planned: PlannedFile) -> Task:
        """Note a file.

        Raises:
            CheckpointError: What it is to hold cannot be written.
        """
        line = line_of(_told(planned))
        nbytes = sum(record.nbytes for record in planned.records)
        return Task(planned.plan.file, nbytes, self.add(line), hashlib.sha256(line).hexdigest())


def planned_file(lines: SpoolLines, task: Task) -> PlannedFile:
    """A file as it was planned.

    Raises:
        Corrupt: Its line does not say that.
    """
    line = lines.read(task.place)
    try:
        if hashlib.sha256(line).hexdigest() != task.digest:
            raise ValueError("is not the line that was planned")
        planned = _planned(value_of(line))
        if not (f"/{planned.plan.file}".endswith(f"/{task.path}") or f"/{task.path}".endswith(f"/{planned.plan.file}")):
            raise ValueError(f"is that of {planned.plan.file}")
        return planned
    except Exception as error:  # whatever it takes to lay out what nobody planned
        raise Corrupt(
            f"{task.path}: what the plan says of it cannot be read: {error}\nThe plan is damaged: make it again."
        ) from error


def _told(planned: PlannedFile) -> dict[str, Any]:
    plan, records = planned.plan, planned.records
    copies = plan.copies
    assert isinstance(copies, Copies)  # as the planner makes them
    numbers = {record.key: number for number, record in enumerate(records)}
    moves, movement = _renumbered(copies.movement, copies.movements)
    sources, source = _renumbered(copies.source, copies.sources)
    targets, target = _renumbered(copies.target, copies.targets)
    columns = {
        **{name: getattr(copies, name) for name, _ in _COLUMNS},
        "movement": movement,
        "source": source,
        "target": np.array([numbers[record.key] for record in targets], np.int64)[target] if len(targets) else target,
    }
    return {
        "file": plan.file,
        "content": [planned.container.name, *planned.container.told(plan.file, numbers)],
        "records": [told_record(record)[1:] for record in records],
        "sources": [told_record(record) for record in sources],
        "moves": [[move.shape, move.source_strides, move.target_strides] for move in moves],
        "copies": {name: base64.b64encode(columns[name].astype(kind).tobytes()).decode() for name, kind in _COLUMNS},
    }


def _renumbered(numbers: Any, things: Sequence[Any]) -> tuple[list[Any], Any]:
    """Those that are used, in the order of first use, and the numbers that they have then."""
    used, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    new = np.empty_like(order)
    new[order] = np.arange(len(order))
    return [things[number] for number in used[order].tolist()], new[which]


def told_record(record: Record) -> list[Any]:
    """A record as data for JSON."""
    return [record.file, record.key, record.dtype.name, record.numel, record.byte_offset, record.computed]


def record_of(told: Sequence[Any]) -> Record:
    """From :func:`told_record`.

    Raises:
        ValueError, TypeError: It is something else.
    """
    file, key, dtype, numel, offset, computed = told
    if (type(file), type(key), type(dtype), type(computed)) != (str, str, str, bool):
        raise TypeError("no record")
    many, at = naturals([numel, offset])
    return Record(file, key, dtype_of(dtype), many, at, computed)


def _planned(told: Mapping[str, Any]) -> PlannedFile:
    file = told["file"]
    if type(file) is not str:
        raise TypeError("no file")
    records = [record_of([file, *one]) for one in told["records"]]
    sources = [record_of(one) for one in told["sources"]]
    moves = [_movement(*map(naturals, one)) for one in told["moves"]]
    columns = {
        name: np.frombuffer(base64.b64decode(told["copies"][name], validate=True), kind) for name, kind in _COLUMNS
    }
    for name, many in (("movement", moves), ("source", sources), ("target", records)):
        column = columns[name]
        if len(column) and not 0 <= column.min() <= column.max() < len(many):
            raise ValueError(f"no such {name}")
    if len({len(column) for column in columns.values()}) > 1 or any(c.min(initial=0) < 0 for c in columns.values()):
        raise ValueError("no copies")
    copies = Copies(moves, sources, records, *(columns[name].astype(np.int64) for name, _ in _COLUMNS))
    _check_bounds(copies)
    name, *content = told["content"]
    container = container_of(name).of_told(content, records)
    planned = PlannedFile(FilePlan(file, copies), records, container)
    layout = planned.layout
    if {record.key: record.nbytes for record in records} != {
        key: nbytes for key, (_, nbytes) in layout.records.items()
    }:
        raise ValueError("its records are not those of its content")
    if layout.nbytes >= _LONGEST:
        raise ValueError(f"{layout.nbytes} bytes are more than a file can have")
    return planned


def _check_bounds(copies: Copies) -> None:
    """Every copy lies in its records, and has no more elements than the one that it fills."""
    if not len(copies):
        return
    moves = copies.movements
    have, room = (
        np.array([record.numel for record in records], np.int64)[number] - start  # a sum could run over
        for records, number, start in (
            (copies.sources, copies.source, copies.source_start),
            (copies.targets, copies.target, copies.target_start),
        )
    )
    read = np.array([_reach(move.shape, move.source_strides) for move in moves], np.int64)[copies.movement]
    filled = np.array([max(_reach(move.shape, move.target_strides), move.numel) for move in moves], np.int64)
    if (read > have).any() or (filled[copies.movement] > room).any():
        raise ValueError("a copy lies outside its record")


def _reach(shape: Shape, strides: Shape) -> int:
    """How many elements it is from its first one to behind its last."""
    return 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


def _movement(shape: Shape, source: Shape, target: Shape) -> Movement:
    each = list(zip(shape, source, target, strict=True))
    if not each or not all(shape) or any(count == 1 and not ahead == behind == 1 for count, ahead, behind in each):
        raise ValueError("no movement")
    return Movement(shape, source, target, 0, 0, prod(shape))
