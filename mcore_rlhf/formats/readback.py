"""What a format of whole tensors writes, it reads: its two sayings are held against each other before anything is written.

Such a format says twice where a tensor lies, in ``laid`` and in ``stored``, and twice what is no tensor, in ``texts`` and in ``run``. Where
these differ, files are made that nobody reads as they were meant. So the folder is made as a skeleton, of small files and of heads with
holes for records, and read: the plan from the one relation to the other must copy every element onto itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb

from mcore_rlhf.core.account import Report, named
from mcore_rlhf.core.cast import is_exact
from mcore_rlhf.core.catalog import MASTER, PARAM, Chunk, DType, Record, Shape, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, same
from mcore_rlhf.core.plan import Copy, check_tiles, plan_file
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, shown
from mcore_rlhf.families.inventory import state_items
from mcore_rlhf.families.sidecar import FOLDER, Sidecar
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.beneath import remove, scratch_folder
from mcore_rlhf.storage.destination import LocalFolder
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.record_file import Layout

from .believing import SURPRISES
from .beside import beside_of

Given = Sequence[tuple[TensorName, Shape, DType]]
Read = tuple[Sequence[TensorEntry], Sidecar | None]
_GROUPS = Item(Kind.GROUP, "parameters")
_SHOWN, _LONG = 5, 200
_ADVICE = "Nothing was written. Whoever wrote the format has to mend it; --debug shows where."


@dataclass(frozen=True, slots=True)
class Written:
    """What a format is about to write.

    Args:
        form: The format's name.
        entries: Where it lays the tensors.
        layouts: Its files of tensors.
        texts: Its small files.
    """

    form: str
    entries: Sequence[TensorEntry]
    layouts: Mapping[str, Layout]
    texts: Mapping[str, str | bytes]

    def hold_against(self, tensors: Given, source: Source, read: Callable[[Path], Read], report: Report) -> None:
        """See that it reads the same.

        Args:
            tensors: What it was given to hold.
            source: Whose they are, with as much of its training state as is written.
            read: What it makes of a folder: its tensors, and what its own files say of the run.
            report: Told of states that it has no place for, and of what its own files say nothing of, though they say what the run was.

        Raises:
            LayoutMismatch: It reads otherwise what it writes, or lays a tensor otherwise than it is; all of it.
            Untrusted: A name of a file is none.
        """
        given = {name: (shape, dtype) for name, shape, dtype in tensors}
        laid = {entry.name for entry in self.entries}
        states = {PARAM, *(name.state for name in laid)}
        wrong = [f"{shown(str(entry.name))}: {why}" for entry in self.entries if (why := _wrong(entry, given))]
        wrong += [f"{shown(str(one))}: given, and not laid" for one in given if one.state in states and one not in laid]
        self._refuse(wrong)
        report.through(_NO_STATE, (self.form, sorted({name.state for name in given} - states)))
        with _skeleton(self.layouts, self.texts) as folder, surprised(self.form, folder):
            back, own = read(folder)
        self._refuse(_otherwise(self.entries, back))
        if own is not None:
            kept = beside_of(source)[0]
            missing, made, other = differences(own, kept)
            self._refuse([f"{item}: run says {there}, and it is {here}" for item, there, here in other])
            report.through(_BESIDE, (self.form, missing, made))

    def _refuse(self, wrong: Sequence[str]) -> None:
        if wrong:
            listed = "".join(f"\n  - {text}" for text in wrong[:_SHOWN])
            more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise LayoutMismatch(f"format {self.form} does not read what it writes:{listed}{more}\n{_ADVICE}")


_NO_STATE: Sequence[Rule[tuple[str, Sequence[str]]]] = [
    Rule(Fate.LOST, "{state}: format {0[0]} lays out none of it", lambda f: [{"state": s, "of": [Item(Kind.TENSOR, s)]} for s in f[1]])
]  # fmt: skip
_BESIDE: Sequence[Rule[tuple[str, Sequence[Item], Sequence[Item]]]] = [
    Rule(Fate.KEPT, "{what}: in mcore_rlhf/ alone, since files of {0[0]} itself say nothing of it",
         lambda f: {"of": f[1], "what": named(sorted(f[1]))} if f[1] else None),
    Rule(Fate.DERIVED, "{what}: made, as files of {0[0]} have it, and the source has not",
         lambda f: {"of": f[2], "what": named(sorted(f[2]))} if f[2] else None),
]  # fmt: skip


def differences(own: Sidecar, kept: Sidecar) -> tuple[list[Item], list[Item], list[tuple[Item, str, str]]]:
    """What a format's own files say nothing of, what they alone say, and what they say otherwise, with both values.

    Args:
        own: As they say it.
        kept: As it is.
    """
    there, here = _items(own), _items(kept)
    missing, made = (
        [item for item, value in one.items() if item not in other and not _is_nothing(value)]
        for one, other in ((here, there), (there, here))
    )
    both = ((item, there[item], value) for item, value in here.items() if item in there)
    return missing, made, [(item, _told(a), _told(b)) for item, a, b in both if not _agree(a, b)]


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def _items(beside: Sidecar) -> dict[Item, object]:
    """Everything that is said; a field that says nothing is no item."""
    state, module, groups = beside.state, beside.module, beside.state.groups
    found = {**dict(state_items(state)), **module.inventory()}
    again = state.other.get("iteration", state.iteration)  # one item, in which the second would hide the first
    found[Item(Kind.VALUE, "iteration")] = state.iteration if again == state.iteration else (state.iteration, again)
    found |= {Item(Kind.RNG, f"rank {rank}"): dict(states) for rank, states in enumerate(beside.ranks)}
    further = {
        Item(Kind.RNG, "ranks"): beside.ranks and [len(beside.ranks), dict(beside.parallel)],
        _GROUPS: any(group.params for group in groups) and [group.params for group in groups],
        Item(Kind.GROUP, "experts"): any(group.expert for group in groups) and [group.expert for group in groups],
        Item(Kind.GROUP, "scalars"): any(group.scalars for group in groups) and [group.scalars for group in groups],
        **{Item(Kind.VALUE, name): getattr(state, name) for name in ("release", "by_steps")},
        **{Item(Kind.VALUE, name): getattr(beside, name) for name in ("origin", "base", "fused")},
        **{Item(Kind.OPTIMIZER, name): getattr(beside, name) for name in ("optimizer", "parallel", "frozen")},
        **{
            Item(Kind.MODEL, name): getattr(module, name)
            for name in ("order", "pipeline", "without_frozen", "left_out")
        },
    }
    return found | {item: value for item, value in further.items() if value}


def _agree(there: object, here: object) -> bool:
    """Whether two values are the same for whom a list is a tuple, and 1 is 1.0; Python compares the two exactly, however long they are."""
    if isinstance(there, int | float) and isinstance(here, int | float):
        equal = there == here or (there != there and here != here)  # a NaN is itself
        return equal and isinstance(there, bool) == isinstance(here, bool)
    if isinstance(there, list | tuple) and isinstance(here, list | tuple):
        return len(there) == len(here) and all(map(_agree, there, here))
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        return there.keys() == here.keys() and all(_agree(there[key], here[key]) for key in here)
    return same(there, here)


def _told(value: object) -> str:
    text = repr(value)
    return shown(text if len(text) < _LONG else f"{text[:_LONG]}…")


def _wrong(entry: TensorEntry, given: Mapping[TensorName, tuple[Shape, DType]]) -> str | None:
    """What is wrong with where a tensor is laid."""
    if entry.name not in given:
        return "laid, and was not given"
    shape, dtype = given[entry.name]
    if entry.global_shape != shape:
        return f"laid says shape {entry.global_shape}, and it is {shape}"
    rounded = entry.name.state == PARAM and entry.name._replace(state=MASTER) in given  # of which parity is asked
    if entry.dtype != dtype and (rounded or not is_exact(dtype, entry.dtype)):
        return f"laid says {entry.dtype}, and it is to be {dtype}"
    return check_tiles(entry)


def _otherwise(entries: Sequence[TensorEntry], back: Sequence[TensorEntry]) -> list[str]:
    """Where what is read is not what was laid."""
    read = {entry.name for entry in back}
    wrong = [
        f"{shown(str(entry.name))}: laid, and stored does not give it" for entry in entries if entry.name not in read
    ]
    plans = [plan_file(file, Chunks.of(parts), Chunks.of(entries)) for file, parts in by_file(back).items()]
    wrong += [problem.message for plan in plans for problem in plan.problems.found]
    casts = {name: of for plan in plans for name, of in plan.casts.items()}
    wrong += [
        f"{shown(str(name))}: laid says {laid}, and stored says {stored}" for name, (laid, stored) in casts.items()
    ]
    wrong += [f"{shown(str(entry.name))}: as stored gives it, {why}" for entry in back if (why := check_tiles(entry))]
    once = [entry for entry in entries if len(entry.primary()) == len(entry.chunks)]  # of replicas the plan takes any
    records = {chunk.record for entry in once for chunk in entry.chunks}
    ours = (copy for plan in plans for copy in plan.copies if copy.source in records and copy.cast is None)
    moved = dict.fromkeys(copy.source.key for copy in ours if _place(copy, True) != _place(copy, False))
    return wrong + [f"{shown(key)}: stored finds its elements elsewhere than laid puts them" for key in moved]


def by_file(entries: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The parts of tensors that lie in each file."""
    parts = defaultdict[str, list[TensorEntry]](list)
    for entry in entries:
        of_file = defaultdict[str, list[Chunk]](list)
        for chunk in entry.chunks:
            of_file[chunk.record.file].append(chunk)
        for file, chunks in of_file.items():
            parts[file].append(replace(entry, chunks=tuple(chunks)))
    return parts


def _place(copy: Copy, laid: bool) -> tuple[str, int, Shape]:
    """The file, the byte and the steps of one end of a copy."""
    record, start = (copy.source, copy.source_start) if laid else (copy.target, copy.target_start)
    steps = zip(copy.source_strides if laid else copy.target_strides, copy.shape, strict=True)
    return record.file, record.byte_offset + start * record.dtype.itemsize, tuple(by for by, n in steps if n > 1)


def placed(entry: TensorEntry, layouts: Mapping[str, Layout]) -> TensorEntry:
    """A tensor that is laid, with its records where the containers put them.

    Args:
        entry: It.
        layouts: The files.
    """

    def at(record: Record) -> Record:
        placed = layouts[record.file].records.get(record.key)
        return record if placed is None else replace(record, byte_offset=placed[0])

    return replace(entry, chunks=tuple(replace(chunk, record=at(chunk.record)) for chunk in entry.chunks))


@contextmanager
def _skeleton(layouts: Mapping[str, Layout], texts: Mapping[str, str | bytes]) -> Iterator[Path]:
    """The folder, with holes where elements will be."""
    folder = LocalFolder(scratch_folder("mcore_rlhf-"), (MANIFEST_NAME, FOLDER))
    try:
        for file, layout in layouts.items():
            with folder.writer(file, layout) as there:
                there.finish(dict.fromkeys(layout.records, 0))
        for file, text in texts.items():
            folder.put(file, text)
        yield folder.root
    finally:
        remove(folder.root)


@contextmanager
def surprised(form: str, folder: Path | None = None) -> Iterator[None]:
    """Say whose the error is where a format fails at what it is to write.

    Args:
        form: The format's name.
        folder: Its skeleton, while that is read.

    Raises:
        LayoutMismatch: It failed.
    """
    try:
        yield
    except (CheckpointError, FileNotFoundError) as error:
        if folder is None:
            raise
        why = str(error).replace(f"{folder}/", "")
        raise LayoutMismatch(f"format {form} does not read what it writes: {why}\n{_ADVICE}") from error
    except SURPRISES as error:
        last = extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error).replace(f'{folder}/', '')}"
        raise LayoutMismatch(f"format {form} fails at what it is to write: {why}\n{_ADVICE}") from error
