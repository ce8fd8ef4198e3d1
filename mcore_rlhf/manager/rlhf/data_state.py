"""The content of ``data/data.pt``: which kind of loader wrote it, its state, and the dataset's fingerprint."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from ...errors import Corrupt, Incomplete, LayoutMismatch, Problems, StorageError, Unsupported, UsageError
from ...installation import to_upgrade
from ...storage.paths import storage_error
from ...storage.records import members, record_of, told

if TYPE_CHECKING:
    from hashlib import _Hash


ALL_ITEMS_UP_TO = 100_000
"""A longer dataset is hashed at this many positions, evenly spaced, the first and the last among them."""

_BLOCK_NBYTES = 1 << 20

VERSION = 1

WHERE = "data/data.pt"

DataState: TypeAlias = "dict[str, Any]"
"""``{"version", "kind", "state", "fingerprint"}``, of plain values (and tensors, for other people's loaders)."""

_FIELDS = ("version", "kind", "state", "fingerprint")


class Indexable(Protocol):
    """A dataset with a length and items by number: a list, a torch or Hugging Face dataset, an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Dataset: TypeAlias = "Indexable | os.PathLike[str] | str"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a dataset was when its order was made.

    Args:
        length: Number of items, or of bytes of a file.
        sha256: Hash of the content, hexadecimal.
        method: ``items``: every item was hashed; ``sampled``: :data:`ALL_ITEMS_UP_TO` of them, so that a change
            between two of these goes unseen; ``file``: every byte.
    """

    length: int
    sha256: str
    method: Literal["items", "sampled", "file"]

    def __str__(self) -> str:
        unit = "bytes" if self.method == "file" else "items"
        return f"{self.length:,} {unit}, SHA-256 {self.sha256[:16]}… ({self.method})"


def fingerprint(dataset: Dataset, *, all_items_up_to: int = ALL_ITEMS_UP_TO) -> Fingerprint:
    """Hash a dataset.

    Args:
        dataset: A file, by its path, or anything with a length and items by number. Items are text, bytes, numbers,
            None, arrays or tensors, paths of files (hashed by their content), and these nested in lists, tuples and
            dictionaries (whose order does not count).
        all_items_up_to: A longer dataset is sampled at this many positions.

    Raises:
        UsageError: An item is of another type, or the dataset has no length.
        StorageError: A file cannot be read.
    """
    if isinstance(dataset, (str, os.PathLike)):
        return _of_file(Path(dataset))
    try:
        length = len(dataset)
    except TypeError:
        raise UsageError(
            f"the dataset ({type(dataset).__name__}) has no length, so that it has no fingerprint\n"
            "Give the files that it reads, or a Fingerprint of your own."
        ) from None
    positions = _positions(length, max(all_items_up_to, 2))
    hasher = hashlib.sha256(f"{length}|".encode())
    for index in positions:
        _add(hasher, dataset[index], f"item {index}")
    return Fingerprint(length, hasher.hexdigest(), "items" if len(positions) == length else "sampled")


def _positions(length: int, limit: int) -> Sequence[int]:
    if length <= limit:
        return range(length)
    return [index * (length - 1) // (limit - 1) for index in range(limit)]


def _of_file(path: Path) -> Fingerprint:
    hasher, nbytes = hashlib.sha256(), 0
    for block in _blocks(path):
        hasher.update(block)
        nbytes += len(block)
    return Fingerprint(nbytes, hasher.hexdigest(), "file")


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.expanduser().open("rb") as file:
            while block := file.read(_BLOCK_NBYTES):
                yield block
    except IsADirectoryError:
        raise StorageError(f"{path}: is a folder, expected a file\nGive the list of its files.") from None
    except OSError as error:
        raise storage_error(error, path, "read", "to take the dataset's fingerprint") from error


def _add(hasher: _Hash, value: Any, where: str) -> None:
    """Add a value with its type and length, so that ["ab", "c"] is not ["a", "bc"], and 1 is not "1"."""
    if isinstance(value, Mapping):
        hasher.update(f"dict{len(value)}:".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            _add(hasher, key, where)
            _add(hasher, value[key], f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list{len(value)}:".encode())
        for index, item in enumerate(value):
            _add(hasher, item, f"{where}[{index}]")
    else:
        kind, data = _leaf(value, where)
        hasher.update(f"{kind}{len(data)}:".encode())
        hasher.update(data)


def _leaf(value: Any, where: str) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "str", value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes", bytes(value)
    if value is None or isinstance(value, (bool, int)):
        return type(value).__name__, str(value).encode()
    if isinstance(value, float):
        return "float", float(value).hex().encode()  # numpy's own floats write themselves differently by version
    if isinstance(value, os.PathLike):
        return "file", _of_file(Path(value)).sha256.encode()
    return _array(value, where)


def _array(value: Any, where: str) -> tuple[str, bytes]:
    torch = sys.modules.get("torch")  # a tensor cannot exist before torch was imported
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"array {value.dtype} {tuple(value.shape)} ".replace("torch.", ""), flat.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return f"array {value.dtype} {value.shape} ", value.tobytes()
    raise UsageError(
        f"{where} of the dataset is of type {type(value).__name__}, which has no fingerprint\n"
        "Give a Fingerprint of your own: of the files that the dataset reads, say."
    )


def pack(kind: str, state: Mapping[str, Any], dataset: Fingerprint | None) -> DataState:
    """What is to be written.

    Args:
        kind: ``prompt_sampler`` or ``stateful``.
        state: The loader's own.
        dataset: Fingerprint of the dataset, where it is known.
    """
    return {"version": VERSION, "kind": kind, "state": dict(state), "fingerprint": told(dataset)}


def unpack(saved: object, kind: str) -> tuple[dict[str, Any], Fingerprint | None]:
    """The loader's state and the dataset's fingerprint.

    Args:
        saved: What :func:`pack` made.
        kind: The kind of the loader that is to be restored.

    Raises:
        CheckpointError: It is not such a state, of another kind or of a newer version, or fields are missing or
            unknown; they are named.
    """
    if not isinstance(saved, Mapping):
        raise Corrupt(f"{WHERE}: expected a dictionary with {', '.join(_FIELDS)}, found {type(saved).__name__}")
    _check_version(saved.get("version"))
    problems = Problems()
    members(saved, _FIELDS, WHERE, problems)
    problems.raise_if_any()
    if saved["kind"] != kind:
        raise LayoutMismatch(
            f"{WHERE}: kind: expected {kind!r}, found {saved['kind']!r}\n"
            "Resume with the kind of loader that saved it (prompt_sampler: PromptSampler; stateful: Carried), "
            "or start the data anew by not loading this file."
        )
    if not isinstance(saved["state"], Mapping):
        raise Corrupt(f"{WHERE}: state: expected a dictionary, found {type(saved['state']).__name__}")
    mark = saved["fingerprint"]
    return dict(saved["state"]), None if mark is None else record_of(Fingerprint, mark, f"{WHERE}: fingerprint")


def _check_version(version: object) -> None:
    if version is None:
        raise Incomplete(
            f"{WHERE}: has no version; this is another program's state\n"
            "The bare state of a torchdata loader, as RLinf writes it, is loaded by Carried(loader)."
        )
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Unsupported(
            f"{WHERE}: version {version!r} of the data state; this release reads up to {VERSION}\n"
            f"Upgrade: {to_upgrade()}"
        )
