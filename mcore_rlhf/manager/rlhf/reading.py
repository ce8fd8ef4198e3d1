"""The RLHF state from a tree of plain values and its tensor files: every problem is found before any is raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...errors import Corrupt, Incomplete, Problems, Unsupported
from .best import BestMetric
from .kl import KL_CONTROLLERS
from .plain import decode, shorten
from .records import convert, members, read_fields
from .schedules import SCHEDULES
from .schema import BUFFER_FIELDS, COUNTERS, EXTRA, FIELDS, IN_FLIGHT, check_buffer_name, is_stem
from .statistics import RunningStatistics
from .tensors import Buffer, InFlightPrompt, join, pick, references
from .versions import Document, up_to_date

T = TypeVar("T")
Read = Callable[[object, str, Problems], T | None]


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
    reader = _Reader(where, stems, files, problems)
    reader.check_files()
    members(tree, FIELDS, f"{where}: ", problems)
    values = reader.fields(tree)
    problems.raise_if_any()
    return values


@dataclass(slots=True)
class _Reader:
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
            "statistics": lambda item: {"statistics": self._named(_statistics, item, "statistics")},
            "schedules": lambda item: {"schedules": self._named(SCHEDULES.read, item, "schedules")},
            "best": lambda item: {"best": item if item is None else self._record(BestMetric, item, "best")},
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

    def _record(self, cls: type[T], item: object, place: str) -> T | None:
        return read_fields(cls, item, f"{self.where}: {place}", self.problems)

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
        expected = self._expected(found["tensors"], f"{place}/tensors")
        return Buffer(self._tensors(name, expected), convert(found["meta"], dict, f"{place}/meta", problems))

    def _in_flight(self, item: object) -> list[InFlightPrompt]:
        prompts: list[InFlightPrompt] = []
        for index, content in enumerate(self._plain(item, list, "in_flight") or []):
            prompt = self._record(InFlightPrompt, content, f"in_flight/{index}")
            if prompt is not None:
                expected = self._expected(prompt.tensors, f"{self.where}: in_flight/{index}/tensors")
                prompt.tensors = self._tensors(IN_FLIGHT, expected, str(index))
                prompts.append(prompt)
        return prompts

    def _extra(self, item: object) -> object:
        tree = self._plain(item, dict, "extra")
        return join(tree, self._tensors(EXTRA, references(tree)))

    def _expected(self, item: object, place: str) -> dict[str, str]:
        if isinstance(item, dict) and all(isinstance(text, str) for pair in item.items() for text in pair):
            return item
        self.problems.add(Corrupt, f"{place}: expected names and forms of tensors, found {shorten(item)}")
        return {}

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


def _statistics(item: object, place: str, problems: Problems) -> RunningStatistics | None:
    return read_fields(RunningStatistics, item, place, problems)
