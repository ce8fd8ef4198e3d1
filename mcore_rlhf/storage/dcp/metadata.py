"""Reading ``.metadata``, the pickle that says which tensors a DCP folder has and where their parts lie.

Of its names, those that matter become the inert classes of :mod:`.classes`; :mod:`..unpickle` makes stubs of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mcore_rlhf.core.catalog import DType, Shape, dtype_of
from mcore_rlhf.errors import Corrupt, Incomplete, NotACheckpoint, Unsupported, shown

from .. import reading
from ..paths import ReadablePath, cannot_open
from ..stored import StubType
from ..unpickle import MAX_NBYTES, Vocabulary, unpickle
from . import METADATA_FILE, classes

RESTORE = "Copy the folder again from where it was written, or use an older step."

Path_ = tuple[str | int, ...]

_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "LoadPlan", "ReadItem", "LoadItemType")
_KNOWN = {f"torch.distributed.checkpoint.planner.{name}" for name in _PLANS} | {
    classes.STORAGE_META,
    classes.STORAGE_PREFIX,
}
"""Stubs that nobody looks at: what Megatron's ``all_local_plans`` adds, with ``--ckpt-assume-constant-structure`` also the beginning of
each rank's file names, and the id of the save."""


class ItemPlace(NamedTuple):
    """Where one item lies: a whole zip of ``torch.save``.

    Args:
        file: Name of the file, relative to the folder.
        offset: First byte of the zip.
        length: Its bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as ``.metadata`` describes it: dtype, whole shape, and ``(offsets, sizes)`` of its chunks."""

    dtype: DType
    global_shape: Shape
    chunks: tuple[tuple[Shape, Shape], ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The content of ``.metadata``.

    Args:
        tensors: By name.
        objects: Names of what is not a tensor.
        places: Where each item lies, by name and offset of the chunk; the offset is None for an object.
        planner_data: For every name the path in the saved nest of dictionaries, an int being a list's index; empty where
            the writer left it out, as Megatron does.
        unflattened: Of tensors whose parts are stored flattened, the shape that they have otherwise, as megatron-core before 0.16 says it.
    """

    tensors: Mapping[str, TensorMeta]
    objects: tuple[str, ...]
    places: Mapping[tuple[str, Shape | None], ItemPlace]
    planner_data: Mapping[str, Path_] = field(default_factory=dict)
    unflattened: Mapping[str, Shape] = field(default_factory=dict)


def read_metadata(folder: ReadablePath, stubs: Collection[str] = ()) -> DcpMetadata:
    """Read ``.metadata`` without running anything of it.

    Args:
        folder: The DCP folder.
        stubs: Names of classes that the user allows as inert stubs.

    Raises:
        Incomplete: There is none: the save was not finished. Or it is cut off.
        Untrusted: It names something that is not known to be harmless.
        Corrupt: It is not a pickle of torch's ``Metadata``, or contradicts itself.
        Unsupported: It has something that is not supported: sparse tensors, transformed items.
        StorageError: It cannot be read.
    """
    path = folder / METADATA_FILE
    return _Checked(path, unpickle(_bytes(path), str(path), stubs, _VOCABULARY)).metadata()


def _bytes(path: ReadablePath) -> bytes:
    try:
        return reading.read_bytes(path, MAX_NBYTES)
    except OSError as error:
        failure = cannot_open(error, path)
        if isinstance(failure, NotACheckpoint):
            raise Incomplete(
                f"{path}: missing: torch writes it last, so this save was not finished (or a copy left out files whose "
                "names begin with a dot).\nCopy the folder with its hidden files, or use an older step."
            ) from error
        raise failure from error


_VOCABULARY = Vocabulary(classes.READ, lambda name: name in _KNOWN)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What was unpickled, taken over value by value: a pickle can hold anything anywhere."""

    path: ReadablePath
    value: Any
    shapes: dict[Shape, Shape] = field(default_factory=dict)
    chunks: dict[tuple[Shape, Shape], tuple[Shape, Shape]] = field(default_factory=dict)
    """Equal ones are one object: a model has few, in a million places."""

    def metadata(self) -> DcpMetadata:
        value = self.value
        if not isinstance(value, classes.Metadata):
            raise self._corrupt(f"holds a {type(value).__name__} instead of torch's Metadata")
        described = self._dict(getattr(value, "state_dict_metadata", None), "state_dict_metadata")
        tensors = {fqn: self._tensor(fqn, v) for fqn, v in described.items() if not _is_bytes(v)}
        objects = tuple(fqn for fqn, v in described.items() if _is_bytes(v))
        planner = getattr(value, "planner_data", None)
        planned = self._dict({} if planner is None else planner, "planner_data")
        paths = {fqn: self._path(fqn, path) for fqn, path in planned.items()}
        return DcpMetadata(tensors, objects, dict(self._places(getattr(value, "storage_data", None))), paths)

    def _dict(self, value: Any, what: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise self._corrupt(f"{what} is a {type(value).__name__}, not a dictionary")
        if any(type(key) is not str for key in value):
            raise self._corrupt(f"a key of {what} is not a string")
        return value

    def _tensor(self, fqn: str, value: Any) -> TensorMeta:
        properties = getattr(value, "properties", None) if isinstance(value, classes.StoredTensorMeta) else None
        if not isinstance(properties, classes.Properties):
            raise self._corrupt(f"{fqn} is described by a {type(value).__name__}")
        dtype, layout = getattr(properties, "dtype", None), getattr(properties, "layout", None)
        if layout != classes.STRIDED:
            raise Unsupported(f"{self.path}: {fqn} has the layout {shown(layout)}; only dense tensors are supported.")
        shape, chunks = self._shape(fqn, getattr(value, "size", None)), getattr(value, "chunks", None)
        found = chunks if isinstance(chunks, list) else []
        return TensorMeta(
            self._dtype(fqn, dtype), shape, tuple([self._chunk(fqn, chunk, len(shape)) for chunk in found])
        )

    def _dtype(self, fqn: str, value: Any) -> DType:
        if not isinstance(value, StubType):
            raise self._corrupt(f"{fqn} has the dtype {shown(value)}")
        try:
            return dtype_of(value.stub_name)
        except ValueError as error:
            raise Unsupported(f"{self.path}: {fqn}: {error}.") from None

    def _chunk(self, fqn: str, value: Any, ndim: int) -> tuple[Shape, Shape]:
        if not isinstance(value, classes.ChunkMeta):
            raise self._corrupt(f"{fqn} has a chunk that is a {type(value).__name__}")
        offsets = self._shape(fqn, getattr(value, "offsets", None))
        sizes = self._shape(fqn, getattr(value, "sizes", None))
        if len(offsets) != ndim or len(sizes) != ndim:
            raise self._corrupt(f"{fqn} has {ndim} dimensions, but a chunk at {offsets} of {sizes}")
        return self.chunks.setdefault((offsets, sizes), (offsets, sizes))

    def _shape(self, fqn: str, value: Any) -> Shape:
        if type(value) is tuple:
            for n in value:
                if type(n) is not int or n < 0:
                    break
            else:
                return self.shapes.setdefault(value, value)
        raise self._corrupt(f"{fqn} has {shown(value)} where a shape belongs")

    def _path(self, fqn: str, value: Any) -> Path_:
        if type(value) is not tuple or not all(type(part) in (str, int) for part in value):
            raise self._corrupt(f"planner_data of {fqn} is {shown(value)}, not a path")
        return value

    def _places(self, value: Any) -> Iterator[tuple[tuple[str, Shape | None], ItemPlace]]:
        if type(value) is not dict:
            raise self._corrupt(f"storage_data is a {type(value).__name__}, not a dictionary")
        names: dict[str, str] = {}  # one string for each file, not one for each item
        for index, info in value.items():
            if not isinstance(index, classes.Index) or not isinstance(info, classes.StorageInfo):
                raise self._corrupt(f"storage_data maps a {type(index).__name__} to a {type(info).__name__}")
            fqn, offset, file = (
                getattr(index, "fqn", None),
                getattr(index, "offset", None),
                getattr(info, "relative_path", None),
            )
            if type(fqn) is not str or type(file) is not str:
                raise self._corrupt(f"an item has the name {shown(fqn)} and lies in {shown(file)}")
            if transforms := getattr(info, "transform_descriptors", None):
                raise Unsupported(
                    f"{self.path}: {fqn} was stored through {shown(transforms)}; only plain items can be "
                    "read.\nSave it again without extensions of the storage writer."
                )
            start, length = getattr(info, "offset", None), getattr(info, "length", None)
            if type(start) is not int or start < 0 or type(length) is not int or length < 0:
                raise self._corrupt(f"{fqn} has {shown((start, length))} where a shape belongs")
            key = fqn, None if offset is None else self._shape(fqn, offset)
            yield key, ItemPlace(names.setdefault(file, file), start, length)

    def _corrupt(self, what: str) -> Corrupt:
        return Corrupt(f"{self.path}: {what}.\n{RESTORE}")


def _is_bytes(value: Any) -> bool:
    return isinstance(value, classes.StoredBytesMeta)
