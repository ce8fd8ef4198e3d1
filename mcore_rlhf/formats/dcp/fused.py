"""Queries, keys and values that a run trains as one parameter and saves as three: its optimizer's state is of the one.

A module with hooks on its state dict does so: the model's tensors are ``wq``, ``wk`` and ``wv``, and the optimizer names its parameter,
``wqkv``: for each group of heads that share keys and values its queries, its key, its value. How many groups there are no file says.

Source: torchtitan 0.3.0, ``models/common/attention.py`` (``FusedQKVLinear``: ``_split_qkv_on_save``, ``_merge_qkv_on_load``; the default of
its Llama and Qwen3), ``components/optimizer/utils.py`` (``get_flat_optim_state_dict``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mcore_rlhf.core.catalog import Box, DType, Shape, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.rows import Tensor
from mcore_rlhf.core.shares import Share
from mcore_rlhf.storage.dcp.folder import DcpTensor

_ONE, _PARTS = ".wqkv.", (".wq.", ".wk.", ".wv.")
FUSED = "fused_groups"
"""What the note of a DCP folder's layout calls the number of groups of heads, where its optimizer has such parameters."""


@dataclass(frozen=True, slots=True)
class FusedParam:
    """Such a parameter.

    Args:
        name: What the optimizer calls it.
        parts: Its queries, keys and values, with the shapes that the model has them in.
        groups: Groups of heads that share keys and values.
    """

    name: str
    parts: Mapping[str, Shape]
    groups: int

    @property
    def shape(self) -> Shape:
        """Its own."""
        first = next(iter(self.parts.values()))
        return (sum(shape[0] for shape in self.parts.values()), *first[1:])

    @property
    def fits(self) -> bool:
        """Whether the parts can be dealt to so many groups."""
        rows = [shape[0] if shape else 0 for shape in self.parts.values()]
        return 0 < self.groups <= min(rows) and not any(
            count % self.groups for count in rows
        )  # a stranger said how many

    def shares(self) -> dict[str, tuple[Share, ...]]:
        """For each part, which rows of the parameter it is made of."""
        found: dict[str, list[Share]] = {name: [] for name in self.parts}
        at = 0
        for group in range(self.groups):
            for name, shape in self.parts.items():
                rows, rest = shape[0] // self.groups, (0,) * len(shape[1:])
                part = (rows, *shape[1:])
                found[name].append(Share(Box((group * rows, *rest), part), self.name, Box((at, *rest), part)))
                at += rows
        return {name: tuple(shares) for name, shares in found.items()}

    def whole(self) -> tuple[Share, ...]:
        """Which rows of the parts the parameter is made of."""
        return tuple(share.inverse(name) for name, shares in self.shares().items() for share in shares)


def fused_names(trained: Iterable[str], model: Collection[str]) -> dict[str, tuple[str, ...]]:
    """What an optimizer trains and the model has in parts alone: its name, and theirs.

    Args:
        trained: Names that the optimizer has.
        model: Those of the model's tensors.
    """
    found = {name: tuple(name.replace(_ONE, part) for part in _PARTS) for name in trained if name not in model}
    return {name: parts for name, parts in found.items() if _ONE in name and all(part in model for part in parts)}


def fused_again(shapes: Mapping[str, Shape], groups: int) -> Iterator[FusedParam]:
    """The parameters that the run has in the place of queries, keys and values, where a model has all three.

    Args:
        shapes: Of the model's tensors.
        groups: Groups of heads that share keys and values.
    """
    for name in shapes:
        parts = [name.replace(_PARTS[0], part) for part in _PARTS]
        if _PARTS[0] in name and all(part in shapes for part in parts):
            yield FusedParam(name.replace(_PARTS[0], _ONE), {part: shapes[part] for part in parts}, groups)


@dataclass(frozen=True, slots=True)
class PartTensor:
    """The rows of one part in a state of such a parameter, in the place of a tensor of the folder.

    Args:
        of: The whole state.
        fused: The parameter.
        part: Which part.
    """

    of: DcpTensor
    fused: FusedParam = field(repr=False)
    part: str = ""

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.of.dtype

    @property
    def global_shape(self) -> Shape:
        """The part's."""
        return self.fused.parts[self.part]

    @property
    def cut(self) -> bool:
        """Whether the whole is stored in several parts."""
        return self.of.cut

    def identity(self) -> object:
        """That of the whole, and which part it is."""
        return self.part, self.of.identity()

    def as_tensor(self) -> Tensor:
        """The tensor as a table has it."""
        table, whole, own = Chunks(), TensorName("", self.fused.name, ""), TensorName("", self.part, "")
        table.add(whole, self.of.as_tensor())
        return table.recut("", {self.part: self.fused.shares()[self.part]}, self.fused.parts).tensor(own)
