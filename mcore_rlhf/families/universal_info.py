"""How tensor parallelism cuts each parameter of a run of DeepSpeed's: what its ``universal_checkpoint_info`` says.

Who reads native files asks for the parts that the ranks have, as boxes; who writes a universal checkpoint for what a file says
beside its tensor, for a loader with tensor parallelism.

Source: deepspeed 0.19.8, ``checkpoint/affine.py`` (``AffinePiece``), ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``),
``checkpoint/universal_checkpoint.py``, ``checkpoint/constants.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mcore_rlhf.core.catalog import Box, Shape, row_major
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported, Untrusted, shown
from mcore_rlhf.layouts.tensor import LocalLayout, Shard, ViewPiece, global_shape_of, local_layout
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition, Rules

INFO = "universal_checkpoint_info"
CAT_DIM, VOCAB_TENSOR, N_SUB_PARAMS = "cat_dim", "vocab_tensor", "param_n_sub_params"
"""Keys of a universal file beside its tensor."""

_WHOLE = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_VOCABULARY = "vocabulary_parameter_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_PARTITIONS = {**dict.fromkeys(_WHOLE, REPLICATED), _VOCABULARY: VOCABULARY, _ROW: ROW, _HALVES: GATED}
_SUB_PARAMS = "parameter_with_sub_params"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"


@dataclass(frozen=True, slots=True)
class CutTensor:
    """How one tensor is cut.

    Args:
        partition: In words that every format knows.
        global_shape: Shape of the whole.
        layouts: The part of every tensor-parallel rank.
    """

    partition: Partition
    global_shape: Shape
    layouts: tuple[LocalLayout, ...]


@dataclass(frozen=True, slots=True)
class UniversalCheckpointInfo:
    """Patterns of names by the way in which those parameters are cut.

    Args:
        stored: As a run stores it; empty where it was not tensor-parallel.
    """

    stored: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> UniversalCheckpointInfo:
        """That among the values of a model's file, or one that says nothing."""
        found = values.get(INFO)
        return cls(found if isinstance(found, Mapping) else {})

    @property
    def affine(self) -> Mapping[str, Any]:
        """The affine map, by pattern; it comes before all other patterns."""
        found = self.stored.get("affine_map")
        return (found.get("params") or {}) if isinstance(found, Mapping) else {}

    def cut(self, name: str, shapes: Sequence[Shape], rules: Rules, *, buffer: bool = False) -> CutTensor:
        """How a tensor is cut.

        Args:
            name: Its name.
            shapes: Its local shape on every tensor-parallel rank.
            rules: The user's own, which come before the patterns.
            buffer: Whether it is a buffer: every rank has those whole.

        Raises:
            LayoutMismatch: Nothing says it.
            Unsupported: It is cut in a way that boxes cannot describe.
        """
        if len(shapes) == 1 or buffer:
            return _cut_by(REPLICATED, shapes)
        refused = _first(self._patterns(_UNSUPPORTED), name)
        if refused is not None:
            raise Unsupported(f"{name}: AutoTP itself says that it cannot be converted ({_UNSUPPORTED}: {refused!r})")
        pattern = _first(self.affine, name)
        if pattern is not None:
            return _affine_cut(name, self.affine[pattern], shapes)
        return _cut_by(rules.partition(name) or self._partition(name, len(shapes)), shapes)

    def keys(self, name: str) -> dict[str, object]:
        """What a universal file of a parameter says beside the tensor.

        Raises:
            LayoutMismatch: Two patterns of one kind match it.
            Unsupported: The layout of its shards is one that DeepSpeed cannot convert either.
        """
        if (reason := self._only(_UNSUPPORTED, name)) is not None:
            raise Unsupported(f"{name}: universal_checkpoint_info says that it cannot be converted ({reason})")
        keys = self._layout_keys(name)
        return keys | ({VOCAB_TENSOR: True} if self._only(_VOCABULARY, name) is not None else {})

    def check_patterns(self, names: Sequence[str]) -> None:
        """Every pattern must be there for something.

        Raises:
            LayoutMismatch: Patterns match no parameter; all of them.
        """
        problems = Problems()
        for kind in (*_WHOLE, _ROW, _VOCABULARY, _HALVES):
            for pattern in self._patterns(kind):
                if not any(_matches(pattern, name) for name in names):
                    problems.add(
                        LayoutMismatch,
                        f"universal_checkpoint_info: {kind}: {pattern!r} matches no parameter",
                        "The patterns are those of another model, or a parameter's file is missing.",
                    )
        problems.raise_if_any()

    def _partition(self, name: str, tp: int) -> Partition:
        if self._has_sub_params(name):
            raise Unsupported(f"{name}: parameter_with_sub_params without an affine map is not supported yet")
        found = [partition for kind, partition in _PARTITIONS.items() if _first(self._patterns(kind), name) is not None]
        if len(set(found)) > 1:
            raise LayoutMismatch(
                f"{name}: universal_checkpoint_info says both {found[0]} and {found[1]}\nSay it with --rules."
            )
        if not found and not self.stored:
            raise LayoutMismatch(
                f"{name}: TP {tp}, and no universal_checkpoint_info says how it is cut\n"
                "Say it with --rules rules.yaml (pattern → replicated, column, row, …)."
            )
        return found[0] if found else COLUMN

    def _layout_keys(self, name: str) -> dict[str, object]:
        if _first(self.affine, name) is not None or any(self._only(kind, name) is not None for kind in _WHOLE):
            return {}
        if self._only(_HALVES, name) is not None:
            return {CAT_DIM: 0, N_SUB_PARAMS: 2}
        if self._has_sub_params(name):
            raise Unsupported(
                f"{name}: is made of sub-parameters of different widths ({_SUB_PARAMS}), which is not written yet\n"
                "Convert it with DeepSpeed's own ds_to_universal; the result is read."
            )
        return {CAT_DIM: 1 if self._only(_ROW, name) is not None else 0}

    def _has_sub_params(self, name: str) -> bool:
        listed = self.stored.get(_SUB_PARAMS) or ()
        return any(_first(dict(item).get("patterns", ()), name) is not None for item in listed)

    def _only(self, kind: str, name: str) -> str | None:
        """The pattern of a kind that matches, of which DeepSpeed allows one."""
        matched = [pattern for pattern in self._patterns(kind) if _matches(pattern, name)]
        if len(matched) > 1:
            raise LayoutMismatch(
                f"universal_checkpoint_info: {kind}: {name} matches {' and '.join(map(repr, matched))}; at most one may match"
            )
        return matched[0] if matched else None

    def _patterns(self, kind: str) -> list[str]:
        found = self.stored.get(kind)
        return [str(pattern) for pattern in found] if isinstance(found, list | tuple | dict) else []


_MOST_LETTERS, _MOST_REPEATS, _MOST_WAYS = 1000, 4, 8
_REPEAT, _OF_A_GROUP, _WAY = re.compile(r"[*+{]"), re.compile(r"\)[*+{]"), re.compile(r"(?<!\()\?|\|")
_NO_OPERATOR = re.compile(r"\\.|\[\^?\]?[^]]*\]", re.DOTALL)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of the checkpoint's, which is a stranger's: one that cannot take for ever.

    A repeated group, and repeats in a row, try a name's letters in more ways than there is time for. DeepSpeed's own patterns are names
    with a few ``.*`` in them.

    Raises:
        Untrusted: It may.
        LayoutMismatch: It is no pattern.
    """
    bare = _NO_OPERATOR.sub("c", pattern)
    repeats, ways = len(_REPEAT.findall(bare)), len(_WAY.findall(bare))
    if len(pattern) > _MOST_LETTERS or repeats > _MOST_REPEATS or ways > _MOST_WAYS or _OF_A_GROUP.search(bare):
        raise Untrusted(
            f"universal_checkpoint_info: the pattern {shown(pattern)} may take for ever to be matched: it repeats a group, or more than "
            f"{_MOST_REPEATS} things, leaves more than {_MOST_WAYS} choices, or has more than {_MOST_LETTERS:,} letters"
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise LayoutMismatch(f"universal_checkpoint_info: {shown(pattern)} is no pattern: {error}") from None


def _matches(pattern: str, name: str) -> bool:
    return _compiled(pattern).match(name) is not None


def _first(patterns: Iterable[object], name: str) -> str | None:
    return next((str(pattern) for pattern in patterns if _matches(str(pattern), name)), None)


def _cut_by(partition: Partition, shapes: Sequence[Shape]) -> CutTensor:
    tp = len(shapes)
    if len(set(shapes)) > 1:
        raise LayoutMismatch(f"tensor-parallel ranks have different shapes: {', '.join(map(str, shapes))}")
    if partition.dim is not None and len(shapes[0]) <= partition.dim:
        partition = REPLICATED
    whole = global_shape_of(partition, shapes[0], tp, 1, 0)
    return CutTensor(partition, whole, tuple(local_layout(partition, whole, Shard(rank, tp)) for rank in range(tp)))


def _affine_cut(name: str, stored: Mapping[str, Any], shapes: Sequence[Shape]) -> CutTensor:
    whole = tuple(map(int, stored["logical_shape"]))
    layouts = []
    for rank, shape in enumerate(shapes):
        at = stored["ranks"].get(rank, stored["ranks"].get(str(rank)))
        if at is None or tuple(at["shard_shape"]) != shape:
            found = None if at is None else tuple(at["shard_shape"])
            raise LayoutMismatch(f"{name}: affine_map says shape {found} on TP rank {rank}, the module has {shape}")
        layouts.append(LocalLayout(shape, shape, tuple(_affine_pieces(name, at["pieces"], whole, shape))))
    cut = [dim for dim, count in enumerate(whole) if any(shape[dim] != count for shape in shapes)]
    return CutTensor(Partition(cut[0]) if cut else REPLICATED, whole, tuple(layouts))


def _affine_pieces(name: str, pieces: Sequence[Mapping[str, Any]], whole: Shape, local: Shape) -> Iterator[ViewPiece]:
    for piece in pieces:
        shape = tuple(map(int, piece["shape"]))
        source, dest = piece["source"], piece["dest"]
        plain = tuple(source[1]) == row_major(whole) and tuple(dest[1]) == row_major(local)
        if not plain or piece.get("scale", 1.0) != 1.0:
            raise Unsupported(f"{name}: its affine_map is no set of plain boxes ({dict(piece)})")
        yield ViewPiece(Box(_unravel(int(source[0]), whole), shape), _unravel(int(dest[0]), local))


def _unravel(offset: int, shape: Shape) -> Shape:
    index = []
    for stride in row_major(shape):
        index.append(offset // stride)
        offset %= stride
    return tuple(index)
