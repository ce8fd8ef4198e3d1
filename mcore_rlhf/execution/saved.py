"""A plan as a file: what the parts of a conversion go by, so that none of them opens the source's files and plans anew.

Lines of JSON, each behind its own CRC-32, as in a journal: the tasks, one a line; the head, which says of what the plan is and where
every task stands; and where the head stands. A part reads the head and its own lines.

Nothing of it is run, and nothing of it is believed that can be asked:

* the head has the length and the times of every file of the source; where one of them is another now, the plan is refused;
* values are of a few known classes, and the type of every field is checked;
* what every file of the target is to be has its digest, and those make the plan's fingerprint. ``--finish`` plans anew and joins only
  parts of the fingerprint that it finds, and believes comparisons only where they were those that it would make: what a plan led to
  that somebody edited is never published.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from dataclasses import fields as fields_of
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from mcore_rlhf import __version__
from mcore_rlhf.core.catalog import FLOATING, Box, Chunk, DType, Record, TensorName, dtype_of
from mcore_rlhf.core.plan import Copy, FilePlan
from mcore_rlhf.errors import Corrupt, Problems, StorageError, Unsupported, UsageError
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.families.source import open_bytes
from mcore_rlhf.storage.beneath import move, open_new, remove
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.containers import CONTAINERS
from mcore_rlhf.storage.dcp.writer import ObjectItem, TensorItem
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath, canonical, real_path, storage_error
from mcore_rlhf.storage.pickling import PickledTree
from mcore_rlhf.storage.pt import Pickled
from mcore_rlhf.storage.reading import opened, parse_json
from mcore_rlhf.storage.record_file import Container
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.transactions import new_transaction
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.audit import Pair

from .fingerprint import Binding, Fingerprint, changed, digest, planned_line, told_options
from .work import Block, FileTask, PlannedFile, PlannedTarget, Reading, Work

_VERSION = 1
_TAIL = '{{"head":[{:20d},{:20d}]}}'
_TAIL_NBYTES = 8 + 1 + len(_TAIL.format(0, 0)) + 1
_SHOWN = 8
_WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What data can raise that is not what it should be."""

_WORK = {"name": str, "root": str, "files": dict, "lines": list, "distrust": str, "nbytes": int}
"""What the head says of every model."""

Place = tuple[int, int]
"""Where a line stands: offset and length."""


def write_plan(
    path: Path,
    conversion: PlannedTarget,
    bindings: Mapping[str, Binding],
    source: ReadablePath,
    beside: Mapping[str, str],
    options: ConvertOptions,
) -> int:
    """Save a plan.

    Args:
        path: Where; a file that is there is replaced.
        conversion: The plan, made for parts.
        bindings: What decides the bytes of every model of it, by role.
        source: What is converted.
        beside: Files beside the models that are taken over, as :func:`.fingerprint.identity` has them.
        options: How.

    Returns:
        Its length.

    Raises:
        Unsupported: Values are computed on the way.
        StorageError: It cannot be written.
    """
    if any(one.computed for one in bindings.values()):
        raise Unsupported(
            f"{path}: values are computed on the way (--merge-adapter, --dequantize), and a saved plan holds copies alone\n"
            "Leave --save out: parts plan by themselves."
        )
    aside = path.with_name(f".{path.name}.tmp-{new_transaction()}")
    try:
        with open_new(aside) as out:
            lines = _Lines(out)
            tasks = [task for number, work in enumerate(conversion.works) for task in _saved(lines, number, work)]
            works = [_work_told(work, bindings[work.name]) for work in conversion.works]
            head = {
                "plan": _VERSION, "release": __version__, "source": _told_path(source), "options": told_options(options),
                "fingerprint": _asked(conversion), "beside": dict(beside), "space": conversion.space, "works": works, "tasks": tasks,
            }  # fmt: skip
            lines.add_text(_TAIL.format(*lines.add(head)))
            out.flush()
            os.fsync(out.fileno())
        move(aside, path)
    except OSError as error:
        raise storage_error(error, path, "write") from error
    finally:
        remove(aside)
    return lines.at


@dataclass(slots=True)
class _Lines:
    """Writes lines, each behind its CRC-32."""

    out: BinaryIO
    at: int = 0

    def add(self, value: object) -> Place:
        """A line of JSON; where it stands."""
        return self.add_text(json.dumps(value, separators=(",", ":")))

    def add_text(self, text: str) -> Place:
        """A line."""
        data = text.encode()
        self.out.write(b"%08x %s\n" % (crc32(data), data))
        place = self.at, len(data) + 10
        self.at += place[1]
        return place


def _saved(lines: _Lines, number: int, work: Work) -> Iterator[list[Any]]:
    """Save the tasks of one model; what the head says of each: the model's number, what it is, its name, its bytes, its place."""
    for file in work.files:
        planned = file.planned()
        path = planned.plan.file
        value = (path, planned.container.settled(path), planned.records, planned.plan.copies)
        yield [number, "write", file.path, file.nbytes, *lines.add([file.path, _Encoder().plain(value)])]
    problems = Problems()
    for kind, blocks in (("compare", work.compared(problems)), ("read", work.readings)):
        for block in blocks:
            yield [number, kind, block.name, block.nbytes, *lines.add([block.name, _Encoder().plain(block.items())])]
    problems.raise_if_any()


def _work_told(work: Work, binding: Binding) -> dict[str, Any]:
    return {
        "name": work.name, "root": _told_path(binding.root), "files": dict(binding.files), "lines": list(binding.lines),
        "distrust": work.distrust, "nbytes": work.nbytes,
    }  # fmt: skip


def _asked(conversion: PlannedTarget) -> dict[str, Any]:
    assert conversion.fingerprint is not None  # who plans for parts asks for it
    return asdict(conversion.fingerprint)


def _told_path(path: ReadablePath) -> str:
    return str(real_path(path))


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan that was saved.

    Args:
        path: The file.
    """

    path: ReadablePath

    def load(self, source: ReadablePath, options: ConvertOptions) -> PlannedTarget:
        """What parts have to do, if it is what they would plan themselves. Its manifest is empty: a part has its own.

        Args:
            source: What is converted.
            options: How.

        Raises:
            Unsupported: It is the plan of another release, of another source, or for other options.
            Corrupt: It is damaged, or the source has changed since; what of it is said.
        """
        head = self._head()
        try:
            self._check(head, source, options)
            works = [self._work(head, number) for number in range(len(head["works"]))]
            fingerprint, space = Fingerprint(**head["fingerprint"]), head["space"]
            _expect(type(space) is int and all(type(one) is str for one in asdict(fingerprint).values()))
            return PlannedTarget(works, Manifest({}), fingerprint=fingerprint, space=space)
        except _WRONG as error:
            raise self._damaged("its head says what it cannot") from error

    def _damaged(self, what: str) -> Corrupt:
        return Corrupt(f"{self.path}: {what}: the plan is damaged, or cut off\nSave it again: mcore-rlhf plan … --save")

    def _head(self) -> dict[str, Any]:
        with opened(self.path) as file:
            nbytes = file.nbytes
        try:
            place = self._line(nbytes - _TAIL_NBYTES, _TAIL_NBYTES)["head"]
            head = self._line(*place)
            version = head["plan"]
        except _WRONG as error:
            raise self._damaged("what stands at its end is not a plan's") from error
        if version != _VERSION or head.get("release") != __version__:
            raise Unsupported(
                f"{self.path}: is a plan of release {head.get('release')}, and this is {__version__}\n"
                "Save it again with this release: mcore-rlhf plan … --save"
            )
        return dict(head)

    def _line(self, offset: int, nbytes: int) -> Any:
        """What a line says."""
        with opened(self.path) as file:
            if type(offset) is not int or type(nbytes) is not int or not 0 <= offset <= offset + nbytes <= file.nbytes:
                raise self._damaged(f"has no line at {offset}")
            data = file.read(offset, nbytes)
        crc, _, text = data.partition(b" ")
        try:
            if int(crc, 16) == crc32(text[:-1]) and text[-1:] == b"\n":
                return parse_json(text)
        except ValueError:
            pass
        raise self._damaged(f"the line at {offset} has not its checksum")

    def _check(self, head: Mapping[str, Any], source: ReadablePath, options: ConvertOptions) -> None:
        here, there = _told_path(source), head["source"]
        if here != there:
            raise Unsupported(f"{self.path}: is a plan for {there}, and not for {here}\nSave one for it.")
        told, planned = told_options(options), head["options"]
        differing = [
            f"{_option(name)} is {planned.get(name)} in the plan, and {told.get(name)} here"
            for name in sorted({*told, *planned})
            if told.get(name) != planned.get(name)
        ]
        if differing:
            raise UsageError(
                f"{self.path}: is a plan for other options: {'; '.join(differing)}\nGive those that it was saved with, or save it again."
            )
        found = [line for work in head["works"] for line in changed(checkpoint_path(work["root"]), work["files"])]
        found += changed(source, head["beside"])
        if found:
            more = f", … ({len(found)} files)" if len(found) > _SHOWN else ""
            raise Corrupt(
                f"{self.path}: the source has changed since the plan was saved: {'; '.join(found[:_SHOWN])}{more}\nSave it again."
            )
        layouts = {work["name"]: Fingerprint("", "", digest(work["lines"])) for work in head["works"]}
        if Fingerprint.joined(layouts).layouts != head["fingerprint"]["layouts"]:
            raise self._damaged("its files are not those of its fingerprint")

    def _work(self, head: Mapping[str, Any], number: int) -> Work:
        told = head["works"][number]
        tasks = [(kind, name, nbytes, place) for at, kind, name, nbytes, *place in head["tasks"] if at == number]
        _expect(all(type(told[name]) is kind for name, kind in _WORK.items()))
        for kind, name, nbytes, _ in tasks:
            _expect((type(name), type(nbytes)) == (str, int) and kind in ("write", "compare", "read") and nbytes >= 0)
            if kind == "write":
                canonical(name, self.path)
        lines = frozenset(told["lines"])
        files = [
            FileTask(name, nbytes, partial(self._file, name, lines, place))
            for kind, name, nbytes, place in tasks
            if kind == "write"
        ]
        compared, readings = (
            [
                Block(name, nbytes, partial(self._items, of, name, place))
                for kind, name, nbytes, place in tasks
                if kind == what
            ]
            for what, of in (("compare", Pair), ("read", Reading))
        )
        return Work(
            told["name"], files, lambda problems: compared, tuple, partial(open_bytes, checkpoint_path(told["root"]), None),
            told["distrust"], told["nbytes"], readings=readings,
        )  # fmt: skip

    def _value(self, name: str, place: Place) -> Any:
        """What the line of a task holds."""
        told, value = self._line(*place)
        if told != name:
            raise ValueError(told)
        return _Decoder().value(value)

    def _items(self, of: type[Any], name: str, place: Place) -> Sequence[Any]:
        try:
            items = self._value(name, place)
            _expect(all(type(item) is of and _is_sound(item) for item in items))
            return tuple(items)
        except _WRONG as error:
            raise self._damaged(f"{name} is no such task") from error

    def _file(self, name: str, lines: Collection[str], place: Place) -> PlannedFile:
        try:
            path, container, records, copies = self._value(name, place)
            _expect(isinstance(container, Container) and (name == path or name.endswith(f"/{path}")))
            _expect(all(type(record) is Record for record in records) and all(type(copy) is Copy for copy in copies))
            planned = PlannedFile(FilePlan(path, list(copies)), records, container)
            layout, types = planned.layout, {record.key: record.dtype for record in records}
            _expect(
                {record.key: record.nbytes for record in records}
                == {key: size for key, (_, size) in layout.records.items()}
            )
            _expect(all(copy.target.dtype == types[copy.target.key] for copy in copies))
            _expect(planned_line(layout, planned.plan) in lines)
            return planned
        except (Corrupt, StorageError):
            raise
        except Exception as error:  # whatever it takes to lay out what nobody planned
            raise self._damaged(f"{name} is not what was planned") from error


def _option(name: str) -> str:
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def _is_sound(item: Pair | Reading) -> bool:
    """Whether what is read lies in its record, and two that are compared have one shape."""
    if isinstance(item, Reading):
        return item.offset >= 0 and 0 <= item.start <= item.stop
    types = {chunk.record.dtype for chunk in (item.a, item.b)}
    alike = item.a.box.shape == item.b.box.shape and (types <= FLOATING if item.parity else len(types) == 1)
    return alike and _lies_in_record(item.a) and _lies_in_record(item.b)


def _lies_in_record(chunk: Chunk) -> bool:
    shape, strides, record = chunk.box.shape, chunk.strides, chunk.record
    last = chunk.start + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    whole = min((chunk.start, record.byte_offset, *strides), default=0) >= 0 and not record.computed
    return whole and min(shape, default=1) > 0 and last < record.numel


def _expect(condition: bool) -> None:
    if not condition:
        raise ValueError


_KNOWN: tuple[type[Any], ...] = (
    *CONTAINERS, Pickled, PickledTree, StoredTensor, TensorItem, ObjectItem, Box, Record, Chunk, Copy, TensorName, Pair, Reading,
)  # fmt: skip
_CLASSES: Mapping[str, type[Any]] = {one.__name__: one for one in _KNOWN}
"""What a plan is made of."""


@dataclass(slots=True)
class _Encoder:
    """Makes JSON of values: of classes with their fields in order, and of records once, then by their number."""

    known: dict[Record, int] = field(default_factory=dict)

    def plain(self, value: Any) -> Any:
        """A value as data for JSON."""
        if value is None or type(value) in (int, str, bool):
            return value
        if isinstance(value, DType):
            return {"DType": value.name}
        if isinstance(value, bytes | bytearray | memoryview):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, Record):
            if value in self.known:
                return {"": self.known[value]}
            self.known[value] = len(self.known)
        kind = type(value)
        if _CLASSES.get(kind.__name__) is kind:
            return {kind.__name__: [self.plain(getattr(value, name)) for name in _fields(kind.__name__)]}
        if isinstance(value, Mapping):
            return {"Mapping": [[key, self.plain(one)] for key, one in value.items()]}
        if isinstance(value, Sequence):
            return [self.plain(one) for one in value]
        raise Unsupported(f"{kind.__name__}: has no form in a saved plan\nLeave --save out: parts plan by themselves.")


@dataclass(slots=True)
class _Decoder:
    """Makes values of what :class:`_Encoder` made of them."""

    records: list[Record] = field(default_factory=list)

    def value(self, plain: Any) -> Any:
        """A value; ValueError, KeyError, TypeError or IndexError where it is none."""
        if isinstance(plain, list):
            return tuple(map(self.value, plain))
        if not isinstance(plain, dict):
            return plain
        ((kind, told),) = plain.items()
        if kind in _CLASSES:
            return self._made(_CLASSES[kind], told)
        if kind == "Mapping":
            return {key: self.value(one) for key, one in told}
        if kind == "bytes":
            return base64.b64decode(told, validate=True)
        if kind == "DType":
            return dtype_of(told)
        _expect(kind == "" and type(told) is int and told >= 0)
        return self.records[told]

    def _made(self, kind: type[Any], told: list[Any]) -> Any:
        values, wanted = [self.value(one) for one in told], _fields(kind.__name__).values()
        _expect(all(fits(value) for fits, value in zip(wanted, values, strict=True)))
        made = kind(*values)
        if kind is Record:
            self.records.append(made)
        return made


@cache
def _fields(name: str) -> Mapping[str, Callable[[Any], bool]]:
    """The fields of a class in order, each with what says whether a value fits."""
    kind = _CLASSES[name]
    if is_dataclass(kind):
        return {one.name: _fits(str(one.type)) for one in fields_of(kind)}
    return {name: _fits(getattr(told, "__forward_arg__", told)) for name, told in kind.__annotations__.items()}


_UNIONS: Mapping[str, tuple[type[Any], ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "bytes": (bytes,), "memoryview": (bytes,), "DType": (DType,),
    "Item": (TensorItem, ObjectItem),
}  # fmt: skip


@cache
def _fits(told: str) -> Callable[[Any], bool]:
    """Whether a value is of a type, as an annotation names it."""
    if told.endswith(" | None"):
        inner = _fits(told.removesuffix(" | None"))
        return lambda value: value is None or inner(value)
    outer, _, rest = told.partition("[")
    if told == "Shape" or outer == "Sequence":
        of = _fits("int" if told == "Shape" else rest[:-1])
        return lambda value: type(value) is tuple and all(map(of, value))
    if outer in ("Mapping", "dict"):
        key, one = map(_fits, rest[:-1].split(", "))
        return lambda value: type(value) is dict and all(key(name) and one(value[name]) for name in value)
    types = _UNIONS.get(told) or (_CLASSES[told],)
    return lambda value: type(value) in types
