"""``rlhf/rlhf_state.json`` and the tensor files beside it: written, read, and brought up to date.

docs/reference/rlhf-state.md describes them. Every problem is found before any is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Problems, Unsupported, UsageError
from ...installation import to_upgrade
from ...storage.records import convert, members, shorten, under, write_fields
from .controls import KL_CONTROLLERS, SCHEDULES, KindRegistry
from .json_values import decode, forms, join, pick, references, split
from .pieces import BestMetric, Buffer, InFlightPrompt, RunningStatistics

T = TypeVar("T")
Files = dict[str, dict[str, object]]
"""Tensor files by stem: what ``rlhf/<stem>.pt`` holds."""

COUNTERS = (
    "iteration", "rollout_step", "optimizer_steps", "prompts_consumed", "samples_consumed", "tokens_consumed",
    "epoch", "ppo_epoch", "minibatch",
)  # fmt: skip
FIELDS = (
    "format", "version", "algorithm", "counters", "weight_version", "kl", "statistics", "schedules", "best",
    "in_flight", "buffers", "extra", "tensors",
)  # fmt: skip
BUFFER_FIELDS = ("meta", "tensors")

EXTRA, IN_FLIGHT = "extra", "in_flight"
"""Stems of the tensor files that are not buffers."""

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

FORMAT = "mcore_rlhf.rlhf_state"

VERSION = 1

Document = dict[str, object]

UPGRADES: Mapping[int, Callable[[Document], Document]] = {}
"""By version: what turns a document of that version into one of the next. A change of the schema raises ``VERSION``
and adds one entry here, ``{1: _from_1_to_2}``; nothing else ever reads an old document. The functions see the JSON
as it stands in the file, with marked values not yet decoded, and return a new dict.
"""

Read = Callable[[object, str, Problems], T | None]


def is_stem(name: object) -> bool:
    """Whether a name can be a file's: one that cannot lead out of the folder."""
    return isinstance(name, str) and _STEM.fullmatch(name) is not None


def check_buffer_name(name: str, place: str, problems: Problems, kind: type[CheckpointError]) -> None:
    """A buffer's name is the name of its file; note it where it cannot be."""
    if not is_stem(name) or name in (EXTRA, IN_FLIGHT):
        problems.add(
            kind,
            f"{place}: a buffer's name must be a plain file name, other than {EXTRA!r} and {IN_FLIGHT!r}",
            "It has letters, digits, '_', '-' and '.', and starts with a letter or digit.",
        )


def up_to_date(document: object, where: str) -> Document:
    """The document, of this release's version.

    Args:
        document: What the file holds.
        where: Its path, for messages.

    Raises:
        NotACheckpoint: It is not an RLHF state.
        Unsupported: A newer release wrote it.
        Corrupt: Its version is no version.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NotACheckpoint(f'{where}: not an RLHF state (it has no "format": "{FORMAT}").')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise Corrupt(f"{where}: version: expected a whole number from 1, found {shorten(version)}.")
    if version > VERSION:
        raise Unsupported(
            f"{where}: version {version} of the RLHF state; this release reads up to {VERSION}.\n"
            f"Upgrade: {to_upgrade()}"
        )
    for older in range(version, VERSION):
        document = UPGRADES[older](document) | {"version": older + 1}
    return document


def write(values: Mapping[str, Any]) -> tuple[Document, Files]:
    """The state as plain values, and tensor files that hold the live tensors; :func:`read` is the inverse.

    Args:
        values: The fields of the state, by name.

    Raises:
        UsageError: Something in it cannot be stored; every such place is named.
    """
    writer = _StateWriter("RlhfState: ", Problems(), {})
    document = writer.document(values)
    if writer.problems:
        raise UsageError(writer.problems.describe())
    return document, writer.files


class _StateWriter:
    def __init__(self, place: str, problems: Problems, files: Files) -> None:
        self.place, self.problems, self.files = place, problems, files

    def document(self, values: Mapping[str, Any]) -> Document:
        content: Document = {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": convert(values["algorithm"], str, f"{self.place}algorithm", self.problems),
            "counters": {name: self._whole(values[name], name) for name in COUNTERS},
            "weight_version": self._whole(values["weight_version"], "weight_version"),
            "kl": self._kinds(KL_CONTROLLERS, values["kl"], "kl"),
            "statistics": {
                name: self._record(RunningStatistics, item, f"statistics/{name}")
                for name, item in values["statistics"].items()
            },
            "schedules": self._kinds(SCHEDULES, values["schedules"], "schedules"),
            "best": None if values["best"] is None else self._record(BestMetric, values["best"], "best"),
            "in_flight": self._in_flight(values["in_flight"]),
            "buffers": {name: self._buffer(name, buffer) for name, buffer in values["buffers"].items()},
            "extra": self._extra(values["extra"]),
        }
        return content | {"tensors": sorted(self.files)}

    def _whole(self, value: object, name: str) -> object:
        return convert(value, int, f"{self.place}{name}", self.problems)

    def _record(self, cls: type[object], record: object, place: str) -> dict[str, object]:
        return write_fields(record, f"{self.place}{place}", self.problems) if self._is(cls, record, place) else {}

    def _is(self, cls: type[object], item: object, place: str) -> bool:
        fits = type(item) is cls  # the fields of a subclass would not be known when the file is read
        if not fits:
            text = f"{self.place}{place}: expected a {cls.__name__}, found {shorten(item)}"
            self.problems.add(UsageError, text, "What has no place of its own goes into extra.")
        return fits

    def _kinds(self, kinds: KindRegistry[T], items: Mapping[str, T], place: str) -> dict[str, object]:
        return {name: kinds.write(item, f"{self.place}{place}/{name}", self.problems) for name, item in items.items()}

    def _in_flight(self, prompts: list[InFlightPrompt]) -> list[object]:
        written: list[object] = []
        files: dict[str, object] = {}
        for index, prompt in enumerate(prompts):
            place = f"in_flight/{index}"
            content = self._record(InFlightPrompt, prompt, place)
            if content:
                content["tensors"] = forms(prompt.tensors, f"{self.place}{place}/tensors", self.problems)
                files |= {str(index): dict(prompt.tensors)} if prompt.tensors else {}
            written.append(content)
        self._file(IN_FLIGHT, files)
        return written

    def _buffer(self, name: str, buffer: Buffer) -> dict[str, object]:
        place = under(f"{self.place}buffers", name)
        check_buffer_name(name, place, self.problems, UsageError)
        if not self._is(Buffer, buffer, f"buffers/{name}"):
            return {}
        self._file(name, dict(buffer.tensors))
        return {"meta": buffer.meta, "tensors": forms(buffer.tensors, place, self.problems)}

    def _extra(self, extra: dict[str, object]) -> object:
        tensors: dict[str, torch.Tensor] = {}
        try:
            tree = split(convert(extra, dict, f"{self.place}extra", self.problems), "", tensors)
        except RecursionError:
            raise UsageError(f"{self.place}extra: the values are nested too deeply, or hold themselves.") from None
        self._file(EXTRA, dict(tensors))
        return tree

    def _file(self, stem: str, content: Mapping[str, object]) -> None:
        if content:
            self.files[stem] = dict(content)


def tensor_stems(document: Document, where: str) -> tuple[str, ...]:
    """The stems of the tensor files that belong to an up-to-date document.

    Raises:
        Corrupt: It does not say.
    """
    stems = document.get("tensors", [])
    if not isinstance(stems, list) or not all(is_stem(stem) for stem in stems):
        raise Corrupt(f"{where}: tensors: expected a list of file names, found {shorten(stems)}.")
    return tuple(stems)


def read(document: object, files: Mapping[str, object], where: str) -> dict[str, Any]:
    """The fields of the state, by name.

    Args:
        document: The JSON, its marked values not yet decoded.
        files: What the tensor files hold, by stem.
        where: The JSON's path, for messages.

    Raises:
        CheckpointError: Everything that is wrong, in one error, of the class of the first: ``NotACheckpoint``,
            ``Unsupported``, ``Incomplete`` or ``Corrupt``.
    """
    current, problems = up_to_date(document, where), Problems()
    # Where the list is missing, that is the one thing to report, and not every file as well.
    stems = tensor_stems(current, where) if "tensors" in current else tuple(files)
    try:
        tree = {name: decode(item, f"{where}: {name}", problems) for name, item in current.items()}
    except RecursionError:
        raise Corrupt(f"{where}: is nested too deeply to be an RLHF state.") from None
    reader = _StateReader(where, stems, files, problems)
    reader.check_files()
    members(tree, FIELDS, f"{where}: ", problems)
    values = reader.fields(tree)
    problems.raise_if_any()
    return values


@dataclass(slots=True)
class _StateReader:
    where: str
    stems: tuple[str, ...]
    files: Mapping[str, object]
    problems: Problems

    def fields(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Read what is there; what is missing was noted by name, and is skipped here."""
        reads: dict[str, Callable[[Any], dict[str, Any]]] = {
            "algorithm": lambda item: {"algorithm": self._plain(item, str, "algorithm")},
            "counters": self._counters,
            "weight_version": lambda item: {"weight_version": self._plain(item, int, "weight_version")},
            "kl": lambda item: {"kl": self._named(KL_CONTROLLERS.read, item, "kl")},
            "statistics": lambda item: {"statistics": self._plain(item, dict[str, RunningStatistics], "statistics")},
            "schedules": lambda item: {"schedules": self._named(SCHEDULES.read, item, "schedules")},
            "best": lambda item: {"best": self._plain(item, BestMetric | None, "best")},
            "in_flight": lambda item: {"in_flight": self._in_flight(item)},
            "buffers": lambda item: {"buffers": self._named(self._buffer, item, "buffers")},
            "extra": lambda item: {"extra": self._extra(item)},
        }
        values: dict[str, Any] = {}
        for name, item in tree.items():
            if name in reads:
                values |= reads[name](item)
        return values

    def check_files(self) -> None:
        """Hold the names of the files against those in the JSON."""
        for stem in self.stems:
            if stem not in self.files:
                self.problems.add(
                    Incomplete, f"{self._file(stem)}: is missing; rlhf_state.json names it", "Use an older step."
                )
        for stem in sorted(self.files.keys() - set(self.stems)):
            self.problems.add(Unsupported, f"{self._file(stem)}: is not named in rlhf_state.json")

    def _file(self, stem: str) -> str:
        folder, slash, _ = self.where.rpartition("/")
        return f"{folder}{slash}{stem}.pt"

    def _plain(self, item: object, hint: object, place: str) -> Any:
        return convert(item, hint, f"{self.where}: {place}", self.problems)

    def _counters(self, item: object) -> dict[str, Any]:
        found = members(item, COUNTERS, f"{self.where}: counters", self.problems) or {}
        return {name: self._plain(value, int, f"counters/{name}") for name, value in found.items()}

    def _named(self, read: Read[T], item: object, place: str) -> dict[str, T | None]:
        here = f"{self.where}: {place}"
        if not isinstance(item, dict):
            self.problems.add(Corrupt, f"{here}: expected an object, found {shorten(item)}")
            return {}
        for name in item:
            if not isinstance(name, str):
                self.problems.add(Corrupt, f"{here}: expected a string as name, found {shorten(name)}")
        return {str(name): read(content, f"{here}/{name}", self.problems) for name, content in item.items()}

    def _buffer(self, item: object, place: str, problems: Problems) -> Buffer | None:
        name = place.removeprefix(f"{self.where}: buffers/")
        check_buffer_name(name, place, problems, Corrupt)
        found = members(item, BUFFER_FIELDS, place, problems)
        if found is None:
            return None
        expected = convert(found["tensors"], dict[str, str], f"{place}/tensors", problems) or {}
        return Buffer(self._tensors(name, expected), convert(found["meta"], dict, f"{place}/meta", problems))

    def _in_flight(self, item: object) -> list[InFlightPrompt]:
        prompts: list[InFlightPrompt] = []
        for index, content in enumerate(self._plain(item, list, "in_flight") or []):
            prompt = self._plain(content, InFlightPrompt, f"in_flight/{index}")
            if prompt is not None:
                expected = self._plain(prompt.tensors, dict[str, str], f"in_flight/{index}/tensors") or {}
                prompt.tensors = self._tensors(IN_FLIGHT, expected, str(index))
                prompts.append(prompt)
        return prompts

    def _extra(self, item: object) -> object:
        tree = self._plain(item, dict, "extra")
        return join(tree, self._tensors(EXTRA, references(tree)))

    def _tensors(self, stem: str, expected: Mapping[str, str], member: str = "") -> dict[str, torch.Tensor]:
        """The expected tensors out of a file, or out of one member of it."""
        if expected and stem not in self.stems:
            self.problems.add(Corrupt, f"{self.where}: tensors: lacks {stem!r}, which other fields refer to")
        if stem not in self.files or not expected:
            return {}  # a file that is missing was noted once, not once per tensor
        content, place = self.files[stem], self._file(stem)
        if member:
            content = content.get(member, {}) if isinstance(content, Mapping) else content
            place = f"{place}: {member}"
        return pick(content, expected, place, self.problems)
