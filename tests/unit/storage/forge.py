"""Making ``.pt`` files by hand: odd ones, damaged ones, and attacks."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.pt import Pt, PtFile
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.storage.torchzip import archive


def write_pt(path: Path, pickled: bytes, **records: bytes) -> Path:
    """A torch-save zip around any pickle; records are given as ``_0=b"…"``."""
    members = {"data.pkl": pickled, "byteorder": b"little"}
    members |= {f"data/{key[1:]}": data for key, data in records.items()}
    zipped, _ = archive(path.stem, members | {"version": b"3\n"})
    path.write_bytes(zipped)
    return path


def saved_pickle(tree: Any) -> bytes:
    """The ``data.pkl`` that torch.save makes."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    with zipfile.ZipFile(buffer) as zipped:
        return zipped.read("archive/data.pkl")


def member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as zipped:
        return zipped.read(f"{path.stem}/{name}")


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def called(function: Any, *args: Any, protocol: int = 2) -> bytes:
    return pickle.dumps(Call(function, *args), protocol)


def copy_pt(source: PtFile, path: Path, tree: Any = None) -> FileEntry:
    """Write a file's tree again, with the bytes of its records."""
    crcs = {}
    tree = source.tree if tree is None else tree
    with (
        OpenFiles(source.root) as files,
        Pt.of(tree).create(path, source.file) as writer,
    ):
        for name, item in source.directory.members.items():
            if name.startswith("data/") and name in writer.layout.records:
                data = files.view(source.file, item.byte_offset, item.nbytes)
                writer.write(name, 0, data)
                crcs[name] = crc32(data)
        return writer.finish(crcs)


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """All leaves of a nest, by path."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    elif hasattr(tree, "__dict__") and not isinstance(tree, torch.Tensor | type):
        items = list(vars(tree).items())
    else:
        return {path: tree}
    return {k: v for key, value in items for k, v in flatten(value, f"{path}/{key}").items()}
