"""A plan as a file: what the parts of a conversion go by, so that none of them opens the source's files and plans anew.

Lines of JSON, each behind its own CRC-32, as in a journal: the tasks, one a line; the head, which says of what the plan is and where
every task stands; and where the head stands. A part reads the head and its own lines.

Nothing of it is run, and nothing of it is believed that can be asked:

* the head has the length and the times of every file of the source; where one of them is another now, the plan is refused; so it is
  where a model's folder is not the source's;
* values are of a few known classes, and the type of every field is checked;
* what every file of the target is to be has its digest, and those make the plan's fingerprint. ``--finish`` plans anew and joins only
  parts of the fingerprint that it finds, and believes comparisons only where they were those that it would make: what a plan led to
  that somebody edited is never published.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mcore_rlhf import __version__
from mcore_rlhf.core.catalog import FLOATING, Box, Chunk, Record, TensorName
from mcore_rlhf.errors import Corrupt, Problems, Unsupported, UsageError
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.families.source import open_bytes
from mcore_rlhf.storage.beneath import move, open_new, remove
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath, canonical, real_path, storage_error
from mcore_rlhf.storage.reading import opened
from mcore_rlhf.storage.record_file import naturals
from mcore_rlhf.storage.transactions import new_transaction
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.audit import Pair

from .fingerprint import Binding, PlanFingerprint, changed, digest, told_options
from .spool import SpoolLine, Task, line_of, record_of, told_record, value_of
from .work import Block, PlannedTarget, Reading, Work

_VERSION = 1
_TAIL_NBYTES = 8 + 1 + len('{"head":[,]}') + 2 * 20 + 1
_SHOWN = 8
_WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What data can raise that is not what it should be."""

_WORK = {"name": str, "root": str, "files": dict, "lines": list, "distrust": str, "nbytes": int}
"""What the head says of every model."""


def tail_of(head: SpoolLine) -> bytes:
    """The last line, which is as long in every plan: where the head stands."""
    text = f'{{"head":[{head.offset:20d},{head.nbytes:20d}]}}'.encode()
    return b"%08x %s\n" % (crc32(text), text)


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
            lines = _Written(out)
            tasks = [task for number, work in enumerate(conversion.works) for task in _saved(lines, number, work)]
            works = [_work_told(work, bindings[work.name]) for work in conversion.works]
            head = {
                "plan": _VERSION, "release": __version__, "source": _told_path(source), "options": told_options(options),
                "fingerprint": _asked(conversion), "beside": dict(beside), "space": conversion.space, "works": works, "tasks": tasks,
            }  # fmt: skip
            lines.add(tail_of(lines.add(line_of(head))))
            out.flush()
            os.fsync(out.fileno())
        move(aside, path)
    except OSError as error:
        raise storage_error(error, path, "write") from error
    finally:
        remove(aside)
    return lines.at


@dataclass(slots=True)
class _Written:
    """A plan on its way into a file."""

    out: BinaryIO
    at: int = 0

    def add(self, line: bytes) -> SpoolLine:
        """A line; where it stands."""
        self.out.write(line)
        self.at += len(line)
        return SpoolLine(self.at - len(line), len(line))


def _saved(lines: _Written, number: int, work: Work) -> Iterator[list[Any]]:
    """Save the tasks of one model; what the head says of each: the model's number, what it is, its name, its bytes, its place."""
    for file in work.files:
        yield [number, "write", file.path, file.nbytes, *lines.add(work.lines.read(file.place)), file.digest]
    problems = Problems()
    for kind, blocks in (("compare", work.compared(problems)), ("read", work.readings)):
        for block in blocks:
            line = line_of({"name": block.name, **_told_items(block.items())})
            yield [number, kind, block.name, block.nbytes, *lines.add(line), ""]
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
            fingerprint, space = PlanFingerprint(**head["fingerprint"]), head["space"]
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
            place = self._line(SpoolLine(nbytes - _TAIL_NBYTES, _TAIL_NBYTES))["head"]
            head = self._line(SpoolLine(*place))
            version = head["plan"]
        except _WRONG as error:
            raise self._damaged("what stands at its end is not a plan's") from error
        if version != _VERSION or head.get("release") != __version__:
            raise Unsupported(
                f"{self.path}: is a plan of release {head.get('release')}, and this is {__version__}\n"
                "Save it again with this release: mcore-rlhf plan … --save"
            )
        return dict(head)

    def read(self, place: SpoolLine) -> bytes:
        """See :class:`.spool.SpoolLines`."""
        with opened(self.path) as file:
            offset, nbytes = place
            if type(offset) is not int or type(nbytes) is not int or not 0 <= offset <= offset + nbytes <= file.nbytes:
                raise self._damaged(f"has no line at {offset}")
            return file.read(offset, nbytes)

    def _line(self, place: SpoolLine) -> Any:
        """What a line says."""
        try:
            return value_of(self.read(place))
        except ValueError as error:
            raise self._damaged(f"the line at {place.offset} {error}") from None

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
        if not options.read.follow_links:  # which may lead anywhere
            for work in head["works"]:
                self._check_root(work["root"], here)
        found = [line for work in head["works"] for line in changed(checkpoint_path(work["root"]), work["files"])]
        found += changed(source, head["beside"])
        if found:
            more = f", … ({len(found)} files)" if len(found) > _SHOWN else ""
            raise Corrupt(
                f"{self.path}: the source has changed since the plan was saved: {'; '.join(found[:_SHOWN])}{more}\nSave it again."
            )
        layouts = {work["name"]: PlanFingerprint("", "", digest(work["lines"])) for work in head["works"]}
        if PlanFingerprint.joined(layouts).layouts != head["fingerprint"]["layouts"]:
            raise self._damaged("its files are not those of its fingerprint")

    def _check_root(self, root: str, source: str) -> None:
        """A model lies in the source; or the source is an iteration, and its root is the folder around it."""
        below = root.removeprefix(f"{source}/")
        if root in (source, source.rpartition("/")[0]):
            return
        if below == root:
            raise self._damaged(f"a model of it lies in {root}, outside {source}")
        canonical(below, self.path, "folder")

    def _work(self, head: Mapping[str, Any], number: int) -> Work:
        told = head["works"][number]
        tasks = [task for at, *task in head["tasks"] if at == number]
        _expect(all(type(told[name]) is kind for name, kind in _WORK.items()))
        for kind, name, nbytes, *_, whole in tasks:
            _expect((type(name), type(nbytes), type(whole)) == (str, int, str) and nbytes >= 0)
            _expect(kind in ("write", "compare", "read"))
        lines = {tuple(line.rsplit(" ", 2)[1:]) for line in told["lines"]}
        files: list[Task] = []
        for kind, name, nbytes, offset, length, whole in tasks:
            if kind == "write":
                _expect((str(nbytes), whole) in lines)
                files.append(Task(canonical(name, self.path), nbytes, SpoolLine(offset, length), whole))
        compared, readings = (
            [
                Block(name, nbytes, partial(self._items, of, name, SpoolLine(offset, length)))
                for kind, name, nbytes, offset, length, _ in tasks
                if kind == what
            ]
            for what, of in (("compare", Pair), ("read", Reading))
        )
        return Work(
            told["name"], files, self, lambda problems: compared, tuple, partial(open_bytes, checkpoint_path(told["root"]), None),
            told["distrust"], told["nbytes"], readings=readings,
        )  # fmt: skip

    def _items(self, of: type[Any], name: str, place: SpoolLine) -> Sequence[Any]:
        try:
            told = self._line(place)
            items = _items_of(of, told)
            _expect(told["name"] == name and all(map(_is_sound, items)))
            return tuple(items)
        except _WRONG as error:
            raise self._damaged(f"{name} is no such task") from error


def _option(name: str) -> str:
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def _is_sound(item: Pair | Reading) -> bool:
    """Whether what is read lies in its record, and two that are compared have one shape."""
    if isinstance(item, Reading):
        return item.start <= item.stop
    types = {chunk.record.dtype for chunk in (item.a, item.b)}
    alike = item.a.box.shape == item.b.box.shape and (types <= FLOATING if item.parity else len(types) == 1)
    return alike and _lies_in_record(item.a) and _lies_in_record(item.b)


def _lies_in_record(chunk: Chunk) -> bool:
    box, record = chunk.box, chunk.record
    last = chunk.start + sum((count - 1) * stride for count, stride in zip(box.shape, chunk.strides, strict=True))
    sides = len(box.offset) == len(box.shape) == len(box.steps) and min((*box.shape, *box.steps), default=1) > 0
    return sides and not record.computed and last < record.numel


def _expect(condition: bool) -> None:
    if not condition:
        raise ValueError


def _told_items(items: Iterable[Pair | Reading]) -> dict[str, Any]:
    """What a block is about as data for JSON, records once."""
    records: dict[Record, int] = {}

    def told(chunk: Chunk) -> list[Any]:
        box = chunk.box
        return [
            box.offset,
            box.shape,
            box.step,
            chunk.strides,
            records.setdefault(chunk.record, len(records)),
            chunk.start,
        ]

    found = [
        [*one] if isinstance(one, Reading) else [[*one.name], told(one.a), told(one.b), one.parity] for one in items
    ]
    return {"items": found, "records": [told_record(record) for record in records]}


def _items_of(kind: type[Pair] | type[Reading], told: Mapping[str, Any]) -> list[Pair] | list[Reading]:
    """From :func:`_told_items`; ValueError, KeyError, TypeError or IndexError where it is something else."""
    if kind is Reading:
        return [_reading(*one) for one in told["items"]]
    records = [record_of(one) for one in told["records"]]

    def chunk(offset: Any, shape: Any, step: Any, strides: Any, record: Any, start: Any) -> Chunk:
        box = Box(naturals(offset), naturals(shape), None if step is None else naturals(step))
        number, at = naturals([record, start])
        return Chunk(box, records[number], at, naturals(strides))

    pairs = [(name, chunk(*a), chunk(*b), parity) for name, a, b, parity in told["items"]]
    _expect(
        all(type(parity) is bool and len(name) == 3 and set(map(type, name)) == {str} for name, _, _, parity in pairs)
    )
    return [Pair(TensorName(*name), a, b, parity) for name, a, b, parity in pairs]


def _reading(file: Any, key: Any, *numbers: Any) -> Reading:
    _expect(type(file) is str and type(key) is str)
    offset, start, stop = naturals([*numbers])
    return Reading(file, key, offset, start, stop)
