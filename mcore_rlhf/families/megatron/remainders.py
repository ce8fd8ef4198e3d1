"""fp32 masters that a precision-aware optimizer stores as what rounding them to the parameters cut off: joined, they are masters again.

With bf16 parameters and fp32 masters Transformer Engine keeps 16 bits of each master, as an integer; the parameter has the others,
rounded up where the remainder is negative. Megatron writes those integers as floats in the place of the masters, and nothing in the
file says so. So they are told by their values: all integers of 16 bits, and, taken for masters, not those of their parameters.

Sources: Transformer Engine 2.1, ``transformer_engine/pytorch/optimizers/fused_adam.py`` (``store_param_remainders``,
``get_unscaled_state``) and ``common/multi_tensor/adam.cu`` (``AdamFunctorMasterParamRemainder``); megatron-core 0.19.2,
``optimizer/distrib_optimizer.py`` (``get_parameter_state_dp_zero``), which takes the state as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

import numpy as np

from mcore_rlhf.core.cast import Words, differing_after_rounding
from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT32,
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Record,
    TensorEntry,
    TensorName,
    dot,
    dtype_of,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.computed import COMPUTED, words_of
from mcore_rlhf.core.execute import WINDOW_BYTES, SourceBytes
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.core.rows import Rows, Strip, Tensor
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.source import Computed, Source, bytes_of
from mcore_rlhf.models.meaning.bounds import is_number

from .arguments import DISTRIBUTED, Arguments

REMAINDER = "remainder"
"""Under which name of a state what is stored is found, and not what is made of it."""
_INT16 = dtype_of("int16")

_SAMPLE = 1 << 12
"""Elements of a parameter that are looked at."""
_LOW, _HIGH = -(1 << 15), (1 << 15) - 1


@dataclass(frozen=True, slots=True)
class JoinedMaster:
    """One parameter's masters, computed of it and of the remainders.

    Args:
        param: The parameter, of bf16.
        remainder: What was cut off, integers of 16 bits as floats; of the same shape.
    """

    param: TensorEntry
    remainder: TensorEntry

    @property
    def _rows(self) -> int:
        """Rows that are computed together."""
        return max(1, WINDOW_BYTES // max(1, FLOAT32.itemsize * prod(self.param.global_shape[1:])))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a whole block of rows."""
        return self._rows * FLOAT32.itemsize * prod(self.param.global_shape[1:])

    def block(self, number: int, source: SourceBytes) -> Words:
        """One block of rows, as words of fp32.

        Raises:
            Corrupt: What is stored is no remainder.
        """
        shape = self.param.global_shape
        first = number * self._rows
        if not shape:
            return self.joined(Box((), ()), source)
        box = Box((first, *(0 for _ in shape[1:])), (min(self._rows, shape[0] - first), *shape[1:]))
        return self.joined(box, source)

    def joined(self, box: Box, source: SourceBytes) -> Words:
        """The masters of a box, as words of fp32; see :meth:`block`."""
        values = words_of(self.remainder, box, FLOAT32, source).view(np.float32)
        if not _are_remainders(values):
            raise Corrupt(
                f"{self.remainder.name}: {box} holds values that are no remainders of 16 bits, as those of the other parameters are\n"
                "The file is damaged, or its states are of two kinds. The weights alone can be converted with --no-optimizer."
            )
        whole = values.astype(np.int32)
        high = words_of(self.param, box, BFLOAT16, source).astype(np.uint32) - (whole < 0)
        found: Words = (high << np.uint32(16)) | (whole.astype(np.uint32) & np.uint32(0xFFFF))
        return found


def _are_remainders(values: Words) -> bool:
    """Whether all values, of fp32, are integers of 16 bits."""
    return bool(((values >= _LOW) & (values <= _HIGH) & (values == np.rint(values))).all())


def joined_masters(catalog: Chunks) -> Chunks:
    """A table whose masters are joined where it has remainders, which are found besides. Copies of remainders stay copies, so that
    they are compared as any others.
    """
    masters = {name for name in catalog if name.state == MASTER and _has_remainder(catalog, name)}
    stored = {name._replace(state=REMAINDER): catalog.tensor(name) for name in masters}
    joined = {name: Tensor(catalog.tensor(name).shape, FLOAT32, partial(_runs, catalog, name)) for name in masters}
    return catalog.replaced(joined).replaced(stored, told=False)


def _runs(catalog: Chunks, name: TensorName, rows: Rows) -> Iterator[Strip]:
    entry = catalog.get(name)
    assert entry is not None  # it was among the names
    strides = row_major(entry.global_shape)
    return rows.strips(
        Chunk(chunk.box, _record(entry, copy), dot(chunk.box.offset, strides), strides)
        for copy, chunk in _numbered(entry)
    )


def kept_remainders(catalog: Chunks) -> Chunks:
    """The masters of a checkpoint as the remainders that it stores, in 16 bits, for a target that holds its parameters as they are."""
    masters = (name for name in catalog if name.state == MASTER and name._replace(state=REMAINDER) in catalog)
    stored = {name: catalog.tensor(name._replace(state=REMAINDER)) for name in masters}
    return catalog.replaced({name: one._replace(dtype=_INT16) for name, one in stored.items()}, same=True)


def remainder_dtype(param: DType) -> DType:
    """The type of the masters of parameters of a type, where remainders are kept."""
    return _INT16 if param == BFLOAT16 else FLOAT32


@dataclass(frozen=True, slots=True)
class Joins(Mapping[str, JoinedMaster]):
    """Every join of a catalogue by the name of its record's file, made when it is asked for.

    Args:
        catalog: The one with remainders.
        role: Role of its tensors.
    """

    catalog: Chunks
    role: str

    def __getitem__(self, file: str) -> JoinedMaster:
        return _join(self, file)

    def __iter__(self) -> Iterator[str]:
        for name in self.catalog:
            entry = self.catalog.get(name) if name.state == MASTER and _has_remainder(self.catalog, name) else None
            if entry is not None:
                yield from dict.fromkeys(_record(entry, copy).file for copy, _ in _numbered(entry))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@lru_cache(maxsize=256)
def _join(joins: Joins, file: str) -> JoinedMaster:
    """The join of a computed file: of one copy of the remainders."""
    copy, _, param = file.removeprefix(COMPUTED).partition("/")
    found = [joins.catalog.get(TensorName(joins.role, param, state)) for state in (PARAM, MASTER)]
    if not file.startswith(COMPUTED) or not is_number(copy) or found[0] is None or found[1] is None:
        raise KeyError(file)
    numbered = [(at, chunk) for at, chunk in _numbered(found[1]) if at <= int(copy)]
    last = {chunk.box: chunk for _, chunk in numbered}  # what has fewer copies stands in for those that it lacks
    return JoinedMaster(found[0], replace(found[1], chunks=tuple(last.values())))


def _has_remainder(catalog: Chunks, name: TensorName) -> bool:
    """Parameters of other types have no remainders: what is fp32 is its own master."""
    return catalog.dtype(name._replace(state=PARAM)) == BFLOAT16


def _record(entry: TensorEntry, copy: int) -> Record:
    param = entry.name.param
    return Record(
        f"{COMPUTED}{copy}/{param}", f"{param} · remainder", FLOAT32, prod(entry.global_shape), 0, computed=True
    )


def _numbered(entry: TensorEntry) -> Iterator[tuple[int, Chunk]]:
    """Every chunk with the number of the copies of its box that come before it."""
    seen: dict[Box, int] = {}
    for chunk in entry.chunks:
        seen[chunk.box] = number = seen.get(chunk.box, -1) + 1
        yield number, chunk


_JOINED: Rule[Source] = Rule(
    Fate.DERIVED,
    "fp32 master parameters: the precision-aware optimizer stored what bf16 cuts off of them (store_param_remainders); joined with the "
    "parameters they are the masters again, bit for bit; a target that holds masters alone rounds parameters of them to even, where "
    "Transformer Engine rounds up what lies half way: about one in 131,072 has another last bit there, and on the way back",
)


def with_masters_joined(source: Source) -> Source:
    """The checkpoint of a precision-aware optimizer with masters, where it stored remainders; otherwise as it is.

    Args:
        source: An opened checkpoint, as it is stored.
    """
    if MASTER not in source.states or not _holds_remainders(source):
        return source
    source.notes.through([_JOINED], source)
    joins = Joins(source.catalog, source.role)
    return replace(source, catalog=joined_masters(source.catalog), computed=Computed(source.root, joins))


def has_remainders(source: Source) -> bool:
    """Whether masters were joined of remainders that a source stores in their place; see :data:`REMAINDER`.

    Args:
        source: An opened checkpoint.
    """
    if source.optimizer != DISTRIBUTED or not Arguments(source.state.args).flag("use_precision_aware_optimizer"):
        return False
    names = (TensorName(source.role, spec.name, REMAINDER) for spec in source.model.params)
    return any(name in source.catalog for name in names)


def _holds_remainders(source: Source) -> bool:
    names = (TensorName(source.role, spec.name, MASTER) for spec in source.model.params)
    pairs = ((source.catalog.get(name), source.catalog.get(name._replace(state=PARAM))) for name in names)
    with bytes_of(source) as files:
        return are_remainders(((master, param) for master, param in pairs if master and param), files)


def are_remainders(stored: Iterable[tuple[TensorEntry, TensorEntry]], files: SourceBytes) -> bool:
    """Whether what stands in the place of the masters are remainders, by samples of the parameters one after the other.

    The first one that tells decides: values that are no integers of 16 bits are masters, as are those of a parameter that they are
    not, when rounded. Zeros tell nothing.

    Args:
        stored: What stands there, and the parameter.
        files: Their bytes.
    """
    for master, param in stored:
        if param.dtype != BFLOAT16 or not param.chunks or not master.chunks:
            continue
        box = sampled(master.primary()[0].box)
        values = words_of(master, box, FLOAT32, files)
        if not _are_remainders(values.view(np.float32)):
            return False
        if differing_after_rounding(values, words_of(param, box, BFLOAT16, files), FLOAT32, BFLOAT16):
            return True
    return False


def sampled(box: Box) -> Box:
    """The first elements of a box, whole rows of it where they are few."""
    rows = max(1, _SAMPLE // max(1, prod(box.shape[1:])))
    return Box(box.offset, (min(rows, box.shape[0]), *box.shape[1:])) if box.shape else box
