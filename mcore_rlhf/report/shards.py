"""The shard map: every logical tensor as a rectangle, and which file holds which part of it, off the catalogue alone.

Tensors that are cut alike are one drawing with many names, whatever their layer, expert or state: a mixture of experts with
144,384 tensors is some dozens of drawings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Literal, TypedDict

from mcore_rlhf.core.catalog import Box, Shape, TensorEntry, TensorName
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.spec import ModelSpec, ParamSpec

_NUMBER = re.compile(r"(?<=\.)\d{1,18}(?=\.|$)|(?<=\.weight)\d{1,18}$|(?<=\.bias)\d{1,18}$")
_PLACE = "{}"
_LAYER = re.compile(r"(?:^|[._])(?:layers?|blocks?|h)\.$")
_EXPERT = re.compile(r"experts\.(?:$|.+\.(?:weight|bias)$)")
_ALIKE = 32
"""Drawings of one pattern that are kept: flat buffers are cut at other places in every layer."""
_BOXES = 60_000
"""Rectangles of all drawings together: what a browser holds easily, in less than 5 MB."""

_COUNTS = ("tensors", "chunks", "replicas", "bytes", "replica_bytes")
Span = tuple[int, int]
"""First and last of consecutive numbers."""
Place = Literal["layer", "expert", "number"]
"""What a number in a name is."""


class Rectangle(TypedDict):
    """A part of a tensor: from ``y`` and ``x`` on, ``h`` rows of ``w`` elements, in ``slots`` of its drawing: replicas are several."""

    y: int
    x: int
    h: int
    w: int
    slots: list[int]


class Members(TypedDict):
    """Tensors of a drawing that lie in the same files: ``numbers`` for every place of the name, ``files`` for every slot."""

    numbers: list[list[Span]]
    files: list[int]


class DrawnStates(TypedDict):
    """What a drawing is of: ``states`` that are cut alike and lie in the same files, their ``dtype``, how many ``tensors``."""

    states: list[str]
    dtype: str
    tensors: int
    members: list[Members]


class Drawing(TypedDict):
    """Tensors that are cut alike.

    ``pattern`` is their name, with ``{}`` for layer and expert numbers, which ``places`` says of each; ``experts`` is the dimension
    along which the experts of a layer lie, where they are one tensor, or null; ``fused`` are the blocks of which the dimension ``dim``
    is made, with their lengths, ``periods`` times one after another (``linear_qkv``: as many as query groups); ``padding`` is the
    first row behind the true vocabulary, or null; ``step`` says that rectangles hold every so-many-th element alone; ``omitted``
    counts rectangles that were left out.
    """

    pattern: str
    places: list[Place]
    experts: int | None
    shape: list[int]
    partition: str | None
    dim: int | None
    fused: list[tuple[str, int]]
    periods: int
    padding: int | None
    step: bool
    rectangles: list[Rectangle]
    omitted: int
    held: list[DrawnStates]


class HeldFile(TypedDict):
    """A file: its ``path`` (with ``{param}`` where every tensor has its own), ``bytes`` of tensors in it, and ``tensors``."""

    path: str
    bytes: int
    tensors: int


class ShardMap(TypedDict):
    """All of it. ``folded`` are patterns of which further drawings, cut elsewhere, were left out: pattern and tensors."""

    tensors: int
    chunks: int
    replicas: int
    bytes: int
    replica_bytes: int
    states: list[str]
    files: list[HeldFile]
    drawings: list[Drawing]
    folded: list[tuple[str, int]]


def shard_map(source: Source) -> ShardMap:
    """Draw every tensor of a checkpoint; none is read.

    Args:
        source: An opened checkpoint.
    """
    folding = _Folding(source.model, Arguments(source.state.args))
    for name in source.catalog:
        entry = source.catalog.get(name)
        if entry is not None:
            folding.add(name, entry)
    return folding.result()


def pattern_of(param: str) -> tuple[str, tuple[int, ...]]:
    """A parameter's name with ``{}`` for its numbers, and the numbers: layer first, then expert."""
    numbers = tuple(int(found) for found in _NUMBER.findall(param))
    return _NUMBER.sub(_PLACE, param), numbers


def places_of(pattern: str) -> list[Place]:
    """What each ``{}`` of a pattern stands for, by what stands before it: ``experts.{}``, and ``experts.linear_fc1.weight{}``."""
    before, found = "", list[Place]()
    for text in pattern.split(_PLACE)[:-1]:
        before += text
        found.append("expert" if _EXPERT.search(text) else "layer" if _LAYER.search(before) else "number")
    return found


def _stacked(pattern: str, shape: Shape, model: ModelSpec) -> int | None:
    """The dimension of which every index is an expert: that of the layers may stand before it."""
    if not model.num_experts or "experts." not in pattern or "expert" in places_of(pattern):
        return None
    return next((dim for dim in range(min(2, len(shape) - 1)) if shape[dim] == model.num_experts), None)


def spans(numbers: Iterable[int]) -> list[Span]:
    """Numbers as runs of consecutive ones."""
    found: list[Span] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


_Cut = tuple[Shape, tuple[tuple[Box, tuple[int, ...]], ...]]
"""A shape, and its boxes, each with the slots that hold it."""


@dataclass(slots=True)
class _Drawn:
    """A drawing while it is made: by state its type, and by files the numbers of its tensors."""

    pattern: str
    cut: _Cut
    spec: ParamSpec | None
    states: dict[str, tuple[str, dict[tuple[int, ...], list[tuple[int, ...]]]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Folding:
    """Sorts tensors into drawings."""

    model: ModelSpec
    args: Arguments
    drawings: dict[tuple[str, _Cut], _Drawn] = field(default_factory=dict)
    of_pattern: dict[str, int] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, None] = field(default_factory=dict)
    boxes: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))

    def add(self, name: TensorName, entry: TensorEntry) -> None:
        """Put a tensor where those that are cut alike are."""
        pattern, numbers = pattern_of(name.param)
        cut, files = self._cut(name, entry)
        self.states[name.state] = None
        self.counts["tensors"] += 1
        drawn = self.drawings.get((pattern, cut)) or self._begin(pattern, cut, self.model.get(name.param))
        if drawn is None:
            self.folded[pattern] = self.folded.get(pattern, 0) + 1
            return
        _, members = drawn.states.setdefault(name.state, (str(entry.dtype), {}))
        members.setdefault(files, []).append(numbers)

    def _begin(self, pattern: str, cut: _Cut, spec: ParamSpec | None) -> _Drawn | None:
        """A new drawing; None where there are enough."""
        known = self.of_pattern.get(pattern, 0)
        if known and (known >= _ALIKE or self.boxes + len(cut[1]) > _BOXES):
            return None
        self.of_pattern[pattern] = known + 1
        self.boxes += len(cut[1])
        drawn = self.drawings[pattern, cut] = _Drawn(pattern, cut, spec)
        return drawn

    def _cut(self, name: TensorName, entry: TensorEntry) -> tuple[_Cut, tuple[int, ...]]:
        """How a tensor is cut, and the files of its slots; counts what every file holds."""
        slots: dict[int, int] = {}
        boxes: dict[Box, list[int]] = {}
        for chunk in entry.chunks:
            file = self._file(chunk.record.file.replace(name.param, "{param}"))
            nbytes = chunk.box.numel * entry.dtype.itemsize
            figures = self.files[file]
            figures[1] += nbytes
            figures[2] += figures[0] not in slots
            self.counts["chunks"] += 1
            self.counts["replicas"] += chunk.box in boxes
            self.counts["replica_bytes"] += nbytes if chunk.box in boxes else 0
            boxes.setdefault(chunk.box, []).append(slots.setdefault(figures[0], len(slots)))
        self.counts["bytes"] += prod(entry.global_shape) * entry.dtype.itemsize
        return (entry.global_shape, tuple((box, tuple(held)) for box, held in boxes.items())), tuple(slots)

    def _file(self, path: str) -> str:
        if path not in self.files:
            self.files[path] = [len(self.files), 0, 0]
        return path

    def result(self) -> ShardMap:
        """All drawings, in the order of the model."""
        return {
            "tensors": self.counts["tensors"], "chunks": self.counts["chunks"], "replicas": self.counts["replicas"],
            "bytes": self.counts["bytes"], "replica_bytes": self.counts["replica_bytes"],
            "states": list(self.states),
            "files": [{"path": path, "bytes": nbytes, "tensors": n} for path, (_, nbytes, n) in self.files.items()],
            "drawings": [_drawing(drawn, self.model, self.args) for drawn in self.drawings.values()],
            "folded": list(self.folded.items()),
        }  # fmt: skip


def _drawing(drawn: _Drawn, model: ModelSpec, args: Arguments) -> Drawing:
    shape, boxes = drawn.cut
    spec = drawn.spec
    partition = spec.partition if spec is not None else None
    padded = partition is not None and partition.vocabulary and model.vocab_size is not None
    periods, fused = _fused(spec, shape, args)
    padding = model.vocab_size if padded and (model.vocab_size or 0) < shape[0] else None
    return {
        "pattern": drawn.pattern,
        "places": places_of(drawn.pattern),
        "experts": _stacked(drawn.pattern, shape, model),
        "shape": list(shape),
        "partition": None if partition is None else str(partition),
        "dim": None if partition is None else partition.dim,
        "fused": fused,
        "periods": periods,
        "padding": padding,
        "step": any(box.step is not None for box, _ in boxes),
        "rectangles": [_rectangle(box, shape, slots) for box, slots in boxes[:_BOXES]],
        "omitted": max(0, len(boxes) - _BOXES),
        "held": _held(drawn),
    }


def _fused(spec: ParamSpec | None, shape: Shape, args: Arguments) -> tuple[int, list[tuple[str, int]]]:
    """The blocks of which the dimension that is cut is made, where there are several, and how often they follow one another."""
    if spec is None or spec.partition.dim is None:
        return 1, []
    if spec.partition.parts:
        return 1, list(spec.partition.parts)
    if ".linear_qkv." in spec.name and args.query_groups is not None:
        groups, heads, channels = args.query_groups
        if groups * (heads + 2) * channels == shape[0]:
            return groups, [("q", heads * channels), ("k", channels), ("v", channels)]
    blocks = spec.partition.blocks
    names = ("gate", "up") if blocks == 2 else tuple(f"block {n}" for n in range(blocks))
    return 1, [(name, shape[spec.partition.dim] // blocks) for name in names] if blocks > 1 else []


def _rectangle(box: Box, shape: Shape, slots: Sequence[int]) -> Rectangle:
    """A box as it is drawn: all dimensions but the last are rows; what a box with gaps spans is drawn whole."""
    stop = box.stop
    if len(shape) < 2:
        first, last = (box.offset[0], stop[0]) if shape else (0, 1)
        return {"y": 0, "x": first, "h": 1, "w": last - first, "slots": list(slots)}
    top = bottom = 0
    for dim, count in enumerate(shape[:-1]):
        top, bottom = top * count + box.offset[dim], bottom * count + stop[dim] - 1
    return {"y": top, "x": box.offset[-1], "h": bottom - top + 1, "w": stop[-1] - box.offset[-1], "slots": list(slots)}


def _held(drawn: _Drawn) -> list[DrawnStates]:
    """States whose tensors have the same type and lie in the same files, together."""
    found: list[DrawnStates] = []
    for state, (dtype, by_files) in drawn.states.items():
        members: list[Members] = [
            {"numbers": block, "files": list(files)}
            for files, numbers in by_files.items()
            for block in _blocks(numbers)
        ]
        alike = next((held for held in found if held["dtype"] == dtype and held["members"] == members), None)
        if alike is not None:
            alike["states"].append(state)
            continue
        tensors = sum(map(len, by_files.values()))
        found.append({"states": [state], "dtype": dtype, "tensors": tensors, "members": members})
    return found


def _blocks(numbers: Sequence[tuple[int, ...]]) -> list[list[list[Span]]]:
    """Tuples of numbers as products of spans: layers that have the same experts are one block."""
    if not numbers or len(numbers[0]) < 2:
        return [[spans(n[0] for n in numbers)] if numbers and numbers[0] else []]
    inner: dict[str, tuple[list[list[Span]], list[int]]] = {}
    for first, group in groupby(sorted(numbers), key=lambda n: n[0]):
        for block in _blocks([n[1:] for n in group]):
            inner.setdefault(repr(block), (block, []))[1].append(first)
    return [[spans(firsts), *block] for block, firsts in inner.values()]
