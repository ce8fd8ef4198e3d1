"""The model that an adapter belongs to, known by its fingerprint.

That is cheap enough for every save, and different for any other model that was trained.
It is a SHA-256 over the name, shape, type and a CRC-32 of every tensor, in the order of the names. The CRC is of the whole tensor
up to :data:`WHOLE_NBYTES`, and of :data:`RUNS` evenly spaced runs of it beyond: training moves every element, so that a few
thousand of each tensor tell two models apart, though not a single flipped bit, which checksums are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from math import prod

from mcore_rlhf.core.catalog import MASTER, PARAM, DType, Shape, TensorEntry, TensorName, flat_boxes
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.computed import gather
from mcore_rlhf.core.execute import SourceBytes
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.records import record_of, told

from ..sidecar import STATE, Sidecar
from ..source import TrainingState

WHOLE_NBYTES = 1 << 16
RUNS = 16
RUN_NBYTES = 1 << 12

Runs = tuple[tuple[int, int], ...]
"""Elements that are looked at: starts and stops in the flat tensor."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What a model was.

    Args:
        tensors: How many it has; tied ones count once.
        elements: Of all of them together.
        dtypes: Their element types, sorted.
        sha256: The hash, hexadecimal.
    """

    tensors: int
    elements: int
    dtypes: tuple[str, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {self.elements:,} elements of {', '.join(self.dtypes)}, SHA-256 {self.sha256[:16]}…"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One tensor as the fingerprint sees it.

    Args:
        name: What the model calls it.
        shape: Its shape.
        dtype: Its element type.
        read: Gives the bytes of the runs, one after the other.
    """

    name: str
    shape: Shape
    dtype: DType
    read: Callable[[Runs], bytes]


def fingerprint(tensors: Iterable[Sampled]) -> ModelFingerprint:
    """The fingerprint of a model, in whatever order its tensors come."""
    lines, elements, dtypes = [], 0, set()
    for tensor in tensors:
        crc = crc32(tensor.read(runs_of(prod(tensor.shape), tensor.dtype.itemsize)))
        lines.append(f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {crc:08x}\n")
        elements += prod(tensor.shape)
        dtypes.add(str(tensor.dtype))
    text = "".join(sorted(lines))
    return ModelFingerprint(len(lines), elements, tuple(sorted(dtypes)), sha256(text.encode()).hexdigest())


def runs_of(numel: int, itemsize: int) -> Runs:
    """Which elements of a tensor are looked at; the first and the last always are."""
    if numel * itemsize <= WHOLE_NBYTES:
        return ((0, numel),)
    length = RUN_NBYTES // itemsize
    last = numel - length
    return tuple((start, start + length) for start in (last * run // (RUNS - 1) for run in range(RUNS)))


def sampled(catalog: Chunks, role: str, names: Iterable[str], source: SourceBytes) -> Iterator[Sampled]:
    """The tensors of a catalogue as a fingerprint sees them.

    Args:
        catalog: Where they lie.
        role: Whose they are.
        names: What the model calls them, which is their names in the catalogue.
        source: Where their bytes are.
    """
    for name in names:
        entry = catalog.get(TensorName(role, name, PARAM)) or catalog.get(TensorName(role, name, MASTER))
        if entry is not None:
            yield Sampled(name, entry.global_shape, entry.dtype, _reader(entry, source))


def _reader(entry: TensorEntry, source: SourceBytes) -> Callable[[Runs], bytes]:
    def read(runs: Runs) -> bytes:
        boxes = [box for start, stop in runs for box in flat_boxes(entry.global_shape, start, stop)]
        return bytes(gather(entry, boxes, entry.dtype, source))

    return read


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that an adapter was trained on.

    Args:
        path: Where it was, as the run was told; empty where nobody said.
        fingerprint: What it was; None where nobody looked.
    """

    path: str = ""
    fingerprint: ModelFingerprint | None = None

    def check(self, found: ModelFingerprint, where: str) -> None:
        """Whether a model is this one.

        Args:
            found: What it is.
            where: The model, for the message.

        Raises:
            LayoutMismatch: It is another one.
        """
        if self.fingerprint is not None and found != self.fingerprint:
            raise LayoutMismatch(
                f"{where}: is not the model on which the adapter was trained{f' ({self.path})' if self.path else ''}:\n"
                f"  expected {self.fingerprint}\n  found    {found}\n"
                f"Give that model. If this one is known to be the right one, remove the fingerprint from the adapter's {STATE}."
            )


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What lies beside an adapter; see :mod:`mcore_rlhf.families.sidecar`.

    Args:
        iteration: When it was saved.
        base: What it belongs to; None where nobody said.
    """

    iteration: int = 0
    base: BaseModel | None = None

    def texts(self) -> dict[str, str | bytes]:
        """The files by path."""
        base = {} if self.base is None else told(self.base, sparse=True)
        return Sidecar(state=TrainingState(self.iteration), base=base).texts()[0]

    @classmethod
    def read(cls, folder: ReadablePath) -> SavedAdapter | None:
        """What lies beside an adapter; None where nothing does.

        Raises:
            Corrupt: It is no JSON.
            Unsupported: It is of another version.
        """
        found = Sidecar.read(folder)
        if found is None:
            return None
        base = record_of(BaseModel, found.base, f"{folder / STATE}: base", sparse=True) if found.base else None
        return cls(found.state.iteration, base)
