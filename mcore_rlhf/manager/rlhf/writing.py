"""The RLHF state as a tree of plain values, and the tensor files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch

from ...errors import Problems, UsageError
from .best import BestMetric
from .kinds import Kinds
from .kl import KL_CONTROLLERS
from .plain import shorten, under
from .records import convert, write_fields
from .schedules import SCHEDULES
from .schema import COUNTERS, EXTRA, IN_FLIGHT, Files, check_buffer_name
from .statistics import RunningStatistics
from .tensors import Buffer, InFlightPrompt, forms, split
from .versions import FORMAT, VERSION, Document

if TYPE_CHECKING:
    from .state import RlhfState

T = TypeVar("T")


def write(state: RlhfState) -> tuple[Document, Files]:
    """The state as plain values, and tensor files that hold the live tensors.

    Raises:
        UsageError: Something in it cannot be stored; every such place is named.
    """
    writer = _Writer("RlhfState: ", Problems(), {})
    document = writer.document(state)
    if writer.problems:
        raise UsageError(writer.problems.describe())
    return document, writer.files


class _Writer:
    def __init__(self, place: str, problems: Problems, files: Files) -> None:
        self.place, self.problems, self.files = place, problems, files

    def document(self, state: RlhfState) -> Document:
        content: Document = {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": convert(state.algorithm, str, f"{self.place}algorithm", self.problems),
            "counters": {name: self._whole(getattr(state, name), name) for name in COUNTERS},
            "weight_version": self._whole(state.weight_version, "weight_version"),
            "kl": self._kinds(KL_CONTROLLERS, state.kl, "kl"),
            "statistics": {
                name: self._record(RunningStatistics, item, f"statistics/{name}")
                for name, item in state.statistics.items()
            },
            "schedules": self._kinds(SCHEDULES, state.schedules, "schedules"),
            "best": None if state.best is None else self._record(BestMetric, state.best, "best"),
            "in_flight": self._in_flight(state.in_flight),
            "buffers": {name: self._buffer(name, buffer) for name, buffer in state.buffers.items()},
            "extra": self._extra(state.extra),
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

    def _kinds(self, kinds: Kinds[T], items: Mapping[str, T], place: str) -> dict[str, object]:
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
