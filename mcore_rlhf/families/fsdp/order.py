"""In which order a module has its parameters, by which torch's optimizers number them, and which of them FSDP1 flattens together.

Sources: torch 2.13.0, ``nn/modules/module.py`` (``named_parameters``), ``distributed/fsdp/_flat_param.py`` (``FlatParamHandle``:
parameters one behind the other, padded at the end to a multiple of the ranks), ``distributed/fsdp/wrap.py``; verl 0.9.1,
``utils/fsdp_utils.py`` (``get_fsdp_wrap_policy``: each of the model's ``_no_split_modules``, which are its layers, is a unit; with a LoRA
each module that is trained and has none in it, which are the adapter's matrices). Checked against the pieces of verl's own files bit for
bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from mcore_rlhf.core.catalog import Chunk, Record, Shape, dot, flat_boxes, row_major
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.models.huggingface.order import module_order

_ADAPTER = re.compile(r"(.*\.lora_[AB]\.[^.]{1,100})\.[^.]+")
_UNIT = re.compile(r"(.*?(?:^|\.)(?:layers|layer|blocks|block|h)\.\d{1,18})\.")


def by_table(names: Collection[str], config: Mapping[str, object]) -> list[str]:
    """The parameters of a model in the order of ``model.named_parameters()``, as the table of its architecture has them.

    Args:
        names: Of its parameters, each once.
        config: Its description, as ``config.json`` has it.

    Returns:
        All of them; none where no table has them all.
    """
    try:
        found = module_order(config, names)
    except CheckpointError:
        return []
    return found if len(found) == len(set(names)) else []


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP1 has as one flat one, cut into a piece for each rank.

    Args:
        shapes: Of its parameters, in their order.
    """

    shapes: Mapping[str, Shape]

    @cached_property
    def _firsts(self) -> dict[str, int]:
        """Where each parameter begins in the flat one."""
        return dict(zip(self.shapes, accumulate(map(prod, self.shapes.values()), initial=0), strict=False))

    @cached_property
    def numel(self) -> int:
        """Elements of all, without padding."""
        return sum(map(prod, self.shapes.values()))

    def piece(self, world: int) -> int:
        """Elements of a rank's piece, padding included."""
        return -(-self.numel // world)

    def span(self, name: str, world: int, rank: int) -> tuple[int, int]:
        """Which elements of a parameter lie in a rank's piece: the first, and the one behind the last; none where they are the same.

        Args:
            name, world, rank: See :meth:`chunks`.
        """
        low, numel = rank * self.piece(world) - self._firsts[name], prod(self.shapes[name])
        return min(max(low, 0), numel), max(min(low + self.piece(world), numel), 0)

    def chunks(self, name: str, world: int, rank: int, record: Record, start: int = 0) -> Iterator[Chunk]:
        """What of a parameter lies in a rank's piece, and where.

        Args:
            name: The parameter.
            world: Ranks.
            rank: Which of them.
            record: Holds the piece.
            start: Its first element in the record.
        """
        shape, low = self.shapes[name], rank * self.piece(world) - self._firsts[name]
        first, stop = self.span(name, world, rank)
        strides = row_major(shape)
        for part in flat_boxes(shape, first, stop):
            yield Chunk(part, record, start + dot(part.offset, strides) - low, strides)


def units_of(shapes: Mapping[str, Shape]) -> list[Unit]:
    """What FSDP1 makes flat parameters of: what lies in no layer first, then layer after layer, behind each the adapter's matrices in it.

    Args:
        shapes: Of the parameters, in the module's order.
    """
    found: dict[str, dict[str, Shape]] = {"": {}}
    for name, shape in shapes.items():
        layer = _ADAPTER.fullmatch(name) or _UNIT.match(name)
        found.setdefault(layer[1] if layer else "", {})[name] = shape
    return [Unit(of) for of in found.values() if of]


def ordered(names: Sequence[str], config: Mapping[str, object], known: Sequence[str]) -> tuple[list[str], list[str]]:
    """The order of a model's parameters: by the table of its architecture, or as its own state dict had it.

    Args:
        names: Of its parameters.
        config: Its description.
        known: Keys of its state dict in their order; empty where nobody knows them.

    Returns:
        The order, and the names of which nobody knows where they stand.
    """
    there = set(names)
    tabled, own = by_table(names, config), [name for name in dict.fromkeys(known) if name in there]
    best = tabled if len(tabled) == len(there) else own
    return best, sorted(there.difference(best))
