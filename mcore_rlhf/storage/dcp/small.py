"""Small values of a DCP folder as what they are: counters, steps, random states; and a zip inside a tensor."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.catalog import Chunk
from mcore_rlhf.errors import Corrupt, Unsupported
from mcore_rlhf.storage.torch_values import SmallTensor

from ..checksum import crc32
from ..reading import opened
from .folder import DcpFolder, DcpTensor
from .items import item_directory, load_tree
from .metadata import RESTORE
from .writer import saved

if TYPE_CHECKING:
    from mcore_rlhf.core.cast import Words

_MOST_ELEMENTS = 16 << 20
"""What is larger is a model's tensor, and is not loaded whole."""


def load_tensor(tensor: DcpTensor) -> SmallTensor:
    """A small tensor, whole.

    Args:
        tensor: It.

    Raises:
        Unsupported: It is not small.
        CheckpointError: It is damaged.
    """
    numel = prod(tensor.global_shape)
    if numel > _MOST_ELEMENTS:
        raise Unsupported(
            f"{tensor.folder.folder}: {tensor.fqn} has {numel:,} elements, but is neither a weight nor a state of the "
            "optimizer\nIf the folder holds several models, convert them one by one: save each into a folder of its own."
        )
    import numpy as np  # looking at a folder needs it not

    from mcore_rlhf.core.execute import WORDS

    result: Words = np.zeros(tensor.global_shape, WORDS[tensor.dtype.itemsize])
    for chunk in tensor.chunks():
        box = chunk.box
        where = tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))
        result[where] = _loaded(tensor, chunk)
    return SmallTensor(result.tobytes(), tensor.dtype, tensor.global_shape, row_major(tensor.global_shape))


def _loaded(tensor: DcpTensor, chunk: Chunk) -> Words:
    import numpy as np

    from mcore_rlhf.core.execute import WORDS, strided

    record, expected = chunk.record, tensor.folder.checksum(tensor, chunk.box)
    file = opened(tensor.folder.root / record.file)
    data = bytearray(file.read(record.byte_offset, record.nbytes))
    if expected and (found := crc32(data)) != expected:
        raise Corrupt(
            f"{file.path}: {tensor.fqn} ({record.nbytes} bytes) has CRC-32 {found:08x}, but the file says {expected:08x}: its bytes are "
            f"damaged.\n{RESTORE}"
        )
    return strided(np.frombuffer(data, WORDS[record.dtype.itemsize]), chunk.start, chunk.box.shape, chunk.strides)


def wrapped(tree: Any) -> bytes:
    """An object as the zip of a byte tensor that holds the zip of the object.

    Whoever loads all items of a folder, as ``dcp_to_torch_save`` does, then gets a tensor and needs none of the classes.

    Args:
        tree: See :func:`.writer.saved`.
    """
    return saved(SmallTensor.of_bytes(saved(tree)))


def unwrap(folder: DcpFolder, fqn: str) -> Any:
    """The object that :func:`wrapped` stored under a name.

    Raises:
        CheckpointError: It is damaged, or something else.
    """
    file, directory = folder.item(fqn)
    outer = load_tree(file, directory, ()).tree
    inside = getattr(outer, "record", None)
    if inside is None or outer.strides != row_major(outer.shape):
        raise Unsupported(f"{file.path}: {fqn} is not what it says: a stored object was expected")
    data = directory.members[inside.key]
    inner = item_directory(file, fqn, data.byte_offset, data.nbytes)
    found = load_tree(file, inner, folder.stubs)
    return found.materialize(found.tree)
