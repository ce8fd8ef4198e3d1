"""How tensor parallelism cuts each parameter: what ``universal_checkpoint_info`` says, as boxes.

Source: deepspeed 0.19.8, ``checkpoint/affine.py`` (``AffinePiece``), ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``),
``checkpoint/constants.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.layouts.tensor import LocalLayout, Piece, Shard, global_shape_of, local_layout
from mcore_rlhf.models.rules import Rules
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition

_PATTERNS = (
    ("tp_replicated_parameter_patterns", REPLICATED),
    ("parameter_to_average_patterns", REPLICATED),
    ("vocabulary_parameter_patterns", VOCABULARY),
    ("parameter_with_row_parallelism_patterns", ROW),
    ("parameter_with_2_sub_params_cat_dim_0", GATED),
)
_REFUSED = "autotp_unsupported_parameter_patterns"


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


class TensorCuts:
    """Says how tensors are cut over tensor-parallel ranks.

    Args:
        info: ``universal_checkpoint_info``, or nothing.
        tp: Tensor-parallel degree.
        rules: The user's own, which come first.
    """

    def __init__(self, info: Mapping[str, Any] | None, tp: int, rules: Rules) -> None:
        self.info, self.tp, self.rules = info or {}, tp, rules
        self.affine: Mapping[str, Any] = (self.info.get("affine_map") or {}).get("params", {})

    def of(self, name: str, shapes: Sequence[Shape], *, buffer: bool = False) -> CutTensor:
        """How a tensor is cut.

        Args:
            name: Its name.
            shapes: Its local shape on every tensor-parallel rank.
            buffer: Whether it is a buffer: every rank has those whole.

        Raises:
            LayoutMismatch: Nothing says it.
            Unsupported: It is cut in a way that boxes cannot describe.
        """
        if self.tp == 1 or buffer:
            return _cut_by(REPLICATED, shapes, self.tp)
        refused = self._first(self.info.get(_REFUSED) or (), name)
        if refused is not None:
            raise Unsupported(f"{name}: AutoTP itself says that it cannot be converted ({_REFUSED}: {refused!r})")
        pattern = self._first(self.affine, name)
        if pattern is not None:
            return _affine(name, self.affine[pattern], shapes)
        return _cut_by(self._partition(name), shapes, self.tp)

    def _partition(self, name: str) -> Partition:
        rule = self.rules.partition(name)
        if rule is not None:
            return rule
        if self.info.get("parameter_with_sub_params") and self._sub_params(name):
            raise Unsupported(f"{name}: parameter_with_sub_params without an affine map is not supported yet")
        found = [partition for key, partition in _PATTERNS if self._first(self.info.get(key) or (), name) is not None]
        if len(set(found)) > 1:
            raise LayoutMismatch(
                f"{name}: universal_checkpoint_info says both {found[0]} and {found[1]}\nSay it with --rules."
            )
        if found:
            return found[0]
        if not self.info:
            raise LayoutMismatch(
                f"{name}: TP {self.tp}, and no universal_checkpoint_info says how it is cut\n"
                "Say it with --rules rules.yaml (pattern → replicated, column, row, …)."
            )
        return COLUMN

    def _sub_params(self, name: str) -> bool:
        listed = self.info["parameter_with_sub_params"]
        return any(re.match(p, name) for item in listed for p in dict(item).get("patterns", ()))

    @staticmethod
    def _first(patterns: Any, name: str) -> str | None:
        return next((str(pattern) for pattern in patterns if re.match(str(pattern), name)), None)


def _cut_by(partition: Partition, shapes: Sequence[Shape], tp: int) -> CutTensor:
    if len(set(shapes)) > 1:
        raise LayoutMismatch(f"tensor-parallel ranks have different shapes: {', '.join(map(str, shapes))}")
    if partition.dim is not None and len(shapes[0]) <= partition.dim:
        partition = REPLICATED
    whole = global_shape_of(partition, shapes[0], tp, 1, 0)
    return CutTensor(partition, whole, tuple(local_layout(partition, whole, Shard(rank, tp)) for rank in range(tp)))


def _affine(name: str, stored: Mapping[str, Any], shapes: Sequence[Shape]) -> CutTensor:
    whole = tuple(map(int, stored["logical_shape"]))
    layouts = []
    for rank, shape in enumerate(shapes):
        at = stored["ranks"].get(rank, stored["ranks"].get(str(rank)))
        if at is None or tuple(at["shard_shape"]) != shape:
            found = None if at is None else tuple(at["shard_shape"])
            raise LayoutMismatch(f"{name}: affine_map says shape {found} on TP rank {rank}, the module has {shape}")
        layouts.append(LocalLayout(shape, shape, tuple(_pieces(name, at["pieces"], whole, shape))))
    return CutTensor(_partition_of(whole, shapes), whole, tuple(layouts))


def _pieces(name: str, pieces: Sequence[Mapping[str, Any]], whole: Shape, local: Shape) -> Iterator[Piece]:
    for piece in pieces:
        shape = tuple(map(int, piece["shape"]))
        source, dest = piece["source"], piece["dest"]
        plain = tuple(source[1]) == row_major(whole) and tuple(dest[1]) == row_major(local)
        if not plain or piece.get("scale", 1.0) != 1.0:
            raise Unsupported(f"{name}: its affine_map is no set of plain boxes ({dict(piece)})")
        yield Piece(Box(_unravel(int(source[0]), whole), shape), _unravel(int(dest[0]), local))


def _unravel(offset: int, shape: Shape) -> Shape:
    index = []
    for stride in row_major(shape):
        index.append(offset // stride)
        offset %= stride
    return tuple(index)


def _partition_of(whole: Shape, shapes: Sequence[Shape]) -> Partition:
    """The partition in plain words: the dimension in which the parts are smaller."""
    cut = [dim for dim, count in enumerate(whole) if any(shape[dim] != count for shape in shapes)]
    return Partition(cut[0]) if cut else REPLICATED
